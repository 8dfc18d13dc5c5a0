"""Compiles the Triton kernels of a step in parallel, before the step needs them one after the other.

Triton compiles a kernel when it is launched first, for the dtypes, alignments and constants of its arguments. So one
layer of the model runs once without launching anything: its launches are only noted. Then threads compile what was
noted, as most of that time is spent in LLVM and ptxas, outside of Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from lra.batch import Batch
from lra.errors import name_error
from lra.tasks.base import TaskModule
from lra.timeline import inner_phase
from lra.training.optim import trained_parameters
from lra.training.output import say

Compilations = dict[Any, list[Callable[[], Any]]]  # by kernel


def precompile_kernels(module: TaskModule, batch: Batch, bf16: bool, threads: int) -> None:
    """Compiles the kernels of a training step and of an evaluation of a batch like this one.

    Nothing else changes. What runs out of memory here is left to the step.

    Args:
        module: on a GPU.
        batch: on the same device, with a seed.
        bf16: whether the step runs under autocast.
        threads: at most so many kernels are compiled at a time.
    """
    device = batch.tokens.device
    cast = partial(torch.autocast, device.type, torch.bfloat16, bf16, cache_enabled=False)
    with (
        inner_phase("noting launches"), suppress(torch.OutOfMemoryError), noted_launches() as noted,
        _unchanged(module, device), _one_layer(module.model.encoder),
    ):  # fmt: skip
        with cast():
            loss = module.loss(batch)
        torch.autograd.grad(loss, trained_parameters(module), allow_unused=True)
        module.eval()
        with cast(), torch.no_grad():
            module(batch)
    with inner_phase("compiling kernels in parallel"):
        errors = compile_noted(noted, threads, device)
    if errors:
        first = name_error(errors[0])
        say(f"note: threads could not compile {len(errors)} of a step's kernels ({first}): their first launch does")


@contextmanager
def noted_launches() -> Iterator[Compilations]:
    """Inside, no kernel of Triton is launched, so its results are arbitrary. Yields what compiles the noted ones."""
    from triton.runtime.jit import JITFunction

    launch, noted = JITFunction.run, defaultdict(list)

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        noted[id(kernel)].append(partial(launch, kernel, *args, grid=grid, warmup=True, **options))

    JITFunction.run = note  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]


def compile_noted(noted: Compilations, threads: int, device: torch.device) -> list[Exception]:
    """Compiles what was noted. A kernel's launches follow each other: they may be alike.

    Returns an error for each kernel that can't be compiled here. Its launch meets what is wrong with the kernel again,
    where it can be explained.
    """

    def compile_one(compilations: list[Callable[[], Any]]) -> Exception | None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has a device of its own, at first GPU 0
        for compilation in compilations:
            try:
                compilation()
            except Exception as error:  # whatever a compiler raises
                return error
        return None

    if not noted:  # no kernel is Triton's
        return []
    with ThreadPoolExecutor(min(threads, len(noted))) as pool:
        return [error for error in pool.map(compile_one, noted.values()) if error is not None]


@contextmanager
def _one_layer(encoder: Any) -> Iterator[None]:
    """Inside, the encoder has its first layer alone: all layers launch the same kernels."""
    blocks = encoder.blocks
    encoder.blocks = nn.ModuleList(blocks[:1])
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
