"""`lra compare`: two runs, or the seeds of two settings, by fields, by scores, and by tests of significance."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lra.config.compose import flatten
from lra.config.options import parse_options
from lra.errors import UsageError
from lra.experiments.reproduction import Reproduction, TextTable, format_mean_std
from lra.experiments.results import significance
from lra.experiments.results.curve_plot import check_figure_file, draw_curves
from lra.experiments.results.ledger import describe_gpus, is_stuck
from lra.experiments.results.run_groups import RunGroup, find_group, seed_of
from lra.training.predictions import Predictions, read_predictions
from lra.training.run_directory import PREDICTIONS_FILE, had_gpu_alone
from lra.training.run_files import as_mapping, read_whole_result, stated_code

SIDES = ("A", "B")
TEST_SETS = ("test", "fresh")


@dataclass(frozen=True)
class CompareOptions:
    out: str | None = None  # an .svg or .pdf file for the curves

    def __post_init__(self) -> None:
        if self.out is not None:
            check_figure_file(self.out)


@dataclass(frozen=True)
class Side:
    """The runs of A or of B: their directories, and the results of those that ended, by seed."""

    label: str
    group: RunGroup
    results: Mapping[int, Mapping[str, Any]]
    notes: tuple[str, ...]

    @property
    def finished(self) -> dict[int, Mapping[str, Any]]:
        return {seed: result for seed, result in self.results.items() if result["status"] == "finished"}

    def directory(self, seed: int) -> Path:
        return next(run for run in self.group.runs if seed_of(run) == seed)

    def values(self, read: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
        """What `read` finds in the finished results, by seed, where it is known."""
        return [value for result in self.finished.values() if (value := read(result)) is not None]


def compare_runs(first: str, second: str, args: Sequence[str] = ()) -> Reproduction:
    """Compares two runs, or the seeds of two settings.

    Args:
        first, second: a run's directory; without `-s<seed>` it stands for the runs of all seeds.
        args: `field=value` of CompareOptions.

    Returns:
        Tables of the fields that differ, of scores and of tests, and lines on what can't be tested and why.

    Raises:
        UsageError: no run has ended in one of the two, both are the same, or a file can't be read or written.
    """
    options = parse_options(CompareOptions, args)
    a, b = (_read_side(label, find_group(place)) for label, place in zip(SIDES, (first, second), strict=True))
    if a.group.runs == b.group.runs:
        raise UsageError(f"{second} is {first} once more: name another run")
    lines = [note for side in (a, b) for note in side.notes]
    tables = [_fields_table(a, b), _scores_table(a, b)]
    others = [(read(a), read(b)) for read in (_task_of, _learned_by) if read(a) != read(b)]
    if others:
        lines += [f"nothing is tested: A is of {one}, and B of {other}" for one, other in others]
    else:
        for made, said in (_test_seeds(a, b), _test_pairs(a, b)):
            tables += made
            lines += said
    if options.out is not None:
        draw_curves([a.group, b.group], options.out)
        lines.append(f"curves: {options.out}")
    return Reproduction([table for table in tables if table[2]], lines)


def _read_side(label: str, group: RunGroup) -> Side:
    results, notes = {}, []
    for run in group.runs:
        try:
            results[seed_of(run)] = read_whole_result(run / "result.json")
        except FileNotFoundError:
            notes.append(f"{run} has no result yet, so it is left out: lra fit with resume=auto ends it")
        except ValueError as error:
            raise UsageError(f"{run}/result.json is not a whole result ({error}): name another run") from None
    if not results:
        raise UsageError(f"{group.name} has no result yet: lra fit with resume=auto ends it")
    seeds = ", ".join(map(str, results))
    notes.insert(0, f"{label}: {group.name}, {'seed' if len(results) == 1 else 'seeds'} {seeds}")
    return Side(label, group, results, tuple(notes))


def _task_of(side: Side) -> str:
    return ", ".join(sorted({result["task"] for result in side.results.values()}))


def _learned_by(side: Side) -> str:
    """What the accuracies of a side are of: labels, or what a pretraining finds."""
    found = {result["config"].get("pretrain", "none") for result in side.results.values()}
    return ", ".join("labels" if each == "none" else f"pretrain={each}" for each in sorted(found))


def _fields_table(a: Side, b: Side) -> TextTable:
    """The fields, versions and hardware that differ."""
    stated = [_stated(side) for side in (a, b)]
    names = dict.fromkeys(name for each in stated for name in each)
    alike = [part for part in ("task", "attn") if len({each[f"{part}.name"] for each in stated}) == 1]

    def state(name: str, each: Mapping[str, str]) -> str:
        section = name.partition(".")[0]
        foreign = section in ("task", "attn") and section not in alike  # a field of the other component
        return each.get(name, "" if foreign else "(default)")

    shown = [[name, *(state(name, each) for each in stated)] for name in names]
    return "what differs", ["field", *SIDES], [row for row in shown if row[1] != row[2]]


def _stated(side: Side) -> dict[str, str]:
    """What the results of a side state, by field; several values if its runs differ."""
    found: dict[str, dict[str, None]] = {}
    for result in side.results.values():
        made_with = as_mapping(result.get("environment"))
        config = {name: value for name, value in flatten(result["config"]) if name not in ("seed", "name")}
        if isinstance(config.get("init"), str):  # of the run before it, with its seed
            config["init"] = re.sub(r"-s\d+(?=/|$)", "", config["init"])
        config |= {"version of the task": result["task"], "commit": made_with.get("commit") or "unknown"}
        config["digest of the data"] = as_mapping(result.get("data")).get("digest") or "unknown"
        config["own code"] = ", ".join(map(" ".join, stated_code(result))) or "none stated"
        config["hardware"] = describe_gpus(made_with.get("gpu"), result.get("world_size") or 1)
        for name, value in config.items():
            found.setdefault(name, {})["null" if value is None else str(value)] = None
    return {name: ", ".join(values) for name, values in found.items()}


def _score(split: str, name: str, factor: float = 1.0) -> Callable[[Mapping[str, Any]], float | None]:
    """Reads a score of a split from a result."""

    def read(result: Mapping[str, Any]) -> float | None:
        value = as_mapping(result.get(split)).get(name)
        return None if value is None else factor * value

    return read


def _fact(name: str, factor: float = 1.0, alone: bool = False) -> Callable[[Mapping[str, Any]], float | None]:
    """Reads a number from a result. `alone`: only of runs that had their GPU alone."""

    def read(result: Mapping[str, Any]) -> float | None:
        value = result.get(name)
        return None if value is None or (alone and not had_gpu_alone(result)) else factor * value

    return read


SCORES: dict[str, tuple[int, Callable[[Mapping[str, Any]], float | None]]] = {  # digits after the point
    "validation accuracy, %": (1, _score("val", "accuracy", 100)),
    "test accuracy, %": (1, _score("test", "accuracy", 100)),
    "test loss": (3, _score("test", "loss")),
    "fresh accuracy, %": (1, _score("fresh", "accuracy", 100)),
    "fresh loss": (3, _score("fresh", "loss")),
    "parameters": (0, _fact("parameters")),
    "steps": (0, _fact("steps")),
    "training seconds": (1, _fact("train_seconds", alone=True)),
    "steps per second": (1, _fact("steps_per_second", alone=True)),
    "peak memory of one GPU, GB": (2, _fact("peak_gpu_bytes", 1e-9)),
}


def _scores_table(a: Side, b: Side) -> TextTable:
    """The mean and deviation of what the results say, beside each other."""
    rows, several = [], any(len(side.results) > 1 for side in (a, b))
    for name, (digits, read) in SCORES.items():
        found = [side.values(read) for side in (a, b)]
        if any(found):
            texts = [format_mean_std(values if len({*values}) > 1 else values[:1], digits) for values in found]
            rows.append([name, *texts, _difference(found, digits)])
    if several or any(len(side.results) > len(side.finished) for side in (a, b)):
        rows.append(["finished seeds", *(f"{len(side.finished)} of {len(side.results)}" for side in (a, b)), ""])
    stuck = [[is_stuck(result["test"]) for result in side.finished.values()] for side in (a, b)]
    if any(map(any, stuck)):
        rows.append(["stuck seeds", *(f"{sum(each)} of {len(each)}" for each in stuck), ""])
    title = "scores: mean ± standard deviation over seeds" if several else "scores"
    return title, ["", *SIDES, "B - A"], rows


def _difference(found: Sequence[Sequence[float]], digits: int) -> str:
    return f"{statistics.fmean(found[1]) - statistics.fmean(found[0]):+.{digits}f}" if all(found) else ""


def _test_seeds(a: Side, b: Side) -> tuple[list[TextTable], list[str]]:
    """Intervals over seeds and permutation tests of the means."""
    counts = [len(side.finished) for side in (a, b)]
    if min(counts) < 2:
        have = " and ".join(f"{side.label} has {count}" for side, count in zip((a, b), counts, strict=True))
        return [], [f"no test over seeds: {have} finished, each needs 2 or more; train them with seed=1, seed=2, …"]
    rows = []
    for split in TEST_SETS:
        found = [side.values(_score(split, "accuracy", 100)) for side in (a, b)]
        if min(map(len, found)) >= 2:
            means = [f"{statistics.fmean(values):.1f}{_interval(values)}" for values in found]
            difference = _difference(found, 1) + _interval(*found)
            rows.append([split, *means, difference, _p(significance.permuted_means(*found))])
    lines = [
        f"95% intervals over seeds: {significance.INTERVAL_METHOD}, from {significance.LEAST_SEEDS} seeds on",
        f"a permutation test of {counts[0]} and {counts[1]} seeds can't give less than "
        f"p = {_p(significance.least_p(*counts))}",
    ]
    header = ["test set", *(f"{side}, % (95%)" for side in SIDES), "B - A (95%)", "p"]
    return [("accuracy over seeds, and a permutation test of the means", header, rows)], lines


def _interval(*samples: Sequence[float]) -> str:
    found = significance.bootstrap_interval(*samples)
    return "" if found is None else f" ({found[0]:.1f} to {found[1]:.1f})"


def _test_pairs(a: Side, b: Side) -> tuple[list[TextTable], list[str]]:
    """Paired tests on the predictions of the same examples, of each seed that both have and of all of them."""
    if (learned := _learned_by(a)) != "labels":
        return [], [f"no paired test: {learned} predicts no class of an example"]
    seeds = [(seed, seed) for seed in a.finished if seed in b.finished]
    if len(a.finished) == len(b.finished) == 1:
        seeds = [(*a.finished, *b.finished)]
    if not seeds:
        return [], ["no paired test: no seed is finished in both"]
    lines, kept = [], []
    for pair in seeds:
        found = [read_predictions(s.directory(seed) / PREDICTIONS_FILE) for s, seed in zip((a, b), pair, strict=True)]
        lacking = [s.directory(seed) for s, seed, its in zip((a, b), pair, found, strict=True) if not its]
        lines += [
            f"no paired test of {each}: it has no {PREDICTIONS_FILE}; lra test init={each} predictions=true makes it"
            for each in lacking
        ]
        if not lacking:
            kept.append((pair, found))
    rows = []
    for split in TEST_SETS:
        pairs = {pair: tuple(its[split] for its in found) for pair, found in kept if all(split in its for its in found)}
        same = {pair: both for pair, both in pairs.items() if _same_examples(a, b, pair, both)}
        if len(same) < len(pairs):
            lines.append(f"no paired test on {split}: A and B have other examples there, of other data")
        rows += _paired_rows(split, {pair: tuple(its.right for its in both) for pair, both in same.items()})
    header = ["test set", "seed", "examples", "only A right", "only B right", "McNemar's p", "permutation p"]
    return [("paired tests on the same examples (McNemar's exact test; permutation test)", header, rows)], lines


def _same_examples(a: Side, b: Side, seeds: tuple[int, int], both: Sequence[Predictions]) -> bool:
    """Whether predictions are of the same examples: equal labels, and one store or one imported source."""
    data = [as_mapping(side.results[seed].get("data")) for side, seed in zip((a, b), seeds, strict=True)]
    imported = data[0].get("source") == data[1].get("source") != "generated"
    return np.array_equal(both[0].label, both[1].label) and (imported or data[0].get("store") == data[1].get("store"))


def _paired_rows(split: str, right: Mapping[tuple[int, int], tuple[np.ndarray, ...]]) -> Iterator[list[str]]:
    """A row for each pair of seeds, and one of all. `right`: whether A and B classify each example correctly."""
    for (one, other), (first, second) in right.items():
        seed = str(one) if one == other else f"{one}, {other}"
        only = [f"{int(each.sum()):,}" for each in (first & ~second, second & ~first)]
        permuted = significance.permuted_pairs(first.astype(float), second.astype(float))
        yield [split, seed, f"{len(first):,}", *only, _p(significance.mcnemar(first, second)), _p(permuted)]
    if len(right) > 1:
        first, second = (np.mean(each, axis=0) for each in zip(*right.values(), strict=True))
        yield [split, "all", f"{len(first):,}", "", "", "", _p(significance.permuted_pairs(first, second))]


def _p(value: float) -> str:
    return f"{value:.2g}"
