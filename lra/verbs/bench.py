"""Verbs that check attentions, and those that measure speed, memory and memory traffic."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from lra.commands import app, bench_app, verb
from lra.completion import complete_fields
from lra.imports import uncollected_imports
from lra.printing import console, print_measured, print_rows


@verb(app, parser="lra.models.conformance.report:parse_check")
def check(
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="attn=… [attn.field=value …] [device=cpu|cuda] [compile=true]", autocompletion=complete_fields
        ),
    ] = None,
) -> None:
    """Whether an attention or mixer keeps what all must keep; exit code 1 if not."""
    with uncollected_imports():
        from lra.models.conformance.report import check_component, parse_check

    subject, options = parse_check(fields or ())
    results = list(check_component(subject, options.compile))
    precision = str(subject.dtype).removeprefix("torch.")
    title = f"attn={subject.name} on {subject.device}, {precision}"
    counts = Counter(result.status for result in results)
    print_measured(
        [(title, ["property", "result", "why"], [[*result] for result in results])],
        [", ".join(f"{count} {status}" for status, count in counts.items())],
        wrong="failed" in counts,
    )


@verb(bench_app, "attention", "lra.bench.attention:configure_attention")
def bench_attention(
    fields: Annotated[list[str] | None, typer.Argument(metavar="attn=… | attns=… [lengths=… field=value …]")] = None,
) -> None:
    """Speed and memory of attentions, each checked first; exit code 1 if one is wrong."""
    from lra.bench.attention import attention_notes, attention_tables, measure_attention

    result = measure_attention(fields or (), progress=console.print)
    records = result.cells
    wrong = any(record.failed for record in records)
    print_measured(attention_tables(records, result.options["table"]), attention_notes(records), wrong)


@verb(bench_app, "io", "lra.bench.traffic:IoOptions")
def bench_io(fields: Annotated[list[str] | None, typer.Argument(metavar="[field=value …]")] = None) -> None:
    """Bytes that attention moves to and from HBM, against block size: by formula, and measured where ncu is."""
    from lra.bench.traffic import measure_traffic, traffic_table

    result = measure_traffic(fields or ())
    print_rows(*traffic_table(result))
    for note in result.notes:
        console.print(note)


@verb(bench_app, "step", "lra.bench.step:parse_step_fields")
def bench_step(
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="task=… attn=… [recipe=…] [loops=… steps=… field=value …]")
    ] = None,
) -> None:
    """Time of a training step of lra fit, beside loops without Lightning, and where it goes."""
    from lra.bench.step import measure_step, step_notes, step_tables

    result = measure_step(fields or (), progress=console.print)
    print_measured(step_tables(result), step_notes(result), any(record.failed for record in result.loops))


@verb(bench_app, "start", "lra.bench.start:parse_start_fields")
def bench_start(
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="task=… attn=… [recipe=…] [cold=true] [out=<file>] [field=value …]")
    ] = None,
) -> None:
    """Where the seconds of one lra fit go, from the start of its process to its end."""
    from lra.bench.start import measure_start, start_notes, start_table

    result = measure_start(fields or ())
    print_measured([start_table(result)], start_notes(result))
