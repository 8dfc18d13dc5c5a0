"""Block-sparse attention by the Triton kernels, interpreted on the CPU or compiled on a GPU, against the reference."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from lra.kernels import block_sparse_attention, flash_attention
from lra.kernels.block_sparse import layouts
from lra.kernels.flash.layout import Layout
from lra.kernels.testing import Case, check_case, make_inputs, run_with_gradients
from tests.kernels.cases import random_sparse_case
from tests.sampling import sampled

HALF, SINGLE = torch.float16, torch.float32  # the interpreter multiplies bfloat16 wrongly
SMALL = ((16, 16), (16, 64), (64, 16), (32, 32), (64, 64))


def assert_within_budget(case: Case, device: torch.device) -> None:
    for name, error in check_case(case, device, "triton").items():
        assert error.ok, f"{name} of {case}: error {error.error:.3g}, budget {error.budget:.3g}"


BUTTERFLY = layouts.butterfly(256, 32)
CASES = [
    Case((100, 0, 33), sparse=BUTTERFLY),
    Case((100, 0, 33), sparse=BUTTERFLY, deterministic=True, dtype=HALF),
    Case((140, 1, 33), sparse=BUTTERFLY, layout="padded", slack=20, dropout=0.5, dtype=HALF, head_dim=64),
    Case((77, 64), sparse=layouts.window(128, 16, band=9), head_dim=16, strides="heads_first"),
    Case((90, 30), sparse=layouts.butterfly(100, 16, 1, globals=5), dropout=0.1, dtype=HALF, strides="fused"),
    Case((90, 30), sparse=layouts.butterfly(100, (16, 64), 1, band=3, causal=True), dropout=0.2, head_dim=48),
    Case((120,), sparse=layouts.bigbird(128, 32, heads=2, random=1), heads=4, dtype=HALF, strides="d_strided"),
    Case((50, 7), sparse=layouts.butterfly(64, 16), dropout=0.1, head_dim=3),  # narrower than a tensor-core product
]


@pytest.mark.parametrize("case", sampled(CASES), ids=range(len(CASES)))
def test_within_budget(case, device):
    assert_within_budget(case, device)


@pytest.mark.parametrize("seed", sampled(range(9, -1, -1), 6))
def test_random_layouts(seed, device):
    dtypes = (HALF, SINGLE) if device.type == "cpu" else (HALF, torch.bfloat16, SINGLE)
    case = random_sparse_case(random.Random(seed), dtypes, max_length=100, blocks=SMALL)
    if case.dtype == SINGLE:  # in the interpreter another order of sums exceeds the budget under a peaked softmax
        case = dataclasses.replace(case, spread=1.0)
    assert_within_budget(case, device)


def attend(case: Case, device: torch.device, layout: Layout | None, **changes) -> tuple[torch.Tensor, ...]:
    inputs = make_inputs(case, device)
    options = {**inputs.sequences, "max_length": case.max_length, "dropout": case.dropout, "seed": inputs.seed}
    options |= {"impl": "triton", **changes}
    if layout is None:
        return run_with_gradients(flash_attention, inputs, case.dtype, **options)
    return run_with_gradients(block_sparse_attention, inputs, case.dtype, layout=layout, **options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_layout_that_shows_everything_is_dense_attention(device, deterministic):
    """Bit for bit where sums have an order, dropout included: tiles are the same, and visited in the same order."""
    case = Case((128, 50), dropout=0.2, dtype=HALF, head_dim=32)
    everything = Layout(torch.ones(1, 1, 1, dtype=torch.bool), (128, 128))
    sparse = attend(case, device, everything, deterministic=deterministic)
    dense = attend(case, device, None, deterministic=deterministic)
    if device.type == "cuda" and not deterministic:  # dq is summed in any order
        for a, b in zip(sparse, dense, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        return
    assert all(map(torch.equal, sparse, dense))


def test_a_query_that_sees_nothing_gives_zeros(device):
    """Its only block of keys lies past the length."""
    blocks = torch.tensor([[[False, True], [True, True]]])
    layout = Layout(blocks, (64, 64))
    case = Case((50, 100), heads=1, layout="padded", slack=20, sparse=layout)
    assert_within_budget(case, device)
    out, dq, dk, dv = attend(case, device, layout)
    for x in (out, dq, dk, dv):
        assert not x[:50].any()  # the first sequence has no pair at all
    assert bool(out[120:184].isfinite().all()) and bool(out[120:184].any())


def test_each_head_has_its_layout(device):
    """Head h has layout h % H."""
    two = torch.stack([torch.eye(3), torch.ones(3, 3)]).bool()
    case = Case((96,), heads=4, dtype=HALF)
    both = attend(case, device, Layout(two, (32, 32)))
    tolerance = 0.0 if device.type == "cpu" else 1e-3  # there dq is summed in any order
    for h, blocks in enumerate(two):
        alone = attend(case, device, Layout(blocks[None], (32, 32)))
        for all_heads, one in zip(both, alone, strict=True):
            torch.testing.assert_close(all_heads[:, h::2], one[:, h::2], rtol=0, atol=tolerance)


def test_refusals(device):
    q = torch.zeros(1, 40, 2, 16, device=device)
    with pytest.raises(ValueError, match="the layout covers 32 tokens, and max_length is 40"):
        block_sparse_attention(q, q, q, layouts.butterfly(32, 16), impl="triton")
    with pytest.raises(ValueError, match="multiples of 16, not 24x24"):
        block_sparse_attention(q, q, q, layouts.butterfly(48, 24), impl="triton")
    with pytest.raises(ValueError, match="use 'auto', 'triton' or 'gather'"):
        block_sparse_attention(q, q, q, layouts.butterfly(48, 16), impl="sdpa")


@pytest.mark.slow
def test_compiles_into_one_graph(device):
    layout = layouts.butterfly(70, 32)
    case = Case((70, 20), dropout=0.3, dtype=HALF)
    inputs = make_inputs(case, device)
    options = {**inputs.sequences, "max_length": 70, "dropout": 0.3, "seed": inputs.seed, "impl": "triton"}

    def function(q, k, v):
        return block_sparse_attention(q, k, v, layout, deterministic=True, **options)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(*(run_with_gradients(f, inputs, HALF) for f in (function, compiled)), strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (16, 256)])
def test_full_gpu_repeats_itself(block, dropout, head_dim):
    """All but dq, a sum in any order, and dq too if asked, with thousands of programs: races need company."""
    n, size, heads = 1000, 64, 8
    layout = layouts.butterfly(n, block)
    torch.manual_seed(0)
    q, k, v, do = torch.randn(4, size, n, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    length = torch.randint(1, n + 1, (size,), device="cuda", dtype=torch.int32)
    seed = torch.tensor(3, device="cuda")

    def attend_all(deterministic: bool) -> list[torch.Tensor]:
        out = block_sparse_attention(
            q, k, v, layout, length=length, dropout=dropout, seed=seed, deterministic=deterministic
        )
        return [out, *torch.autograd.grad(out, (q, k, v), do)]

    for deterministic in (False, True):
        out, dq, dk, dv = attend_all(deterministic)
        for _ in range(5):
            again = attend_all(deterministic)
            assert torch.equal(again[0], out) and torch.equal(again[2], dk) and torch.equal(again[3], dv)
            assert not deterministic or torch.equal(again[1], dq)
            torch.testing.assert_close(again[1], dq, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_a_graph_replays_with_another_seed():
    """The lists of tiles are on the device before the capture, and dropout advances between replays."""
    layout = layouts.butterfly(1024, 128)
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 4, 1024, 4, 64, device="cuda", dtype=torch.bfloat16))
    seed = torch.tensor(1, device="cuda")

    def step() -> list[torch.Tensor]:
        out = block_sparse_attention(q, k, v, layout, dropout=0.2, seed=seed)
        return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for value in (5, 6):
        seed.fill_(value)
        graph.replay()
        replayed = [x.clone() for x in captured]
        expected = step()
        assert torch.equal(replayed[0], expected[0])
        for graphed, eager in zip(replayed[1:], expected[1:], strict=True):
            torch.testing.assert_close(graphed, eager, rtol=0.02, atol=0.02)
