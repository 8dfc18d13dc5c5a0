"""Training loops that take the same steps: Lightning's as `lra fit` runs it, and three without Lightning.

`captured` and `eager` are `lra.training.step.Step` with either engine. `bare` is what one would write by hand for
sequences of one length: see `Dense` and `full`.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.config.schema import RunConfig
from lra.data.collated import Collated
from lra.data.split import IGNORED
from lra.kernels import effective_dropout
from lra.models.attention.sdpa import SdpaAttention
from lra.tasks.base import TaskModule
from lra.tasks.batches import Rank, TrainBatches
from lra.training.assembly import build_modules, make_rank, make_trainer
from lra.training.clock import Clock
from lra.training.engine import CapturedStep
from lra.training.step import Step

BLOCKS = 5  # of the steps that are timed; their median counts
ALONE = 10  # steps that start when the GPU is idle, which show what the host needs


class Stopwatch:
    """Times a loop that calls `start` before its first step and `tick` after each.

    On a GPU by its own clock: to wait for it between the blocks would leave it idle until the next step is launched.
    """

    def __init__(self, warmup: int, steps: int, device: torch.device):
        self.device, self.done, self.first_seconds = device, 0, 0.0
        blocks = min(BLOCKS, steps)
        self.bounds = [warmup + steps * i // blocks for i in range(blocks + 1)]
        self.stamps: list[Any] = []  # at the bounds: events of a GPU, else seconds
        self.shapes: list[tuple[int, int] | None] = []  # there, too
        self.launches: list[float] = []  # seconds until a step that is alone was launched
        self.idle = 0.0  # when the GPU had done all

    @property
    def measured(self) -> range:
        """The steps that are timed."""
        return range(self.bounds[0], self.bounds[-1])

    def start(self) -> None:
        self._synchronize()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def tick(self, step: Step | None = None) -> bool:
        """Whether this was the last step, which `step` took."""
        launched, before = time.perf_counter(), self.idle
        self.done += 1
        if self.done == 1:
            self._synchronize()
            self.first_seconds = self.idle - before
        elif self.done > self.bounds[-1]:
            self.launches.append(launched - before)
            self._synchronize()
        if self.done in self.bounds:
            self.stamps.append(self._stamp())
            self.shapes.append(shapes(step))
        if self.done == self.bounds[-1]:
            self._synchronize()
        return self.done == self.bounds[-1] + ALONE

    def block_ms(self) -> list[float]:
        """Milliseconds of a step, in each block."""
        pairs = zip(itertools.pairwise(self.bounds), itertools.pairwise(self.stamps), strict=True)
        return [self._ms(begin, end) / (last - first) for (first, last), (begin, end) in pairs]

    def steady(self) -> list[bool]:
        """Of each block, whether no shape of batches was compiled or captured in it."""
        return [before == after for before, after in itertools.pairwise(self.shapes)]

    def memory_mb(self) -> float | None:
        """Peak of what was allocated since the start, in 10^6 bytes, what lay there before included."""
        return torch.cuda.max_memory_allocated(self.device) / 1e6 if self.device.type == "cuda" else None

    def host_ms(self) -> float:
        """Median milliseconds from a step's start until all of it was launched."""
        return 1e3 * statistics.median(self.launches)

    def _stamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _ms(self, begin: Any, end: Any) -> float:
        """Between two stamps."""
        return begin.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - begin)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.idle = time.perf_counter()


class Loop(NamedTuple):
    """A loop that was timed."""

    module: TaskModule
    step: Step
    tokens: int  # real ones, in the steps that were measured
    rows: int  # the same with padding and filling
    loss: float | None  # mean over all steps; of `fit` as it was logged last
    further: Iterator[None]  # goes on with a step at each `next`; none of `fit`


def shapes(step: Step | None) -> tuple[int, int] | None:
    """Of a captured step, how many shapes of batches came, and how many are graphs, as those that came again."""
    if step is None or not isinstance(step.engine, CapturedStep):
        return None
    graphs = [graph.graph for _, graph in step.engine.micro_batches.values()]
    return len(graphs), sum(graph is not None for graph in graphs)


class _Watched(Step):
    """Step that is timed."""

    def __init__(self, run: RunConfig, watch: Stopwatch):
        super().__init__(run)
        self.watch, self.ended = watch, False

    def __call__(self, module: TaskModule, batches: list[Collated]) -> None:
        if module.trainer.global_step == 0:
            self.watch.start()
        super().__call__(module, batches)
        if not self.ended and self.watch.tick(self):
            module.trainer.should_stop = self.ended = True


def fit(run: RunConfig, watch: Stopwatch) -> Loop:
    """Lightning's loop with the callbacks and loggers of `lra fit`, but for what it tells the user; no validation."""
    step = _Watched(run, watch)
    with tempfile.TemporaryDirectory(prefix="lra-bench-") as folder:
        trainer = make_trainer(run, Path(folder), Clock())  # without a narrator
        data, module = build_modules(run, make_rank(trainer), lambda: trainer.global_step, step)
        trainer.limit_val_batches = 0
        trainer.fit(module, datamodule=data)
    work = _work(cast(TrainBatches, trainer.train_dataloader), watch.measured)
    return Loop(module, step, *work, step.logged, iter(()))


def by_hand(name: str, run: RunConfig, watch: Stopwatch) -> Loop:
    """`captured`, `eager` or `bare`; UsageError if it can't run on the watch's device."""
    device = watch.device
    run = replace(run, engine="eager" if name == "eager" else "captured")
    if name == "bare":
        run = replace(run, attn=SdpaAttention.Config(), batch=replace(run.batch, layout="padded"))
    step = Step(run)
    data, module = build_modules(run, Rank(0, 1, device), step=step)
    if name == "bare":
        encoder = module.model.encoder
        encoder.embedding.fused = False
        for block in encoder.blocks:
            block.attention, block.fused = Dense(effective_dropout(run.model.attn_dropout)), False  # type: ignore[assignment]
    module.to(device).train()
    optimizer = step.optimizer(module)
    step.start(module, optimizer)
    data.setup()
    batches = data.train_dataloader()
    if name == "bare":
        step_0 = batches.step(0)
        tokens = torch.randint(len(data.vocabulary), (step_0[0].rows,), dtype=torch.int32, device=device)
        padded = [full(batch, tokens) for batch in step_0]
        steps, rows = itertools.repeat(padded), len(watch.measured) * sum(batch.rows for batch in padded)
        work = rows, rows
        del data, batches  # with what they hold on the GPU
    else:
        steps, work = itertools.chain.from_iterable(batches), _work(batches, watch.measured)
    loop = _taken(step, device, steps)
    watch.start()
    for _ in loop:
        if watch.tick(step):
            break
    assert step.tally is not None
    return Loop(module, step, *work, float(step.tally.total) / watch.done, loop)


def _taken(step: Step, device: torch.device, steps: Iterable[list[Collated]]) -> Iterator[None]:
    """Takes a step at each `next`."""
    assert step.engine is not None
    for number, batches in enumerate(steps):
        # around all of a step, as Lightning has it
        with torch.autocast(device.type, torch.bfloat16, step.run.trainer.precision == "bf16"):
            step.forward_backward(batches, number)
            step.engine.update()
        yield


class Dense(nn.Module):
    """PyTorch's scaled_dot_product_attention of padded sequences that all have `max_length` tokens, so without a mask.

    With it the model is a plain Transformer on `[B, N]` tokens of PyTorch's layers, its step compiled and captured,
    AdamW fused.
    """

    facts = SdpaAttention.facts  # takes batches as they are

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """`[T, H, D]` to the same."""
        q, k, v = (x.unflatten(0, (batch.size, batch.max_length)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return out.transpose(1, 2).flatten(0, 1)

    attend = forward  # as an Attention has it: batches are padded


def full(padded: Collated, tokens: Tensor) -> Collated:
    """A padded batch of these tokens, which stay where they are, in which each sequence has `max_length` of them."""
    length = np.full_like(padded.length, padded.max_length)
    return replace(padded, length=length, prefix=None, laid=[], read=lambda laid, rows: (tokens[:rows], None))


def _work(batches: TrainBatches, steps: range) -> tuple[int, int]:
    """Real tokens, and rows with padding and filling, of these steps."""
    tokens = rows = 0
    for batch in itertools.chain.from_iterable(map(batches.step, steps)):
        real = batch.label != IGNORED
        tokens += int(batch.length.reshape(len(real), -1)[real].sum())  # of Retrieval two sequences have one label
        rows += batch.rows
    return tokens, rows
