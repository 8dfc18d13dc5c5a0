"""The kernels around attention on a GPU."""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lra.kernels.dropout import dropout_threshold
from lra.kernels.layers import layer_ops, reference
from lra.kernels.layers.fused_layers import (
    MODEL_WIDTHS,
    feed_forward,
    project,
    supports_feed_forward,
    supports_projection,
)
from lra.kernels.testing import poisoned_empty
from lra.models.dropout import drop, keep_scale
from lra.models.positions import rotate
from tests.kernels.layers import (
    BF16,
    EPS,
    FP32,
    HALF,
    SITE,
    angles,
    assert_within_budget,
    dropout,
    embedding_case,
    feed_forward_case,
    fused_feed_forward,
    fused_mean,
    fused_project,
    plain_feed_forward,
    plain_mean,
    plain_project,
    pooled_case,
    project_case,
    sequences,
    table_case,
)  # fmt: skip

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize(("d", "f"), [(64, 128), (64, 192), (128, 256), (128, 128)])
def test_feed_forward_of_many_rows(d, f, rate, dtype):
    case = feed_forward_case(50_001, d, f, dtype, "cuda")
    assert_within_budget(case, fused_feed_forward, plain_feed_forward, dtype, rate, case.keys if rate else None)


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("pairs", [0, 16, 32])
@pytest.mark.parametrize("d", MODEL_WIDTHS)
def test_projection_of_many_rows(d, pairs, dtype):
    case = project_case(50_001, d, dtype, "cuda")
    assert_within_budget(case, fused_project(dtype), plain_project, dtype, *angles(50_001, pairs, "cuda"))


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("d", "f"), [(64, 128), (64, 192), (128, 256), (128, 128)])
def test_the_mean_of_many_normed_rows(d, f, padded, rate, dtype):
    given = sequences((2000, 1, 0, 777, 16_384), d, padded, "cuda")
    case = pooled_case(given, f, dtype)
    assert_within_budget(case, fused_mean(given), plain_mean(given), dtype, rate, case.keys if rate else None)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("padded", [None, False, True])
@pytest.mark.parametrize(("d", "vocabulary"), [(64, 18), (64, 256), (128, 257), (128, 5)])
def test_the_gradients_of_tables_of_many_rows(d, vocabulary, padded, rate):
    """Twice the same, bit by bit."""
    given = table_case((2000, 1, 0, 777, 4096, *range(100, 1124, 32)), d, vocabulary, BF16, padded, rate, "cuda")
    with poisoned_empty():
        first, second = layer_ops.table_gradient(*given), layer_ops.table_gradient(*given)
    for a, again, e in zip(first, second, reference.table_gradient(*given), strict=True):
        assert torch.equal(a, again)
        torch.testing.assert_close(a, e, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_what_is_looked_up_for_many_rows(d, placed, rate):
    given = embedding_case(30_001, d, placed, rate, "cuda")
    with poisoned_empty():
        actual = layer_ops.embed(*given)
    torch.testing.assert_close(actual, reference.embed(*given), atol=0, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 63, 129, 20_000])
def test_kernels_compute_the_definition_of_any_number_of_rows(rows):
    """On the GPU itself; twice the same, bit by bit."""
    case = feed_forward_case(rows, 128, 256, BF16, "cuda")
    o, x, *layers = case.given
    numbers = dropout(0.1, case.keys)
    with poisoned_empty():
        y, *kept = layer_ops.feed_forward(o, x, *layers, EPS, *numbers)
        backward = (case.dy[0], o, *kept, *layers[2:5], *numbers)
        first, second = layer_ops.feed_forward_backward(*backward), layer_ops.feed_forward_backward(*backward)
    expected = reference.feed_forward(o, x, *layers, EPS, *numbers)[0], *reference.feed_forward_backward(*backward)
    for a, e in zip((y, *first), expected, strict=True):
        assert (a.float() - e.float()).norm() < 5e-3 * e.float().norm()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("d", MODEL_WIDTHS)
@pytest.mark.parametrize("lengths", [(1,), (60, 3), (100, 0, 29), (20_000, 7, 64)])
def test_pooled_kernels_compute_the_definition_of_any_number_of_rows(lengths, d):
    """Likewise."""
    given = sequences(lengths, d, False, "cuda")
    case = pooled_case(given, 2 * d, BF16)
    o, x, *layers = case.given[:-2]
    numbers = dropout(0.1, case.keys)
    forward = (o, x, *layers, given.start, given.length, 0, EPS, EPS, *numbers)
    with poisoned_empty():
        sums, *kept = layer_ops.pooled_feed_forward(*forward)
        backward = (given.dy, o, *kept, *layers[2:5], *numbers)
        first, second = (layer_ops.pooled_feed_forward_backward(*backward) for _ in range(2))
    expected = reference.pooled_feed_forward(*forward)[:2], reference.pooled_feed_forward_backward(*backward)
    for a, e in zip((sums, kept[0], *first), (*expected[0], *expected[1]), strict=True):
        assert (a.float() - e.float()).norm() <= 5e-3 * e.float().norm()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_modules_are_taken_under_autocast(rate):
    """With layers in fp32; what they give is what the layers give in 16 bits, but for rounding."""
    torch.manual_seed(0)
    d, f = 64, 128
    before, qkv, out, norm = (
        nn.LayerNorm(d).cuda(),
        nn.Linear(d, 3 * d).cuda(),
        nn.Linear(d, d).cuda(),
        nn.LayerNorm(d).cuda(),
    )
    up, down = nn.Linear(d, f).cuda(), nn.Linear(f, d).cuda()
    keys, rotary = feed_forward_case(999, d, f, BF16, "cuda").keys, angles(999, 16, "cuda")
    o, x = torch.randn(999, d, device="cuda", dtype=BF16), torch.randn(999, d, device="cuda")
    with torch.autocast("cuda", BF16):
        assert supports_feed_forward(o, x, up) and supports_projection(x, qkv, 32, rotary)
        dropped, scale = dropout_threshold(rate), keep_scale(dropout_threshold(rate))
        actual = feed_forward(o, x, out, norm, up, down, scale=scale, threshold=dropped, keys=keys, site=SITE)
        z = x + drop(out(o), rate, keys, SITE)
        h = drop(F.gelu(up(norm(z))), rate, keys, SITE + 1)
        expected = z + drop(down(h), rate, keys, SITE + 2)
        through, *parts = project(x, before, qkv, 2, rotary)
        q, k, v = qkv(before(x)).unflatten(1, (3, 2, 32)).unbind(1)
    assert actual.dtype == FP32 and torch.equal(through, x)
    torch.testing.assert_close(actual, expected, atol=0.05, rtol=0.02)
    for part, wanted in zip(parts, (rotate(q, *rotary), rotate(k, *rotary), v), strict=True):
        assert part.dtype == BF16 and part.shape == (999, 2, 32)
        torch.testing.assert_close(part, wanted, atol=0.05, rtol=0.02)
