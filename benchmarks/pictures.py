"""Draws what a released Pathfinder model gets right and wrong, and what it attends to.

    python -m benchmarks.pictures init=checkpoints/<name> [count=512]

A sheet shows some of the first `count` test images, and one of them is drawn with the attention of each layer. The
files are docs/pictures/<name>-*.png, and <name>.json with the facts. `make docs` makes the page and the curves of
these, without the weights.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import lra
from benchmarks.command import command
from benchmarks.pages.cards import RELEASES, released
from benchmarks.pages.pictures import FOLDER
from lra import environment
from lra.bench.output import write_measurement
from lra.config.options import parse_options
from lra.data import picture
from lra.data.pathfinder.generate import draw_image, generate_images
from lra.data.pathfinder.law import image_law
from lra.data.split import Split
from lra.errors import UsageError
from lra.models.attention.base import Attention
from lra.tasks import versioned_name
from lra.tasks.base import TaskModule
from lra.tasks.pathfinder import Pathfinder, PathfinderData

EACH = 4  # images on the sheet of each kind: right or wrong, of either label
CHUNK = 16  # images in a batch
PANEL, GAP, LETTER = 320, 14, 20  # pixels: an image's side about, what is between them, height of letters
KINDS = ((True, 1), (True, 0), (False, 1), (False, 0))  # whether it is right, and the label
# little to much attention: purple, red, orange, light yellow
RAMP = ((0.0, (122, 28, 109)), (0.4, (212, 60, 66)), (0.7, (249, 142, 9)), (1.0, (252, 255, 164)))
QUERY = (0, 200, 255)


@dataclass(frozen=True)
class PictureOptions:
    init: str = ""  # a released folder
    count: int = 512  # test images, of which the sheet shows the first of each kind

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"count={self.count} must be at least 1")


@command
def main(arguments: Sequence[str]) -> None:
    depict(parse_options(PictureOptions, arguments))
    print("make docs shows them in docs/pictures.md")


def depict(options: PictureOptions, folder: Path = FOLDER) -> dict[str, Any]:
    """Draws the sheet and the attention of a released model, and returns what it wrote of them."""
    path = Path(options.init)
    if path.name not in released() or path.resolve() != RELEASES / path.name:
        raise UsageError(
            f"init={options.init} is not a released folder: python -m benchmarks.release makes one of a run"
        )
    module = lra.load(path)
    task = module.run.task
    if not isinstance(module, Pathfinder) or task.source != "generate":
        raise UsageError(f"init={path} is of {task.name}, source={task.source}: choose a model of generated Pathfinder")
    first, count = task.train + task.val, min(options.count, task.test)
    stream = {"seed": task.data_seed, "version": task.version}
    images = list(generate_images(image_law(task.resolution, task.level), **stream, first=first, count=count))
    pixels, labels = (np.concatenate([getattr(i, name) for i in images]) for name in ("pixels", "labels"))
    shares = connected(module, pixels)
    right = (shares > 0.5) == (labels == 1)
    chosen = [[int(i) for i in np.flatnonzero((right == good) & (labels == label))[:EACH]] for good, label in KINDS]
    if not chosen[0]:
        raise UsageError(f"of {count} images there is none with one path that it gets right: raise count=")
    one = chosen[0][0]
    drawing = draw_image(image_law(task.resolution, task.level), **stream, index=first + one)
    row, column = drawing.markers[0].tolist()
    attention = [layer.reshape(task.resolution, -1) for layer in attentions(module, pixels[one], (row, column))]
    names = PathfinderData.label_names
    shown = [
        [{"image": i, "label": names[labels[i]], "connected": round(float(shares[i]), 4)} for i in kind]
        for kind in chosen
    ]
    checkpoint = f"{RELEASES.name}/{path.name}"
    called = f"python -m benchmarks.pictures init={checkpoint} count={options.count}"
    record: dict[str, Any] = {
        "checkpoint": checkpoint,
        "task": versioned_name(task),
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
    picture.save_png(sheet(rows), folder / f"{path.name}-samples.png")
    picture.save_png(overlays(grey[one], attention, (row, column)), folder / f"{path.name}-attention.png")
    write_measurement(folder / f"{path.name}.json", record)
    return record


def gather(module: TaskModule, pixels: np.ndarray) -> Any:
    """The batch of images uint8 `[n, pixels]`, in the form that the model saw in training."""
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
    """The attention of each layer from one pixel to all, the mean over heads, fp32 `[pixels]`; NaN where there is no
    token.

    It is computed here as softmax(q k^T / sqrt(d)) of the q and k of the layer's attention. UsageError if the attention
    computes something else, or if the pixel is no token.
    """
    parts = [part for part in module.modules() if isinstance(part, Attention)]
    if not all(part.facts.exact for part in parts):
        raise UsageError(f"attn={module.run.attn.name} has other weights than softmax attention: choose an exact one")
    prefix = int(module.model.encoder.prefix is not None)
    width, found = module.run.task.resolution, []
    place = query[0] * width + query[1] + prefix

    def look(part: Any, given: tuple[Any, ...]) -> None:
        q_THD, k_THD, _, batch = given
        rows, length = batch.token_positions(), int(batch.length[0])
        at = torch.nonzero(rows[:length] == place).flatten()
        if not len(at):
            raise UsageError(f"the pixel {query} is dark, and tokens=lit leaves it out: choose a lit one")
        q_HD, k_NHD = q_THD[at[0]].float(), k_THD[:length].float()
        scores_HN = torch.einsum("hd,nhd->hn", q_HD, k_NHD) / math.sqrt(q_HD.shape[1])
        if part.spec.causal:
            scores_HN[:, at[0] + 1 :] = -torch.inf
        share_N = scores_HN.softmax(1).mean(0)
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
    """Images uint8 `[H, W]` in named rows. Below each stands the model's probability that there is one path."""
    return _panels([
        (name, [(_magnified(np.stack([image] * 3, 2)), f"P(connected) = {share:.3f}") for image, share in row])
        for name, row in rows
    ])  # fmt: skip


def overlays(image: np.ndarray, layers: Sequence[np.ndarray], query: tuple[int, int]) -> Image.Image:
    """An image uint8 `[H, W]`, and on it each layer's attention `[H, W]` from the framed pixel.

    The more attention, the less of the image's grey. The weight is the square root of its share of the layer's largest,
    as little of it would be visible otherwise. A pixel without a token (NaN) is black.
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
    """An image uint8 `[H, W, 3]`, magnified by a whole factor."""
    height, width, _ = image.shape
    factor = max(1, PANEL // width)
    return Image.fromarray(image).resize((width * factor, height * factor), Image.Resampling.NEAREST)


def _panels(rows: Sequence[tuple[str, Sequence[tuple[Image.Image, str]]]]) -> Image.Image:
    """Rows of images of one size. Each row has its name above it, if it has one, and each image its caption below."""
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


if __name__ == "__main__":
    sys.exit(main())
