"""Makes docs/table3.md and docs/table6.md from all runs in benchmarks.

Each recipe with a finished run in the table has a section, which is what `lra report` shows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import cards, measured
from lra.config.recipes import config_names, read_recipe, recipe_names
from lra.environment import UNCLEAN_MARK
from lra.experiments import speed
from lra.experiments.grid import grid, plan
from lra.experiments.grid.cells import with_stages
from lra.experiments.grid.grid import Cell, Grid
from lra.experiments.results import ledger, report
from lra.experiments.results.accuracy_tables import SEEDS_TITLE
from lra.training.run_directory import had_gpu_alone, time_and_memory

MEASURED = Path(measured.BENCHMARKS.name)  # seen from the top of the checkout
HEAD = (
    "# {title}\n\n<!-- made by benchmarks/pages/tables.py of benchmarks/results: make docs -->\n\n{about} ({source}). "
    "`lra reproduce {name}` runs the cells, and `lra report {name}` makes these tables. A cell that was not run is "
    "empty. [results.md](results.md) says how to read them. "
    "Differences are to the paper's figure, in parentheses. An average is over the columns shown that have the paper's "
    "protocol and data set, and over the seeds that all of them have; the paper's is over the same columns."
)
OVERLAP = "studies/overlap/*/*.json"
OTHERS = "of no cell of this table"  # how a note begins on files that other pages show


@dataclass(frozen=True)
class Section:
    """A table under one recipe: what `lra report` makes of the runs, and how many GPU-hours they are."""

    recipe: str
    report: report.Report
    runs: Mapping[Cell, ledger.ResultFile]  # of the cells and of their stages
    hours: tuple[str, ...]  # sentences: of all runs; and, where speed was measured, of one seed's runs alone

    def markdown(self) -> str:
        title = f"## Recipe `{self.recipe}`: {read_recipe(self.recipe)['about']}"
        return "\n\n".join([title, *markdown(self.report, self.hours)])


def markdown(made: report.Report, notes: Sequence[str] = ()) -> list[str]:
    """The tables of a report, and a list of these notes and its own."""
    parts = [f"**{title}**\n\n{measured.bare_table(header, rows)}" for title, header, rows in made.tables]
    said = (note for note in (*notes, *made.notes) if not note.startswith(OTHERS))
    return [*parts, "\n".join(f"- {note}" for note in said)]


def with_seeds(made: report.Report) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a report's accuracies, each with the number of its seeds, and how others ended."""
    _title, header, rows = made.tables[0]
    counts = {row[0]: row[1:] for title, _, lines in made.tables if title.startswith(SEEDS_TITLE) for row in lines}

    def counted(cell: str, seeds: str) -> str:
        finished, *others = seeds.split(", ")
        if not finished.isdecimal():  # none finished
            return seeds
        figure = cell.removesuffix(UNCLEAN_MARK)
        return ", ".join([f"{figure} ({finished})", *others]) + cell[len(figure) :]

    return header, [[row[0], *map(counted, row[1:], counts[row[0]])] if row[0] in counts else list(row) for row in rows]


@functools.cache
def sections(name: str) -> dict[str, Section]:
    """The sections of a table by recipe. A recipe without a finished run in the table has none."""
    table, found = grid.read_grid(name), {}
    with contextlib.chdir(measured.ROOT):  # results are named as from there
        runs = [entry.result for entry in ledger.find_results(MEASURED)[0]]
        for recipe in recipe_names():
            if section := _section(table, recipe, runs):
                found[recipe] = section
    return found


def page(name: str) -> str | None:
    """The text of a table's page; None if no run of it has finished."""
    if not (found := sections(name)):
        return None
    table = grid.read_grid(name)
    title, about = name.replace("table", "Table "), table.about[0].upper() + table.about[1:]
    head = HEAD.format(title=title, about=about, source=table.source, name=name)
    resized = _resized({column.task for column in table.columns.values()})
    return "\n\n".join([head, caveats(name), *(section.markdown() for section in found.values()), *resized]) + "\n"


def reported(name: str, *fields: str) -> report.Report:
    """What `lra report` says of a table from all runs in benchmarks."""
    with contextlib.chdir(measured.ROOT):  # results are named as from there
        return report.make_report(name, [f"results={MEASURED}", *fields])


def caveats(name: str) -> str:
    """What speaks against scores on the test sets of a table's tasks, as sentences."""
    tasks = {column.task for column in grid.read_grid(name).columns.values()}
    said = [
        f"{store['in_train']:,} of the {store['test']:,} test examples of "
        f"{' with '.join(f'`{part}`' for part in (task, *store['fields']))} are also in train."
        for store in overlaps()
        if (task := store["task"].partition("@")[0]) in tasks and store["in_train"]
    ]
    if "path256" in tasks:
        said.append(
            "Under `curriculum` the test images of `path256` are among those that validated the stage `path256-lit`, "
            "which chose its best checkpoint on them. Nothing was trained on them. On images of another seed `flash` "
            f"has {new_images():.1f}."
        )
    return " ".join(said)


def overlaps() -> list[dict[str, Any]]:
    """For each task, how many of its test examples are in train."""
    return [store for _, result in measured.read(measured.BENCHMARKS, OVERLAP) for store in result["stores"]]


def new_images() -> float:
    """The accuracy of the released weights of `flash` for Path-256 on images of another seed, %."""
    ((_, result),) = measured.read(measured.BENCHMARKS, "studies/rescoring/*/path256-all.json")
    return 100 * result["test"]["accuracy"]


def _section(table: Grid, recipe: str, runs: Sequence[Mapping[str, Any]]) -> Section | None:
    tasks = {column.task for column in table.columns.values()}
    own = [run for run in runs if run["recipe"] == recipe and run["config"]["task"]["name"] in tasks]
    ran = {(run["config"]["task"]["name"], run["config"]["attn"]["name"], run["seed"]) for run in own}
    some = [name for name, column in table.columns.items() if column.task in {task for task, _, _ in ran}]
    if not some:
        return None
    seeds = 1 + max(seed for _, _, seed in ran)
    cells = table.cells(some, seeds=seeds, recipe=recipe)
    cells = [cell for cell in cells if (table.columns[cell.column].task, cell.attn, cell.seed) in ran]
    matched = ledger.match_results(with_stages(cells, begun=lambda cell: False), MEASURED).entries
    if not (found := {cell.column for cell in matched} & {*some}):
        return None
    shown = [name for name in some if name in found]
    fields = {"results": str(MEASURED), "recipe": recipe, "seeds": str(seeds), "tasks": ",".join(shown)}
    speeds = sorted(MEASURED.glob(f"results/speed/*/{table.name}-{recipe}.json"))
    if speeds:
        fields["speed"] = str(speeds[0])
    made = report.make_report(table.name, [f"{name}={value}" for name, value in fields.items()])
    first = [entry.result for cell, entry in matched.items() if cell.seed == 0]
    part = f", {_gpu_hours(first)} of them for seed 0" if len(first) < len(matched) else ""
    hours = _gpu_hours([entry.result for entry in matched.values()])
    shared = "; the smaller figure counts only its share of a GPU for a run that shared it" if " to " in hours else ""
    time = (
        f"{hours} GPU-hours for all {len(matched)} runs{part}, with stages and compilation, without the start and the "
        f"end of processes{shared}"
    )
    alone = [_alone(table, table.cells(shown, seeds=1, recipe=recipe), matched, file) for file in speeds[:1]]
    return Section(recipe, made, matched, (time, *alone))


def _alone(table: Grid, cells: Sequence[Cell], matched: Mapping[Cell, ledger.ResultFile], file: Path) -> str:
    """How long the training of one seed takes."""
    paces, runs = (
        plan.MeasuredSpeeds(speed.measured_paces(table, speed.read_speeds(file))),
        with_stages(cells, begun=lambda cell: False),
    )
    alone, most = training_hours(runs, matched, paces)
    more = f"; at most {sum(most):.1f} for {len(most)} more, which may have shared a GPU" if most else ""
    part = f"{len(alone)} of the {len(runs)}" if len(alone) < len(runs) else f"all {len(runs)}"
    return f"{sum(alone):.1f} GPU-hours of training for {part} runs of one seed, each alone on its GPU{more}"


def training_hours(
    runs: Iterable[Cell], matched: Mapping[Cell, ledger.ResultFile], paces: plan.MeasuredSpeeds
) -> tuple[list[float], list[float]]:
    """GPU-hours of training of runs: those whose speed was measured alone, and those that may have shared their GPU.

    A run of which neither is known is left out. Two columns may share a stage, so runs are found by their directories.
    """
    found = {cell.directory.path: entry.result for cell, entry in matched.items()}
    alone, most = [], []
    for run in runs:
        steps, own = run.composed.config.trainer.steps, found.get(run.directory.path, {})
        if pace := paces.pace(run):
            alone.append(steps / pace / 3600)
        elif pace := own.get("steps_per_second"):
            hours = steps / pace / 3600 * (own.get("world_size") or 1)
            (alone if had_gpu_alone(own) else most).append(hours)
    return alone, most


def _gpu_hours(results: Sequence[Mapping[str, Any]]) -> str:
    """How long runs took: from each having always shared its GPU with the most runs seen there, to never."""
    least = most = 0.0
    for result in results:
        hours = (time_and_memory(result)[0] or result["train_seconds"]) / 3600 * (result.get("world_size") or 1)
        least, most = least + hours / result.get("runs_per_device", 1), most + hours
    return f"{least:.1f}" if f"{least:.1f}" == f"{most:.1f}" else f"{least:.1f} to {most:.1f}"


def _resized(tasks: Collection[str]) -> Iterator[str]:
    """What weights score on these tasks at another resolution, or with background, before any training there."""
    rows = []
    for file, result in measured.read(measured.BENCHMARKS, "studies/resizing/*/*.json"):
        for run in result["runs"]:
            test = run["test"]
            name, best = max(test["baselines"].items(), key=lambda baseline: baseline[1])
            accuracy = f"{100 * test['accuracy']:.1f} ± {100 * test['plus_minus']:.1f} of {test['n']:,}"
            if run["task"] in tasks:
                rows.append((
                    measured.link(_weights(run), file), f"`{run['task']}`", run["protocol"],
                    f"`{run['way']}`", accuracy, f"{test['loss']:.3f}", f"{100 * best:.1f} {name}",
                ))  # fmt: skip
    if rows:
        header = ("weights", "task", "protocol", "with", "test accuracy, %", "loss", "strongest baseline, %")
        yield "## Right after resizing"
        yield (
            "What weights score before any training at that resolution or with that background "
            "(benchmarks/studies/resizing). A guess has a loss of 0.693."
        )
        yield measured.table(header, rows)


def _weights(run: Mapping[str, Any]) -> str:
    """The name of the weights, and which they were if no release has them today."""
    folder = measured.ROOT / run["init"]
    if folder.parent != cards.RELEASES or (folder.is_dir() and cards.digest(folder) == run.get("sha256")):
        return run["init"]
    return f"{run['init']} of {run['transfer']['task']}, no longer released"


def make() -> dict[Path, str]:
    """The text of the page of every paper's table for which there are runs."""
    names = [name for name in config_names("table") if grid.read_grid(name).paper]
    made = {measured.ROOT / "docs" / f"{name}.md": page(name) for name in names}
    return {path: measured.from_docs(text) for path, text in made.items() if text is not None}
