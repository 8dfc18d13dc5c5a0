"""One optimisation step: forward, backward and update over this rank's micro-batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lra.batch import Batch
from lra.config.schema import OptimConfig, RunConfig
from lra.errors import UsageError
from lra.tasks.base import TaskModule
from lra.training.curves import record
from lra.training.seeding import derive


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


class Step:
    """The manual optimisation step inside Lightning, which costs a seventh of its automatic loop.

    Dropout is seeded from (run seed, step): the attention's through the batch, the same on every rank; the other
    layers' through PyTorch's generator, different on each.
    """

    def __init__(self, run: RunConfig):
        self.run = run
        self.total: Tensor | None = None  # summed loss since the last logged one, on the device

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        config = self.run.optim
        parameters = [p for p in module.parameters() if p.requires_grad]
        fused = parameters[0].is_cuda
        return torch.optim.AdamW(parameters, config.lr, config.betas, config.eps, config.weight_decay, fused=fused)

    def __call__(self, module: TaskModule, batches: list[Batch]) -> None:
        run, trainer = self.run, module.trainer
        step, optimizer = trainer.global_step, module.optimizers()
        torch.manual_seed(derive(run.seed, "dropout", step, trainer.global_rank))
        seed = torch.tensor(derive(run.seed, "attention", step), device=module.device)
        rate = learning_rate(run.optim, step, run.trainer.steps)
        for group in optimizer.param_groups:  # type: ignore[union-attr]
            group["lr"] = rate
        for batch in batches:
            # DDP averages the ranks' gradients; the loss is the mean over the global batch
            loss = module.loss(batch.with_seed(seed)) / run.batch.size
            module.manual_backward(loss * trainer.world_size)
            self.total = loss.detach() if self.total is None else self.total + loss.detach()
        if run.optim.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), run.optim.clip)
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
        if (step + 1) % run.trainer.log_every == 0:
            self._log(module, rate, step + 1)

    def _log(self, module: TaskModule, rate: float, step: int) -> None:
        assert self.total is not None
        mean = module.trainer.strategy.reduce(self.total / self.run.trainer.log_every, reduce_op="sum").item()
        self.total = None
        module.log("train/loss", mean, prog_bar=True, logger=False)
        record(module.trainer, {"train/loss": mean, "lr": rate})
        if not math.isfinite(mean):
            raise NotFinite(f"the training loss is {mean} at step {step}: lower optim.lr, or set optim.clip=1")
