"""What only a GPU can show: compiled code in every dtype, long sequences, offsets beyond 2^31."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lra.kernels import flash_attention
from lra.kernels.flash.reference import keep_mask, reference_attention
from lra.kernels.testing import Error, check, largest, random_case

pytestmark = pytest.mark.gpu


def memory(gib: int) -> pytest.MarkDecorator:
    have = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0
    return pytest.mark.skipif(have < gib, reason=f"needs {gib} GiB of GPU memory, found {have:.0f}")


@pytest.mark.parametrize("seed", range(8))
def test_random_cases(seed):
    """25 cases each. All are run before failing: which ones fail says more than the first."""
    rng = random.Random(seed)
    failures = []
    for _ in range(25):
        case = random_case(rng)
        for name, error in check(case, "cuda", "triton").items():
            if not error.ok:
                failures.append(f"{name} of {case}: error {error.error:.3g}, budget {error.budget:.3g}")
        torch.cuda.empty_cache()
    assert not failures, "\n" + "\n".join(failures)


@memory(40)
def test_more_than_2_to_the_31_elements():
    """8,448 sequences of 256 rows, 1,024 numbers wide: the last two sequences lie past 2^31 in every tensor."""
    size, n, heads, d, dtype = 8448, 256, 8, 128, torch.bfloat16
    torch.manual_seed(0)
    qkv = torch.empty(size * n, 3, heads, d, dtype=dtype, device="cuda")
    for part in qkv.chunk(16):
        part.normal_()
    q, k, v = (x.requires_grad_() for x in qkv.unbind(1))
    length = torch.full((size,), n, dtype=torch.int32, device="cuda")
    length[-1] = 100
    index = torch.arange(size, dtype=torch.int32, device="cuda")
    seed = torch.tensor(1, device="cuda")
    assert q.numel() > 2**31
    out = flash_attention(q, k, v, start=index * n, length=length, max_length=n, dropout=0.1, seed=seed, impl="triton")
    do = out.detach()  # any non-zero gradient
    results = [out, *torch.autograd.grad(out, (q, k, v), do)]

    last = slice(-2 * n, None)
    options = dict(start=index[:2] * n, length=length[-2:], index=index[-2:], dropout=0.1, seed=seed)

    def reference(precision: torch.dtype) -> list[Tensor]:
        rows = [x[last].detach().to(precision).requires_grad_() for x in (q, k, v)]
        result = reference_attention(*rows, **options)
        return [result, *torch.autograd.grad(result, rows, do[last].to(precision))]

    for actual, exact, plain in zip(results, reference(torch.float64), reference(dtype), strict=True):
        error = compare(actual[last], exact, plain)
        assert error.ok, error


@memory(30)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_65536_rows_with_dropout(dtype):
    """The flat index of a score passes 2^32 here. The reference runs in chunks of rows, as the scores need 32 GiB."""
    n, d, dropout, threshold, chunk = 65536, 32, 0.1, 26, 512
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = torch.randn(4, 1, n, 1, d, generator=generator, device="cuda").to(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seed = torch.tensor(2**40 + 7, device="cuda")
    out = flash_attention(*leaves, dropout=dropout, seed=seed, impl="triton")
    results = [x.flatten(0, 2) for x in (out, *torch.autograd.grad(out, leaves, do))]

    zero, column = torch.zeros((), dtype=torch.int64, device="cuda"), torch.arange(n, device="cuda")

    def reference(precision: torch.dtype) -> list[Tensor]:
        rows, keys, values, gradient = (x.detach().flatten(0, 2).to(precision) for x in (q, k, v, do))
        accumulator = torch.promote_types(precision, torch.float32)
        total = [torch.zeros(n, d, dtype=accumulator, device="cuda") for _ in range(4)]
        keys.requires_grad_()
        values.requires_grad_()
        for first in range(0, n, chunk):
            part = slice(first, first + chunk)
            query = rows[part].requires_grad_()
            keep = keep_mask(seed, 0, zero, column[part, None], column, threshold)
            p = (query @ keys.T * d**-0.5).softmax(-1) * keep * (256 / (256 - threshold))
            result = p @ values
            dq, dk, dv = torch.autograd.grad(result, (query, keys, values), gradient[part])
            total[0][part], total[1][part] = result.detach(), dq
            total[2] += dk
            total[3] += dv
        return total

    for actual, exact, plain in zip(results, reference(torch.float64), reference(dtype), strict=True):
        error = compare(actual, exact, plain)
        assert error.ok, error


def test_graph_replay_reads_the_seed_from_the_device():
    """A captured forward and backward draws a new mask when the seed's tensor is overwritten."""
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 100, 2, 32, device="cuda", dtype=torch.bfloat16).requires_grad_()
    seed = torch.tensor(1, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        out = flash_attention(*qkv, dropout=0.5, seed=seed, impl="triton")
        return out, torch.autograd.grad(out.float().square().sum(), qkv)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for value in (1, 2):
        seed.fill_(value)
        graph.replay()
        for replayed, eager in zip(captured, step(), strict=True):
            assert torch.equal(replayed, eager)


def compare(actual: Tensor, exact: Tensor, plain: Tensor) -> Error:
    budget = 2 * largest(plain.double() - exact) + 2 * torch.finfo(actual.dtype).eps * largest(exact)
    return Error(largest(actual.double() - exact), budget)
