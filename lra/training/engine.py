"""The two ways to compute an optimisation step: eagerly, or as CUDA graphs.

Both start with a seed and a learning rate, add the gradients of each micro-batch, and update the parameters. A captured
step launches the work of a GPU with a few calls instead of hundreds.

The tensors of a captured step keep their addresses. So each batch is copied into a buffer of its shape, and the graph
unpacks it there. Packed batches have few shapes because `Split.collate` rounds their rows up. The first call for a
shape runs eagerly, which compiles and allocates. The second call captures the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lra.batch import Batch
from lra.data.collated import CollatedBatch
from lra.timeline import inner_phase
from lra.training.optim import Optimizer


class CapturedFunction:
    """A function without arguments or result. Its second call captures it, and later calls replay the graph."""

    def __init__(self, function: Callable[[], None], pool: Any):
        self.function, self.pool = function, pool
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == 1 or self.pool is None:
            self.function()
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with inner_phase("capturing"), torch.cuda.graph(self.graph, pool=self.pool):
                self.function()
        self.graph.replay()


@dataclass
class EagerStep:
    """Computes forward, backward and update eagerly.

    Args:
        loss: returns the share of the step's loss that a micro-batch has.
        parameters: the trained parameters.
        optimizer: updates these parameters.
        judge_and_update: is given the whole gradient as a vector, with the loss last. It checks, clips and updates.
        device: the parameters are here.
        backward: adds the gradients of a loss to those of the parameters, and reduces them over several ranks.
        reduced: other tensors that the ranks add up before an update.
    """

    loss: Callable[[Batch], Tensor]
    parameters: list[nn.Parameter]
    optimizer: Optimizer
    judge_and_update: Callable[[Tensor], None]
    device: torch.device
    backward: Callable[[Tensor], None]
    reduced: Sequence[Tensor] = ()
    made: ClassVar[int] = 0  # nothing is compiled or captured

    def begin(self, seed: int, rate: float) -> None:
        """Sets the step's seed of attention dropout and its learning rate."""
        self.seed = torch.full((), seed, device=self.device)  # a copy would wait
        self.total = torch.zeros((), device=self.device)
        self.optimizer.set_rate(rate)

    def add(self, batch: CollatedBatch) -> None:
        """Adds the gradients of a micro-batch."""
        loss = self.loss(batch.to(self.device).with_seed(self.seed))
        self.backward(loss)
        self.total += loss.detach()

    def update(self) -> None:
        """Updates the parameters and clears the gradients."""
        if dist.is_initialized():
            for each in (self.total, *self.reduced):
                dist.all_reduce(each)
        gradients = [parameter.grad.flatten() for parameter in self.parameters if parameter.grad is not None]
        self.judge_and_update(torch.cat([*gradients, self.total.view(1)]))
        self.optimizer.zero_grad(set_to_none=True)


class CapturedStep:
    """The same on static tensors, compiled and in CUDA graphs.

    Gradients of all micro-batches are summed in one flat buffer, which the ranks reduce before the update. Its last
    element is the step's loss.

    Args:
        loss, parameters, update, reduced: as of `EagerStep`.
        optimizer: of the parameters; its learning rates become tensors.
        bf16: whether the loss is computed under autocast.
    """

    def __init__(
        self, loss: Callable[[Batch], Tensor], parameters: list[nn.Parameter], optimizer: Optimizer,
        update: Callable[[Tensor], None], device: torch.device, bf16: bool = False,
        reduced: Sequence[Tensor] = (),
    ):  # fmt: skip
        self.loss, self.parameters, self.optimizer, self.judge_and_update = loss, parameters, optimizer, update
        self.bf16, self.reduced = bf16, reduced
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.seed = torch.zeros((), dtype=torch.int64, device=device)
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes) + 1, device=device)
        parts = self.flat[:-1].split(sizes)
        self.sums = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        optimizer.make_capturable(device)
        self.micro_batches: dict[
            tuple[int, ...], tuple[Tensor, CapturedFunction]
        ] = {}  # by shape: the buffer of a packed batch, and its graph
        self.updating = CapturedFunction(self._update, self.pool)

    @property
    def made(self) -> int:
        """How often a shape or the update was compiled or captured. Such a call takes longer than a step."""
        return sum(
            min(graph.calls, 2) for graph in (self.updating, *(graph for _, graph in self.micro_batches.values()))
        )

    def begin(self, seed: int, rate: float) -> None:
        """Sets the step's seed of attention dropout and its learning rate."""
        self.seed.fill_(seed)
        self.optimizer.set_rate(rate)

    def add(self, batch: CollatedBatch) -> None:
        """Adds the gradients of a micro-batch. All must be of one split and collated with the same options."""
        if batch.shape not in self.micro_batches:
            there = torch.empty(batch.nbytes, dtype=torch.uint8, device=self.flat.device)
            self.micro_batches[batch.shape] = there, CapturedFunction(lambda: self._add(batch.unpack(there)), self.pool)
        there, graph = self.micro_batches[batch.shape]
        there.copy_(batch.pack(pinned=there.is_cuda), non_blocking=True)
        graph()

    def update(self) -> None:
        """Reduces the gradients over the ranks and updates the parameters."""
        if dist.is_initialized():
            for each in (self.flat, *self.reduced):
                dist.all_reduce(each)
        self.updating()

    def _add(self, batch: Batch) -> None:
        # with a cache, autocast would keep this step's weights for all later ones
        with torch.autocast(self.flat.device.type, torch.bfloat16, self.bf16, cache_enabled=False):
            loss = self.loss(batch.with_seed(self.seed))
        found = torch.autograd.grad(loss, self.parameters)
        self.flat += torch.cat([*map(torch.flatten, found), loss.detach().view(1)])

    def _update(self) -> None:
        for parameter, part in zip(self.parameters, self.sums, strict=True):
            parameter.grad = part
        self.judge_and_update(self.flat)
        self.flat.zero_()
