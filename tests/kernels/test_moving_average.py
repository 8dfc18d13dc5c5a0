"""`moving_average`: kernels, interpreted or compiled, against the recurrence of plain PyTorch in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, library

from lra.kernels.moving_average import moving_average
from lra.kernels.testing import measure_error, poisoned_empty
from tests.kernels.compiling import compiled
from tests.sampling import sampled

NAMES = ("y", "dx", "dq", "dweight")


class Case(NamedTuple):
    lengths: tuple[int, ...]
    directions: int = 2
    dims: int = 4
    width: int = 5
    padded: bool = False
    dtype: torch.dtype = torch.float32
    slow: bool = False  # whether the averages hardly fade


CASES = [
    Case((9, 2), dims=8, width=3),
    Case((40,), directions=1, dims=3),
    Case((40, 33), width=35, dims=2, slow=True),
    Case((11, 0, 5), directions=1, padded=True, dtype=torch.bfloat16),
    Case((21, 0, 9)),
]
MANY_CHUNKS = [Case((21, 0, 9), padded=True), Case((40,), directions=1, dims=3), Case((40, 33), width=35, slow=True)]


def inputs_of(case: Case, device: Any) -> tuple[Tensor, ...]:
    """x, dy, start, length, q and weight. Rows past a length are NaN."""
    generator = torch.Generator().manual_seed(0)
    length = torch.tensor(case.lengths, dtype=torch.int32)
    start = length.cumsum(0, dtype=torch.int32) - length
    total, longest = sum(case.lengths), max(case.lengths) + 3
    if case.padded:
        start, total = torch.arange(len(length), dtype=torch.int32) * longest, len(length) * longest
    x, dy = torch.full((2, total, case.width), float("nan"))
    for first, count in zip(start.tolist(), case.lengths, strict=True):
        for rows in (x, dy):
            rows[first : first + count] = torch.randn(count, case.width, generator=generator)
    shape = (case.directions, case.dims, case.width)
    q = torch.rand(shape, generator=generator) * (0.01 if case.slow else 1) + (0.99 if case.slow else 0)
    weight = torch.randn(shape, generator=generator)
    return tuple(y.to(device) for y in (x.to(case.dtype), dy, start, length, q, weight))


def by_steps(x: Tensor, start: Tensor, length: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    y = torch.zeros(x.shape, dtype=q.dtype, device=x.device)
    for first, count in zip(start.tolist(), length.tolist(), strict=True):
        own = x[first : first + count].to(q.dtype)
        for direction in range(len(q)):
            state, found = torch.zeros_like(q[0]), []
            for row in own.flip(0) if direction else own:
                state = q[direction] * state + row
                found.append((weight[direction] * state).sum(0))
            if found:
                rows = torch.stack(found[::-1] if direction else found)
                y = y.index_add(0, torch.arange(first, first + count, device=x.device), rows)
    return y


def results(function: Any, x: Tensor, dy: Tensor, start: Tensor, length: Tensor, q: Tensor, weight: Tensor) -> Any:
    leaves = [leaf.detach().requires_grad_() for leaf in (x, q, weight)]
    y = function(leaves[0], start, length, *leaves[1:])
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))


def by_kernels(case: Case, x: Tensor, *given: Tensor) -> Tensor:
    return moving_average(x, *given, max_length=max(case.lengths) + 3, padded=case.padded)


def assert_within_budget(case: Case, device: Any) -> None:
    inputs = inputs_of(case, device)
    with poisoned_empty():
        found = results(lambda *given: by_kernels(case, *given), *inputs)
    real = [y.nan_to_num() for y in inputs[:2]]
    exact, plain = (
        results(by_steps, real[0].to(dtype), real[1].to(dtype), *inputs[2:4], *(y.to(dtype) for y in inputs[4:]))
        for dtype in (torch.float64, torch.float32)
    )
    for name, a, e, p in zip(NAMES, found, exact, plain, strict=True):
        error = measure_error(a, e, p.to(a.dtype))
        assert error.ok, f"{name} of {case}: error {error.error:.3g}, budget {error.budget:.3g}"


@pytest.mark.parametrize("case", sampled(CASES))
def test_within_budget(case, device):
    assert_within_budget(case, device)


@pytest.mark.parametrize("case", sampled(MANY_CHUNKS))
def test_sequences_of_many_chunks(case, device, monkeypatch):
    from lra.kernels.moving_average import average_kernels

    monkeypatch.setattr(average_kernels, "SHORTEST_CHUNK", 16)
    assert_within_budget(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case((1500, 700), width=40, dims=16, slow=True), Case((1500, 700), directions=1)])
def test_long_sequences(case):
    assert_within_budget(case, "cuda")


def test_nothing_to_average(device):
    x = torch.zeros(0, 4, device=device, requires_grad=True)
    q = torch.rand(2, 3, 4, device=device, requires_grad=True)
    length = torch.zeros(2, dtype=torch.int32, device=device)
    y = moving_average(x, length, length, q, q, max_length=1, padded=False)
    dx, dq = torch.autograd.grad(y.sum(), (x, q))
    assert y.shape == dx.shape == (0, 4) and not dq.any()


@pytest.mark.slow
def test_operators_are_as_their_fakes_say(device):
    x, dy, *rest = inputs_of(Case((3, 2), dims=1), device)
    given = (*rest, 3, False)
    library.opcheck(torch.ops.lra.moving_average.default, (x, *given), test_utils="test_faketensor")
    library.opcheck(torch.ops.lra.moving_average_backward.default, (dy, x, *given), test_utils="test_faketensor")


COMPILED = [dict(arch=arch, dtype=dtype, n=n) for arch, dtype, n in (
    (90, "float32", 4096), (90, "bfloat16", 100), (80, "float32", 4096), (120, "float32", 100)
)]  # fmt: skip


@pytest.mark.slow
def test_kernels_compile():
    """A thread keeps all of its feature in registers, and asks no other one."""
    for case, kernels in compiled(COMPILED, "tests.kernels.test_moving_average"):
        chunked = ["chunk_state_kernel"] if case["n"] > 128 else []
        names = [*chunked, "average_kernel", *chunked, "coefficient_gradient_kernel"]
        assert [kernel["name"] for kernel in kernels] == names
        for kernel in kernels:
            assert not kernel["stack"] and not kernel["shuffles"] and not kernel["atomics"], f"{case}: {kernel}"


def launch_case(case: dict[str, Any]) -> None:
    from lra.kernels.moving_average.average_kernels import launch_average, launch_coefficient_gradient
    from tests.kernels.aot import choose

    choose(case["arch"], hopper=False)
    x = torch.zeros(2 * case["n"], 128, dtype=getattr(torch, case["dtype"]))
    q, length = torch.zeros(2, 16, 128), torch.full((2,), case["n"], dtype=torch.int32)
    start, y = torch.tensor([0, case["n"]], dtype=torch.int32), torch.zeros(x.shape)
    launch_average(x, start, length, q, q, case["n"], 0, 1, y)
    launch_coefficient_gradient(x, y, start, length, q, case["n"], 1)
