"""Do released weights keep their accuracy when grey levels move by one?

    python -m benchmarks.studies.levels.study NAME … [--count 2000] [--source FOLDER] [--out FOLDER]

A NAME is a folder of checkpoints, or a path of a run, of a Pathfinder task or of Image. The first images of its test
set are made again: rounded to whole grey levels, as in training; truncated, as another program may do; and rounded,
with each pixel moved by -1, 0 or 1. Rounded images are those that `lra test` scores. Pathfinder's are drawn, and those
of Image are read from CIFAR-10, of which FOLDER may be a mirror.
FOLDER/<gpu>/NAME.json has the three accuracies, and the digest of model.safetensors. The card of a release with these
weights shows what this folder has.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lra
from benchmarks.command import command
from benchmarks.pages import cards, measured
from lra import environment
from lra.bench.output import write_measurement
from lra.data import hub, picture
from lra.data.cifar10 import PUBLISHED
from lra.data.pathfinder.generate import ROUNDING, generate_images
from lra.data.pathfinder.law import image_law
from lra.data.split import Split
from lra.errors import UsageError
from lra.tasks.base import TaskModule
from lra.tasks.image import Image
from lra.tasks.options import PathfinderConfig

SEED = 0  # of the moved pixels
LUMA = np.array((19595, 38470, 7471))  # of red, green and blue, in 65,536ths, as Pillow has it


def variants(task: Any, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Pixels of the same test images by what was done to them, uint8 `[count, pixels]`, and labels `[count]`."""
    pixels, labels = photographs(task, count) if isinstance(task, Image.Config) else drawings(task, count)
    moved = pixels["rounded"].astype(np.int64) + np.random.default_rng(SEED).integers(-1, 2, pixels["rounded"].shape)
    return pixels | {"moved": moved.clip(0, 255).astype(np.uint8)}, labels


def drawings(task: Any, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Pathfinder's images, rounded and truncated, and their labels."""
    law = image_law(task.resolution, task.level)
    which: Any = dict(seed=task.data_seed, first=task.train + task.val, count=count, version=task.version)
    rounded, truncated = (list(generate_images(law, **which, added=added)) for added in (ROUNDING, 0.0))
    pixels = {
        name: np.concatenate([chunk.pixels for chunk in chunks])
        for name, chunks in (("rounded", rounded), ("truncated", truncated))
    }
    return pixels, np.concatenate([chunk.labels for chunk in rounded])


def photographs(task: Any, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """CIFAR-10's images in grey, rounded and truncated, and their labels."""
    mend = "give --source, a folder with a mirror of it"
    test = hub.load_splits(task.source, name="CIFAR-10", columns=("img", "label"), mend=mend, note=print)["test"]
    rows = (row for batch in test for row in zip(batch["img"], batch["label"], strict=True))
    colours, labels = [], []
    for stored, label in itertools.islice(rows, count):
        with picture.open_image(stored["bytes"]) as read:
            colours.append(np.asarray(read, np.int64).reshape(-1, 3))
        labels.append(label)
    luma = np.stack(colours) @ LUMA
    pixels = {name: (luma + added >> 16).astype(np.uint8) for name, added in (("rounded", 1 << 15), ("truncated", 0))}
    return pixels, np.array(labels)


@torch.no_grad()
def accuracy(module: TaskModule, pixels: np.ndarray, labels: np.ndarray, size: int) -> float:
    """The share of images that the module classifies correctly, `size` at once."""
    task, device = module.run.task, next(module.parameters()).device
    split = Split.from_offsets(pixels.ravel(), np.arange(len(pixels) + 1) * task.max_length, labels)
    kept = task.kept if isinstance(task, PathfinderConfig) else {}
    how: Any = kept | {"max_length": task.max_length, "prefix": module.model.encoder.prefix}
    right = 0
    for rows in np.array_split(np.arange(len(pixels)), -(-len(pixels) // size)):
        batch = split.collate(rows, **how).to(device)
        bf16 = module.run.trainer.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            right += int((module(batch).argmax(1) == batch.label).sum())
    return right / len(pixels)


def measure(name: str, count: int, source: str | None = None) -> dict[str, Any]:
    path = cards.RELEASES / name if name in cards.released() else Path(name)
    module = lra.load(path)
    task: Any = module.run.task
    drawn, read = isinstance(task, PathfinderConfig) and task.source == "generate", isinstance(task, Image.Config)
    if not (drawn or read) or module.run.pretrain != "none":
        raise UsageError(f"{path} classifies no images of generated Pathfinder or of Image: choose other weights")
    if count > (most := PUBLISHED["test"] if read else task.test):
        raise UsageError(f"--count {count} is more than the {most} test images of {path}: set a smaller one")
    if source and drawn:
        raise UsageError(f"--source {source} is of Image, and images of {path} are drawn: leave it out")
    if source:
        task = replace(task, source=source)
    module.to("cuda" if torch.cuda.is_available() else "cpu")
    pixels, labels = variants(task, count)
    size = max(1, min(module.run.batch.eval, count))
    return {
        "checkpoint": f"{cards.RELEASES.name}/{name}" if path.parent == cards.RELEASES else name,
        "sha256": cards.digest(path),
        "n": count,
        "accuracy": {name: accuracy(module, these, labels, size) for name, these in pixels.items()},
        "environment": environment.describe(),
    }


@command
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Score released weights on images whose grey levels moved by one.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="of a folder of checkpoints, or a path")
    parser.add_argument("--count", type=int, default=2000, help="images")
    parser.add_argument("--source", metavar="FOLDER", help="of Image: a mirror of CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="FOLDER", help="for the results")
    given = parser.parse_args(arguments)
    for name in given.names:
        result = measure(name, given.count, given.source)
        place = given.out / measured.place(result["environment"]["gpu"])
        write_measurement(place / f"{Path(name).name}.json", result)
        shown = ", ".join(f"{what} {100 * share:.2f}" for what, share in result["accuracy"].items())
        print(f"{name}: {shown} of {result['n']:,}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
