"""One optimisation step: forward, backward and update over this rank's micro-batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, cast

import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lra import environment
from lra.batch import Batch
from lra.config.schema import OptimConfig, RunConfig
from lra.errors import UsageError
from lra.models.attention.base import Attention
from lra.tasks.base import TaskModule
from lra.training.curves import record
from lra.training.engine import CapturedStep, mark_rows
from lra.training.seeding import derive, seed_generators


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of update number `step` (from 0) of `steps`.

    Linear warmup to the peak, then constant, or linear or cosine decay that reaches 0 with the last update.
    `rsqrt` is Tay et al.'s: lr * min(1, step / warmup) / sqrt(max(step, warmup)).
    """
    done = step + 1
    if config.schedule == "rsqrt":
        warmup = max(config.warmup, 1)
        return config.lr * min(1.0, done / warmup) / math.sqrt(max(done, warmup))
    if done <= config.warmup:
        return config.lr * done / config.warmup
    if config.schedule == "constant":
        return config.lr
    left = (steps - done) / max(steps - config.warmup, 1)
    return config.lr * (left if config.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))


class NotFinite(UsageError):
    """The training loss is NaN or infinite."""


class AdamW(torch.optim.AdamW):
    """PyTorch's, whose step may be replayed: `captured` does it then."""

    captured: Callable[[], None] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.captured is None:
            return super().step(closure)
        if closure is not None:  # Lightning's hooks
            closure()
        self.captured()

    def update(self) -> None:
        """The step itself."""
        super().step()


class Step:
    """The manual optimisation step inside Lightning, which costs a seventh of its automatic loop.

    Dropout is seeded from (run seed, step), through the batch: the same sequences drop the same on any rank. Attentions
    that draw from PyTorch's generator draw something else on each.
    """

    def __init__(self, run: RunConfig):
        self.run = run
        self.total: Tensor | None = None  # summed loss since the last logged one, on the device
        self.logged: float | None = None  # mean loss of a step, as it was logged last
        self.engine: CapturedStep | None = None

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        config = self.run.optim
        parameters = trained(module)
        return AdamW(parameters, config.lr, config.betas, config.eps, config.weight_decay, fused=parameters[0].is_cuda)

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

    def __call__(self, module: TaskModule, batches: list[Batch]) -> None:
        run, trainer = self.run, module.trainer
        step, optimizer = trainer.global_step, module.optimizers()
        seed, rate = self.begin(step, trainer.global_rank)
        if self.engine is None and self.captures(module, module.device):
            self.engine = self.capture(module, cast(LightningOptimizer, optimizer).optimizer)
            self.total = self.engine.total
        if self.engine is not None:
            self.engine.begin(seed, rate)
            for batch in batches:
                self.engine.add(batch)
            optimizer.step()  # type: ignore[union-attr]
        else:
            self._run(module, batches, torch.tensor(seed, device=module.device), rate)
        if (step + 1) % run.trainer.log_every == 0:
            self._log(module, rate, step + 1)

    def begin(self, step: int, rank: int = 0) -> tuple[int, float]:
        """Seeds PyTorch's generator for a step; returns the seed that batches carry, and the learning rate."""
        seed_generators(derive(self.run.seed, "dropout", step, rank))
        return derive(self.run.seed, "attention", step), learning_rate(self.run.optim, step, self.run.trainer.steps)

    def _run(self, module: TaskModule, batches: list[Batch], seed: Tensor, rate: float) -> None:
        run, optimizer = self.run, module.optimizers()
        for group in optimizer.param_groups:  # type: ignore[union-attr]
            group["lr"] = rate
        for batch in batches:
            # DDP averages the ranks' gradients; the loss is the mean over the global batch
            loss = module.loss(batch.with_seed(seed)) / run.batch.size
            module.manual_backward(loss * module.trainer.world_size)
            self.total = loss.detach() if self.total is None else self.total + loss.detach()
        self._clip(module)
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]

    def capture(self, module: TaskModule, optimizer: torch.optim.Optimizer) -> CapturedStep:
        """The step of a module and its `optimizer`, whose own step becomes that of the captured one."""
        assert isinstance(optimizer, AdamW)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(environment.cache_root() / "inductor"))  # /tmp is emptied
        run, compiled = self.run, torch.compile(module.loss)
        evaluate = torch.compile(module.forward)  # not captured: validation is not where a run's time goes

        def scores(batch: Batch) -> Tensor:
            mark_rows(batch)
            return evaluate(batch)

        module.evaluate = scores

        def loss(batch: Batch) -> Tensor:
            # what autocast keeps of the weights would be this step's in every later one
            with torch.autocast(module.device.type, torch.bfloat16, run.trainer.precision == "bf16", False):
                return compiled(batch) / run.batch.size

        def update() -> None:
            self._clip(module)
            optimizer.update()

        engine = CapturedStep(loss, trained(module), optimizer, update, module.device)
        optimizer.captured = engine.finish
        return engine

    def _clip(self, module: nn.Module) -> None:
        if self.run.optim.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), self.run.optim.clip)

    def _log(self, module: TaskModule, rate: float, step: int) -> None:
        assert self.total is not None
        mean = module.trainer.strategy.reduce(self.total / self.run.trainer.log_every, reduce_op="sum").item()
        self.total.zero_()
        self.logged = mean  # not by module.log: Lightning would fetch it from the device in every step
        record(module.trainer, {"train/loss": mean, "lr": rate})
        if not math.isfinite(mean):
            raise NotFinite(f"the training loss is {mean} at step {step}: lower optim.lr, or set optim.clip=1")


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]
