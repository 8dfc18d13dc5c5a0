"""The fields of batches and of the trainer, `batch.*` and `trainer.*`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lra.config.checks import check_at_least, check_at_most
from lra.errors import UsageError


@dataclass(frozen=True)
class BatchConfig:
    """Examples per optimisation step, and their layout. An example is a sequence, for Retrieval a pair of them."""

    size: int = 32  # examples of an optimisation step, over all devices
    micro: int | None = None  # examples that a device holds at once: fewer take less memory; null: its whole share
    eval: int = 64  # examples of an evaluation batch on each device
    # packed: no gaps between sequences; padded: all as long as the longest
    layout: Literal["packed", "padded"] = "packed"

    def divide(self, devices: int) -> tuple[int, int]:
        """(examples of one device in a step, examples that it holds at once)."""
        share = self.size // devices
        return share, min(self.micro or share, share)

    def __post_init__(self) -> None:
        check_at_least(1, "batch", self, "size", "micro", "eval")
        check_at_most(1 << 20, "batch", self, "size", "eval")  # more than any of the data sets has
        if self.micro is not None and self.micro > self.size:
            raise UsageError(f"batch.micro={self.micro} is larger than batch.size={self.size}")


@dataclass(frozen=True)
class TrainerConfig:
    """How long, how often and on what."""

    steps: int = 1000  # optimisation steps
    # passes over the training set, in place of trainer.steps; null: trainer.steps says how long
    epochs: float | None = None
    eval_every: int = 100  # steps between validations, each of which writes last.ckpt; divides trainer.steps
    log_every: int = 50  # steps whose mean training loss is logged; divides trainer.eval_every
    log_grad_norm: bool = False  # log the norm of the gradient before clipping, its mean over the same steps
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: computed under autocast, with weights in fp32
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"  # where to compute; auto: on a GPU if there is one
    devices: int = 1  # GPUs or CPU processes of each node; where this is left out, torchrun says how many
    on_nan: Literal["stop", "skip"] = "stop"  # when a loss or gradient is not finite, stop the run or skip the update
    # average of the weights that is scored and kept; ema: exponential; tail: the mean over the last steps
    average: Literal["none", "ema", "tail"] = "none"
    average_decay: float = 0.999  # of ema: what the share of a step's weights is multiplied by in each later step
    average_share: float = 0.25  # of tail: share of the steps, at the end, whose weights are averaged
    # validations in a row without a better one after which training ends; null: it does all steps
    patience: int | None = None

    @property
    def stride(self) -> int:
        """Steps that Lightning sees as one batch: its own work around a batch takes as long as a small model's step."""
        return max(count for count in range(1, 11) if self.log_every % count == 0)

    def __post_init__(self) -> None:
        check_at_least(1, "trainer", self, "steps", "eval_every", "log_every", "devices", "patience")
        check_at_most(10**9, "trainer", self, "steps", "patience")  # weeks, at a millisecond a step
        check_at_most(1 << 7, "trainer", self, "devices")  # each is a process, and a node has fewer
        if self.epochs is not None and self.epochs <= 0:
            raise UsageError(f"trainer.epochs={self.epochs} must be positive")
        if not 0 < self.average_decay < 1:
            raise UsageError(f"trainer.average_decay={self.average_decay} must be above 0 and below 1")
        if not 0 < self.average_share <= 1:
            raise UsageError(f"trainer.average_share={self.average_share} must be above 0 and at most 1")
        for name, average in (("average_decay", "ema"), ("average_share", "tail")):
            if self.average != average and getattr(self, name) != getattr(TrainerConfig, name):
                raise UsageError(
                    f"trainer.{name}={getattr(self, name)} needs trainer.average={average}: set that, or leave it out"
                )
        if self.patience is not None and self.average == "tail":
            raise UsageError(
                f"trainer.patience={self.patience}: trainer.average=tail averages the last steps, and which steps are "
                "the last is not known before; set trainer.average=ema, or trainer.patience=null"
            )
        if self.eval_every % self.log_every:
            raise UsageError(
                f"trainer.log_every={self.log_every} must divide trainer.eval_every={self.eval_every}: "
                f"set trainer.log_every={math.gcd(self.log_every, self.eval_every)}"
            )
        if self.eval_every > self.steps:
            raise UsageError(
                f"trainer.eval_every={self.eval_every} is larger than trainer.steps={self.steps}: no validation"
            )
        if rest := self.steps % self.eval_every:
            raise UsageError(
                f"trainer.eval_every={self.eval_every} must divide trainer.steps={self.steps}: the weights that are "
                f"scored are chosen by validation, and the last {rest} steps would have none"
            )
