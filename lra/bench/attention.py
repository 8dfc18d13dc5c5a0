"""`lra bench attention`: speed and memory of attentions, each checked before it is timed."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lra import environment
from lra.bench import plots
from lra.bench.case import DTYPES, BenchmarkCase, attend, configurable, make_batch
from lra.bench.check import Verdict, check_dropout, check_small, check_timed, has_reference
from lra.bench.files import output
from lra.bench.presets import COMPARED, IMDB_LENGTHS, PASSES, RUNTIME, TABLES, masked, sized
from lra.bench.records import AttentionMeasurement, Measured
from lra.bench.sparse import compared
from lra.bench.timing import Pass, Steps, measure
from lra.config.options import parse_options, recorded_options, refuse_repeats
from lra.config.override import parse_overrides
from lra.config.schema import check_at_most, check_dropout_rate
from lra.errors import UsageError, named, out_of_memory
from lra.models.attention import ATTENTIONS

FLOPS = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # the backward recomputes the scores: five products, not two


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
        for name, known in (("dtypes", DTYPES), ("passes", PASSES)):
            if unknown := set(getattr(self, name)) - set(known):
                raise UsageError(f"{name}={unknown.pop()} is unknown: choose from {', '.join(known)}")
        if self.ragged == "imdb" and (self.batch or 32) > len(IMDB_LENGTHS):
            raise UsageError(f"batch={self.batch}: ragged=imdb has {len(IMDB_LENGTHS)} lengths")

    def cases(self) -> Iterator[BenchmarkCase]:
        """Attentions vary fastest, so that what is compared is measured together."""
        sizes = [(n, (n,) * (self.batch or max(1, self.tokens // n))) for n in self.lengths]
        if self.ragged == "mask":
            sizes = [(n, masked(n, len(lengths))) for n, lengths in sizes]
        if self.ragged == "imdb":
            sizes = [(0, tuple(sorted(IMDB_LENGTHS[: self.batch or 32], reverse=True)))]  # as a batch of training lies
        for dtype, d, p, (n, lengths), name in itertools.product(
            self.dtypes, self.head_dims, self.dropout, sizes, self.attns
        ):
            attention = sized(name, n) if self.table in COMPARED else name
            yield BenchmarkCase(attention, dtype, d, p, lengths, self.heads, span=n if self.ragged == "mask" else 0)

    def facts(self, case: BenchmarkCase) -> dict[str, str]:
        """What a record says of its case beyond the sizes; options that the table chose are not part of the name."""
        name, fields = case.attention, ""
        if name not in self.attns:
            name, _, fields = name.partition(":")
        return {"attention": name, "options": fields, "ragged": self.ragged}


def configure(args: Sequence[str]) -> AttentionOptions:
    """The options of `field=value` arguments, with the defaults of the chosen table."""
    overrides = parse_overrides(args)
    given = {override.field: override.text for override in overrides}
    table = given.get("table")
    compared_by_default = {"attns": tuple(ATTENTIONS.catalogue())} if table in COMPARED else {}
    options = parse_options(AttentionOptions, overrides, **compared_by_default, **TABLES.get(table, {}))
    clash = given.keys() & ({"lengths", "tokens", "table"} if options.ragged == "imdb" else set())
    if {"attn", "attns"} <= given.keys():
        raise UsageError("attn= does not go with attns=: give one, as attn= chooses what to compare")
    if clash:
        raise UsageError(f"{min(clash)}= does not go with ragged=imdb")
    if "tokens" in given and options.batch is not None:
        raise UsageError(f"tokens= does not go with {'batch=' if 'batch' in given else f'table={table}: give batch='}")
    if options.attn is not None:
        configurable(options.attn)
        options = replace(options, attns=compared(options.attn))
    for attention in options.attns if given.keys() & {"attn", "attns"} else ():
        name, cls = configurable(attention)
        parse_options(cls.Config, attention.split(":")[1:], f"attns={name}: ")
    return options


def bench(args: Sequence[str], progress: Callable[[str], None] = lambda line: None) -> Measured[AttentionMeasurement]:
    """Measures; writes `out=` after every case and `plots=` in the end.

    Args:
        args: `field=value` of AttentionOptions.
        progress: is given a line for each case when it is done.
    """
    options = configure(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = Measured[AttentionMeasurement](environment.describe(), recorded_options(options), [])

    def draw() -> None:
        if options.plots:
            plots.draw(result.cells, Path(options.plots))

    with output(options.out) as keep:
        draw()  # what can't be written is refused before it is measured
        try:
            for records in run(options, device):
                result.cells += records
                progress(line(records))
                keep(result.saved())
        finally:
            draw()
    return result


def run(
    options: AttentionOptions, device: torch.device, done: Collection[tuple[str, int]] = ()
) -> Iterator[list[AttentionMeasurement]]:
    """The records of each case, but for cases whose (attention, N) is `done`."""
    small = functools.cache(lambda case: check_small(case, device).worse(check_dropout(case, device)))
    for case in options.cases():
        facts = options.facts(case)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises if the last case was a fault: no later one could be measured
        if (facts["attention"], case.padded_length) not in done:
            yield [*run_case(case, facts, options.passes, device, small)]


def run_case(
    case: BenchmarkCase, facts: Mapping[str, str], passes: Sequence[str], device: torch.device,
    small: Callable[[BenchmarkCase], Verdict],
) -> Iterator[AttentionMeasurement]:  # fmt: skip
    """One record for each pass.

    `facts` are those of `AttentionOptions.facts`. `small` checks a small problem; its answer is the same for all that
    give that one.
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
        _clear(device)
        verdict = small(case.small(layout))
        if not verdict.wrong:
            _clear(device)  # compiled for the small size, a kernel would be one for any size
            verdict, times, out_of_memory = _measure(case, backward, device, verdict)
            status = "OOM" if out_of_memory else "ok"
        status = "WRONG" if verdict.wrong else status
        reason = verdict.wrong
    except UsageError as error:
        status, reason = "unsupported", str(error)
    except Exception as error:  # whatever a compiler or a driver raises: the other cases are still worth having
        status, reason = "failed", named(error)
    if status in ("WRONG", "failed"):
        times = {}
    for name in passes:
        spent = _pass(times, name)
        yield AttentionMeasurement(
            **facts, pass_name=name, length=case.padded_length, head_dim=case.head_dim, dtype=case.dtype,
            dropout=case.dropout, batch=len(case.lengths), heads=case.heads,
            tokens=sum(case.lengths), squares=sum(n * n for n in case.lengths),
            density=_round(density), block="x".join(map(str, layout.block)) if layout else None,
            status="ok" if spent else status,
            ms=_round(spent and spent.ms),
            tflops=_round(spent and density and FLOPS[name] * density * case.flops / spent.ms / 1e9),
            memory_mb=_round(spent and spent.memory_mb),
            repetitions=spent and spent.repetitions,
            checked=_round(verdict.ratio),
            reason="" if spent else reason, made=None,
        )  # fmt: skip


def _measure(
    case: BenchmarkCase, backward: bool, device: torch.device, verdict: Verdict
) -> tuple[Verdict, dict[str, Pass], bool]:
    """Checks at full size, then times: the verdict, the passes, and whether something did not fit."""
    try:
        return *_checked_times(case, backward, device, verdict), False
    except Exception as error:
        if not out_of_memory(error):
            raise
        # what follows is outside the handler, whose traceback keeps the tensors alive
    _clear(device)
    if backward:
        return *_measure(case, False, device, verdict)[:2], True
    return verdict, {}, True


def _checked_times(
    case: BenchmarkCase, backward: bool, device: torch.device, verdict: Verdict
) -> tuple[Verdict, dict[str, Pass]]:
    attention = case.build(device)
    batch = make_batch(case.lengths, case.full, device)
    if not case.full:  # a padding mask is of N columns, also where no sequence has N tokens
        batch = replace(batch, max_length=case.padded_length)
        batch = batch if attention.facts.ragged else batch.to_padded()
    shape = (batch.tokens.numel(), case.heads, case.head_dim)

    def prepare() -> list[torch.Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        return [torch.randn(shape, generator=generator, device=device, dtype=DTYPES[case.dtype]) for _ in range(4)]

    def prepare_leaves() -> list[torch.Tensor]:
        *qkv, do = prepare()
        return [*(x.requires_grad_() for x in qkv), do]

    def forward(inputs: list[torch.Tensor]) -> Any:
        q, k, v, do = inputs
        return attend(attention, q, k, v, batch, case.full), (q, k, v, *attention.parameters()), do

    steps: Steps = {"forward": forward}
    if backward:
        steps["backward"] = lambda done: torch.autograd.grad(*done, allow_unused=True)
    verdict = verdict.worse(check_timed(case, prepare(), batch, backward))
    if verdict.wrong:
        return verdict, {}
    result: Any = prepare_leaves()
    for step in steps.values():  # warm-up: with dropout it is another kernel than the one checked
        result = step(result)
    del result
    _clear(device, compiled=False)
    return verdict, measure(prepare_leaves, steps, device)


def _pass(times: dict[str, Pass], name: str) -> Pass | None:
    """`both` is the two in a row: their sum, and the larger of their peaks."""
    if name != "both" or len(times) < 2:
        return times.get(name)
    parts = list(times.values())
    memory = None if parts[0].memory_mb is None else max(part.memory_mb or 0.0 for part in parts)
    return Pass(sum(part.ms for part in parts), parts[0].repetitions, memory)


def _clear(device: torch.device, compiled: bool = True) -> None:
    """Gives freed memory back; forgets what torch.compile made for another size, which would make it dynamic."""
    if device.type != "cuda":
        return
    if compiled and "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def tables(
    records: Sequence[AttentionMeasurement], number: str | None = None
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of each pass, then of the memory; a row is a size, a column an attention.

    `number` is that of the paper's table: the title names it, and Tables 9 to 20 are milliseconds alone.

    What is block-sparse also shows its density, and its time over density x time of `flash`, where that is measured.
    """
    absent = ("unsupported",) if number in RUNTIME else ()  # so many columns: empty ones are left to the notes
    attentions = list(dict.fromkeys(record.attention for record in records if record.status not in absent))
    dense = {(record.pass_name, *_size(record)): record.ms for record in records if record.attention == "flash"}

    def speed(record: AttentionMeasurement) -> str:
        if number in RUNTIME:  # not all that is compared has these FLOPs
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
        if number in RUNTIME:
            yield table(f"{name}: ms", name, speed)
            continue
        also = [", density", ", time / (density x time of flash)"] if any(record.block for record in records) else []
        yield table(f"{name}: ms (TFLOP/s)" + "".join(also if dense else also[:1]), name, speed)
    if number not in RUNTIME and any(record.memory_mb is not None for record in records):
        widest = max(passes, key=PASSES.index)
        yield table(f"peak memory of {widest}, MB", widest, _memory)


def notes(records: Sequence[AttentionMeasurement]) -> list[str]:
    """Why cases have no number, each reason once."""
    return list(dict.fromkeys(f"{r.attention}: {r.status}: {r.reason}" for r in records if r.reason))


def _size(record: AttentionMeasurement) -> tuple[Any, ...]:
    """What a row of a table is of."""
    return record.dtype, record.head_dim, record.dropout, record.length, record.batch


def _speed(record: AttentionMeasurement) -> str:
    if not record.ok:
        return _status(record)
    return f"{record.ms:g}" + ("" if record.tflops is None else f" ({record.tflops:.0f})")


def _memory(record: AttentionMeasurement) -> str:
    return f"{record.memory_mb:.0f}" if record.ok else _status(record)


def _status(record: AttentionMeasurement) -> str:
    return "" if record.status == "unsupported" else record.status


def line(records: Sequence[AttentionMeasurement]) -> str:
    """What was measured of a case."""
    first = records[0]
    size = f"{first.attention} {first.dtype} d={first.head_dim} p={first.dropout:g} N={first.length}"
    size += f" density={first.density:.3g}" if first.block else ""
    return f"{size}: " + ", ".join(f"{record.pass_name} {_speed(record) or record.status}" for record in records)


def _round(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")
