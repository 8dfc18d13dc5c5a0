"""The optimisation step as CUDA graphs: what the GPU does in a step is launched by a few calls, not by hundreds.

A captured step works on tensors that stay where they are. So a batch is copied into a buffer of its shape, where the
graph unpacks it, and packed batches have few shapes: `Split.collate` rounds their rows up. What comes for the first
time runs as it is, which compiles and allocates; what comes for the second time is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lra.batch import Batch
from lra.data.collated import Collated
from lra.training.tally import Tally


class Graph:
    """A function without arguments or result. Its second call captures it; from then on it is replayed."""

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
            with torch.cuda.graph(self.graph, pool=self.pool):
                self.function()
        self.graph.replay()


class CapturedStep:
    """Forward, backward and update of a model on static tensors.

    Gradients of all micro-batches are summed in one flat buffer, which the ranks reduce before the update. Its last
    element is the step's loss.

    Args:
        loss: a micro-batch's share of the step's loss.
        parameters: those that are trained.
        optimizer: of these; its learning rate becomes a tensor.
        update: clips, and updates the parameters with the optimizer.
        tally: judges each step before its update.
    """

    def __init__(
        self,
        loss: Callable[[Batch], Tensor],
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        update: Callable[[], None],
        device: torch.device,
        tally: Tally,
    ):
        self.loss, self.parameters = loss, parameters
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.seed = torch.zeros((), dtype=torch.int64, device=device)
        self.rate = torch.zeros((), device=device)
        self.tally = tally
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes) + 1, device=device)
        parts = self.flat[:-1].split(sizes)
        self.sums = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        for group in optimizer.param_groups:
            group.update(lr=self.rate, capturable=device.type == "cuda")
        self.micro_batches: dict[tuple[int, ...], tuple[Tensor, Graph]] = {}  # of each shape, where a batch lies packed
        self.update = Graph(lambda: self._update(update), self.pool)

    @property
    def made(self) -> int:
        """How often a shape, or the update, was compiled or captured: what takes longer than a step."""
        return sum(min(graph.calls, 2) for graph in (self.update, *(graph for _, graph in self.micro_batches.values())))

    def begin(self, seed: int, rate: float) -> None:
        """Of this step: the seed of attention's dropout, and the learning rate."""
        self.seed.fill_(seed)
        self.rate.fill_(rate)

    def add(self, batch: Collated) -> None:
        """Adds the gradients of a micro-batch: of one split, and collated with the same options as all others."""
        if batch.shape not in self.micro_batches:
            there = torch.empty(batch.nbytes, dtype=torch.uint8, device=self.flat.device)
            self.micro_batches[batch.shape] = there, Graph(lambda: self._add(batch.unpack(there)), self.pool)
        there, graph = self.micro_batches[batch.shape]
        there.copy_(batch.pack(pinned=there.is_cuda), non_blocking=True)
        graph()

    def finish(self) -> None:
        """Reduces the gradients over the ranks and updates the parameters."""
        if dist.is_initialized():
            dist.all_reduce(self.flat)
        self.update()

    def _add(self, batch: Batch) -> None:
        loss = self.loss(batch.with_seed(self.seed))
        found = torch.autograd.grad(loss, self.parameters)
        self.flat += torch.cat([*map(torch.flatten, found), loss.detach().view(1)])

    def _update(self, update: Callable[[], None]) -> None:
        for parameter, part in zip(self.parameters, self.sums, strict=True):
            parameter.grad = part
        self.tally.judge(self.flat)
        update()
        self.flat.zero_()
