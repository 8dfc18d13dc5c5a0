"""Pictures of a released Pathfinder model: how it learned, what it gets right and wrong, where it looks.

    python -m benchmarks.pictures init=checkpoints/<name> [count=512]
    python -m benchmarks.pictures [--check]

The first needs the weights: of the first `count` test images it draws some on a sheet, and on one of them the attention
of each layer, and writes down what they show, docs/pictures/<name>-*.png and <name>.json. Both make docs/pictures.md
and the curves, which need no weights: make docs. With --check nothing is written, and the exit code is 1 if the page or
a curve is not what would be.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import lra
from benchmarks import pages, release
from lra import environment
from lra.bench import plots
from lra.bench.files import write
from lra.config.options import parse
from lra.data import picture
from lra.data.pathfinder.generate import draw, generate
from lra.data.pathfinder.law import law
from lra.data.split import Split
from lra.errors import UsageError
from lra.models.attention.base import Attention
from lra.tasks import TASKS, versioned
from lra.tasks.base import TaskModule
from lra.tasks.pathfinder import Pathfinder, PathfinderData
from lra.training import curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, FOLDER = pages.ROOT / "docs" / "pictures.md", pages.ROOT / "docs" / "pictures"
EACH = 4  # images on the sheet of each kind: right or wrong, of either label
CHUNK = 16  # images in a batch
PANEL, GAP, LETTER = 320, 14, 20  # pixels: an image's side about, what is between them, height of letters
KINDS = ((True, 1), (True, 0), (False, 1), (False, 0))  # whether it is right, and the label
# little to much attention: purple, red, orange, light yellow
RAMP = ((0.0, (122, 28, 109)), (0.4, (212, 60, 66)), (0.7, (249, 142, 9)), (1.0, (252, 255, 164)))
QUERY = (0, 200, 255)
GREY = "#777777"


@dataclass(frozen=True)
class Options:
    init: str = ""  # a released folder
    count: int = 512  # test images, of which the sheet shows the first of each kind

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"count={self.count} must be at least 1")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if any("=" in argument for argument in arguments):
            depict(parse(Options, arguments))
            arguments = []
        return pages.main(make, arguments)
    except UsageError as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 2


def depict(options: Options, folder: Path = FOLDER) -> dict[str, Any]:
    """Draws the sheet and the attention of a released model, and returns what it wrote of them."""
    path = Path(options.init)
    if path.name not in release.released() or path.resolve() != release.RELEASES / path.name:
        raise UsageError(f"init={options.init} is no released folder: python -m benchmarks.release makes one of a run")
    module = lra.load(path)
    task = module.run.task
    if not isinstance(module, Pathfinder) or task.source != "generate":
        raise UsageError(f"init={path} is of {task.name}, source={task.source}: choose a model of generated Pathfinder")
    first, count = task.train + task.val, min(options.count, task.test)
    stream = {"seed": task.data_seed, "version": task.version}
    images = list(generate(law(task.resolution, task.level), **stream, first=first, count=count))
    pixels, labels = (np.concatenate([getattr(i, name) for i in images]) for name in ("pixels", "labels"))
    shares = connected(module, pixels)
    right = (shares > 0.5) == (labels == 1)
    chosen = [[int(i) for i in np.flatnonzero((right == good) & (labels == label))[:EACH]] for good, label in KINDS]
    if not chosen[0]:
        raise UsageError(f"of {count} images there is none with one path that it gets right: raise count=")
    one = chosen[0][0]
    drawing = draw(law(task.resolution, task.level), **stream, index=first + one)
    row, column = drawing.markers[0].tolist()
    attention = [layer.reshape(task.resolution, -1) for layer in attentions(module, pixels[one], (row, column))]
    names = PathfinderData.label_names
    shown = [
        [{"image": i, "label": names[labels[i]], "connected": round(float(shares[i]), 4)} for i in kind]
        for kind in chosen
    ]
    checkpoint = f"{release.RELEASES.name}/{path.name}"
    called = f"python -m benchmarks.pictures init={checkpoint} count={options.count}"
    record: dict[str, Any] = {
        "checkpoint": checkpoint,
        "task": versioned(task),
        "count": count,
        "accuracy": round(float(right.mean()), 4),
        "sheet": {
            f"{'right' if good else 'wrong'}, {names[label]}": kind
            for (good, label), kind in zip(KINDS, shown, strict=True)
        },
        "attention": {
            "image": one,
            "query": [row, column],
            "tokens": int(np.isfinite(attention[0]).sum()),
            "largest": [float(f"{np.nanmax(layer):.3g}") for layer in attention],
        },
        "environment": environment.describe() | {"command": called},
    }
    folder.mkdir(parents=True, exist_ok=True)
    grey = pixels.reshape(count, task.resolution, -1)
    rows = [
        (name, [(grey[s["image"]], s["connected"]) for s in kind]) for name, kind in record["sheet"].items() if kind
    ]
    picture.save(sheet(rows), folder / f"{path.name}-samples.png")
    picture.save(overlays(grey[one], attention, (row, column)), folder / f"{path.name}-attention.png")
    write(folder / f"{path.name}.json", record)
    return record


def gather(module: TaskModule, pixels: np.ndarray) -> Any:
    """The batch of images uint8 `[n, pixels]`, as the model saw such in training."""
    task, (count, length) = module.run.task, pixels.shape
    split = Split.from_offsets(pixels.ravel(), np.arange(count + 1) * length)
    return split.collate(
        range(count), max_length=length, layout=module.run.batch.layout, prefix=module.model.encoder.prefix,
        **task.kept,
    ).to("cpu")  # fmt: skip


@torch.inference_mode()
def connected(module: TaskModule, pixels: np.ndarray) -> np.ndarray:
    """The model's probability that the markers are on one path, float `[n]`, of images uint8 `[n, pixels]`."""
    chunks = (pixels[i : i + CHUNK] for i in range(0, len(pixels), CHUNK))
    return torch.cat([module(gather(module, chunk)).softmax(1)[:, 1] for chunk in chunks]).numpy()


@torch.inference_mode()
def attentions(module: TaskModule, pixels: np.ndarray, query: tuple[int, int]) -> list[np.ndarray]:
    """Per layer the attention from one pixel to all, the heads' mean, fp32 `[pixels]`; NaN where is no token.

    It is computed here, softmax(q k^T / sqrt(d)) of the q and k that the layer's attention is given. UsageError if that
    is not what the attention computes, or if the pixel is no token.
    """
    parts = [part for part in module.modules() if isinstance(part, Attention)]
    if not all(part.facts.exact for part in parts):
        raise UsageError(f"attn={module.run.attn.name} has other weights than softmax attention: choose an exact one")
    prefix = int(module.model.encoder.prefix is not None)
    width, found = module.run.task.resolution, []
    place = query[0] * width + query[1] + prefix

    def look(_: Any, given: tuple[Any, ...]) -> None:
        q_THD, k_THD, _, batch = given
        rows, length = batch.token_positions(), int(batch.length[0])
        at = torch.nonzero(rows[:length] == place).flatten()
        if not len(at):
            raise UsageError(f"the pixel {query} is dark, and tokens=lit leaves it out: choose a lit one")
        q_HD, k_NHD = q_THD[at[0]].float(), k_THD[:length].float()
        share_N = (torch.einsum("hd,nhd->hn", q_HD, k_NHD) / math.sqrt(q_HD.shape[1])).softmax(1).mean(0)
        image = torch.full((prefix + width * width,), torch.nan).index_copy(0, rows[:length], share_N)
        found.append(image[prefix:].numpy())

    hooks = [part.register_forward_pre_hook(look) for part in parts]
    try:
        module(gather(module, pixels[None]))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def sheet(rows: Sequence[tuple[str, Sequence[tuple[np.ndarray, float]]]]) -> Image.Image:
    """Images uint8 `[H, W]` in named rows, below each the probability that the model gives to one path."""
    return _panels([
        (name, [(_magnified(np.stack([image] * 3, 2)), f"P(connected) = {share:.3f}") for image, share in row])
        for name, row in rows
    ])  # fmt: skip


def overlays(image: np.ndarray, layers: Sequence[np.ndarray], query: tuple[int, int]) -> Image.Image:
    """An image uint8 `[H, W]`, and on it each layer's attention `[H, W]` from the framed pixel.

    The more attention, the less of the image's grey: by the square root of its share of the layer's largest, else
    little of it would be seen. What is no token (NaN) is black.
    """
    stops, colours = (np.array(part) for part in zip(*RAMP, strict=True))
    grey = np.stack([image] * 3, 2)
    panels = [(_framed(grey, query), "the image, query framed")]
    for number, layer in enumerate(layers, 1):
        most = np.nanmax(layer)
        share = np.sqrt(np.nan_to_num(layer) / most)
        colour = np.stack([np.interp(share, stops, colours[:, channel]) for channel in range(3)], 2)
        weight = np.minimum(2 * share, 1)[..., None]
        mixed = weight * colour + (1 - weight) * (30 + 0.4 * grey)
        mixed[np.isnan(layer)] = 0
        panels.append((_framed(mixed.astype(np.uint8), query), f"layer {number}, at most {most:.2g}"))
    return _panels([("", panels)])


def _framed(image: np.ndarray, query: tuple[int, int]) -> Image.Image:
    large = _magnified(image)
    factor = large.width // image.shape[1]
    y, x = (factor * place for place in query)
    width = max(2, factor // 4)
    box = (x - width, y - width, x + factor + width - 1, y + factor + width - 1)
    ImageDraw.Draw(large).rectangle(box, outline=QUERY, width=width)
    return large


def _magnified(image: np.ndarray) -> Image.Image:
    """Of uint8 `[H, W, 3]`, by a whole factor."""
    height, width, _ = image.shape
    factor = max(1, PANEL // width)
    return Image.fromarray(image).resize((width * factor, height * factor), Image.Resampling.NEAREST)


def _panels(rows: Sequence[tuple[str, Sequence[tuple[Image.Image, str]]]]) -> Image.Image:
    """Rows of images of one size, each row under its name, if it has one, and each image above its caption."""
    font = ImageFont.load_default(LETTER)
    width, height = next(image.size for _, row in rows for image, _ in row)
    line = LETTER + GAP // 2
    steps = [(line if name else 0) + height + line + GAP for name, _ in rows]
    columns = max(len(row) for _, row in rows)
    whole = Image.new("RGB", (GAP + columns * (width + GAP), GAP + sum(steps)), "white")
    pen, top = ImageDraw.Draw(whole), GAP
    for (name, row), step in zip(rows, steps, strict=True):
        below = top + (line if name else 0)
        pen.text((GAP, top - 2), name, "black", font)
        for number, (image, caption) in enumerate(row):
            left = GAP + number * (width + GAP)
            whole.paste(image, (left, below))
            pen.text((left, below + height + 3), caption, "#444444", font)
        top += step
    return whole


def curve(chain: Sequence[tuple[release.Result, Sequence[tuple[int, float]]]], chance: float) -> str:
    """The SVG text of the validation accuracy of runs one after another, each of (step, accuracy) points."""
    ends = [0, *itertools.accumulate(result["steps"] for result, _ in chain)]

    def plot(axes: Axes) -> None:
        for begin, end, (result, points) in zip(ends, ends[1:], chain, strict=False):
            places = [(begin + step, 100 * share) for step, share in points]
            look = plots.look(0) | {"markevery": [-1], "clip_on": False}
            axes.plot(*zip(*places, strict=True), gid=f"until-{end}", **look)
            axes.annotate(f"{places[-1][1]:.1f}", places[-1], (-4, 5), textcoords="offset points", ha="right")
            task = f"{result['task'].partition('@')[0]}\n{result['config']['task']['level']}"
            axes.text((begin + end) / 2, 101, task, ha="center", va="bottom", color=GREY)
        axes.axhline(100 * chance, color=GREY, linestyle="--")
        axes.annotate("chance", (0, 100 * chance), (3, -3), textcoords="offset points", va="top", color=GREY)
        axes.set(xlabel="step, of all runs together", ylabel="validation accuracy, %", xlim=(0, ends[-1]), xticks=ends)
        axes.set_ylim(min(axes.get_ylim()[0], 100 * chance - 5), 100)
        plots.ticks(axes.xaxis)

    return plots.svg((9, 4), plot)


def page(records: dict[str, dict[str, Any]], drawn: set[str]) -> str:
    """The whole text, of what was written down of each model, and of which of them there are curves."""
    return "\n\n".join(["\n\n".join(_HEAD), *("\n\n".join(_section(*each, drawn)) for each in records.items())]) + "\n"


_HEAD = (
    "# Pictures of released Pathfinder models",
    "<!-- made by benchmarks/pictures.py of docs/pictures and benchmarks/results: make docs -->",
    "How a model learned, some images of its test set that it gets right and wrong, and where it looks. *Attention* is "
    "softmax(q kᵀ / √d) of the q and k of each layer, the mean of its heads, from the token at the middle of one "
    "marker, which is framed, to every token of the image; what is black is no token. The colour goes from grey over "
    "purple, red and orange to yellow with the square root of the probability, up to the layer's largest, which stands "
    "below. Images are counted within the test set, from 0. "
    "`python -m benchmarks.pictures init=checkpoints/<name>` draws them.",
)


def _section(name: str, record: dict[str, Any], drawn: set[str]) -> Iterator[str]:
    result = release.released()[name]
    yield f"## {name}"
    yield (
        f"[{record['checkpoint']}](../{record['checkpoint']}/README.md): {record['task']}, {result['protocol']}, "
        f"`{result['attn']}`, test accuracy {release.accuracy(result['test'])}. The images are from the first "
        f"{record['count']:,}, of which it gets {100 * record['accuracy']:.1f}% right."
    )
    if name in drawn:
        yield f"![validation accuracy of the runs that led to {name}]({FOLDER.name}/{name}-curves.svg)"
    yield f"![test images that {name} gets right and wrong]({FOLDER.name}/{name}-samples.png)"
    look = record["attention"]
    yield (
        f"Attention on image {look['image']}, {look['tokens']:,} tokens, of which an equal share would be "
        f"{1 / look['tokens']:.2g}:"
    )
    yield f"![attention of each layer of {name} from one marker]({FOLDER.name}/{name}-attention.png)"


def make() -> dict[Path, str]:
    """The text of each file that is made without weights."""
    runs, found = release.known(), release.released()
    files = sorted(FOLDER.glob("[!.]*.json"))
    records = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    if gone := records.keys() - found.keys():
        raise UsageError(f"docs/pictures has pictures of {', '.join(sorted(gone))}, which is not released: remove them")
    drawn = {}
    for name in records:
        chain = [(stage, _points(stage, runs)) for stage in release.stages(found[name], runs)]
        if all(points for _, points in chain):
            drawn[name] = curve(chain, 1 / TASKS.get(found[name]["config"]["task"]["name"]).facts.classes)
    svgs = {FOLDER / f"{name}-curves.svg": text for name, text in drawn.items()}
    return {PAGE: page(records, set(drawn))} | svgs


def _points(stage: release.Result, runs: dict[str, list[tuple[Path, release.Result]]]) -> list[tuple[int, float]]:
    """A run's validation accuracy by step, of the metrics.csv beside its result; none if there is no such file."""
    files = [file.with_suffix(".csv") for file, _ in runs[stage["directory"]]]
    rows = next((curves.read(file) for file in files if file.exists()), [])
    return [(int(row["step"]), float(row["val/accuracy"])) for row in rows if row["val/accuracy"]]


if __name__ == "__main__":
    sys.exit(main())
