"""Steps whose loss or gradient is NaN or infinite, counted on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepCounts(NamedTuple):
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

    def __init__(self, device: torch.device, step: int = 0, skip: bool = False, counts: StepCounts | None = None):
        counts = counts or StepCounts(0.0, 0, -1, 0)
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

    def read(self) -> StepCounts:
        """The counts now; waits for the device."""
        return PendingCounts(self).counts()

    def clear(self) -> None:
        """The next steps' losses are summed anew."""
        self.total.zero_()
        self.taken.zero_()


class PendingCounts:
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

    def counts(self) -> StepCounts:
        """Waits for what the device had to do when this was made, and for nothing after it."""
        if self._copied is not None:
            self._copied.synchronize()
        total, *rest = self._values.tolist()
        return StepCounts(total, *map(int, rest))
