"""The choice of the kernel and the tile for a pass of attention, with a reason. No other file decides it.

There are two families. The plain Triton kernels run everywhere and compute every call. The Gluon kernels are faster,
run on Hopper GPUs only, and compute most calls in 16 bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lra.kernels.device import Gpu
from lra.kernels.dropout import MAX_DROP_THRESHOLD
from lra.kernels.flash import tuning
from lra.kernels.flash.problem import Problem
from lra.kernels.flash.tuning import SHORT_LENGTH, Tile, block_dim, forced_tiles

HOPPER_HEAD_DIMS = (32, 64, 128)


class KernelChoice(NamedTuple):
    """The kernel of one pass, and its tile on the current device."""

    kernel: str  # one of tuning.KERNELS; "dkdv" means "dkdv" and then "dq"
    tile: Tile
    reason: str  # one line


def choose_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, gpu: Gpu) -> KernelChoice:
    """The kernel for the result of `[T, H, D]` tensors. Their device must be the current one."""
    kernel, reason = _forward(problem, q, k, v, gpu)
    return KernelChoice(kernel, _tile(kernel, problem, q), reason)


def choose_backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, gpu: Gpu) -> KernelChoice:
    """The kernel for the gradients of `[T, H, D]` tensors. Their device must be the current one."""
    kernel, reason = _backward(problem, q, k, v, gpu)
    return KernelChoice(kernel, _tile(kernel, problem, q), reason)


def _tile(kernel: str, problem: Problem, q: Tensor) -> Tile:
    layout = None if kernel.startswith("hopper_shared") else problem.pattern
    return tuning.find_tile(kernel, q.dtype, block_dim(q.shape[2]), problem.threshold > 0, layout)


def _forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, gpu: Gpu) -> tuple[str, str]:
    """(Kernel, reason)."""
    if obstacle := _hopper_obstacle(problem, (q, k, v), gpu):
        return "forward", obstacle
    for kernel in forced_tiles:
        if kernel == "hopper_forward" or kernel.startswith("hopper_shared"):
            return kernel, "its tile is forced"
    if problem.pattern is not None:
        return "hopper_forward", "groups of warps share keys only where every query sees every key"
    length, dropout = problem.max_length, problem.threshold > 0
    if q.shape[2] == 64 and not (dropout and length > SHORT_LENGTH):
        return "hopper_forward", f"at d = 64 sharing keys gains only with dropout and above {SHORT_LENGTH:,} tokens"
    shared = shared_kernel(length)
    rows = _tile(shared, problem, q).rows
    if 8 * rows * math.ceil(length / rows) > 9 * length:
        return "hopper_forward", "sequences of this length leave more than a ninth of the shared tiles' rows empty"
    if q.shape[0] * q.shape[1] < 8 * rows * gpu.multiprocessors:
        return "hopper_forward", "too few rows: sharing keys needs 8 tiles for each multiprocessor"
    return shared, "many rows in full tiles: groups of warps share keys"


def _backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, gpu: Gpu) -> tuple[str, str]:
    """(Kernel, reason)."""
    if q.dtype == torch.float32:
        return "dkdv", "float32 is summed in float64, which memory does not add: dQ has a kernel of its own"
    if problem.deterministic:
        return "dkdv", "deterministic: dQ has a kernel of its own, which adds in one order"
    if obstacle := _hopper_obstacle(problem, (q, k, v), gpu):
        return "dkdv_dq", obstacle
    if forced_tiles and "hopper_specialized" not in forced_tiles:
        return "hopper_backward", "a tile of another kernel than hopper_specialized is forced"
    if q.shape[2] == 64 and not problem.threshold and problem.pattern is None:
        return "hopper_specialized", "specialised warps are faster at d = 64 without dropout and layout"
    return "hopper_backward", "warps specialise only at d = 64 without dropout and layout"


def shared_kernel(length: int) -> str:
    """The name of the kernel whose groups share keys, for sequences of this length. Each name has its own tiles."""
    return "hopper_shared_short" if length <= SHORT_LENGTH else "hopper_shared"


def has_contiguous_heads(x: Tensor) -> bool:
    """Whether TMA can read `[T, H, D]` as `[T, H * D]`.

    The heads of a row must lie side by side, and rows must begin at multiples of 16 bytes.
    """
    aligned = x.stride(0) > 0 and x.stride(0) % 8 == 0  # the expanded gradient of a sum has stride 0
    return x.stride()[1:] == (x.shape[2], 1) and aligned and x.data_ptr() % 16 == 0


def _hopper_obstacle(problem: Problem, tensors: tuple[Tensor, Tensor, Tensor], gpu: Gpu) -> str | None:
    """Why the plain kernels run; None where Hopper's kernels run."""
    layout, (q, *_) = problem.pattern, tensors
    if problem.causal:
        return "Hopper's kernels have no causal mask"
    if problem.threshold > MAX_DROP_THRESHOLD:
        return f"Hopper's kernels drop at most {MAX_DROP_THRESHOLD} of 256 weights"
    if layout is not None and layout.ruled:
        return "Hopper's kernels know no rules inside a block, such as a band"
    if layout is not None and any(side % 64 for side in layout.block):
        return "Hopper's kernels take blocks whose sides are multiples of 64"
    if q.shape[2] not in HOPPER_HEAD_DIMS:
        return "Hopper's kernels take d = 32, 64 and 128"
    if forced_tiles:
        if not next(iter(forced_tiles)).startswith("hopper_"):
            return "the tile of a plain kernel is forced"
    elif q.dtype == torch.float32:
        return "Hopper's kernels take 16 bits"
    elif gpu.refusal:
        return gpu.refusal
    if not q.numel():
        return "there are no rows"
    if not all(map(has_contiguous_heads, tensors)):
        return "Hopper's kernels read rows whose heads lie side by side, at multiples of 16 bytes"
    return None
