"""One optimisation step: forward, backward and update over this rank's micro-batches."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from typing import Any, cast

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lra import environment
from lra.batch import Batch
from lra.config.schema import OptimConfig, RunConfig
from lra.data.collated import Collated
from lra.errors import UsageError
from lra.models.attention.base import Attention
from lra.tasks.base import TaskModule
from lra.training.curves import record
from lra.training.engine import CapturedStep
from lra.training.seeding import derive, seed_generators
from lra.training.tally import Counts, Reading, Tally

PIECE, PIECES = 1 << 13, 1 << 9  # elements that a block updates at a time; into how many pieces a large model is cut
# a hash of dropout is computed in the kernel that asks for it, never written
INDUCTOR: dict[str, Any] = {"realize_opcount_threshold": 100}


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


class AdamW(torch.optim.AdamW):
    """PyTorch's, which leaves an update out if `left_out` is 1, and whose step may be replayed: by `captured`.

    The fused kernel has a block for each 65,536 elements of a tensor. Few models here have that many: one block then
    updates most of the model, longer than some attentions take. So it is given tensors in pieces, in larger ones where
    there would be too many: each costs the host views, and a launch takes some dozens.
    """

    captured: Callable[[], None] | None = None
    left_out: Tensor | None = None

    @property
    def found_inf(self) -> Tensor | None:
        """What the fused update asks, on the device."""
        return self.left_out if self.left_out is not None and self.left_out.is_cuda else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Whether it is fused and may be captured is this device's matter, not the checkpoint's."""
        own = {name: self.defaults[name] for name in ("fused", "capturable")}
        groups = [group | own for group in state_dict["param_groups"]]
        super().load_state_dict(state_dict | {"param_groups": groups})

    def step(self, closure: Any = None) -> Any:
        if closure is not None:  # Lightning's hooks
            closure()
        (self.captured or self.update)()

    def update(self) -> None:
        """The step itself."""
        if self.found_inf is None and self.left_out is not None and self.left_out:  # a CPU's, which nothing waits for
            return
        if not self.defaults["fused"]:
            super().step()
            return
        for group in self.param_groups:
            self._update_pieces(group)

    @torch.no_grad()
    def _update_pieces(self, group: dict[str, Any]) -> None:
        tensors: list[list[Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *tensors)
        *updated, _, steps = tensors  # parameters, gradients and both moments
        torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
        size = max(PIECE, sum(weight.numel() for weight in updated[0]) // PIECES)
        cut = [[tensor.view(-1).split(size) for tensor in each] for each in updated]
        pieces = [list(itertools.chain.from_iterable(each)) for each in cut]
        of_pieces = [step for parts, step in zip(cut[0], steps, strict=True) for _ in parts]
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(  # type: ignore[call-overload]  # pyright: ignore
            *pieces, [], of_pieces, lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=False, found_inf=self.found_inf,
        )  # fmt: skip
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))  # pyright: ignore[reportPrivateImportUsage]


class Step:
    """The manual optimisation step inside Lightning, which costs a seventh of its automatic loop.

    Dropout is seeded from (run seed, step), through the batch: the same sequences drop the same on any rank. Attentions
    that draw from PyTorch's generator draw something else on each.
    """

    def __init__(self, run: RunConfig):
        self.run = run
        self.tally: Tally | None = None
        self.counts: Counts | None = None  # as they were read last, or restored
        self.counted = 0  # after how many steps they were; 0: not here
        self.logged: float | None = None  # mean loss of a step, as it was logged last
        self._unread: tuple[int, float, Reading] | None = None  # after how many steps, and the learning rate
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

    def __call__(self, module: TaskModule, batches: list[Collated]) -> None:
        trainer, optimizer = module.trainer, cast(LightningOptimizer, module.optimizers())
        step = trainer.global_step
        if self.tally is None:
            self.start(module, optimizer.optimizer, step)

        def backward(loss: Tensor) -> None:
            module.manual_backward(loss * trainer.world_size)  # DDP averages the ranks' gradients

        rate = self.take(module, optimizer, batches, step, trainer.global_rank, backward)
        counted = (step + 1) % self.run.trainer.log_every == 0
        # several ranks at the same step, as they may end there together
        if self._unread is not None and (counted or trainer.world_size > 1 or self._unread[-1].arrived()):
            self.log(trainer)
        if counted:
            assert self.tally is not None
            self._unread = step + 1, rate, Reading(self.tally)
            self.tally.clear()
            if self.run.trainer.on_nan == "skip":  # the run may end here, with the weights that there are
                self.log(trainer)

    def start(self, module: TaskModule, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Before the first step here, whose number, from 0, is `step`; UsageError if it must be captured and can't."""
        assert isinstance(optimizer, AdamW)
        self.tally = Tally(module.device, step, self.run.trainer.on_nan == "skip", self.counts)
        optimizer.left_out = self.tally.left_out
        if self.captures(module, module.device):
            self.engine = self._capture(module, optimizer)

    def take(
        self,
        module: TaskModule,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        batches: list[Collated],
        step: int,
        rank: int = 0,
        backward: Callable[[Tensor], None] = Tensor.backward,
    ) -> float:
        """Does a step, in Lightning or without it, with this rank's micro-batches; returns the learning rate."""
        assert self.tally is not None
        generator, seed = self.seeds(step, rank)
        seed_generators(generator)
        rate = learning_rate(self.run.optim, step, self.run.trainer.steps)
        if self.engine is not None:
            self.engine.begin(seed, rate)
            for batch in batches:
                self.engine.add(batch)
            optimizer.step()
            return rate
        given = torch.full((), seed, device=module.device)  # a copy would wait
        total = torch.zeros((), device=module.device)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for batch in batches:
            there = batch.to(module.device).with_seed(given)
            loss = module.loss(there) / self.run.batch.size  # a share of the global batch's mean
            backward(loss)
            total += loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
        gradients = [p.grad.flatten() for p in trained(module) if p.grad is not None]
        self.tally.judge(torch.cat([*gradients, total.view(1)]))
        self._clip(module)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return rate

    def seeds(self, step: int, rank: int) -> tuple[int, int]:
        """Of a step: the seed of PyTorch's generator, and the one that batches carry."""
        return derive(self.run.seed, "dropout", step, rank), derive(self.run.seed, "attention", step)

    def _capture(self, module: TaskModule, optimizer: AdamW) -> CapturedStep:
        """The step of a module and its `optimizer`, whose own step becomes that of the captured one."""
        assert self.tally is not None
        run, tally, compiled = self.run, self.tally, self.compile(module.loss)

        def loss(batch: Batch) -> Tensor:
            # what autocast keeps of the weights would be this step's in every later one
            with torch.autocast(module.device.type, torch.bfloat16, run.trainer.precision == "bf16", False):
                return compiled(batch) / run.batch.size

        def update() -> None:
            self._clip(module)
            optimizer.update()

        tally.judge = torch.compile(tally.judge)  # type: ignore[method-assign]  # a dozen numbers in one kernel
        engine = CapturedStep(loss, trained(module), optimizer, update, module.device, tally)
        optimizer.captured = engine.finish
        return engine

    def compile_evaluation(self, module: TaskModule) -> None:
        """Compiles what scores batches. From the beginning: a run that has only its test set left scores as others."""
        module.evaluate = self.compile(module.forward)  # not captured: evaluation is not where a run's time goes

    def compile(self, function: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """A compiled function, whose kernels later processes find; /tmp, where PyTorch keeps them, is emptied.

        What is compiled for a packed batch is compiled once, for all numbers of rows. Then kernels depend on the batch
        that came first, and on what is the fastest of several: not where attention has to be deterministic.
        """
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(environment.cache("inductor")))
        if getattr(self.run.attn, "deterministic", False):
            torch._dynamo.config.recompile_limit = 64  # shapes; what comes after them would not be compiled
            return torch.compile(function, dynamic=False, options=INDUCTOR | {"deterministic": True})
        compiled = torch.compile(function, options=INDUCTOR)

        def run(batch: Batch) -> Tensor:
            for rows in () if batch.padded else (batch.tokens, batch.positions):
                if rows is not None:
                    torch._dynamo.maybe_mark_dynamic(rows, 0)
            return compiled(batch)

        return run

    def _clip(self, module: nn.Module) -> None:
        if self.run.optim.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), self.run.optim.clip)

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


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]
