"""Can generated Pathfinder images be learned at all? A small residual CNN on them, with its curves.

    python -m benchmarks.studies.learnability.study task=pathfinder [field=value …] [--steps 4000] [--out FILE]

The images are turned and mirrored at random. The CNN's receptive field covers the image at every resolution. This
checks the data, and is no entry of the benchmark: if the CNN learns, a Transformer at 50% is itself the cause. The
full-size tasks need a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.command import command
from lra import environment
from lra.bench.output import write_measurement
from lra.data.split import Split
from lra.training.data_verbs import task_data


class Residual(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x))))))."""

    def __init__(self, width: int):
        super().__init__()
        layers = [(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)) for _ in "ab"]
        self.layers = nn.Sequential(*itertools.chain(*layers))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ResidualCNN(nn.Module):
    """Grey images uint8 `[B, H, H]` to scores `[B, 2]`: `blocks` residual blocks at each size, halved down to 8."""

    def __init__(self, resolution: int, blocks: int = 2, width: int = 32):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1)]
        self.receptive_field, stride = 3, 1
        while resolution > 8:
            wider = min(2 * width, 256)
            layers += [*(Residual(width) for _ in range(blocks)), nn.Conv2d(width, wider, 3, stride=2, padding=1)]
            self.receptive_field += stride * (4 * blocks + 2)
            resolution, width, stride = resolution // 2, wider, 2 * stride
        layers += [*(Residual(width) for _ in range(blocks)), nn.BatchNorm2d(width), nn.ReLU()]
        self.receptive_field += stride * 4 * blocks
        self.features, self.scores = nn.Sequential(*layers), nn.Linear(width, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = images[:, None].float().div(255).to(memory_format=torch.channels_last)
        return self.scores(self.features(x).float().mean((2, 3)))


def images(split: Split, device: torch.device) -> tuple[Tensor, Tensor]:
    """(uint8 `[n, H, H]`, labels `[n]`) of a whole split, on the device."""
    side = int(split.lengths[0] ** 0.5)
    first, last = int(split.starts[0]), int(split.starts[-1] + split.lengths[-1])
    pixels = split.tokens[first:last].reshape(len(split), side, side)
    return torch.from_numpy(np.array(pixels)).to(device), torch.from_numpy(np.array(split.labels)).to(device)


def turned(batch: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mirrored or not, and each quarter of the batch turned by 0 to 3 right angles."""
    mirror = torch.rand(len(batch), generator=generator, device=batch.device) < 0.5
    batch = torch.where(mirror[:, None, None], batch.flip(2), batch)
    return torch.cat([part.rot90(turns, (1, 2)) for turns, part in enumerate(batch.chunk(4))])


@torch.no_grad()
def accuracy(model: nn.Module, pixels: Tensor, labels: Tensor, size: int) -> float:
    model.eval()
    with torch.autocast(pixels.device.type, torch.bfloat16):
        right = [(model(x).argmax(1) == y).sum() for x, y in zip(pixels.split(size), labels.split(size), strict=True)]
    model.train()
    return float(torch.stack(right).sum() / len(labels))


def train(model: nn.Module, data: Any, steps: int, batch: int, seed: int, log_every: int) -> list[dict[str, float]]:
    """The curve of AdamW with a cosine schedule and bf16: loss and accuracy by step."""
    (pixels, labels), (test_pixels, test_labels) = data["train"], data["test"]
    device = pixels.device
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    curve, total, began = [], torch.zeros((), device=device), time.perf_counter()
    for step in range(1, steps + 1):
        rows = torch.randint(len(labels), (batch,), generator=generator, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            scores = model(turned(pixels[rows], generator))
        loss = F.cross_entropy(scores.float(), labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.detach()
        if step % log_every == 0 or step == steps:
            seen = (step - 1) % log_every + 1
            point = {"step": step, "seconds": round(time.perf_counter() - began, 1), "loss": float(total) / seen}
            total.zero_()
            point["train"] = accuracy(model, pixels[:10_000], labels[:10_000], batch)
            point["test"] = accuracy(model, test_pixels, test_labels, batch)
            curve.append(point)
            print(" ".join(f"{key} {value:.4g}" for key, value in point.items()), flush=True)
    return curve


@command
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Train a residual CNN on Pathfinder images.")
    parser.add_argument("fields", nargs="+", metavar="field=value", help="task= and its fields")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    data = task_data(options.fields)
    data.prepare_data()
    data.setup()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    model = ResidualCNN(data.config.resolution).to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    splits = {name: images(cast(Split, data.parts[name]), device) for name in ("train", "test")}
    curve = train(model, splits, options.steps, options.batch, options.seed, options.log_every)
    content = data.content()
    result = {
        "task": f"{content.task}@{content.version}",
        "data": {"store": data.store.path.name, "source": data.store.manifest["source"], "level": data.config.level},
        "model": "residual CNN",
        "parameters": sum(p.numel() for p in model.parameters()),
        "receptive_field": model.receptive_field,
        "steps": options.steps,
        "batch": options.batch,
        "seed": options.seed,
        "train_seconds": curve[-1]["seconds"],
        "accuracy": curve[-1]["test"],
        "n": len(splits["test"][1]),
        "baselines": data.baselines("test"),
        "curve": curve,
        "environment": environment.describe(),
    }
    if options.out:
        write_measurement(options.out, result)


if __name__ == "__main__":
    sys.exit(main())
