"""The training loop: forward, backward and update over the micro-batches of this rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lra.batch import Batch
from lra.config.schema import RunConfig
from lra.data.collated import CollatedBatch
from lra.errors import UsageError
from lra.models.attention.base import Mixer
from lra.models.norms import batch_norms, update_statistics
from lra.tasks.base import TaskData, TaskModule
from lra.training import optim
from lra.training.average import WeightAverage
from lra.training.compiling import compile_batched
from lra.training.curves import GRAD_NORM, log_row
from lra.training.engine import CapturedStep, EagerStep
from lra.training.hardware import cores_per_rank
from lra.training.optim import Optimizer, trained_parameters
from lra.training.plateau import Plateau
from lra.training.precompile import precompile_kernels
from lra.training.schedule import learning_rate
from lra.training.seeding import derive_seed, seed_generators
from lra.training.tally import PendingCounts, StepCounts, Tally


class Step:
    """A manual optimisation step inside Lightning. It costs a seventh of the automatic loop.

    The batch carries the seed of dropout, a function of the run's seed and the step. So a sequence has the same dropout
    on any rank. Attentions that draw from PyTorch's generator draw different numbers on each rank.
    """

    def __init__(self, run: RunConfig):
        self.run = run
        self.engine: EagerStep | CapturedStep | None = None  # None before the first step
        self.average = None if run.trainer.average == "none" else WeightAverage(run.trainer)
        watches = run.optim.schedule == "plateau" or run.trainer.patience is not None
        self.plateau = Plateau(run) if watches else None
        self.tally: Tally | None = None
        self.counts: StepCounts | None = None  # as last read or restored
        self.counted = 0  # steps after which they were read; 0: not in this session
        self.tokens = 0  # that this rank has trained on in this session
        self.logged: float | None = None  # mean loss of a step, as last logged
        self._unread: tuple[int, float, PendingCounts] | None = None  # steps done, learning rate, counts
        self._scores: Callable[[Batch], Tensor] | None = None  # compiled
        self._fused: bool | None = None  # whether kernels compute all blocks in evaluation; None: nobody asked yet
        self._precompile: Callable[[Batch], None] | None = None  # before the first step of a captured engine

    def loop(self, module: TaskModule, steps: Iterable[list[CollatedBatch]]) -> None:
        """Makes steps, each with the micro-batches of this rank. Lightning sees them as one batch."""
        for batches in steps:
            self(module, batches)

    def __call__(self, module: TaskModule, batches: list[CollatedBatch]) -> None:
        """Makes the next step of a run and logs if a log is due."""
        trainer, optimizer = module.trainer, cast(LightningOptimizer, module.optimizers())
        step = trainer.global_step
        if self.engine is None:

            def backward(loss: Tensor) -> None:
                module.manual_backward(loss * trainer.world_size)  # DDP averages the ranks' gradients

            data = cast(TaskData, trainer.datamodule)  # type: ignore[attr-defined]
            scored = data.val_dataloader() if trainer.enable_validation else ()
            self.start(module, cast(Optimizer, optimizer.optimizer), step, backward, scored)
        assert self.engine is not None
        rate = self.forward_backward(batches, step, trainer.global_rank)
        self.tokens += sum(int(batch.length.sum()) for batch in batches)
        optimizer.step(self.engine.update)  # Lightning counts it
        self._log_due(trainer, step + 1, rate)

    def start(
        self, module: TaskModule, optimizer: Optimizer, step: int = 0,
        backward: Callable[[Tensor], None] = Tensor.backward, scored: Iterable[Batch] = (),
    ) -> None:  # fmt: skip
        """Prepares the first step of this session.

        Args:
            step: the number of this step, from 0.
            backward: adds the gradients of a loss to those of the parameters.
            scored: what the session evaluates. The kernels for its first batch are compiled before the step.

        Raises:
            UsageError: the step must be captured and can't be.
        """
        run, device = self.run, module.device
        captured = self.captures(module, device)
        self.tally = tally = Tally(device, step, run.trainer.on_nan == "skip", self.counts)
        compiled = self._compile(module.loss) if captured else module.loss
        if (average := self.average) is not None:
            average.start(module)
        judge = torch.compile(tally.judge) if captured else tally.judge  # a dozen numbers in one kernel
        norms = batch_norms(module)
        take_statistics = torch.compile(update_statistics) if captured and norms else update_statistics

        def loss(batch: Batch) -> Tensor:
            return compiled(batch) / run.batch.size  # a share of the global batch's mean

        def update(gradient: Tensor) -> None:
            """Is given the whole gradient, with the loss as its last element."""
            judge(gradient)
            norm: Tensor | None = None
            if run.optim.clip is not None:
                norm = nn.utils.clip_grad_norm_(module.parameters(), run.optim.clip)
            if run.trainer.log_grad_norm:
                tally.add_norm(torch.linalg.vector_norm(gradient[:-1]) if norm is None else norm)
            optimizer.update(tally.left_out)
            if norms:
                take_statistics(norms, tally.left_out)
            if average is not None:
                average.update()

        sums = [norm.sums for norm in norms]
        if captured:
            bf16 = run.trainer.precision == "bf16"
            self.engine = CapturedStep(loss, trained_parameters(module), optimizer, update, device, bf16, sums)
            threads = cores_per_rank(run)
            self._precompile = partial(precompile_kernels, module, scored=scored, bf16=bf16, threads=threads)
        else:
            self.engine = EagerStep(loss, trained_parameters(module), optimizer, update, device, backward, sums)

    def restore(self, counts: StepCounts) -> None:
        """Continues the counts of a checkpoint. Call this before the first step."""
        self.counts = counts

    def forward_backward(self, batches: list[CollatedBatch], step: int, rank: int = 0) -> float:
        """Sums the gradients of a step's micro-batches for the engine's `update`. Returns the learning rate."""
        assert self.engine is not None
        generator, seed = self.seeds(step, rank)
        if self._precompile is not None:
            assert self.tally is not None
            device = self.tally.left_out.device
            self._precompile(batches[0].to(device).with_seed(torch.full((), seed, device=device)))
            self._precompile = None
        seed_generators(generator)
        factor = 1.0 if self.plateau is None else self.plateau.factor
        rate = learning_rate(self.run.optim, step, self.run.trainer.steps, factor)
        self.engine.begin(seed, rate)
        if self.average is not None:
            self.average.begin(step)
        for batch in batches:
            self.engine.add(batch)
        return rate

    def _log_due(self, trainer: pl.Trainer, done: int, rate: float) -> None:
        """Logs the last counts after `done` steps, and starts new ones if a loss is due."""
        assert self.tally is not None
        due = done % self.run.trainer.log_every == 0
        # all ranks log at the same step, because a fault ends them together there
        if self._unread is not None and (due or trainer.world_size > 1 or self._unread[-1].arrived()):
            self.log(trainer)
        if due:
            self._unread = done, rate, PendingCounts(self.tally)
            self.tally.clear()
            if self.run.trainer.on_nan == "skip":  # the run may end here and needs the present weights
                self.log(trainer)

    def log(self, trainer: pl.Trainer) -> None:
        """Logs the last counts unless they are logged already. Waits for the device."""
        if self._unread is None:
            return
        self.counted, rate, reading = self._unread
        self._unread = None
        self.counts = counts = reading.counts()
        self.logged = counts.total / counts.taken if counts.taken else math.nan
        row = {"train/loss": self.logged, "lr": rate}
        if self.run.trainer.log_grad_norm:
            row[GRAD_NORM] = counts.norm / counts.taken if counts.taken else math.nan
        # not with module.log: Lightning would fetch the value from the device in every step
        log_row(trainer, row, self.counted)

    def seeds(self, step: int, rank: int) -> tuple[int, int]:
        """Returns the seed of PyTorch's generator in a step, and the seed that its batches carry."""
        return derive_seed(self.run.seed, "dropout", step, rank), derive_seed(self.run.seed, "attention", step)

    def optimizer(self, module: nn.Module) -> Optimizer:
        return optim.make_optimizer(self.run.optim, module)

    def captures(self, module: nn.Module, device: torch.device) -> bool:
        """Whether steps are compiled and captured. UsageError if `engine=captured` is not possible."""
        if self.run.engine == "eager":
            return False
        hinders = self.hinders(module, device)
        if hinders and self.run.engine == "captured":
            raise UsageError(f"engine=captured, but {hinders}: use engine=auto")
        return not hinders

    def hinders(self, module: nn.Module, device: torch.device) -> str:
        """Returns why steps can't be captured; empty if they can be."""
        if device.type != "cuda":
            return "there is no GPU"
        mixers = (part for part in module.modules() if isinstance(part, Mixer))
        return next((part.decides_on_host for part in mixers if part.decides_on_host), "")

    def compile_evaluation(self, module: TaskModule) -> None:
        """Compiles evaluation at the start, so that a run with only its test set left scores like others."""
        self._scores = self._compile(module.forward)  # not captured: evaluation takes little of a run's time

    def evaluate(self, module: TaskModule, batch: Batch) -> Tensor:
        """Applies the module to a batch of validation or test.

        It is not compiled if kernels compute all blocks: that takes seconds, and saves less.
        """
        if self._scores is None:
            return module.forward(batch)
        if self._fused is None:
            self._fused = module.model.encoder.is_fused()
        return module.forward(batch) if self._fused else self._scores(batch)

    def _compile(self, function: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        return compile_batched(function, getattr(self.run.attn, "deterministic", False))
