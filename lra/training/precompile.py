"""Compiles the Triton kernels of a step in parallel, before the step needs them one after the other.

Triton compiles a kernel when it is launched first, for the dtypes, alignments and constants of its arguments. So two
layers of the model run once without launching anything: their launches are only noted. Then threads compile what was
noted, as most of that time is spent in LLVM and ptxas, outside of Python. Meanwhile torch.compile compiles the step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from lra.batch import Batch
from lra.errors import name_error
from lra.kernels.plans import forget_plans
from lra.tasks.base import TaskModule
from lra.timeline import inner_phase
from lra.training.optim import trained_parameters
from lra.training.output import say

Compilations = dict[Any, list[Callable[[], Any]]]  # by kernel


def precompile_kernels(module: TaskModule, batch: Batch, scored: Iterable[Batch], bf16: bool, threads: int) -> None:
    """Starts to compile the kernels of a training step and of an evaluation. The next launch waits for them.

    Nothing else changes. What runs out of memory here is left to the step.

    Args:
        module: on a GPU.
        batch: of the step, on the same device, with a seed.
        scored: batches to evaluate. The first one stands for all.
        bf16: whether the step runs under autocast.
        threads: at most so many kernels are compiled at a time.
    """
    device = batch.tokens.device
    cast = partial(torch.autocast, device.type, torch.bfloat16, bf16, cache_enabled=False)
    with (
        inner_phase("noting launches"), suppress(torch.OutOfMemoryError), noted_launches() as noted,
        _unchanged(module, device), _first_and_last_layer(module.model.encoder),
    ):  # fmt: skip
        with cast():
            loss = module.loss(batch)
        torch.autograd.grad(loss, trained_parameters(module), allow_unused=True)
        module.eval()
        with cast(), torch.no_grad():
            for each in itertools.islice(scored, 1):
                module(each)
    compile_noted(noted, threads, device)


@contextmanager
def noted_launches() -> Iterator[Compilations]:
    """Inside, no kernel of Triton is launched, so its results are arbitrary. Yields what compiles the noted ones."""
    from triton.runtime.jit import JITFunction

    launch, noted = JITFunction.run, defaultdict(list)
    forget_plans()  # a plan that has run launches without JITFunction

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _ = kernel.cache_key  # here, in one order: with the order the hash changes, and threads have none
        noted[id(kernel)].append(partial(launch, kernel, *args, grid=grid, warmup=True, **options))

    JITFunction.run = note  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]


def compile_noted(noted: Compilations, threads: int, device: torch.device) -> None:
    """Starts threads that compile what was noted. The next launch of a kernel waits until all of it is compiled.

    A kernel's launches follow each other in one thread: they may be alike. What can't be compiled here is left to its
    own launch, which meets what is wrong with the kernel where it can be explained.
    """
    from triton.runtime.jit import JITFunction

    def compile_one(compilations: list[Callable[[], Any]]) -> Exception | None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has a device of its own, at first GPU 0
        for compilation in compilations:
            try:
                if (kernel := compilation()) is not None:
                    _ = kernel.run  # Triton loads it when this is asked for; Triton 3.6 calls a C compiler then
            except Exception as error:  # whatever a compiler raises
                return error
        return None

    if not noted:  # no kernel is Triton's
        return
    pool = ThreadPoolExecutor(min(threads, len(noted)))
    compiled = [pool.submit(compile_one, each) for each in noted.values()]
    pool.shutdown(wait=False)
    launch = JITFunction.run

    def wait_and_launch(*args: Any, **options: Any) -> Any:
        JITFunction.run = launch  # type: ignore[method-assign]
        with inner_phase("waiting for kernels"):
            errors = [error for each in compiled if (error := each.result()) is not None]
        if errors:
            first = name_error(errors[0])
            say(f"note: threads could not compile {len(errors)} of a step's kernels ({first}): their first launch does")
        return launch(*args, **options)

    JITFunction.run = wait_and_launch  # type: ignore[method-assign]


@contextmanager
def _first_and_last_layer(encoder: Any) -> Iterator[None]:
    """Inside, the encoder has no other layers. The last one may pool, and all others launch the same kernels."""
    blocks = encoder.blocks
    encoder.blocks = blocks if len(blocks) < 3 else nn.ModuleList([blocks[0], blocks[-1]])
    try:
        yield
    finally:
        encoder.blocks = blocks


@contextmanager
def _unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """At the end the module's buffers and mode, and the generators of random numbers, are what they were."""
    training, buffers = module.training, [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            module.train(training)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
