"""Why do fp32 runs part that differ by rounding alone? A hidden value of the classifier lies at the kink of its
ReLU.

    python -m benchmarks.studies.kinks.study [--seeds 3] [--out FILE] [field=value …]

For each seed there are three runs of Image, as in `exact` of the study `learning`, on the eager engine. The first has
whole batches, the second halves. The third has whole batches again, but one derivative of the ReLU is taken as in the
halves: the first one that was 0 in one run and 1 in the other. If the third has the losses of the second, nothing else
parts them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lra
from benchmarks.command import command
from benchmarks.studies.learning.study import EAGER, FIELDS, HALVES, TASKS, combined, difference, losses_of
from lra import environment
from lra.bench.output import write_measurement

TASK = "image"


class Kink(NamedTuple):
    """A hidden value of the classifier with either sign: its value with whole batches and in halves."""

    step: int
    sample: int
    unit: int
    whole: float
    halves: float


class ReLU(torch.autograd.Function):
    """A ReLU whose derivative is the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


@contextmanager
def watched(hidden: list[Tensor], kink: Kink | None) -> Iterator[None]:
    """Every ReLU in training adds its input to `hidden`. At a kink its derivative is the other one."""

    def forward(self: nn.ReLU, x: Tensor) -> Tensor:
        if not self.training:
            return genuine(self, x)
        mask = (x > 0).to(x.dtype)
        if kink is not None and len(hidden) == kink.step:
            mask[kink.sample, kink.unit] = 1 - mask[kink.sample, kink.unit]
        hidden.append(x.detach().cpu())
        return ReLU.apply(x, mask)  # type: ignore[return-value]

    genuine, nn.ReLU.forward = nn.ReLU.forward, forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.ReLU.forward = genuine  # type: ignore[method-assign]


def train(fields: Sequence[str], kink: Kink | None = None) -> tuple[list[float], Tensor]:
    """The losses of a run's steps, and the hidden values `[steps, samples, units]` of its classifier."""
    hidden: list[Tensor] = []
    with tempfile.TemporaryDirectory(prefix="lra-kinks-") as folder, chdir(folder), watched(hidden, kink):
        lra.fit(*fields, "name=run")
        (path,) = Path().rglob("metrics.csv")
        losses = losses_of(path)
    return losses, torch.cat(hidden).unflatten(0, (len(losses), -1))


def first(whole: Tensor, halves: Tensor) -> Kink | None:
    """The first hidden value with either sign."""
    differ = ((whole > 0) != (halves > 0)).nonzero()
    if not len(differ):
        return None
    step, sample, unit = differ[0].tolist()
    return Kink(step, sample, unit, *(float(hidden[step, sample, unit]) for hidden in (whole, halves)))


def measure(seed: int, fields: Sequence[str]) -> dict[str, Any]:
    """How far halves are from whole batches, at which kink they part, and how far they are if it is taken alike."""
    common = f"task={TASK}", "attn=flash", *TASKS[TASK], *FIELDS["exact"], *EAGER, *fields, f"seed={seed}"
    (whole, at_whole), (halves, at_halves) = train(combined(*common)), train(combined(*common, HALVES))
    kink = first(at_whole, at_halves)
    taken = difference(train(combined(*common), kink)[0], halves) if kink else None
    return {
        "task": TASK, "seed": seed, "args": combined(*common), "steps": len(whole),
        "difference": difference(halves, whole), "kink": kink and kink._asdict(), "taken_alike": taken,
        "hidden_rms": float(at_whole.square().mean().sqrt()),
    }  # fmt: skip


@command
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Where do runs part that differ by rounding?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("fields", nargs="*", metavar="field=value")
    options = parser.parse_args(arguments)
    runs: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        runs.append(measure(seed, options.fields))
        print({name: value for name, value in runs[-1].items() if name != "args"}, flush=True)
        if options.out:  # rewritten after each
            write_measurement(options.out, {"environment": environment.describe(), "runs": runs})


if __name__ == "__main__":
    sys.exit(main())
