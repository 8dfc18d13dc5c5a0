"""`lra reproduce fig3`: Tables 9 to 21 and Figure 3 of FlashAttention (arXiv 2205.14135, appendix E.6).

There are four settings: with and without dropout and padding mask. Each has a JSON file in the folder `out`, as `lra
bench attention` writes it. The same command again measures what the files lack. Several processes may share a folder if
each has its own settings: `CUDA_VISIBLE_DEVICES=1 lra reproduce fig3 settings=mask`. The process that finds all four
complete merges them into fig3.json and draws the figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from lra import environment
from lra.bench import attention, plots
from lra.bench.attention import AttentionOptions
from lra.bench.output import lock_output, write_measurement
from lra.bench.presets import PASSES, SETTINGS
from lra.bench.records import AttentionMeasurement, MeasurementFile, read_measurements, session_of
from lra.config.options import parse, refuse_repeats, shown
from lra.config.registry import unknown
from lra.errors import UsageError
from lra.experiments.reproduction import (
    Reproduction,
    TextTable,
    add_footnote,
    refuse_other_environment,
    refuse_other_options,
)

BLOCK_SPARSE = "butterfly"  # what is block-sparse FlashAttention
PAPER_CLAIM = "block-sparse FlashAttention is faster than all other methods at every N"


@dataclass(frozen=True)
class Fig3Options:
    """What `lra reproduce fig3` measures: by default everything, in the paper's sizes."""

    settings: tuple[str, ...] = tuple(SETTINGS)  # the others are taken as they are found
    attns: tuple[str, ...] | None = None  # all by default
    lengths: tuple[int, ...] | None = None  # 128 to 65536 by default
    batch: int = 16
    heads: int = 8
    head_dim: int = 64
    dtype: Literal["fp32", "fp16", "bf16"] = "bf16"
    out: str = "fig3"  # folder

    def __post_init__(self) -> None:
        for name in self.settings:
            if name not in SETTINGS:
                raise UsageError(f"settings=: {unknown('setting', name, SETTINGS)}")
        refuse_repeats(settings=self.settings, attns=self.attns, lengths=self.lengths)

    def setting(self, name: str) -> AttentionOptions:
        """One setting, as options of `lra bench attention`."""
        fields: dict[str, Any] = {
            "table": SETTINGS[name].tables[0], "passes": PASSES, "attns": self.attns, "lengths": self.lengths,
            "batch": self.batch, "heads": self.heads, "head_dims": self.head_dim, "dtypes": self.dtype,
        }  # fmt: skip
        texts = {k: ",".join(map(str, v)) if isinstance(v, tuple) else v for k, v in fields.items() if v is not None}
        return attention.configure_attention([f"{field}={text}" for field, text in texts.items()])


class SettingFile:
    """A setting and the content of its file. UsageError if the file was measured with other options."""

    def __init__(self, path: Path, options: AttentionOptions):
        self.path, self.options = path, options
        stated = json.loads(json.dumps(shown(options)))
        self.result = MeasurementFile[AttentionMeasurement](environment.describe(), stated, [])
        if not path.exists():
            return
        try:
            self.result = read_measurements(path, AttentionMeasurement)
        except ValueError:
            raise UsageError(
                f"{path} is not a measurement of lra reproduce fig3: remove it, or choose another out="
            ) from None
        refuse_other_options(path, self.result.options, stated)

    @property
    def records(self) -> list[AttentionMeasurement]:
        return self.result.cells

    def lacking(self) -> set[tuple[str, int]]:
        """(attention, N) of the cases that are not measured."""
        wanted = {(self.options.facts(case)["attention"], case.padded_length) for case in self.options.cases()}
        return wanted - self._done()

    def complete(self, session: dict[str, Any], progress: Callable[[str], None]) -> None:
        """Measures the missing cases in the environment `session`. The file is rewritten after every case."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if not self.path.exists():
            self.result.environment = session
        for records in attention.measure_cases(self.options, device, self._done()):
            places = {(record.attention, record.length) for record in records}
            others = [r for r in self.records if (r.attention, r.length) not in places]  # but for those that failed
            self.result.cells = [*others, *(replace(record, made=session_of(session)) for record in records)]
            write_measurement(self.path, self.result.saved())
            progress(f"{self.path.stem}: {attention.attention_line(records)}")

    def _done(self) -> set[tuple[str, int]]:
        """Cases that are measured, or can't be. A case that failed is not done, as its failure may have passed."""
        failed = {(record.attention, record.length) for record in self.records if record.status == "failed"}
        return {(record.attention, record.length) for record in self.records} - failed


def parse_fields(args: Sequence[str]) -> Fig3Options:
    """The settings and attentions to measure."""
    return parse(Fig3Options, args)


def reproduce(args: Sequence[str], progress: Callable[[str], None] = lambda line: None) -> Reproduction:
    """Measures the missing cases of the chosen settings, then reports on all settings.

    Args:
        args: `field=value` of Fig3Options.
        progress: is called with a line for each case when it is done.
    """
    options = parse_fields(args)
    folder, session = Path(options.out), environment.describe()

    def read() -> dict[str, SettingFile]:
        return {name: SettingFile(folder / f"{name}.json", options.setting(name)) for name in SETTINGS}

    parts = read()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"out={options.out} can't be a folder ({error.strerror}): name another") from None
    lacking = [name for name in options.settings if parts[name].lacking()]
    with ExitStack() as held:
        for name in lacking:
            held.enter_context(lock_output(parts[name].path))
        parts = read()  # another process may just have completed them
        _check_environments(list(parts.values()), any(parts[name].lacking() for name in lacking))
        for name in lacking:
            parts[name].complete(session, progress)
    parts = read()  # others may have gone on
    _check_environments(list(parts.values()), False)
    records = [record for part in parts.values() for record in part.records]
    lines = [*attention.attention_notes(records), compare_with_claim(records)]
    if lacking := [name for name, part in parts.items() if part.lacking()]:
        lines.append(f"not merged, as not complete: {', '.join(lacking)}")
    else:
        made_with = parts["plain"].result.environment
        stated = {name: value for name, value in shown(options).items() if name != "settings"}
        write_measurement(folder / "fig3.json", MeasurementFile(made_with, stated, records).saved())
        drawn = plots.draw_figures(records, folder)
        lines.append(f"written: {folder / 'fig3.json'} and {len(drawn)} figures")
    wrong = any(record.failed for record in records)
    return Reproduction([*paper_tables(records), fastest_table(records)], lines, wrong)


def setting_of(record: AttentionMeasurement) -> str:
    """The name of a record's setting."""
    own = (record.dropout > 0, record.ragged)
    return next(name for name, setting in SETTINGS.items() if (setting.dropout > 0, setting.ragged) == own)


def paper_tables(records: Sequence[AttentionMeasurement]) -> Iterator[TextTable]:
    """The paper's tables for which something was measured."""
    for setting, (_, _, numbers) in SETTINGS.items():
        for number, name in zip(numbers, PASSES, strict=True):
            if chosen := [r for r in records if setting_of(r) == setting and r.pass_name == name]:
                yield from (add_footnote(*made) for made in attention.attention_tables(chosen, str(number)))
    chosen = [r for r in records if setting_of(r) == "plain" and r.pass_name == "both"]
    if any(record.memory_mb is not None for record in chosen):
        yield add_footnote(*list(attention.attention_tables(chosen, "21"))[-1])


class Race(NamedTuple):
    """The fastest attention in one setting, pass and N, and a factor: over `butterfly`, or of `butterfly` over the
    second.
    """

    winner: str
    factor: float | None  # None if no other was measured
    second: str


def find_races(records: Sequence[AttentionMeasurement]) -> dict[tuple[str, str, int], Race | None]:
    """The races by (setting, pass, N); None where `butterfly` has no time. Equal times are no win."""
    times: dict[tuple[str, str, int], dict[str, float]] = {}
    for record in records:
        spent = times.setdefault((setting_of(record), record.pass_name, record.length), {})
        if record.ok and record.ms is not None:
            spent[record.attention] = record.ms
    return {place: _race(spent) for place, spent in times.items()}


def _race(spent: dict[str, float]) -> Race | None:
    if BLOCK_SPARSE not in spent:
        return None
    ours = spent[BLOCK_SPARSE]
    others = {name: ms for name, ms in spent.items() if name != BLOCK_SPARSE}
    best = min(others, key=lambda name: others[name], default=None)
    if best is None:
        return Race(BLOCK_SPARSE, None, "")
    if ours < others[best]:
        return Race(BLOCK_SPARSE, others[best] / ours, best)
    return Race(best, ours / others[best], BLOCK_SPARSE)


def fastest_table(records: Sequence[AttentionMeasurement]) -> TextTable:
    """The winner of each pass and N in every setting."""
    found = find_races(records)
    settings = [name for name in SETTINGS if any(place[0] == name for place in found)]
    rows = sorted({place[1:] for place in found}, key=lambda row: (PASSES.index(row[0]), row[1]))
    marks = {(record.pass_name, record.length): record.mark for record in records if record.mark}
    lines = [
        [name, f"{n}{marks.get((name, n), '')}"]
        + [_describe_race(found[place]) if (place := (s, name, n)) in found else "" for s in settings]
        for name, n in rows
    ]
    ours = BLOCK_SPARSE
    title = f"fastest attention: how many times faster than the next, or, if it is not {ours}, than {ours}"
    return add_footnote(title, ["pass", "N", *settings], lines)


def compare_with_claim(records: Sequence[AttentionMeasurement]) -> str:
    """The paper's statement beside the measurements, and who wins where it does not hold."""
    found = find_races(records)
    decided = {place: race for place, race in found.items() if race and race.factor}
    lost: dict[str, list[tuple[int, float]]] = {}
    for (_, _, n), race in decided.items():
        if race.winner != BLOCK_SPARSE:
            lost.setdefault(race.winner, []).append((n, race.factor or 1.0))
    won = len(decided) - sum(map(len, lost.values()))
    parts = [f"paper: {PAPER_CLAIM}; here {BLOCK_SPARSE} is the fastest in {won} of {len(decided)} (setting, pass, N)"]
    for name, races_lost in sorted(lost.items(), key=lambda item: -len(item[1])):
        lengths, most = [n for n, _ in races_lost], max(factor for _, factor in races_lost)
        span = f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
        parts.append(f"{name} in {len(races_lost)}, N = {span}, by a factor of {most:.2f} at most")
    if undecided := len(found) - len(decided):
        parts.append(f"not decided in {undecided}, where {BLOCK_SPARSE} or every other has no time")
    return "; ".join(parts)


def _describe_race(race: Race | None) -> str:
    if race is None:
        return f"no time of {BLOCK_SPARSE}"
    return race.winner if race.factor is None else f"{race.winner} {race.factor:.2f} ({race.second})"


def _check_environments(parts: Sequence[SettingFile], measuring: bool) -> None:
    """Refuses to combine measurements of different environments.

    Args:
        measuring: whether something will be measured, so that this environment counts, too.
    """
    made = [part for part in parts if part.records]
    if made:
        first = environment.describe() if measuring else made[0].result.environment
        for part in made:
            refuse_other_environment(part.path, part.result.environment, first)
