"""The first screen of README.md: accuracies beside the paper's, as a table and as docs/headline.svg."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.pages import measured, speeds
from benchmarks.pages.measured import table
from benchmarks.pages.tables import Section, new_images, overlaps, sections, training_hours, with_seeds
from lra.bench import plots
from lra.experiments import speed
from lra.experiments.grid import grid, plan
from lra.experiments.reproduction import format_mean_std, format_tenth
from lra.experiments.results.ledger import known_values
from lra.tasks import TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = measured.ROOT / "docs" / "headline.svg"
SHOWN = ("flash", "butterfly")
PRETRAINED, PATHS = "amos2024", "paths"
DENSE, PAPERS = "curriculum", "xiong2021"  # what has trained Path-256 on all pixels, and a model of the paper's kind
SMALL = {"listops": "ListOps", "text": "Text", "image": "Image", "pathfinder": "Pathfinder"}  # columns of table3
LARGE = {"pathx": "Path-X", "path256": "Path-256"}  # columns of table6
COLUMNS = SMALL | LARGE
FURTHEST = dict.fromkeys(SMALL, PRETRAINED) | {"pathfinder": PATHS, "pathx": PATHS, "path256": DENSE}  # by column
GREY = "#777777"


def headline(root: Path) -> str:
    """Exact and block-sparse FlashAttention beside the paper's, what the models are, and what test sets share."""
    of = next(store for store in overlaps() if store["task"].startswith("text@"))
    text = f"{of['in_train']} of its {of['test']:,} test reviews are also in train"
    images = f"Path-256; its test images validated an earlier stage, on new images `flash` has {new_images():.1f}"
    names = COLUMNS | {"text": f"Text; {text}", "path256": images}
    rows = [_row("table3", PRETRAINED, "average", f"mean of {', '.join(SMALL.values())}")]
    rows += [_row("table3", PRETRAINED, column, names[column]) for column in SMALL]
    rows.append(_chosen_by_test(root))
    rows.append(_row("table3", PATHS, "pathfinder", "Pathfinder, with more images and augmentation"))
    rows += [_row("table6", FURTHEST[column], column, names[column]) for column in LARGE]
    ran = with_seeds(sections("table3")[PAPERS].report)[0]
    rows += [_row("table3", PAPERS, column, names[column]) for column in SMALL if column in ran]
    header = ("test accuracy, % (seeds)", "recipe", *(name for attn in SHOWN for name in (f"`{attn}`", "paper")))
    return f"{table(header, rows)}\n\n{_models()}\n\n{speeds.in_brief(root, SMALL)}"


def _row(name: str, recipe: str, column: str, what: str) -> list[str]:
    section, stated = sections(name)[recipe], grid.read_grid(name)
    header, accuracies = with_seeds(section.report)
    ours, columns = {row[0]: row[header.index(column)] for row in accuracies}, stated.averaged(header)
    row = [what, f"`{recipe}`"]
    for attn in SHOWN:
        paper = stated.average(attn, columns) if column == "average" else stated.figure(attn, column)
        row += [ours[attn], format_tenth(paper)]
    return row


def _chosen_by_test(root: Path) -> list[str]:
    """The row of Text under LRA's own protocol, which chooses a checkpoint by test."""
    found = measured.read(root, f"results/runs/text/flash/{PRETRAINED}+task.protocol=lra-s*/result.json")
    scores = [100 * result["test"]["accuracy"] for _, result in found]
    what = "Text, trained on all of train, its checkpoint chosen by test (`task.protocol=lra`)"
    return [what, f"`{PRETRAINED}`", f"{format_mean_std(scores, 1)} ({len(scores)})", "", "", ""]


def _models() -> str:
    """What the models of each recipe are, by their runs."""
    kinds = {}
    of_recipes = {PRETRAINED: ("table3",), PATHS: ("table3", "table6"), DENSE: ("table6",), PAPERS: ("table3",)}
    for recipe, tables in of_recipes.items():
        some = [sections(name)[recipe] for name in tables]
        runs = (run for each in some for run in each.runs.items())
        found = [entry.result for cell, entry in runs if cell.attn in SHOWN and cell.column.split()[0] in COLUMNS]
        sizes = sorted(result["parameters"] / 1e6 for result in found)
        models = {
            tuple(result["config"]["model"][key] for key in ("layers", "d_model", "positions")) for result in found
        }
        (kinds[recipe],) = (
            f"{layers} layers of {width}, {_span(sizes)} million parameters, {positions} positions"
            for layers, width, positions in models
        )
    return (
        "*paper*: FlashAttention, Tables 3 and 6. The models differ. "
        f"`{PRETRAINED}` has {kinds[PRETRAINED]}. It pretrains on the hidden tokens of the task's own training set, "
        f"and is of the strict league ([results](docs/results.md#how-to-read-an-accuracy)). `{PATHS}` has "
        f"{kinds[PATHS]}. Its stages see more data: easier and smaller images, and images without background. It "
        "mirrors images and moves their grey levels. Larger images of `butterfly` start from weights of `flash`. "
        f"`{DENSE}` has {kinds[DENSE]} and such stages, too. `{PAPERS}` has {kinds[PAPERS]} and one stage, after "
        "Xiong et al. 2021, from whom the paper took settings. Where the paper has no figure, its model was at chance."
    )


def _span(sizes: Sequence[float]) -> str:
    """The smallest and the largest of these, which ascend."""
    return " to ".join(dict.fromkeys(f"{size:.2f}" for size in (sizes[0], sizes[-1])))


class Point(NamedTuple):
    """A task in the figure. Accuracies are in %."""

    task: str
    ours: float
    paper: float | None  # None: at chance
    guess: float  # what the strongest baseline reaches
    minutes: float  # of training, stages included
    most: bool  # whether a part of that time may have been shared


def points() -> Iterator[Point]:
    """Each task of the headline with `flash`: the mean of its seeds, by the recipe that goes furthest there."""
    with contextlib.chdir(measured.ROOT):
        paces = plan.MeasuredSpeeds(
            speed.measured_paces(grid.read_grid("table3"), speed.read_speeds(measured.BENCHMARKS / speeds.STEPS))
        )
        for name, columns in (("table3", SMALL), ("table6", LARGE)):
            for column in columns:
                section = sections(name)[FURTHEST[column]]
                own = (row for row in section.report.rows if (row.attention, row.column) == ("flash", column))
                rows = [row for row in own if row.accuracy is not None]
                yield _point(section, grid.read_grid(name), column, rows, paces)


def _point(section: Section, stated: grid.Grid, column: str, rows: Sequence[Any], paces: plan.MeasuredSpeeds) -> Point:
    (cell,) = (c for c in section.runs if (c.column, c.attn, c.seed) == (column, "flash", 0))
    runs = (*cell.stages, cell)
    alone, most = training_hours(runs, section.runs, paces)
    if len(alone) + len(most) < len(runs):
        raise ValueError(f"the time of a run before {cell.directory.path} is not known")
    task = TASKS.catalogue()[cell.composed.config.task.name]
    return Point(
        f"{task.summary.partition(':')[0]}\n{TASKS.facts_of(task).length:,} tokens",
        statistics.fmean(known_values(rows, "accuracy")), stated.figure("flash", column),
        max(row.baseline_accuracy for row in rows), 60 * (sum(alone) + sum(most)), bool(most),
    )  # fmt: skip


def figure(found: Sequence[Point]) -> str:
    """The SVG text: a row for each task, from the paper's accuracy to that here, and how long training took."""

    def plot(axes: Axes) -> None:
        places = range(len(found))
        for place, point in zip(places, found, strict=True):
            if point.paper is not None:
                axes.plot([point.paper, point.ours], [place, place], color="#cccccc", zorder=1)
            text = f"{'≤ ' * point.most}{point.minutes:.1f} min"
            axes.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), va="center", annotation_clip=False)
        dots: Iterable[tuple[str, list[float | None], dict[str, Any]]] = (
            ("flash, here", [p.ours for p in found], {"color": "C0", "marker": "o", "markersize": 9}),
            ("FlashAttention, in its paper", [p.paper for p in found], {"color": GREY, "marker": "D", "markersize": 7}),
            ("best guess without a model", [p.guess for p in found], {"color": GREY, "marker": "|", "markersize": 12}),
        )  # fmt: skip
        for name, xs, look in dots:
            shown = [(x, place) for x, place in zip(xs, places, strict=True) if x is not None]
            axes.plot(*zip(*shown, strict=True), linestyle="", label=name, gid=name, **look)
        axes.set_yticks(places, [point.task for point in found])
        axes.set(xlabel="test accuracy, %", xlim=(0, 100), ylim=(len(found) - 0.5, -0.5))
        axes.annotate("training,\none H200", (1.02, 1.03), xycoords="axes fraction", color=GREY, annotation_clip=False)
        axes.figure.legend(loc="outside lower center", ncols=3)

    return plots.render_svg((9, 4), plot)


def make() -> dict[Path, str]:
    return {FIGURE: figure(list(points()))}
