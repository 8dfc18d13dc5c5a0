"""Training loops that take the same steps: Lightning's as `lra fit` runs it, and three without Lightning.

`captured` and `eager` are `lra.training.step.Step` with either engine. `bare` is what one would write by hand for
sequences of one length: see `DenseAttention` and `fill_lengths`.
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

from lra.batch import IGNORED_LABEL, Batch
from lra.config.schema import RunConfig
from lra.data.collated import CollatedBatch
from lra.kernels import effective_dropout
from lra.models.attention.sdpa import SdpaAttention
from lra.tasks.base import TaskModule
from lra.tasks.batches import Rank, TrainBatches
from lra.training.assembly import build_modules, make_rank, make_trainer
from lra.training.clock import Clock
from lra.training.engine import CapturedStep
from lra.training.step import Step

TIMED_BLOCKS = 5  # into which the timed steps are divided; the median of their times counts
IDLE_STARTS = 10  # further steps that start on an idle GPU, and show what the host needs


class Stopwatch:
    """Times a loop that calls `start` before its first step and `tick` after each step.

    On a GPU it uses the GPU's own clock. Waiting for the GPU between the blocks would leave it idle before the next
    step.
    """

    def __init__(self, warmup: int, steps: int, device: torch.device):
        self.device, self.done, self.first_seconds = device, 0, 0.0
        blocks = min(TIMED_BLOCKS, steps)
        self.bounds = [warmup + steps * i // blocks for i in range(blocks + 1)]
        self.stamps: list[Any] = []  # at the bounds: events of a GPU, or seconds
        self.shapes: list[tuple[int, int] | None] = []  # of batches, at the bounds
        self.launches: list[float] = []  # seconds until a step on an idle GPU was launched
        self.idle = 0.0  # when the GPU had finished

    @property
    def measured(self) -> range:
        """The steps that are timed."""
        return range(self.bounds[0], self.bounds[-1])

    def start(self) -> None:
        self._synchronize()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def tick(self, step: Step | None = None) -> bool:
        """Counts a step, which `step` took. Returns whether it was the last one."""
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
            self.shapes.append(count_shapes(step))
        if self.done == self.bounds[-1]:
            self._synchronize()
        return self.done == self.bounds[-1] + IDLE_STARTS

    def block_ms(self) -> list[float]:
        """Milliseconds of a step, in each block."""
        pairs = zip(itertools.pairwise(self.bounds), itertools.pairwise(self.stamps), strict=True)
        return [self._ms(begin, end) / (last - first) for (first, last), (begin, end) in pairs]

    def steady(self) -> list[bool]:
        """For each block, whether no shape of batches was compiled or captured in it."""
        return [before == after for before, after in itertools.pairwise(self.shapes)]

    def memory_mb(self) -> float | None:
        """Peak of allocated memory since the start, in 10^6 bytes, with what was allocated before."""
        return torch.cuda.max_memory_allocated(self.device) / 1e6 if self.device.type == "cuda" else None

    def host_ms(self) -> float:
        """Median milliseconds from a step's start until all of it is launched."""
        return 1e3 * statistics.median(self.launches)

    def _stamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two stamps."""
        return begin.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - begin)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.idle = time.perf_counter()


class TimedLoop(NamedTuple):
    """A loop that was timed."""

    module: TaskModule
    step: Step
    tokens: int  # real ones, in the measured steps
    rows: int  # tokens with padding and filling
    loss: float | None  # mean over all steps; of `time_fit` the last logged one
    further: Iterator[None]  # takes a further step at each `next`; empty for `time_fit`


def count_shapes(step: Step | None) -> tuple[int, int] | None:
    """Of a captured step, how many shapes of batches came, and how many are graphs because they came again."""
    if step is None or not isinstance(step.engine, CapturedStep):
        return None
    graphs = [graph.graph for _, graph in step.engine.micro_batches.values()]
    return len(graphs), sum(graph is not None for graph in graphs)


class _TimedStep(Step):
    """A step that a stopwatch times."""

    def __init__(self, run: RunConfig, watch: Stopwatch):
        super().__init__(run)
        self.watch, self.ended = watch, False

    def __call__(self, module: TaskModule, batches: list[CollatedBatch]) -> None:
        if module.trainer.global_step == 0:
            self.watch.start()
        super().__call__(module, batches)
        if not self.ended and self.watch.tick(self):
            module.trainer.should_stop = self.ended = True


def time_fit(run: RunConfig, watch: Stopwatch) -> TimedLoop:
    """Lightning's loop with the callbacks and loggers of `lra fit`, without its messages and validation."""
    step = _TimedStep(run, watch)
    with tempfile.TemporaryDirectory(prefix="lra-bench-") as folder:
        trainer = make_trainer(run, Path(folder), Clock())  # without a narrator
        data, module = build_modules(run, make_rank(trainer), lambda: trainer.global_step, step)
        trainer.limit_val_batches = 0
        trainer.fit(module, datamodule=data)
    work = _count_work(cast(TrainBatches, trainer.train_dataloader), watch.measured)
    return TimedLoop(module, step, *work, step.logged, iter(()))


def time_by_hand(name: str, run: RunConfig, watch: Stopwatch) -> TimedLoop:
    """Times `captured`, `eager` or `bare`. UsageError if it can't run on the watch's device."""
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
            dense = DenseAttention(effective_dropout(run.model.attn_dropout), run.causal)
            block.attention, block.fused = dense, False  # type: ignore[assignment]
    module.to(device).train()
    optimizer = step.optimizer(module)
    step.start(module, optimizer)
    data.setup()
    batches = data.train_dataloader()
    if name == "bare":
        step_0 = batches.step(0)
        tokens = torch.randint(len(data.vocabulary), (step_0[0].rows,), dtype=torch.int32, device=device)
        padded = [fill_lengths(batch, tokens) for batch in step_0]
        steps, rows = itertools.repeat(padded), len(watch.measured) * sum(batch.rows for batch in padded)
        work = rows, rows
        del data, batches  # with what they hold on the GPU
    else:
        steps, work = itertools.chain.from_iterable(batches), _count_work(batches, watch.measured)
    loop = _take_steps(step, device, steps)
    watch.start()
    for _ in loop:
        if watch.tick(step):
            break
    assert step.tally is not None
    return TimedLoop(module, step, *work, float(step.tally.total) / watch.done, loop)


def _take_steps(step: Step, device: torch.device, steps: Iterable[list[CollatedBatch]]) -> Iterator[None]:
    """Takes a step at each `next`."""
    assert step.engine is not None
    for number, batches in enumerate(steps):
        # around all of a step, as Lightning has it
        with torch.autocast(device.type, torch.bfloat16, step.run.trainer.precision == "bf16"):
            step.forward_backward(batches, number)
            step.engine.update()
        yield


class DenseAttention(nn.Module):
    """PyTorch's scaled_dot_product_attention of padded sequences that all have `max_length` tokens, without a mask.

    With it the model is a plain Transformer on `[B, N]` tokens of PyTorch's layers. Its step is compiled and captured,
    and its AdamW is fused.
    """

    facts = SdpaAttention.facts  # of an attention that takes batches as they are

    def __init__(self, dropout: float, causal: bool = False):
        super().__init__()
        self.dropout, self.causal = dropout, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """`[T, H, D]` to the same."""
        q, k, v = (x.unflatten(0, (batch.size, batch.max_length)).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return out.transpose(1, 2).flatten(0, 1)

    attend = forward  # as an Attention has it: batches are padded


def fill_lengths(padded: CollatedBatch, tokens: Tensor) -> CollatedBatch:
    """A padded batch of these tokens, in which each sequence has `max_length` of them. The tokens are not copied."""
    length = np.full_like(padded.length, padded.max_length)
    return replace(padded, length=length, prefix=None, laid=[], read=lambda laid, rows: (tokens[:rows], None))


def _count_work(batches: TrainBatches, steps: range) -> tuple[int, int]:
    """Real tokens, and rows with padding and filling, of these steps."""
    tokens = rows = 0
    for batch in itertools.chain.from_iterable(map(batches.step, steps)):
        real = batch.label != IGNORED_LABEL
        tokens += int(batch.length.reshape(len(real), -1)[real].sum())  # of Retrieval two sequences have one label
        rows += batch.rows
    return tokens, rows
