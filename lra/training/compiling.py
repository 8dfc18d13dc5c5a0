"""Compiles functions of a batch, and records how long that takes."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lra.batch import Batch
from lra.kernels.layers.reference import mix_bits
from lra.models.dropout import mix_keys
from lra.timeline import Timeline

AUTOTUNING = "CachingAutotuner.benchmark_all_configs"  # what PyTorch calls it
# The gradients of a norm are fused whatever the number of rows. By default PyTorch fuses them from 5 * 2^20 elements
# on, and compiles again when a batch is the first on the other side: a batch of ListOps has about so many.
ANY_ROWS: Any = {"triton.mix_order_reduction_non_strict_mode": True}


def compile_batched(function: Callable[[Batch], Tensor], deterministic: bool) -> Callable[[Batch], Tensor]:
    """Compiles a function.

    A function of packed batches is compiled once for all numbers of rows. Its kernels then depend on the first batch
    and on which of several is fastest.

    Args:
        deterministic: compile for each shape instead, so that kernels depend on nothing else.
    """
    lower_hashes()
    if deterministic:
        torch._dynamo.config.recompile_limit = 64  # so many shapes; further ones would not be compiled
        return torch.compile(function, dynamic=False, options={"deterministic": True})
    compiled = torch.compile(function, options=ANY_ROWS)

    def run(batch: Batch) -> Tensor:
        for rows in () if batch.padded else (batch.tokens, batch.positions):
            if rows is not None:
                torch._dynamo.maybe_mark_dynamic(rows, 0)
        return compiled(batch)

    return run


@functools.cache
def lower_hashes() -> None:
    """Tells torch.compile how to compute the operator `mix_keys`: as `mix_bits` does, in the kernel around it.

    PyTorch has no public names for this. They are those of PyTorch 2.11 to 2.13.
    """
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    class Value:
        """A number inside a kernel, with the operators that `mix_bits` uses."""

        def __init__(self, value: Any):
            self.value = value

        def __xor__(self, other: Value) -> Value:
            return Value(ops.bitwise_xor(self.value, other.value))

        def __rshift__(self, by: int) -> Value:
            return Value(ops.bitwise_right_shift(self.value, ops.constant(by, torch.int32)))

        def __and__(self, mask: int) -> Value:
            return Value(ops.bitwise_and(self.value, ops.constant(mask, torch.int32)))

        def __mul__(self, factor: int) -> Value:
            return Value(ops.mul(self.value, ops.constant(factor, torch.int32)))

    def mix(x: Any) -> Any:
        value: Any = Value(x)
        return mix_bits(value).value  # pyright: ignore[reportAttributeAccessIssue]

    register_lowering(mix_keys, type_promotion_kind=None)(make_pointwise(mix))


def record_compiled_kernels(timeline: Timeline) -> None:
    """Records what Triton compiles in this process: the seconds of each kernel as the fact `kernels`, and as a phase
    those of the main thread, which waited for them."""
    from triton import knobs

    seconds: Counter[str] = Counter()
    waited = 0.0

    def listen(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        nonlocal waited
        if not cache_hit:
            seconds[metadata["name"]] += times.total / 1e6
            if threading.current_thread() is threading.main_thread():
                waited += times.total / 1e6

    knobs.compilation.listener = listen
    timeline.count("compiling kernels", lambda: waited)
    timeline.facts["kernels"] = lambda: {name: round(took, 3) for name, took in seconds.most_common()}


def record_compiled_regions(timeline: Timeline) -> None:
    """Records what torch.compile compiles: phases, and the seconds of each region and pass as the fact `regions`.

    PyTorch has no public names for this, so all of them are here. They are those of PyTorch 2.11 to 2.13.
    """
    from torch._dynamo import utils
    from torch._dynamo.callback import on_compile_end, on_compile_start

    on_compile_start(lambda _: timeline.enter("compiling"))
    on_compile_end(lambda _: timeline.leave())
    timeline.count("autotuning", lambda: sum(utils.compilation_time_metrics.get(AUTOTUNING, ())))
    timeline.facts["regions"] = lambda: _regions(utils.get_compilation_metrics())


def _regions(compiled: list[Any]) -> list[dict[str, Any]]:
    """The seconds of each region and pass. A backward pass has no name, but the number of its forward pass."""
    names = {each.compile_id: each.co_name for each in compiled if each.co_name}
    return [
        {
            "region": names.get(each.compile_id, each.compile_id),
            "pass": "forward" if each.is_forward else "backward",
            "seconds": round((each.duration_us or 0) / 1e6, 3),
        }
        for each in compiled
    ]
