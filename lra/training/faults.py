"""Steps whose loss or gradient is NaN or infinite: seen on the device, told and reproduced on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lra.batch import Batch
from lra.tasks.base import TaskModule
from lra.training.seeding import seed_generators

ADVICE = "lower optim.lr, or set optim.clip=1"


class Counts(NamedTuple):
    """A `Tally` on the host."""

    total: float  # summed loss of the steps taken since the last logged one
    taken: int  # how many these are
    first: int  # number, from 0, of the run's first step that was not finite; -1: none
    skipped: int  # updates left out so far


class Tally:
    """Counts the steps that are finite and those that are not, on the device.

    Args:
        step: number of the next step, from 0.
        skip: leave out just the steps that are not finite, instead of all from the first one on.
        counts: to go on from.
    """

    def __init__(self, device: torch.device, step: int = 0, skip: bool = False, counts: Counts | None = None):
        counts = counts or Counts(0.0, 0, -1, 0)
        self.skip = skip
        self.total = torch.tensor(counts.total, dtype=torch.float32, device=device)
        self.taken, self.first, self.skipped = (torch.tensor(count, device=device) for count in counts[1:])
        self.step = torch.tensor(step, device=device)
        self.left_out = torch.zeros((), device=device)  # 1.0: the update of this step is not to be done

    def judge(self, flat: Tensor) -> None:
        """Decides whether a step is left out, from its whole gradient and, as the last element, its loss."""
        bad = ~flat.isfinite().all()
        self.first.copy_(torch.where(bad & (self.first < 0), self.step, self.first))
        out = bad if self.skip else self.first >= 0
        self.left_out.copy_(out)
        self.skipped += out
        self.taken += ~out
        self.total += flat[-1].masked_fill(out, 0)
        self.step += 1

    def read(self) -> Counts:
        """The counts now; waits for the device."""
        return Reading(self).counts()

    def clear(self) -> None:
        """The next steps' losses are summed anew."""
        self.total.zero_()
        self.taken.zero_()


class Reading:
    """The counts of a tally as they are now, on their way to the host, while the device goes on with what follows."""

    def __init__(self, tally: Tally):
        counts = (tally.total, tally.taken, tally.first, tally.skipped)
        self._values = torch.stack([count.double() for count in counts])
        self._copied: torch.cuda.Event | None = None
        if self._values.is_cuda:
            pinned = torch.empty_like(self._values, device="cpu", pin_memory=True)
            self._values = pinned.copy_(self._values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def arrived(self) -> bool:
        return self._copied is None or self._copied.query()

    def counts(self) -> Counts:
        """Waits for what the device had to do when this was made, and for nothing after it."""
        if self._copied is not None:
            self._copied.synchronize()
        total, *rest = self._values.tolist()
        return Counts(total, *map(int, rest))


def plain(batch: Batch) -> dict[str, Any]:
    """A batch as `torch.load(weights_only=True)` reads it."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    # clones: they may be views of one transfer, of several types
    return {name: value.cpu().clone() if isinstance(value, Tensor) else value for name, value in fields.items()}


def culprit(module: TaskModule, fault: Mapping[str, Any]) -> str:
    """What is not finite in a step, done once more eagerly and without an update.

    Args:
        module: with the weights before that step: `lra.load(<run>/fault.pt)`.
        fault: the content of `fault.pt`: `generators`, the seed of PyTorch's generator for each rank, and `batches`,
            its micro-batches.

    Returns:
        The training loss, or the first parameter whose gradient it is, in words.
    """
    module.train()
    run = module.run
    named = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    device = next(iter(named.values())).device
    loss, sums = 0.0, [torch.zeros_like(p) for p in named.values()]
    for seed, batches in zip(fault["generators"], fault["batches"], strict=True):
        seed_generators(seed)
        for part in batches:
            tensors: dict[str, Any] = {name: v.to(device) for name, v in part.items() if isinstance(v, Tensor)}
            batch = Batch(**(part | tensors))
            with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, run.trainer.precision == "bf16"):
                each = module.loss(batch) / run.batch.size
            found = torch.autograd.grad(each, list(named.values()), allow_unused=True)
            loss += each.item()
            for total, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    total += gradient
    if not math.isfinite(loss):
        return f"the training loss is {loss}"
    for name, total in zip(named, sums, strict=True):
        if not total.isfinite().all():
            return f"the gradient of {name} is not finite"
    return "the training loss or a gradient was not finite, though both are when the step is done again eagerly,"
