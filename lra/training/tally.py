"""Counts steps whose loss or gradient is NaN or infinite, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepCounts(NamedTuple):
    """The counts of a `Tally`, on the host."""

    total: float  # sum of the losses of the steps taken since the last log
    taken: int  # number of these steps
    first: int  # number, from 0, of the first step of the run that was not finite; -1 if none
    skipped: int  # updates skipped so far
    norm: float = 0.0  # sum of the norms of these steps' gradients, where they are measured


class Tally:
    """Counts finite and other steps, on the device.

    Args:
        step: number of the next step, from 0.
        skip: whether only steps that are not finite are skipped. By default the first one ends all updates.
        counts: the counts of a checkpoint, to continue.
    """

    def __init__(self, device: torch.device, step: int = 0, skip: bool = False, counts: StepCounts | None = None):
        counts = counts or StepCounts(0.0, 0, -1, 0)
        self.skip = skip
        self.total, self.norm = (
            torch.tensor(total, dtype=torch.float32, device=device) for total in (counts.total, counts.norm)
        )
        self.taken, self.first, self.skipped = (torch.tensor(count, device=device) for count in counts[1:4])
        self.step = torch.tensor(step, device=device)
        self.left_out = torch.zeros((), device=device)  # 1.0: this step makes no update

    def judge(self, flat: Tensor) -> None:
        """Decides whether a step is skipped.

        Args:
            flat: the whole gradient of the step, with its loss as the last element.
        """
        bad = ~flat.isfinite().all()
        self.first.copy_(torch.where(bad & (self.first < 0), self.step, self.first))
        out = bad if self.skip else self.first >= 0
        self.left_out.copy_(out)
        self.skipped += out
        self.taken += ~out
        self.total += flat[-1].masked_fill(out, 0)
        self.step += 1

    def add_norm(self, norm: Tensor) -> None:
        """Adds the norm of a step's gradient, after the step was judged."""
        self.norm += norm.masked_fill(self.left_out.bool(), 0)

    def read(self) -> StepCounts:
        """Returns the counts. Waits for the device."""
        return PendingCounts(self).counts()

    def clear(self) -> None:
        """Sets the sums of losses and norms to zero."""
        self.total.zero_()
        self.norm.zero_()
        self.taken.zero_()


class PendingCounts:
    """The present counts of a tally on their way to the host. The device does not wait for the copy."""

    def __init__(self, tally: Tally):
        counts = (tally.total, tally.norm, tally.taken, tally.first, tally.skipped)
        self._values = torch.stack([count.double() for count in counts])
        self._copied: torch.cuda.Event | None = None
        if self._values.is_cuda:
            pinned = torch.empty_like(self._values, device="cpu", pin_memory=True)
            self._values = pinned.copy_(self._values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def arrived(self) -> bool:
        return self._copied is None or self._copied.query()

    def counts(self) -> StepCounts:
        """Waits for the work that the device had when this was made, and not for later work."""
        if self._copied is not None:
            self._copied.synchronize()
        total, norm, *counts = self._values.tolist()
        taken, first, skipped = map(int, counts)
        return StepCounts(total, taken, first, skipped, norm)
