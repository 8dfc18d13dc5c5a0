"""Block-sparse attention by `gather`, the path for any device, against the reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lra.kernels import block_sparse_attention
from lra.kernels.block_sparse import layouts
from lra.kernels.block_sparse.gather import gather_attention
from lra.kernels.flash.layout import Layout
from lra.kernels.flash.problem import Problem
from lra.kernels.flash.reference import reference_attention
from lra.kernels.testing import RESULT_NAMES, Case, make_inputs, measure_error, run_with_gradients

CPU = torch.device("cpu")

EYE = torch.eye(5, dtype=torch.bool)
BLIND = Layout(EYE.roll(2, 1)[None], (8, 8))  # rows 0, 1, 2 see blocks 2, 3, 4 alone; rows 3 and 4 see 0 and 1
GATHERED = [
    (Case((70, 0, 33)), layouts.butterfly(70, 16)),
    (Case((70, 1, 33), layout="padded", slack=9), layouts.butterfly(96, 16) | layouts.local(96, 16)),
    (Case((64, 32, 0, 1), strides="fused"), layouts.butterfly(64, 32, 0)),
    (Case((70, 31), heads=3, layout="padded"), layouts.butterfly(70, (4, 32), globals=3)),
    (Case((50, 7), heads=4, strides="heads_first"), layouts.bigbird(50, 8, random=1, heads=2)),
    (Case((33, 65), heads=1), layouts.bigbird(65, (16, 2), random=1, heads=3)),
    (Case((41, 23), layout="padded", slack=3), layouts.window(44, 16, 5, globals=2)),
    (Case((41, 23), strides="d_strided"), layouts.fixed(41, 4, causal=True) | layouts.window(41, 4, 6, causal=True)),
    (Case((90, 20)), layouts.strided(90, (8, 4), band=11, globals=9, causal=True)),
    (Case((20, 40, 9, 1), layout="padded"), BLIND),
    (Case((20, 3, 17)), BLIND),
    (Case((20, 3, 17)), Layout(torch.stack([EYE, EYE.roll(2, 1)]), (8, 8))),
]
IDS = [f"{case.lengths} {case.layout} {layout.block}" for case, layout in GATHERED]


@pytest.mark.parametrize(("case", "layout"), GATHERED, ids=IDS)
def test_gather_is_the_reference(case, layout):
    """Through the public function within the budget of float32, and to the last digits in float64."""
    inputs = make_inputs(case, CPU)
    options: dict[str, Any] = {
        "layout": layout,
        "start": inputs.sequences["start"],
        "length": inputs.sequences["length"],
    }
    exact = run_with_gradients(reference_attention, inputs, torch.float64, **options)
    plain = run_with_gradients(reference_attention, inputs, torch.float32, **options)
    actual = run_with_gradients(
        block_sparse_attention, inputs, torch.float32, **options, max_length=case.max_length, impl="gather"
    )
    for name, a, e, p in zip(RESULT_NAMES, actual, exact, plain, strict=True):
        assert a.shape == e.shape and a.dtype == torch.float32 and a.is_contiguous()
        error = measure_error(a, e, p)
        assert error.ok, f"{name}: error {error.error:.3g}, budget {error.budget:.3g}"

    padded = case.layout == "padded"
    problem = Problem(
        options["start"], options["length"], case.max_length, padded, False, case.head_dim**-0.5, 0, layout=layout.key
    )
    for a, e in zip(run_with_gradients(gather_attention, inputs, torch.float64, problem=problem), exact, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-13)


@pytest.mark.parametrize("seed", range(12))
def test_gather_of_random_layouts(seed):
    rng = random.Random(seed)
    top, heads, block = rng.randint(1, 60), rng.randint(1, 3), rng.choice([1, 6, 16, (2, 8), (12, 3)])
    rules = {"band": rng.choice([None, 0, 5]), "globals": rng.choice([0, 7]), "causal": rng.random() < 0.4}
    layout = layouts.bigbird(top, block, rng.randint(0, 1), 0, rng.randint(0, 2), heads, seed, **rules)
    lengths = (*(rng.randint(0, top) for _ in range(3)), top)
    form = rng.choice(["packed", "padded"])
    case = Case(lengths, heads=heads * rng.randint(1, 2), head_dim=16, layout=form)
    inputs = make_inputs(case, CPU)
    options: dict[str, Any] = {
        "start": inputs.sequences["start"],
        "length": inputs.sequences["length"],
        "layout": layout,
    }
    exact = run_with_gradients(reference_attention, inputs, torch.float64, **options)
    actual = run_with_gradients(
        block_sparse_attention, inputs, torch.float32, **options, max_length=case.max_length, impl="gather"
    )
    for a, e in zip(actual, exact, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=0, atol=1e-5)


def test_queries_without_a_key_give_zeros_and_no_gradient():
    """Of 20 tokens in blocks of 8, queries 0 to 7 see the keys 16 to 19, and the other queries none."""
    q, k, v = qkv = torch.randn(3, 1, 40, 2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = block_sparse_attention(q, k, v, BLIND, length=torch.tensor([20], dtype=torch.int32), impl="gather")
    (gradients,) = torch.autograd.grad(out.square().sum(), qkv)
    assert bool(out[:, :8].all()) and not out[:, 8:].any()
    for gradient, some in zip(gradients, (slice(0, 8), slice(16, 20), slice(16, 20)), strict=True):
        assert bool(gradient[:, some].any()) and bool(gradient.isfinite().all())
        gradient[:, some] = 0
        assert not gradient.any()


@pytest.mark.parametrize(("size", "n"), [(2, 0), (0, 4), (2, 5)])
def test_nothing_to_attend_to(size, n):
    """Empty batches, and sequences that all have length 0."""
    qkv = torch.full((3, size, n, 2, 16), float("nan"), requires_grad=True)
    length = torch.zeros(size, dtype=torch.int32)
    out = block_sparse_attention(qkv[0], qkv[1], qkv[2], layouts.local(8, 2), length=length, impl="gather")
    (gradient,) = torch.autograd.grad(out.sum(), qkv)
    assert out.shape == (size, n, 2, 16) and not out.any() and not gradient.any()


def test_full_layout_is_dense_attention():
    q, k, v = torch.randn(3, 2, 30, 2, 16, generator=torch.Generator().manual_seed(0)).unbind()
    expected = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=0.3)
    for layout in (layouts.local(30, 8, 9), layouts.window(30, 8, 29), layouts.butterfly(30, (2, 8), globals=30)):
        out = block_sparse_attention(q, k, v, layout, scale=0.3)
        torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gather_in_16_bits(dtype):
    case = Case((70, 9), dtype=dtype)
    inputs, layout = make_inputs(case, CPU), layouts.butterfly(70, 16, 2)
    options: dict[str, Any] = {
        "start": inputs.sequences["start"],
        "length": inputs.sequences["length"],
        "layout": layout,
    }
    exact = run_with_gradients(reference_attention, inputs, torch.float64, **options)
    actual = run_with_gradients(block_sparse_attention, inputs, dtype, **options, max_length=70, impl="gather")
    for a, e in zip(actual, exact, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e, rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_dropout_of_gather_has_the_rate_and_the_scale():
    """Uniform weights and one-hot values show the mask: dropped at the rounded rate, scaled by the true keep rate."""
    torch.manual_seed(0)
    n, block = 64, 16
    layout = layouts.local(n, block, 0)
    value = torch.eye(n).expand(50, 2, n, n).transpose(1, 2)
    out = block_sparse_attention(torch.zeros_like(value), value, value, layout, dropout=0.1, impl="gather") * block
    tokens = torch.arange(n)
    seen = layout.token_mask(tokens, tokens)[0][None, :, None].expand_as(out)
    assert not out[~seen].any()
    weights = out[seen]
    dropped = weights == 0
    torch.testing.assert_close(weights[~dropped], torch.full_like(weights[~dropped], 256 / 230))
    p = 26 / 256
    assert abs(dropped.double().mean().item() - p) < 4 * (p * (1 - p) / weights.numel()) ** 0.5


def test_public_function_refuses():
    q = torch.zeros(1, 40, 2, 16)
    with pytest.raises(ValueError, match="the layout covers 32 tokens, and max_length is 40"):
        block_sparse_attention(q, q, q, layouts.local(32, 8))
    with pytest.raises(ValueError, match="'auto', 'triton' or 'gather'"):
        block_sparse_attention(q, q, q, layouts.local(40, 8), impl="sdpa")
