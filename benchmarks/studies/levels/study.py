"""Do released weights keep their accuracy when grey levels move by one?

    python -m benchmarks.studies.levels.study NAME … [--count 2000] [--out FOLDER]

A NAME is a folder of checkpoints, or a path of a run. The first images of its test set are drawn again: rounded to
whole grey levels, as in training; truncated, as another program may do; and rounded, with each pixel moved by -1, 0 or
1. Rounded images are those that `lra test` scores.
FOLDER/<gpu>/NAME.json has the three accuracies, and the digest of model.safetensors. The card of a release with these
weights shows what this folder has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lra
from benchmarks.command import command
from benchmarks.pages import cards, measured
from lra import environment
from lra.bench.output import write_measurement
from lra.data.pathfinder.generate import ROUNDING, generate_images
from lra.data.pathfinder.law import image_law
from lra.data.split import Split
from lra.errors import UsageError
from lra.tasks.base import TaskModule
from lra.tasks.pathfinder import PathfinderConfig

SEED = 0  # of the moved pixels


def variants(task: PathfinderConfig, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Pixels of the same test images by what was done to them, uint8 `[count, pixels]`, and labels `[count]`."""
    law = image_law(task.resolution, task.level)
    which: Any = dict(seed=task.data_seed, first=task.train + task.val, count=count, version=task.version)
    rounded, truncated = (list(generate_images(law, **which, added=added)) for added in (ROUNDING, 0.0))
    pixels = {
        name: np.concatenate([chunk.pixels for chunk in chunks])
        for name, chunks in (("rounded", rounded), ("truncated", truncated))
    }
    moved = pixels["rounded"].astype(np.int64) + np.random.default_rng(SEED).integers(-1, 2, pixels["rounded"].shape)
    pixels["moved"] = moved.clip(0, 255).astype(np.uint8)
    return pixels, np.concatenate([chunk.labels for chunk in rounded])


@torch.no_grad()
def accuracy(module: TaskModule, pixels: np.ndarray, labels: np.ndarray, size: int) -> float:
    """The share of images that the module classifies correctly, `size` at once."""
    task, device = module.run.task, next(module.parameters()).device
    split = Split.from_offsets(pixels.ravel(), np.arange(len(pixels) + 1) * task.max_length, labels)
    how: Any = task.kept | {"max_length": task.max_length, "prefix": module.model.encoder.prefix}
    right = 0
    for rows in np.array_split(np.arange(len(pixels)), -(-len(pixels) // size)):
        batch = split.collate(rows, **how).to(device)
        bf16 = module.run.trainer.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            right += int((module(batch).argmax(1) == batch.label).sum())
    return right / len(pixels)


def measure(name: str, count: int) -> dict[str, Any]:
    path = cards.RELEASES / name if name in cards.released() else Path(name)
    module = lra.load(path)
    task = module.run.task
    if not isinstance(task, PathfinderConfig) or task.source != "generate" or module.run.pretrain != "none":
        raise UsageError(f"{path} classifies no generated Pathfinder images: choose other weights")
    if count > task.test:
        raise UsageError(f"--count {count} is more than the {task.test} test images of {path}: set a smaller one")
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
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="FOLDER", help="for the results")
    given = parser.parse_args(arguments)
    for name in given.names:
        result = measure(name, given.count)
        place = given.out / measured.place(result["environment"]["gpu"])
        write_measurement(place / f"{Path(name).name}.json", result)
        shown = ", ".join(f"{what} {100 * share:.2f}" for what, share in result["accuracy"].items())
        print(f"{name}: {shown} of {result['n']:,}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
