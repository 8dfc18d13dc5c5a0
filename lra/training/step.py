"""Training's loop: forward, backward and update over this rank's micro-batches, step after step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lra.batch import Batch
from lra.config.schema import RunConfig
from lra.data.collated import CollatedBatch
from lra.errors import UsageError
from lra.models.attention.base import Attention
from lra.tasks.base import TaskModule
from lra.training import optim
from lra.training.compiling import compile_batched
from lra.training.curves import record
from lra.training.engine import CapturedStep, EagerStep
from lra.training.optim import Optimizer, learning_rate, trained
from lra.training.seeding import derive, seed_generators
from lra.training.tally import Counts, Reading, Tally


class Step:
    """The manual optimisation step inside Lightning, which costs a seventh of its automatic loop.

    Dropout is seeded from (run seed, step), through the batch: the same sequences drop the same on any rank. Attentions
    that draw from PyTorch's generator draw something else on each.
    """

    def __init__(self, run: RunConfig):
        self.run = run
        self.engine: EagerStep | CapturedStep | None = None  # None before the first step
        self.tally: Tally | None = None
        self.counts: Counts | None = None  # as they were read last, or restored
        self.counted = 0  # after how many steps they were; 0: not here
        self.logged: float | None = None  # mean loss of a step, as it was logged last
        self._unread: tuple[int, float, Reading] | None = None  # after how many steps, and the learning rate
        self._scores: Callable[[Batch], Tensor] | None = None  # compiled

    def loop(self, module: TaskModule, steps: Iterable[list[CollatedBatch]]) -> None:
        """Takes steps, each with this rank's micro-batches. To Lightning they are one batch."""
        for batches in steps:
            self(module, batches)

    def __call__(self, module: TaskModule, batches: list[CollatedBatch]) -> None:
        """Takes a run's next step, and logs what is due."""
        trainer, optimizer = module.trainer, cast(LightningOptimizer, module.optimizers())
        step = trainer.global_step
        if self.engine is None:

            def backward(loss: Tensor) -> None:
                module.manual_backward(loss * trainer.world_size)  # DDP averages the ranks' gradients

            self.start(module, cast(Optimizer, optimizer.optimizer), step, backward)
        assert self.engine is not None
        rate = self.forward_backward(batches, step, trainer.global_rank)
        optimizer.step(self.engine.update)  # Lightning counts it
        self._log_due(trainer, step + 1, rate)

    def start(
        self, module: TaskModule, optimizer: Optimizer, step: int = 0,
        backward: Callable[[Tensor], None] = Tensor.backward,
    ) -> None:  # fmt: skip
        """Before the first step here, whose number, from 0, is `step`; UsageError if it must be captured and can't."""
        run, device = self.run, module.device
        captured = self.captures(module, device)
        self.tally = tally = Tally(device, step, run.trainer.on_nan == "skip", self.counts)
        compiled = self._compile(module.loss) if captured else module.loss
        judge = torch.compile(tally.judge) if captured else tally.judge  # a dozen numbers in one kernel

        def loss(batch: Batch) -> Tensor:
            return compiled(batch) / run.batch.size  # a share of the global batch's mean

        def update(gradient: Tensor) -> None:
            """Of the whole gradient, whose last element is the loss."""
            judge(gradient)
            if run.optim.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), run.optim.clip)
            optimizer.update(tally.left_out)

        if captured:
            bf16 = run.trainer.precision == "bf16"
            self.engine = CapturedStep(loss, trained(module), optimizer, update, device, bf16)
        else:
            self.engine = EagerStep(loss, trained(module), optimizer, update, device, backward)

    def restore(self, counts: Counts) -> None:
        """Counts on from a checkpoint; before the first step here."""
        self.counts = counts

    def forward_backward(self, batches: list[CollatedBatch], step: int, rank: int = 0) -> float:
        """Sums the gradients of a step's micro-batches for the engine's `update`; returns the learning rate."""
        assert self.engine is not None
        generator, seed = self.seeds(step, rank)
        seed_generators(generator)
        rate = learning_rate(self.run.optim, step, self.run.trainer.steps)
        self.engine.begin(seed, rate)
        for batch in batches:
            self.engine.add(batch)
        return rate

    def _log_due(self, trainer: pl.Trainer, done: int, rate: float) -> None:
        """Logs after `done` steps what was counted before, and counts anew where a loss is due."""
        assert self.tally is not None
        due = done % self.run.trainer.log_every == 0
        # several ranks at the same step, as they may end there together
        if self._unread is not None and (due or trainer.world_size > 1 or self._unread[-1].arrived()):
            self.log(trainer)
        if due:
            self._unread = done, rate, Reading(self.tally)
            self.tally.clear()
            if self.run.trainer.on_nan == "skip":  # the run may end here, with the weights that there are
                self.log(trainer)

    def log(self, trainer: pl.Trainer) -> None:
        """Logs what was counted last, unless it is logged already; waits for it."""
        if self._unread is None:
            return
        self.counted, rate, reading = self._unread
        self._unread = None
        self.counts = counts = reading.counts()
        self.logged = counts.total / counts.taken if counts.taken else math.nan
        # not by module.log: Lightning would fetch it from the device in every step
        record(trainer, {"train/loss": self.logged, "lr": rate}, self.counted)

    def seeds(self, step: int, rank: int) -> tuple[int, int]:
        """Of a step: the seed of PyTorch's generator, and the one that batches carry."""
        return derive(self.run.seed, "dropout", step, rank), derive(self.run.seed, "attention", step)

    def optimizer(self, module: nn.Module) -> Optimizer:
        return optim.build(self.run.optim, module)

    def captures(self, module: nn.Module, device: torch.device) -> bool:
        """Whether steps are compiled and captured; UsageError if they can't be and must."""
        if self.run.engine == "eager":
            return False
        hinders = "" if device.type == "cuda" else "there is no GPU"
        attentions = (part for part in module.modules() if isinstance(part, Attention))
        hinders = hinders or next((part.decides_on_host for part in attentions if part.decides_on_host), "")
        if hinders and self.run.engine == "captured":
            raise UsageError(f"engine=captured, but {hinders}: use engine=auto")
        return not hinders

    def compile_evaluation(self, module: TaskModule) -> None:
        """Compiles what scores batches. From the beginning: a run that has only its test set left scores as others."""
        self._scores = self._compile(module.forward)  # not captured: evaluation is not where a run's time goes

    def evaluate(self, module: TaskModule, batch: Batch) -> Tensor:
        """What the module makes of a batch of validation or test."""
        return (self._scores or module.forward)(batch)

    def _compile(self, function: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        return compile_batched(function, getattr(self.run.attn, "deterministic", False))
