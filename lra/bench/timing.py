"""Time and memory of a forward and a backward pass."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

BUDGET_MS = 500.0  # of repetitions, for one attention at one size
FEWEST_REPETITIONS, MOST_REPETITIONS = 5, 100  # repetitions; of a pass that takes 50 ms or less 10 or more fit
HOST_REPETITIONS = 20  # at most, for the time of the host
SLOW_MS = 1000.0  # what takes longer is not repeated
FIRST_PAUSE, LONGEST_PAUSE = 1 << 21, 1 << 26  # cycles, 1 to 30 ms: doubled until launching a pass takes less


TimedSteps = dict[str, Callable[[Any], Any]]  # by name, each given the result of the one before


class PassTime(NamedTuple):
    """Time and memory of a pass."""

    ms: float  # median
    repetitions: int
    memory_mb: float | None  # peak of what is allocated, in 10^6 bytes, inputs and gradients included; None on a CPU
    host_ms: float | None = None  # until the pass is launched on an idle GPU, median; None on a CPU


def time_passes(prepare: Callable[[], Any], steps: TimedSteps, device: torch.device) -> dict[str, PassTime]:
    """Runs `prepare` once, then the steps with its result again and again. The caller has warmed up.

    On a GPU the time is the GPU's own, between two events. The launches are queued behind a pause. The pause is longer
    next time if the GPU was done with it before the last launch. The L2 cache is overwritten before each step. The time
    of the host is measured apart, on an idle GPU. On a CPU the time is the wall clock's.
    """
    memory = _memory(prepare, steps, device) if device.type == "cuda" else dict.fromkeys(steps)
    flush = None
    if device.type == "cuda":
        flush = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    inputs, pauses = prepare(), dict.fromkeys(steps, FIRST_PAUSE)
    medians = _repeat(inputs, steps, 1, flush, pauses)
    once, repetitions = sum(medians.values()), 1
    if once < SLOW_MS:
        repetitions = round(min(MOST_REPETITIONS, max(FEWEST_REPETITIONS, BUDGET_MS / max(1e-3, once))))
        medians = _repeat(inputs, steps, repetitions, flush, pauses)
    host = dict.fromkeys(steps) if flush is None else _host_times(inputs, steps, min(repetitions, HOST_REPETITIONS))
    return {name: PassTime(medians[name], repetitions, memory[name], host[name]) for name in steps}


def _repeat(
    inputs: Any, steps: TimedSteps, repetitions: int, flush: torch.Tensor | None, pauses: dict[str, int]
) -> dict[str, float]:
    """Each step's median milliseconds. A time for which the GPU waited for the host does not count, and its pause
    doubles.
    """
    clocks: dict[str, list[Callable[[], float]]] = {name: [] for name in steps}
    while min(map(len, clocks.values())) < repetitions:
        result = inputs
        for name, step in steps.items():
            result, clock, waited = _clocked(step, result, flush, pauses[name])
            if waited and pauses[name] < LONGEST_PAUSE:
                pauses[name] *= 2
            else:
                clocks[name].append(clock)
        del result
    if flush is not None:
        torch.cuda.synchronize(flush.device)
    return {name: statistics.median(clock() for clock in these) for name, these in clocks.items()}


def _clocked(
    step: Callable[[Any], Any], given: Any, flush: torch.Tensor | None, pause: int
) -> tuple[Any, Callable[[], float], bool]:
    """The step's result, a function that reads its milliseconds after a synchronisation, and whether the GPU may
    have waited.
    """
    if flush is None:
        begin = time.perf_counter()
        result = step(given)
        spent = 1e3 * (time.perf_counter() - begin)
        return result, lambda: spent, False
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(pause)
    begin_event.record()
    result = step(given)
    end_event.record()
    return result, lambda: begin_event.elapsed_time(end_event), begin_event.query()


def _host_times(inputs: Any, steps: TimedSteps, repetitions: int) -> dict[str, float]:
    """Each step's median milliseconds on the host, which waits for the GPU before each step and not within it."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        result = inputs
        for name, step in steps.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            result = step(result)
            spent[name].append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in spent.items()}


def clear_gpu(device: torch.device, compiled: bool = True) -> None:
    """Gives freed memory back, and forgets what torch.compile made for another size or loop.

    It raises if the last kernels ended in a fault: nothing later could be measured.
    """
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    if compiled and "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _memory(prepare: Callable[[], Any], steps: TimedSteps, device: torch.device) -> dict[str, float]:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    result, peaks = prepare(), {}
    for name, step in steps.items():
        torch.cuda.reset_peak_memory_stats(device)
        result = step(result)
        peaks[name] = (torch.cuda.max_memory_allocated(device) - before) / 1e6
    return peaks
