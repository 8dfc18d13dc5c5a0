"""`lra bench attention`: speed and memory of attentions, each checked before it is timed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lra import environment
from lra.bench import plots
from lra.bench.cases import (
    TORCH_DTYPES,
    BenchmarkCase,
    attention_class,
    attention_names,
    call_attention,
    import_named,
    make_batch,
)
from lra.bench.check import Verdict, check_dropout, check_small, check_timed, has_reference
from lra.bench.output import open_output
from lra.bench.presets import (
    COMPARED_TABLES,
    IMDB_LENGTHS,
    PAPER_TABLES,
    PASSES,
    RUNTIME_TABLES,
    masked_lengths,
    with_budget,
)
from lra.bench.records import AttentionMeasurement, MeasurementFile, round_figure
from lra.bench.sparse import with_peers
from lra.bench.timing import PassTime, TimedSteps, clear_gpu, time_passes
from lra.compile_caches import use_compile_caches
from lra.config.checks import check_at_most, check_dropout_rate
from lra.config.options import parse_options, recorded_options, refuse_repeats
from lra.config.override import parse_overrides
from lra.config.sources import explain_own_code
from lra.errors import UsageError, is_out_of_memory, name_error

# The backward recomputes the scores: it has five products, not two.
FLOP_FACTORS = {"forward": 1.0, "backward": 2.5, "both": 3.5}


@dataclass(frozen=True)
class AttentionOptions:
    """What `lra bench attention` measures: every combination of the lists."""

    attns: tuple[str, ...] = ("flash",)  # name, or name:field=value:… with fields of its configuration
    attn: str | None = None  # instead of `attns`: a block-sparse one beside flash and its peers, another alone
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    head_dims: tuple[int, ...] = (32, 64, 128)
    dropout: tuple[float, ...] = (0.0,)
    dtypes: tuple[str, ...] = ("bf16",)
    passes: tuple[str, ...] = PASSES
    heads: int = 8
    tokens: int = 65536  # of a batch: it has tokens // N sequences, at least one
    batch: int | None = None  # sequences, instead of `tokens`
    # imdb: one batch of the lengths of real text, by default of 32; mask: up to 20 tokens of each sequence are missing
    ragged: Literal["false", "imdb", "mask"] = "false"
    # other defaults: those of a table in the FlashAttention paper; of 9 to 21 all attentions, at equal compression
    table: Literal["7", "9", "10", "11", "12", "13", "14", "15", "16", "17", "18", "19", "20", "21"] | None = None
    out: str | None = None  # JSON file
    plots: str | None = None  # folder for the runtime and memory against N, SVG

    def __post_init__(self) -> None:
        for name in ("lengths", "head_dims", "heads", "tokens", "batch"):
            values = getattr(self, name)
            if any(value is not None and value < 1 for value in (values if isinstance(values, tuple) else (values,))):
                raise UsageError(f"{name}= must be at least 1")
        if 1 in self.lengths:
            raise UsageError("lengths=1: the softmax over one token has no gradients to check, use at least 2")
        check_at_most(1 << 20, "", self, "lengths", "batch")
        check_at_most(1 << 24, "", self, "tokens")
        check_at_most(1 << 14, "", self, "heads", "head_dims")
        lists = ("attns", "lengths", "head_dims", "dropout", "dtypes", "passes")
        refuse_repeats(**{name: getattr(self, name) for name in lists})
        if not all(0 <= p < 1 for p in self.dropout):
            raise UsageError("dropout= must be at least 0 and below 1")
        for p in self.dropout:
            check_dropout_rate("dropout", p)
        for name, known in (("dtypes", TORCH_DTYPES), ("passes", PASSES)):
            if unknown := set(getattr(self, name)) - set(known):
                raise UsageError(f"{name}={unknown.pop()} is unknown: choose from {', '.join(known)}")
        if self.ragged == "imdb" and (self.batch or 32) > len(IMDB_LENGTHS):
            raise UsageError(f"batch={self.batch}: ragged=imdb has {len(IMDB_LENGTHS)} lengths")

    def cases(self) -> Iterator[BenchmarkCase]:
        """The cases. Attentions vary fastest, so that those which are compared are measured together."""
        sizes = [(n, (n,) * (self.batch or max(1, self.tokens // n))) for n in self.lengths]
        if self.ragged == "mask":
            sizes = [(n, masked_lengths(n, len(lengths))) for n, lengths in sizes]
        if self.ragged == "imdb":
            sizes = [(0, tuple(sorted(IMDB_LENGTHS[: self.batch or 32], reverse=True)))]  # as a batch of training lies
        for dtype, d, p, (n, lengths), name in itertools.product(
            self.dtypes, self.head_dims, self.dropout, sizes, self.attns
        ):
            attention = with_budget(name, n) if self.table in COMPARED_TABLES else name
            yield BenchmarkCase(attention, dtype, d, p, lengths, self.heads, span=n if self.ragged == "mask" else 0)

    def facts(self, case: BenchmarkCase) -> dict[str, str]:
        """What a record says of its case beside the sizes. Options that the table chose are no part of the name."""
        name, fields = case.attention, ""
        if name not in self.attns:
            name, _, fields = name.partition(":")
        return {"attention": name, "options": fields, "ragged": self.ragged}


def configure_attention(args: Sequence[str]) -> AttentionOptions:
    """The options of `field=value` arguments, with the defaults of the chosen table."""
    overrides = parse_overrides(args)
    given = {override.field: override.text for override in overrides}
    table = given.get("table")
    compared_by_default = {"attns": attention_names()} if table in COMPARED_TABLES else {}
    options = parse_options(AttentionOptions, overrides, **compared_by_default, **PAPER_TABLES.get(table, {}))
    clash = given.keys() & ({"lengths", "tokens", "table"} if options.ragged == "imdb" else set())
    if {"attn", "attns"} <= given.keys():
        raise UsageError("attn= does not go with attns=: give one, as attn= chooses what to compare")
    if clash:
        raise UsageError(f"{min(clash)}= does not go with ragged=imdb")
    if "tokens" in given and options.batch is not None:
        raise UsageError(f"tokens= does not go with {'batch=' if 'batch' in given else f'table={table}: give batch='}")
    if options.attn is not None:
        attn = import_named(options.attn)
        attention_class(attn)
        options = replace(options, attns=with_peers(attn))
    options = replace(options, attns=tuple(map(import_named, options.attns)))
    for attention in options.attns if given.keys() & {"attn", "attns"} else ():
        name, cls = attention_class(attention)
        parse_options(cls.Config, attention.split(":")[1:], f"attns={name}: ")
    return options


def measure_attention(
    args: Sequence[str], progress: Callable[[str], None] = lambda line: None
) -> MeasurementFile[AttentionMeasurement]:
    """Measures all cases. Writes `out=` after every case, and `plots=` at the end.

    Args:
        args: `field=value` of AttentionOptions.
        progress: is called with a line for each case when it is done.
    """
    options = configure_attention(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = MeasurementFile[AttentionMeasurement](environment.describe(), recorded_options(options), [])

    def draw() -> None:
        if options.plots:
            plots.draw_figures(result.cells, Path(options.plots))

    with open_output(options.out) as keep:
        draw()  # what can't be written is refused before it is measured
        try:
            for records in measure_cases(options, device):
                result.cells += records
                progress(attention_line(records))
                keep(result.saved())
        finally:
            draw()
    return result


def measure_cases(
    options: AttentionOptions, device: torch.device, done: Collection[tuple[str, int]] = ()
) -> Iterator[list[AttentionMeasurement]]:
    """The records of each case, except for cases whose (attention, N) is in `done`."""
    use_compile_caches(device)
    small = functools.cache(lambda case: check_small(case, device).worse(check_dropout(case, device)))
    for case in options.cases():
        facts = options.facts(case)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises if the last case was a fault: no later one could be measured
        if (facts["attention"], case.padded_length) not in done:
            yield [*measure_case(case, facts, options.passes, device, small)]


def measure_case(
    case: BenchmarkCase, facts: Mapping[str, str], passes: Sequence[str], device: torch.device,
    small: Callable[[BenchmarkCase], Verdict],
) -> Iterator[AttentionMeasurement]:  # fmt: skip
    """One record for each pass.

    Args:
        facts: those of `AttentionOptions.facts`.
        small: checks a small problem. Cases with the same small problem share its answer.
    """
    backward = set(passes) != {"forward"}
    verdict, times, status, reason = Verdict(None), {}, "ok", ""
    layout, density = None, None
    try:
        attention = case.build(device)
        layout = attention.layout
        if has_reference(attention):  # others have FLOPs of their own
            density = case.density(layout)
        del attention
        clear_gpu(device)
        verdict = small(case.small(layout))
        if not verdict.wrong:
            clear_gpu(device)  # compiled for the small size, a kernel would be one for any size
            verdict, times, out_of_memory = _measure(case, backward, device, verdict)
            status = "OOM" if out_of_memory else "ok"
        status = "WRONG" if verdict.wrong else status
        reason = verdict.wrong
    except UsageError as error:
        status, reason = "unsupported", str(error)
    except Exception as error:  # whatever a compiler or a driver raises: the other cases are still worth having
        status, reason = "failed", explain_own_code(error) or name_error(error)
    if status in ("WRONG", "failed"):
        times = {}
    for name in passes:
        spent = _pass(times, name)
        yield AttentionMeasurement(
            **facts, pass_name=name, length=case.padded_length, head_dim=case.head_dim, dtype=case.dtype,
            dropout=case.dropout, batch=len(case.lengths), heads=case.heads,
            tokens=sum(case.lengths), squares=sum(n * n for n in case.lengths),
            density=round_figure(density), block="x".join(map(str, layout.block)) if layout else None,
            status="ok" if spent else status,
            ms=round_figure(spent and spent.ms),
            tflops=round_figure(spent and density and FLOP_FACTORS[name] * density * case.flops / spent.ms / 1e9),
            memory_mb=round_figure(spent and spent.memory_mb),
            host_ms=round_figure(spent and spent.host_ms),
            repetitions=spent and spent.repetitions,
            checked=round_figure(verdict.ratio),
            reason="" if spent else reason, made=None,
        )  # fmt: skip


def _measure(
    case: BenchmarkCase, backward: bool, device: torch.device, verdict: Verdict
) -> tuple[Verdict, dict[str, PassTime], bool]:
    """Checks at full size, then times: the verdict, the passes, and whether something did not fit into memory."""
    try:
        return *_checked_times(case, backward, device, verdict), False
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # what follows is outside the handler, whose traceback keeps the tensors alive
    clear_gpu(device)
    if backward:
        return *_measure(case, False, device, verdict)[:2], True
    return verdict, {}, True


def _checked_times(
    case: BenchmarkCase, backward: bool, device: torch.device, verdict: Verdict
) -> tuple[Verdict, dict[str, PassTime]]:
    attention = case.build(device)
    batch = make_batch(case.lengths, case.full, device)
    if not case.full:  # a padding mask is of N columns, also where no sequence has N tokens
        batch = replace(batch, max_length=case.padded_length)
        batch = batch if attention.facts.ragged else batch.to_padded()
    shape = (batch.tokens.numel(), case.heads, case.head_dim)

    def prepare() -> list[torch.Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        return [
            torch.randn(shape, generator=generator, device=device, dtype=TORCH_DTYPES[case.dtype]) for _ in range(4)
        ]

    def prepare_leaves() -> list[torch.Tensor]:
        *qkv, do = prepare()
        return [*(x.requires_grad_() for x in qkv), do]

    def forward(inputs: list[torch.Tensor]) -> Any:
        q, k, v, do = inputs
        return call_attention(attention, q, k, v, batch, case.full), (q, k, v, *attention.parameters()), do

    steps: TimedSteps = {"forward": forward}
    if backward:
        steps["backward"] = lambda done: torch.autograd.grad(*done, allow_unused=True)
    verdict = verdict.worse(check_timed(case, prepare(), batch, backward))
    if verdict.wrong:
        return verdict, {}
    result: Any = prepare_leaves()
    for step in steps.values():  # warm-up: with dropout it is another kernel than the one checked
        result = step(result)
    del result
    clear_gpu(device, compiled=False)
    return verdict, time_passes(prepare_leaves, steps, device)


def _pass(times: dict[str, PassTime], name: str) -> PassTime | None:
    """The time of a pass. `both` is the two in a row: their sums, and the larger of their peaks."""
    if name != "both" or len(times) < 2:
        return times.get(name)
    parts = list(times.values())
    memory = None if parts[0].memory_mb is None else max(part.memory_mb or 0.0 for part in parts)
    host = None if parts[0].host_ms is None else sum(part.host_ms or 0.0 for part in parts)
    return PassTime(sum(part.ms for part in parts), parts[0].repetitions, memory, host)


def attention_tables(
    records: Sequence[AttentionMeasurement], number: str | None = None
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of each pass, then of the memory and the host. A row is a size, a column an attention.

    A block-sparse attention also shows its density, and its time over density x time of `flash`, where that is
    measured.

    Args:
        number: of the paper's table. The title names it, and Tables 9 to 20 have milliseconds alone.
    """
    absent = ("unsupported",) if number in RUNTIME_TABLES else ()  # so many columns: empty ones are left to the notes
    attentions = list(dict.fromkeys(record.attention for record in records if record.status not in absent))
    dense = {(record.pass_name, *_size(record)): record.ms for record in records if record.attention == "flash"}

    def speed(record: AttentionMeasurement) -> str:
        if number in RUNTIME_TABLES:  # not all that is compared has these FLOPs
            return f"{record.ms:g}" if record.ok else _status(record)
        text = _speed(record)
        if record.ms and record.density and record.block:
            text += f", {record.density:.3g}"
            if ms := dense.get((record.pass_name, *_size(record))):
                text += f", {record.ms / (record.density * ms):.2f}"
        return text

    def table(
        title: str, name: str, shown: Callable[[AttentionMeasurement], str]
    ) -> tuple[str, list[str], list[list[str]]]:
        rows: dict[tuple[Any, ...], dict[str, str]] = {}
        marks = {_size(record): record.mark for record in records if record.mark and record.pass_name == name}
        for record in records:
            if record.pass_name == name:
                rows.setdefault(_size(record), {})[record.attention] = shown(record)
        lines = []
        for size, texts in rows.items():
            shown_size = [str(value) for value in size]
            shown_size[3] += marks.get(size, "")
            lines.append([*shown_size, *(texts.get(a, "") for a in attentions)])
        header = ["dtype", "d", "dropout", "N", "batch", *attentions]
        return f"Table {number}, {title}" if number else title, header, lines

    passes = list(dict.fromkeys(record.pass_name for record in records))
    for name in passes:
        if number in RUNTIME_TABLES:
            yield table(f"{name}: ms", name, speed)
            continue
        also = [", density", ", time / (density x time of flash)"] if any(record.block for record in records) else []
        yield table(f"{name}: ms (TFLOP/s)" + "".join(also if dense else also[:1]), name, speed)
    if number not in RUNTIME_TABLES and any(record.memory_mb is not None for record in records):
        widest = max(passes, key=PASSES.index)
        yield table(f"peak memory of {widest}, MB", widest, _memory)
    if number not in RUNTIME_TABLES and any(record.host_ms is not None for record in records):
        for name in passes:
            yield table(f"{name}: ms of the host on an idle GPU", name, _host)


def attention_notes(records: Sequence[AttentionMeasurement]) -> list[str]:
    """Why cases have no number, each reason once."""
    return list(dict.fromkeys(f"{r.attention}: {r.status}: {r.reason}" for r in records if r.reason))


def _size(record: AttentionMeasurement) -> tuple[Any, ...]:
    """What a row of a table stands for."""
    return record.dtype, record.head_dim, record.dropout, record.length, record.batch


def _speed(record: AttentionMeasurement) -> str:
    if not record.ok:
        return _status(record)
    return f"{record.ms:g}" + ("" if record.tflops is None else f" ({record.tflops:.0f})")


def _memory(record: AttentionMeasurement) -> str:
    return f"{record.memory_mb:.0f}" if record.ok else _status(record)


def _host(record: AttentionMeasurement) -> str:
    if not record.ok:
        return _status(record)
    return "" if record.host_ms is None else f"{record.host_ms:g}"  # older records have none


def _status(record: AttentionMeasurement) -> str:
    return "" if record.status == "unsupported" else record.status


def attention_line(records: Sequence[AttentionMeasurement]) -> str:
    """A line on what was measured of a case."""
    first = records[0]
    size = f"{first.attention} {first.dtype} d={first.head_dim} p={first.dropout:g} N={first.length}"
    size += f" density={first.density:.3g}" if first.block else ""
    return f"{size}: " + ", ".join(f"{record.pass_name} {_speed(record) or record.status}" for record in records)
