"""What surrounds attention, fused: operators against the layers in float64, kernels against the operators."""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import library, nn
from torch.nn import functional as F

from lra.kernels import device
from lra.kernels.dropout import MAX_DROP_THRESHOLD
from lra.kernels.layers import layer_ops, reference
from lra.kernels.layers.fused_layers import (
    MODEL_WIDTHS,
    on_hopper,
    project,
    supports_embedding,
    supports_feed_forward,
    supports_projection,
    supports_table_gradient,
)
from lra.kernels.testing import poisoned_empty
from tests.kernels.compiling import compiled
from tests.kernels.gluon_on_cpu import Emulated, Language, tile, translated
from tests.kernels.layers import (
    BF16,
    EPS,
    FP32,
    HALF,
    SHAPES,
    angles,
    assert_same,
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
    results,
    sequences,
    table_case,
)
from tests.sampling import sampled

GELU = 1.2e-4  # what the kernels' approximation makes of results and gradients


@pytest.mark.parametrize("dtype", [HALF, FP32])
@pytest.mark.parametrize("rate", sampled([0.0, 0.1, 0.5]))
@pytest.mark.parametrize(("rows", "d", "f"), SHAPES)
def test_feed_forward_within_budget(rows, d, f, rate, dtype):
    case = feed_forward_case(rows, d, f, dtype)
    keys = case.keys if rate else None
    assert_within_budget(case, fused_feed_forward, plain_feed_forward, dtype, rate, keys)


@pytest.mark.parametrize("dtype", [HALF, FP32])
@pytest.mark.parametrize("pairs", sampled([0, 16, 32]))
@pytest.mark.parametrize(("rows", "d"), [shape[:2] for shape in SHAPES])
def test_projection_within_budget(rows, d, pairs, dtype):
    case = project_case(rows, d, dtype)
    assert_within_budget(case, fused_project(dtype), plain_project, dtype, *angles(rows, pairs))


@pytest.fixture
def emulated(monkeypatch, rows):
    """The kernels themselves on the CPU, in the place of the operators' definition."""
    from lra.kernels.layers import embedding, feed_forward, launch_layers, projection

    for module, names in (
        (feed_forward, ("feed_forward_kernel", "feed_forward_backward_kernel")),
        (projection, ("project_kernel", "project_backward_kernel")),
        (embedding, ("embed_kernel", "table_gradient_kernel")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Emulated(getattr(module, name)))
    monkeypatch.setattr(launch_layers, "count_multiprocessors", lambda device: 1)
    # fewer programs, each of which takes long here; of one row parts for two turns of the loop that adds them
    programs = 15 if rows > 1 else 165
    settings = dict.fromkeys(MODEL_WIDTHS, (programs, 64, 3))
    for name, value in dict(SUM_SETTINGS=settings, FOLD_ROWS=32, UNFOLD_ROWS=32).items():
        monkeypatch.setattr(launch_layers, name, value)
    return launch_layers


@pytest.mark.parametrize("rate", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rows", "d", "f"), SHAPES)
def test_feed_forward_kernels_compute_the_definition(rows, d, f, rate, emulated):
    case = feed_forward_case(rows, d, f, HALF)
    o, x, *layers = case.given
    numbers = dropout(rate, case.keys)
    with poisoned_empty():
        actual = emulated.launch_feed_forward(o, x, *layers, EPS, *numbers)
    _, *kept = expected = reference.feed_forward(o, x, *layers, EPS, *numbers)
    assert_same(actual, expected, GELU)
    backward = (case.dy[0], o, *kept, *layers[2:5], *numbers)
    with poisoned_empty():
        actual = emulated.launch_feed_forward_backward(*backward)
    assert_same(actual, reference.feed_forward_backward(*backward), GELU)


def test_gelu_is_close_everywhere():
    """And nothing but finite for what overflows on the way."""
    from lra.kernels.layers import feed_forward

    u = torch.cat([torch.linspace(-8, 8, 160_001), torch.tensor([-3e38, -1e3, -40.0, 40.0, 1e3, 3e38])])
    with np.errstate(over="ignore"):
        below, density = (
            torch.from_numpy(np.asarray(translated(function, Language(0, 1), {})(tile(u.numpy()))))
            for function in (feed_forward.normal_cdf, feed_forward.normal_pdf)
        )
    exact = u.double().requires_grad_()
    gelu = F.gelu(exact)
    (derivative,) = torch.autograd.grad(gelu.sum(), exact)
    torch.testing.assert_close((u * below).double(), gelu.detach(), rtol=1e-6, atol=3.2e-5)
    torch.testing.assert_close((below + u * density).double(), derivative, rtol=0, atol=3.2e-5)


@pytest.mark.parametrize("pairs", [0, 16, 32])
@pytest.mark.parametrize(("rows", "d"), [shape[:2] for shape in SHAPES])
def test_projection_kernels_compute_the_definition(rows, d, pairs, emulated):
    case = project_case(rows, d, HALF)
    x, gain, shift, weight, bias = case.given
    cos, sin = angles(rows, pairs)
    forward = (x, gain, shift, weight, bias, cos, sin, EPS, HALF)
    with poisoned_empty():
        actual = emulated.launch_project(*forward)
    _, _, _, *kept = expected = reference.project(*forward)
    assert_same(actual, expected)
    dy, dq, dk, dv = case.dy
    backward = (dq, dk, dv, dy, *kept, gain, shift, weight, cos, sin)
    with poisoned_empty():
        assert_same(emulated.launch_project_backward(*backward), reference.project_backward(*backward))


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize(("rows", "d"), [(1, 64), (130, 64), (70, 128)])
def test_what_is_looked_up(rows, d, placed, rate, emulated):
    given = embedding_case(rows, d, placed, rate)
    with poisoned_empty():
        actual = emulated.launch_embed(*given)
    torch.testing.assert_close(actual, reference.embed(*given), atol=0, rtol=1e-6)


@pytest.mark.parametrize("rows", [3])
@pytest.mark.parametrize("which", [1, 3])
def test_what_a_table_lacks_is_nan(which, rows, emulated):
    given = embedding_case(rows, 64, True, 0.3)
    given[which][:2] = torch.tensor([-1, 70])
    x = emulated.launch_embed(*given)
    kept = reference.drop_features(torch.ones_like(x), given[6], 0, given[5]) != 0
    assert torch.equal(x.isnan()[:2], kept[:2]) and not x[2].isnan().any()


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("padded", [None, False, True])
@pytest.mark.parametrize(
    ("rows", "lengths", "d", "vocabulary"),
    [(300, (150, 3, 0, 70, 77), 64, 18), (270, (70, 200), 128, 258), (1, (1,), 64, 3)],
)
def test_the_gradient_of_a_table(rows, lengths, d, vocabulary, padded, rate, emulated, monkeypatch):
    """Of tokens alone, and with places in both layouts; some places that no sequence has."""
    given = table_case(lengths, d, vocabulary, HALF, padded, rate)
    assert len(given[0]) == (rows if not padded else len(lengths) * max(lengths))
    monkeypatch.setattr(emulated, "count_multiprocessors", lambda device: 7)
    with poisoned_empty():
        actual = emulated.launch_table_gradient(*given)
    for a, e in zip(actual, reference.table_gradient(*given), strict=True):
        torch.testing.assert_close(a, e, atol=1e-4, rtol=1e-4)


RAGGED = [(150, 3, 0, 70), (1,), (64, 64), (300, 5)]


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [HALF, FP32])
def test_the_mean_of_normed_rows_within_budget(lengths, padded, rate, dtype):
    given = sequences(lengths, 64, padded)
    case = pooled_case(given, 128, dtype)
    assert_within_budget(case, fused_mean(given), plain_mean(given), dtype, rate, case.keys if rate else None)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("padded", sampled([False, True]))
@pytest.mark.parametrize(
    ("lengths", "d", "f", "rows"), [((100, 3, 0, 30), 64, 128, 133), ((40, 30), 128, 256, 70), ((1,), 64, 64, 1)]
)
def test_pooled_kernels_compute_the_definition(lengths, padded, d, f, rows, rate, emulated):
    """And of a sequence past its length nothing."""
    given = sequences(lengths, d, padded)
    case = pooled_case(given, f, HALF)
    o, x, *layers = case.given[:-2]
    numbers = dropout(rate, case.keys)
    where: Any = (given.start, given.length, given.padded_length)
    with poisoned_empty():
        actual = emulated.launch_pooled_feed_forward(o, x, *layers, *where, EPS, 1e-3, *numbers)
    _, *final = expected = reference.pooled_feed_forward(o, x, *layers, *where, EPS, 1e-3, *numbers)
    assert_same(actual, expected, GELU)
    backward = (given.dy, o, *final, *layers[2:5], *numbers)
    with poisoned_empty():
        actual = emulated.launch_pooled_feed_forward_backward(*backward)
    assert_same(actual, reference.pooled_feed_forward_backward(*backward), GELU)


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("d", MODEL_WIDTHS)
def test_the_sums_of_rows(lengths, padded, d, device):
    from lra.kernels.layers.launch_layers import launch_pool

    given = sequences(lengths, d, padded, device)
    where: Any = (given.start, given.length)
    with poisoned_empty():
        actual = launch_pool(given.x.half(), *where, given.padded_length)
    for a, e in zip(actual, reference.pool_rows(given.x.half(), *where), strict=True):
        torch.testing.assert_close(a, e, atol=1e-4, rtol=1e-5)


def test_no_rows():
    given = feed_forward_case(0, 64, 64, HALF)
    for found, leaf in zip(
        results(fused_feed_forward, given.given, given.dy, 0.1, given.keys)[1:], given.given, strict=True
    ):
        assert found.shape == leaf.shape and not found.any()


def test_operators_keep_their_contracts():
    case = feed_forward_case(70, 64, 128, HALF)
    o, x, *layers = case.given
    _, *dropped = dropout(0.1, case.keys)
    library.opcheck(layer_ops.feed_forward, (o, x, *layers, EPS, 1.1, *dropped))
    _, *kept = layer_ops.feed_forward(o, x, *layers, EPS, 1.1, *dropped)
    library.opcheck(layer_ops.feed_forward_backward, (case.dy[0], o, *kept, *layers[2:5], 1.1, *dropped))
    given = sequences((40, 0, 30), 64, False)
    where = given.start, given.length, 0
    library.opcheck(layer_ops.pooled_feed_forward, (o, x, *layers, *where, EPS, EPS, 1.1, *dropped))
    _, *kept = layer_ops.pooled_feed_forward(o, x, *layers, *where, EPS, EPS, 1.1, *dropped)
    library.opcheck(layer_ops.pooled_feed_forward_backward, (given.dy, o, *kept, *layers[2:5], 1.1, *dropped))

    x, *norm, weight, bias = project_case(70, 64, HALF).given
    cos, sin = angles(70, 16)
    library.opcheck(layer_ops.project, (x, *norm, weight, bias, cos, sin, EPS, HALF))
    q, k, v, *kept = layer_ops.project(x, *norm, weight, bias, cos, sin, EPS, HALF)
    library.opcheck(layer_ops.project_backward, (q, k, v, x, *kept, *norm, weight, cos, sin))
    library.opcheck(layer_ops.embed, embedding_case(70, 64, True, 0.1))
    for places in ((given.start, given.length, 50), (None, None, 0)):
        library.opcheck(layer_ops.table_gradient, (x, torch.arange(70) % 9, 9, HALF, *places, *dropped))


@pytest.mark.parametrize("which", ["feed_forward", "project", "pooled"])
def test_only_once_differentiable(which):
    if which == "pooled":
        given = sequences((40, 30), 64, False)
        case = pooled_case(given, 64, HALF)
        x = case.given[1].requires_grad_()
        (y,) = fused_mean(given)(*case.given, 0.1, case.keys)
    elif which == "feed_forward":
        case = feed_forward_case(20, 64, 64, HALF)
        x = case.given[1].requires_grad_()
        (y,) = fused_feed_forward(*case.given, 0.1, case.keys)
    else:
        case = project_case(20, 64, HALF)
        x = case.given[0].requires_grad_()
        y = fused_project(HALF)(*case.given, None, None)[2].float()
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        dx.sum().backward()


class OnGPU:
    """As much of a tensor as is asked."""

    is_cuda, device = True, torch.device("cpu")  # whose autocast is there without a GPU

    def __init__(self, dtype: torch.dtype, *shape: int):
        self.dtype, self.shape = dtype, (1, *shape)


def test_what_the_kernels_take(monkeypatch):
    """Products in 16 bits with a residual in fp32, widths they have, on Hopper where ptxas can be relied on."""
    refusals: list[str | None] = [None]
    monkeypatch.setattr(device, "hopper_refusal", lambda capability: refusals[-1])

    def follows(o: Any = BF16, x: Any = FP32, d: int = 128, f: int = 256, dropped: int = 26) -> bool:
        return supports_feed_forward(OnGPU(o), OnGPU(x), nn.Linear(d, f), dropped)  # type: ignore[arg-type]

    def precedes(x: Any = FP32, d: int = MODEL_WIDTHS[-1], of: int = 3, head_dim: int = 16, rotary: Any = None) -> bool:
        return supports_projection(OnGPU(x), nn.Linear(d, of * d), head_dim, rotary)  # type: ignore[arg-type]

    assert follows() and follows(o=HALF) and all(follows(d=d, f=f * d) for d in MODEL_WIDTHS for f in (1, 2))
    assert follows(d=64, f=704) and not follows(d=64, f=768) and not follows(f=512)  # what shared memory holds
    assert follows(dropped=MAX_DROP_THRESHOLD)  # compared as fp16 magnitudes
    assert not follows(dropped=MAX_DROP_THRESHOLD + 1)
    assert not any([follows(o=FP32), follows(x=BF16), follows(d=96), follows(d=32, f=64), follows(f=192)])
    assert not precedes(), "without autocast the products are in fp32"
    with torch.autocast("cpu", BF16):
        assert all(precedes(d=d) for d in MODEL_WIDTHS) and precedes(head_dim=32, rotary=()) and precedes(head_dim=64)
        assert not any([precedes(x=BF16), precedes(d=96), precedes(of=2), precedes(head_dim=16, rotary=())])
    assert not supports_feed_forward(torch.zeros(2, 64, dtype=BF16), torch.zeros(2, 64), nn.Linear(64, 128))
    assert not supports_table_gradient(OnGPU(FP32, 64), BF16, MAX_DROP_THRESHOLD + 1)  # type: ignore[arg-type]
    assert supports_table_gradient(OnGPU(FP32, 64), BF16, MAX_DROP_THRESHOLD)  # type: ignore[arg-type]
    assert supports_embedding(OnGPU(FP32, 64), MAX_DROP_THRESHOLD)  # type: ignore[arg-type]
    assert not supports_embedding(OnGPU(FP32, 64), MAX_DROP_THRESHOLD + 1)  # type: ignore[arg-type]
    assert all(supports_embedding(OnGPU(FP32, d)) for d in MODEL_WIDTHS)  # type: ignore[arg-type]
    others = OnGPU(BF16, 64), OnGPU(FP32, 96), torch.zeros(1, 64)
    assert not any(supports_embedding(table) for table in others)  # type: ignore[arg-type]
    refusals.append("ptxas 12.8 is known to miscompile for Hopper")
    assert not follows() and not supports_embedding(OnGPU(FP32, 64))  # type: ignore[arg-type]
    with torch.autocast("cpu", BF16):
        assert not precedes()


def test_torch_compile_takes_the_answers_for_constants(monkeypatch):
    """It asks for the version of ptxas, which is no tensor's business, and for autocast's dtype."""
    monkeypatch.setattr(device, "hopper_refusal", lambda capability: None)
    found = torch.compile(lambda x: x + 1 if on_hopper() else x, fullgraph=True, backend="eager")(torch.zeros(2))
    assert found.tolist() == [1, 1]

    norm, qkv, x = nn.LayerNorm(64), nn.Linear(64, 192), torch.randn(5, 64)
    with torch.autocast("cpu", BF16):
        found = torch.compile(project, fullgraph=True, backend="aot_eager")(x, norm, qkv, 2)
        expected = project(x, norm, qkv, 2)
    assert [y.dtype for y in found] == [FP32, BF16, BF16, BF16] and found[1].shape == (5, 2, 32)
    for y, e in zip(found, expected, strict=True):
        torch.testing.assert_close(y, e)


COMPILED = [
    dict(dtype=dtype, rate=rate, d=d, f=f, pairs=pairs)
    for dtype, rate, d, f, pairs in (
        ("bfloat16", 0.1, 64, 128, 0),
        ("float16", 0.0, 64, 256, 16),
        ("bfloat16", 0.1, 128, 256, 16),
        ("bfloat16", 0.0, 128, 128, 32),
    )
]
GRADIENTS = ["sum_kernel", "unfold_kernel"]
ORDER = [
    "fold_kernel", "project_kernel", "fold_kernel", "feed_forward_kernel", "feed_forward_backward_kernel", *GRADIENTS,
    "fold_kernel", "feed_forward_kernel", "pool_kernel", "feed_forward_backward_kernel", *GRADIENTS,
    "project_backward_kernel", *GRADIENTS, "embed_kernel", "table_gradient_kernel", "table_gradient_kernel",
]  # fmt: skip


@pytest.mark.slow
def test_kernels_compile():
    """With the products on tensor cores, and no register spilt beyond a few."""
    for case, kernels in compiled(COMPILED, "tests.kernels.layers"):
        assert [kernel["name"] for kernel in kernels] == ORDER
        for kernel in kernels:
            where = f"{case}: {kernel}"
            assert kernel["stack"] <= 128, where
            assert bool(kernel["wgmma"]) == (not re.search("fold|pool|embed", kernel["name"])), where
            assert not kernel["mma"] and not kernel["atomics"], where
            assert kernel["shared"] <= 227 * 1024, where
