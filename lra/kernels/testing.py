"""Attention problems and error budgets, by which `lra doctor`, `lra tune`, `lra bench` and the tests check kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lra.kernels.block_sparse.sparse_attention import block_sparse_attention
from lra.kernels.flash import flash_attention
from lra.kernels.flash.layout import Layout
from lra.kernels.flash.reference import reference_attention

ROW_LAYOUTS = ("packed", "padded")
STRIDES = ("contiguous", "fused", "heads_first", "d_strided")
RESULT_NAMES = ("out", "dq", "dk", "dv")
# The contents of q, k and v. The first feature of hidden keys makes their scores hugely negative; some masks do so.
INPUT_KINDS = (
    "normal",
    "dominant",  # one key of each sequence has 95% of the weight; among 1,000 keys it scores 10 above the others
    "first_hidden",  # the first half of the keys is hidden
    "last_hidden",
    "two_visible",  # all keys but the first two are hidden
    "all_hidden",  # all keys have the same weight
    "overflow",  # the scores of the first half of the keys are -inf in fp32
    "same",  # q, k and v are one tensor
    "tiny",  # values are around 1e-3
    "nan_neighbour",  # the first sequence is NaN; the others are compared
)
HIDING_INPUTS = ("first_hidden", "last_hidden", "two_visible", "all_hidden")


@dataclass(frozen=True)
class Case:
    """One attention problem. Equal fields give equal numbers on one device."""

    lengths: tuple[int, ...]
    heads: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    layout: str = "packed"  # one of ROW_LAYOUTS
    strides: str = "contiguous"  # one of STRIDES
    causal: bool = False
    dropout: float = 0.0
    slack: int = 0  # max_length minus the longest length
    deterministic: bool = False
    spread: float = 1.0  # standard deviation of the scores
    inputs: str = "normal"  # one of INPUT_KINDS
    sparse: Layout | None = None  # the layout of block-sparse attention; it covers max_length tokens
    seed: int = 0

    @property
    def max_length(self) -> int:
        return max(self.lengths) + self.slack

    @property
    def total(self) -> int:
        return len(self.lengths) * self.max_length if self.layout == "padded" else sum(self.lengths)


class Inputs(NamedTuple):
    q: Tensor  # [T, H, D]
    k: Tensor
    v: Tensor
    do: Tensor
    sequences: dict[str, Tensor]  # start, length, index: int32 [B]
    seed: Tensor  # int64 []


class BudgetedError(NamedTuple):
    error: float  # largest absolute difference from the reference in float64
    budget: float  # 2 * (error of plain PyTorch in the case's dtype) + 2 * eps(dtype) * max|reference|

    @property
    def ok(self) -> bool:
        return self.error <= self.budget  # False for NaN


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    """Random tensors. Rows past a length are NaN, also in the gradient, because nothing may read them."""
    generator = torch.Generator(device).manual_seed(case.seed)
    shape = {
        "contiguous": (3, case.total, case.heads, case.head_dim),
        "fused": (case.total, 3, case.heads, case.head_dim),
        "heads_first": (3, case.heads, case.total, case.head_dim),
        "d_strided": (3, case.total, case.head_dim, case.heads),
    }[case.strides]
    order = {"contiguous": (0, 1, 2, 3), "fused": (1, 0, 2, 3), "heads_first": (0, 2, 1, 3), "d_strided": (0, 1, 3, 2)}
    qkv = torch.randn(shape, generator=generator, device=device).to(case.dtype).permute(order[case.strides])
    do = torch.randn(shape, generator=generator, device=device).to(case.dtype).permute(order[case.strides])[0]

    length = torch.tensor(case.lengths, dtype=torch.int32)
    start = length.cumsum(0, dtype=torch.int32) - length
    if case.layout == "padded":
        start = torch.arange(len(case.lengths), dtype=torch.int32) * case.max_length
    real = torch.zeros(case.total, dtype=torch.bool)
    for first, count in zip(start.tolist(), case.lengths, strict=True):
        real[first : first + count] = True
    qkv[0] *= case.spread
    for b, (first, count) in enumerate(zip(start.tolist(), case.lengths, strict=True)):
        _make_special(qkv[:, first : first + count], case, b)
    qkv[:, ~real.to(device)] = float("nan")
    do[~real.to(device)] = float("nan")

    index = torch.arange(len(case.lengths), dtype=torch.int32).flip(0) + 1000 * (case.seed % 7)
    sequences = {"start": start.to(device), "length": length.to(device), "index": index.to(device)}
    return Inputs(qkv[0], qkv[1], qkv[2], do, sequences, torch.tensor((case.seed << 31) - 12345, device=device))


def _make_special(qkv: Tensor, case: Case, b: int) -> None:
    """Change the q, k and v of sequence `b`, `[3, N, H, D]`, to the contents that `case.inputs` names."""
    count = qkv.shape[1]
    q, k, _ = qkv
    visible: slice | None = {
        "first_hidden": slice(count // 2, None),
        "last_hidden": slice((count + 1) // 2),
        "two_visible": slice(2),
        "all_hidden": slice(0),
        "overflow": slice(count // 2, None),
    }.get(case.inputs)
    if visible is not None:
        lowest = torch.finfo(case.dtype).min
        if case.dtype == torch.float16:  # plain PyTorch has no room below the lowest float16
            lowest /= 2
        hidden = lowest if case.seed % 2 or case.inputs == "overflow" else max(lowest, -1e30)
        q[..., 0] = 2.0 if case.inputs == "overflow" else 1.0
        k[..., 0] = hidden
        k[visible, :, 0] = 0.0
    elif case.inputs == "dominant" and count:
        q[..., 0], k[..., 0] = 1.0, 0.0
        k[case.seed % count, :, 0] = (math.log(count) + 3) * case.head_dim**0.5
    elif case.inputs == "same":
        qkv[1:] = qkv[:1]
    elif case.inputs == "tiny":
        qkv *= 1e-3
    elif case.inputs == "nan_neighbour" and b == 0:
        qkv[:] = float("nan")


def check_case(case: Case, device: torch.device | str, impl: str) -> dict[str, BudgetedError]:
    """Errors of the result and the three gradients of attention, with their budgets.

    The function is `block_sparse_attention` if the case is sparse, and `flash_attention` otherwise. Memory that the
    kernels allocate is filled with NaN first.

    Args:
        case: the problem.
        device: where to compute it.
        impl: the implementation to check. With dropout it must be "triton".
    """
    if case.dropout and impl != "triton":
        raise ValueError(f"impl='{impl}' does not draw the reference's dropout mask: check it with dropout=0")
    inputs = make_inputs(case, device)
    options: dict[str, Any] = {**inputs.sequences, "dropout": case.dropout, "seed": inputs.seed}
    function: Any = block_sparse_attention if case.sparse else flash_attention
    seen = {"layout": case.sparse} if case.sparse else {"causal": case.causal}
    with poisoned_empty():
        more = {"max_length": case.max_length, "deterministic": case.deterministic, "impl": impl}
        actual = run_with_gradients(function, inputs, case.dtype, **options, **seen, **more)
    exact = run_with_gradients(reference_attention, inputs, torch.float64, **options, **seen)
    plain = run_with_gradients(reference_attention, inputs, case.dtype, **options, **seen)

    errors = {}
    for name, a, e, p in zip(RESULT_NAMES, actual, exact, plain, strict=True):
        assert a.shape == inputs.q.shape and a.dtype == case.dtype and a.is_contiguous(), f"{name}: {a.shape} {a.dtype}"
        if case.inputs == "nan_neighbour":
            a, e, p = (x[case.lengths[0] :] for x in (a, e, p))
        if name == "dq" and case.inputs in HIDING_INPUTS:  # a huge feature multiplies the rounding of a sum that is 0
            a, e, p = (x[..., 1:] for x in (a, e, p))
        errors[name] = measure_error(a, e, p)
    return errors


def measure_error(actual: Tensor, exact: Tensor, plain: Tensor) -> BudgetedError:
    """The error of `actual` with its budget. `exact` is in float64; `plain` was computed in the dtype of `actual`."""
    budget = 2 * max_abs(plain.double() - exact) + 2 * torch.finfo(actual.dtype).eps * max_abs(exact)
    return BudgetedError(max_abs(actual.double() - exact), budget)


def run_with_gradients(function: Any, inputs: Inputs, dtype: torch.dtype, **options: Any) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) of `function(q, k, v, **options)` in `dtype`."""
    qkv = [x.detach().to(dtype).requires_grad_() for x in inputs[:3]]
    out = function(*qkv, **options)
    return out.detach(), *torch.autograd.grad(out, qkv, inputs.do.to(dtype), materialize_grads=True)


def max_abs(x: Tensor) -> float:
    """The largest absolute value; NaN if there is one; 0 for an empty tensor."""
    return float(x.detach().abs().max()) if x.numel() else 0.0


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside, `torch.empty` and `torch.empty_like` return NaN. So an element that is never written shows."""

    def poison(make: Any) -> Any:
        def make_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return make_poisoned

    makers = torch.empty, torch.empty_like
    torch.empty, torch.empty_like = map(poison, makers)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = makers
