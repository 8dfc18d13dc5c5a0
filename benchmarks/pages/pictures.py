"""docs/pictures.md, of what benchmarks/pictures.py has drawn, and how each of these models learned, as curves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pages import cards, measured
from lra.bench import plots
from lra.errors import UsageError
from lra.experiments.results.card import format_accuracy
from lra.tasks import TASKS
from lra.training import curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, FOLDER = measured.ROOT / "docs" / "pictures.md", measured.ROOT / "docs" / "pictures"
GREY = "#777777"


def curve(chain: Sequence[tuple[cards.Result, Sequence[tuple[int, float]]]], chance: float) -> str:
    """The SVG text of the validation accuracy of runs one after another, each of (step, accuracy) points."""
    ends = [0, *itertools.accumulate(result["steps"] for result, _ in chain)]

    def plot(axes: Axes) -> None:
        for begin, end, (result, points) in zip(ends, ends[1:], chain, strict=False):
            places = [(begin + step, 100 * share) for step, share in points]
            look = plots.line_style(0) | {"markevery": [-1], "clip_on": False}
            axes.plot(*zip(*places, strict=True), gid=f"until-{end}", **look)
            axes.annotate(f"{places[-1][1]:.1f}", places[-1], (-4, 5), textcoords="offset points", ha="right")
            task = f"{result['task'].partition('@')[0]}\n{result['config']['task']['level']}"
            axes.text((begin + end) / 2, 101, task, ha="center", va="bottom", color=GREY)
        axes.axhline(100 * chance, color=GREY, linestyle="--")
        axes.annotate("chance", (0, 100 * chance), (3, -3), textcoords="offset points", va="top", color=GREY)
        axes.set(xlabel="step, of all runs together", ylabel="validation accuracy, %", xlim=(0, ends[-1]), xticks=ends)
        axes.set_ylim(min(axes.get_ylim()[0], 100 * chance - 5), 100)
        plots.set_ticks(axes.xaxis)

    return plots.render_svg((9, 4), plot)


def page(records: dict[str, dict[str, Any]], drawn: set[str]) -> str:
    """The whole text, of what was written down of each model, and of which of them there are curves."""
    return "\n\n".join(["\n\n".join(_HEAD), *("\n\n".join(_section(*each, drawn)) for each in records.items())]) + "\n"


_HEAD = (
    "# Pictures of released Pathfinder models",
    "<!-- made by benchmarks/pages/pictures.py of docs/pictures and benchmarks/results: make docs -->",
    "How a model learned, some images of its test set that it gets right and wrong, and where it looks. *Attention* is "
    "softmax(q kᵀ / √d) of the q and k of each layer, the mean of its heads, from the token at the middle of one "
    "marker, which is framed, to every token of the image; what is black is no token. The colour goes from grey over "
    "purple, red and orange to yellow with the square root of the probability, up to the layer's largest, which stands "
    "below. Images are counted within the test set, from 0. "
    "`python -m benchmarks.pictures init=checkpoints/<name>` draws them.",
)


def _section(name: str, record: dict[str, Any], drawn: set[str]) -> Iterator[str]:
    result = cards.released()[name]
    yield f"## {name}"
    yield (
        f"[{record['checkpoint']}](../{record['checkpoint']}/README.md): {record['task']}, {result['protocol']}, "
        f"`{result['attn']}`, test accuracy {format_accuracy(result['test'])}. The images are from the first "
        f"{record['count']:,}, of which it gets {100 * record['accuracy']:.1f}% right."
    )
    if name in drawn:
        yield f"![validation accuracy of the runs that led to {name}]({FOLDER.name}/{name}-curves.svg)"
    yield f"![test images that {name} gets right and wrong]({FOLDER.name}/{name}-samples.png)"
    look = record["attention"]
    yield (
        f"Attention on image {look['image']}, which has {look['tokens']:,} tokens. An equal share would be "
        f"{1 / look['tokens']:.2g}."
    )
    yield f"![attention of each layer of {name} from one marker]({FOLDER.name}/{name}-attention.png)"


def make() -> dict[Path, str]:
    """The text of each file that is made without weights."""
    runs, found = cards.known(), cards.released()
    files = sorted(FOLDER.glob("[!.]*.json"))
    records = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    if gone := records.keys() - found.keys():
        raise UsageError(f"docs/pictures has pictures of {', '.join(sorted(gone))}, which is not released: remove them")
    drawn = {}
    for name in records:
        chain = [(stage, _points(stage, runs)) for stage in cards.stages(found[name], runs)]
        if all(points for _, points in chain):
            drawn[name] = curve(chain, 1 / TASKS.get(found[name]["config"]["task"]["name"]).facts.classes)
    svgs = {FOLDER / f"{name}-curves.svg": text for name, text in drawn.items()}
    return {PAGE: page(records, set(drawn))} | svgs


def _points(stage: cards.Result, runs: dict[str, list[tuple[Path, cards.Result]]]) -> list[tuple[int, float]]:
    """A run's validation accuracy by step, of the metrics.csv beside its result; none if there is no such file."""
    files = [file.with_name("metrics.csv") for file, _ in runs[stage["directory"]]]
    rows = next((curves.read_curves(file) for file in files if file.exists()), [])
    return [(int(row["step"]), float(row["val/accuracy"])) for row in rows if row["val/accuracy"]]
