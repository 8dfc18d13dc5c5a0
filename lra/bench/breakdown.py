"""Where the GPU's time of a training step goes: kernels by name in groups, and the gaps between them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

# The first pattern that matches a kernel's name decides, in either case of letters. Attention that is written in
# PyTorch's operators has no kernels of its own: its products are matrix products, and the rest is layers.
KERNEL_GROUPS = {
    # templates are products
    "layers": r"^(fold|unfold|sum|(project|feed_forward|embed|table|pool)\w*)_kernel"
    r"|^(chunk_state|average|coefficient_gradient)_kernel"  # moving averages
    r"|^triton_(?!tem_|flex_)|embedding",
    "attention": r"^(hopper_\w+|forward\w*|softmax_\w+|prepare_backward|convert_dq|extreme_rows|delta|dkdv|dq)_kernel"
    r"|flash|fmha|sdpa|flex_",
    "matrix products": r"^triton_tem_|nvjet|gemm|gemv|cutlass|cublas|xmma|splitk",
    "optimiser": r"multi_tensor|foreach|adam|CatArray",  # also sums of gradients and their norm
    "data": r"memcpy|memset|copy|fill|index|gather|scatter",
}
OTHER, GAPS = "other", "gaps"
LONGEST_KERNELS = 20  # so many kernels are listed by name


class KernelLaunch(NamedTuple):
    """One launch, in microseconds."""

    name: str
    start: float
    end: float


def kernel_group(name: str) -> str:
    """The group of KERNEL_GROUPS that a kernel belongs to, or OTHER."""
    return next((label for label, pattern in KERNEL_GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def record_kernels(steps: Iterator[None], count: int, device: torch.device) -> list[KernelLaunch]:
    """The launches on the GPU in the next `count` of `steps`."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in itertools.islice(steps, count):
            pass
        torch.cuda.synchronize(device)
    events = (event for event in profiler.events() or () if event.device_type.name == "CUDA")
    # an annotation spans kernels that are there themselves
    kernels = (event for event in events if not event.is_user_annotation)
    return [KernelLaunch(event.name, event.time_range.start, event.time_range.end) for event in kernels]


def breakdown(kernels: Sequence[KernelLaunch], steps: int, ms: float) -> dict[str, Any] | None:
    """Milliseconds of a step by group, and its longest kernels; None if there are no kernels.

    Gaps are the rest of `ms`, the time of a step without a profiler. A profiler slows kernels a little, so gaps may be
    slightly below 0.
    """
    if not kernels:
        return None
    groups = dict.fromkeys((*KERNEL_GROUPS, OTHER), 0.0)
    by_name: dict[str, list[float]] = {}  # milliseconds of a step that each launch takes
    for kernel in kernels:
        spent = (kernel.end - kernel.start) / 1e3 / steps
        groups[kernel_group(kernel.name)] += spent
        by_name.setdefault(kernel.name, []).append(spent)
    groups[GAPS] = ms - _busy(kernels) / 1e3 / steps
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LONGEST_KERNELS]
    return {
        "groups": {label: round(spent, 5) for label, spent in groups.items()},
        "kernels": [
            {"name": name, "group": kernel_group(name), "ms": round(sum(spent), 5), "calls": len(spent) / steps}
            for name, spent in longest
        ],
    }


def _busy(kernels: Sequence[KernelLaunch]) -> float:
    """Microseconds in which at least one kernel ran."""
    busy, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        busy += max(0.0, kernel.end - max(until, kernel.start))
        until = max(until, kernel.end)
    return busy
