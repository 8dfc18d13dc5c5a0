"""The Triton kernels, interpreted on the CPU or compiled on a GPU, and the public function, against the reference."""

from __future__ import annotations

import dataclasses
import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from lra.kernels import flash_attention
from lra.kernels.flash import tuning
from lra.kernels.flash.reference import reference_attention
from lra.kernels.flash.tuning import Tile
from lra.kernels.testing import INPUT_KINDS, Case, check_case, make_inputs, poisoned_empty, run_with_gradients
from tests.kernels.cases import random_case, with_inputs
from tests.sampling import sampled

HALF, SINGLE = torch.float16, torch.float32  # the interpreter multiplies bfloat16 wrongly


def assert_within_budget(case: Case, device: torch.device, impl: str = "triton") -> None:
    for name, error in check_case(case, device, impl).items():
        assert error.ok, f"{name} of {case}: error {error.error:.3g}, budget {error.budget:.3g}"


CASES = [
    Case((70, 0, 33)),
    Case((70, 0, 33), dropout=0.1),
    Case((70, 1, 33), layout="padded", slack=70, dropout=0.5),
    Case((129, 5), dtype=HALF, head_dim=64, layout="padded"),
    Case((129, 5), dtype=HALF, head_dim=64, dropout=0.3, strides="fused"),
    Case((77, 64), causal=True, head_dim=16, strides="heads_first"),
    Case((130, 64), causal=True, dtype=HALF, dropout=0.1, layout="padded", strides="d_strided", head_dim=48),
    Case((40,), dtype=HALF, head_dim=24, heads=3, strides="d_strided", spread=4.0),
    Case((33, 17), dtype=HALF, head_dim=80, dropout=0.2, strides="fused", layout="padded", spread=4.0),
    Case((35,), head_dim=128, heads=1, dtype=HALF, causal=True),
    # fp32 products in two sums would round too much, in the rows that this seed draws
    Case((63, 1), heads=3, head_dim=64, dropout=0.5, spread=4.0, seed=12),
    Case((20, 3), head_dim=20, layout="padded"),  # no multiple of 8
    Case((18, 2), head_dim=8),  # narrower than a tensor-core product
]


@pytest.mark.parametrize("case", sampled(CASES, every=2))
def test_within_budget(case, device):
    assert_within_budget(case, device)


SPECIAL: list[dict[str, Any]] = [
    dict(dtype=HALF),
    dict(dtype=SINGLE, dropout=0.2),
    dict(dtype=HALF, causal=True),
    dict(dtype=HALF, deterministic=True, layout="padded", slack=9),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities and NaN on their way
@pytest.mark.parametrize("inputs", sampled([name for name in INPUT_KINDS if name != "normal"], every=2))
def test_special_inputs(inputs, device):
    """Hidden and dominant keys, one tensor as q, k and v, small numbers, and a sequence of NaN beside others."""
    for seed, fields in enumerate(SPECIAL):
        case = with_inputs(Case((37, 20, 1), head_dim=16, heads=1, seed=seed, **fields), inputs)
        assert_within_budget(case, device)


def test_weights_of_fp32_are_not_rounded_as_logarithms(device):
    """dV of weights that are all 1 / n: each element within four roundings of what it sums, however small."""
    n = 61
    q = k = torch.full((1, n, 1, 16), 1e-3, device=device)
    v = torch.randn(1, n, 1, 16, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    do = torch.randn(1, n, 1, 16, generator=torch.Generator().manual_seed(1)).to(device)
    (dv,) = torch.autograd.grad(flash_attention(q, k, v, impl="triton"), v, do)
    exact = do.double().sum(1, keepdim=True).expand_as(do) / n
    allowed = 4 * torch.finfo(torch.float32).eps * do.double().abs().sum(1, keepdim=True) / n
    assert ((dv.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("seed", sampled(range(8), every=8))
def test_random_cases(seed, device):
    if device.type == "cpu":
        case = random_case(random.Random(seed), (HALF, SINGLE), max_length=100)
        if case.dtype == SINGLE:
            # NumPy sums a score in another order in each kernel; under a peaked softmax that exceeds the budget.
            case = dataclasses.replace(case, spread=1.0)
    else:
        case = random_case(random.Random(seed), max_length=100)
    assert_within_budget(case, device)


@pytest.mark.parametrize("tile", sampled([(32, 64), (16, 16), (64, 32)]))
@pytest.mark.parametrize(
    ("dtype", "deterministic", "causal"),
    [
        (SINGLE, False, False),
        (HALF, False, True),
        (HALF, True, False),
        pytest.param(SINGLE, False, True, marks=pytest.mark.slow),
        pytest.param(HALF, False, False, marks=pytest.mark.slow),
        pytest.param(HALF, True, True, marks=pytest.mark.slow),
    ],
)
def test_any_tile_shape(tile, dtype, deterministic, causal, device):
    """Dropout included: its mask must not depend on the tiles, nor differ between the kernels."""
    given, flipped = Tile(*tile, warps=4, stages=2), Tile(*reversed(tile), warps=4, stages=2)
    shapes = {"forward": given, "dkdv": flipped, "dkdv_dq": flipped, "dq": given}
    with ExitStack() as forced:
        for kernel, shape in shapes.items():
            forced.enter_context(tuning.force_tile(kernel, shape))
        case = Case((70, 20), dropout=0.5, causal=causal, dtype=dtype, deterministic=deterministic)
        assert_within_budget(case, device)


def attention(inputs, case: Case, **changes) -> tuple[torch.Tensor, ...]:
    options = {**inputs.sequences, "max_length": case.max_length, "dropout": case.dropout, "seed": inputs.seed}
    with poisoned_empty():
        return run_with_gradients(flash_attention, inputs, case.dtype, impl="triton", **{**options, **changes})


def test_packed_and_padded_agree_bitwise(device):
    packed, padded = (
        Case((37, 0, 80), heads=1, dropout=0.2, layout=layout, slack=7) for layout in ("packed", "padded")
    )
    inputs = make_inputs(padded, device)
    real = ~inputs.q[:, 0, 0].isnan()
    length = inputs.sequences["length"]
    start = length.cumsum(0, dtype=torch.int32) - length
    dense = inputs._replace(**{name: getattr(inputs, name)[real] for name in ("q", "k", "v", "do")})
    dense = dense._replace(sequences={**inputs.sequences, "start": start})
    for whole, part in zip(attention(inputs, padded), attention(dense, packed), strict=True):
        assert torch.equal(whole[real], part)
        assert not whole[~real].any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dropout", sampled([0.0, 0.5]))
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_a_lone_key_has_no_gradient_but_its_values(dtype, dropout, deterministic, device):
    """Its weight is 1 whatever the score: what rounding leaves of the score's gradient must not get through."""
    case = Case((1, 40, 1), dtype=dtype, dropout=dropout, deterministic=deterministic)
    inputs = make_inputs(case, device)
    _, dq, dk, dv = attention(inputs, case, deterministic=deterministic)
    for row in (0, 41):
        assert not dq[row].any() and not dk[row].any()
    assert dq[1:41].any() and dk[1:41].any() and (dropout or dv[0].any())
    _, dq, dk, _ = attention(inputs, case, deterministic=deterministic, causal=True)
    for row in (0, 1, 41):  # the first query sees the first key alone
        assert not dq[row].any()
    assert dq[2:41].any(-1).all() and dk[1:41].any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # delta of padding rows, never read
def test_padding_influences_nothing(device):
    """NaN, infinities or ordinary numbers past a length: the same result, bit for bit, and zeros there."""
    case = Case((50, 0, 64), heads=1, layout="padded", slack=6, dropout=0.1)
    inputs = make_inputs(case, device)
    expected = attention(inputs, case)
    for filling in (float("inf"), 3.0):
        other = inputs._replace(**{n: getattr(inputs, n).nan_to_num(nan=filling) for n in ("q", "k", "v", "do")})
        assert all(map(torch.equal, attention(other, case), expected))


def test_dropout_does_not_depend_on_the_micro_batch(device):
    """Sequences computed together or in two halves, told apart by their index in the global batch."""
    case = Case((40, 40), layout="padded", dropout=0.3)
    inputs = make_inputs(case, device)
    index = torch.arange(2, dtype=torch.int32, device=device)
    whole = attention(inputs, case, index=None)
    halves = []
    for b in (slice(0, 1), slice(1, 2)):
        rows = slice(b.start * 40, b.stop * 40)
        part = inputs._replace(**{name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "do")})
        halves.append(attention(part, case, start=index[:1] * 40, length=inputs.sequences["length"][b], index=index[b]))
    for all_rows, *parts in zip(whole, *halves, strict=True):
        assert torch.equal(all_rows, torch.cat(parts))


def test_dropout_changes_with_every_half_of_the_seed_and_is_reproducible(device):
    case = Case((32,), dropout=0.5, heads=1)
    inputs = make_inputs(case, device)
    results = [attention(inputs, case, seed=torch.tensor(s, device=device))[0] for s in (1, 1, 2, 1 + (1 << 32))]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[3])


def test_gradients_are_deterministic(device):
    case = Case((150, 31), dropout=0.1, dtype=HALF)  # several tiles of keys add to a row of dq
    inputs = make_inputs(case, device)
    first, again = (attention(inputs, case, deterministic=True) for _ in range(2))
    assert all(map(torch.equal, first, again))


def test_seed_overwritten_before_backward_is_noticed(device):
    case = Case((16,), dropout=0.5)
    inputs = make_inputs(case, device)
    q = inputs.q.clone().requires_grad_()
    options: dict[str, Any] = {**inputs.sequences, "max_length": 16, "dropout": 0.5, "seed": inputs.seed}
    out = flash_attention(q, inputs.k, inputs.v, **options, impl="triton")
    inputs.seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("impl", ["triton", "sdpa"])
@pytest.mark.parametrize("transposed", [False, True])
def test_batched_form(impl, transposed, device):
    """[B, N, H, D], flattened by a view or by a copy, against the ragged form; the gradient of a sum has stride 0."""
    torch.manual_seed(0)
    size, n, heads, d = 2, 21, 2, 16
    shape = (3, size, heads, n, d) if transposed else (3, size, n, heads, d)
    qkv = torch.randn(shape, device=device)
    qkv = (qkv.transpose(2, 3) if transposed else qkv).requires_grad_()
    flat = qkv.detach().reshape(3, size * n, heads, d).requires_grad_()
    length = torch.tensor([21, 9], dtype=torch.int32, device=device)
    start = torch.arange(2, dtype=torch.int32, device=device) * n
    for lengths in (length, None):
        out = flash_attention(*qkv, length=lengths, impl=impl)
        ragged_lengths = torch.full_like(length, n) if lengths is None else lengths
        expected = flash_attention(*flat, start=start, length=ragged_lengths, max_length=n, impl=impl)
        assert out.shape == (size, n, heads, d) and out.is_contiguous()
        assert torch.equal(out.flatten(0, 1), expected)
        got, wanted = torch.autograd.grad(out.sum(), qkv)[0], torch.autograd.grad(expected.sum(), flat)[0]
        assert torch.equal(got.reshape(flat.shape), wanted) and wanted.any()


@pytest.mark.parametrize("impl", ["triton", "sdpa"])
@pytest.mark.parametrize(("size", "n"), [(2, 0), (0, 4), (2, 5)])
def test_nothing_to_attend_to(impl, size, n, device):
    """Empty batches, and sequences that all have length 0."""
    qkv = torch.full((3, size, n, 2, 16), float("nan"), device=device, requires_grad=True)
    length = torch.zeros(size, dtype=torch.int32, device=device)
    out = flash_attention(*qkv, length=length, impl=impl)
    (gradient,) = torch.autograd.grad(out.sum(), qkv)
    assert out.shape == (size, n, 2, 16) and not out.any() and not gradient.any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_empty_sequence_owns_no_row_of_another(deterministic, device):
    """A filled-up batch may end with one, which then begins at the last row of the one before."""
    case = Case((9, 0), dtype=HALF, deterministic=deterministic)
    inputs = make_inputs(case, device)
    shared = {**inputs.sequences, "start": torch.tensor([0, 8], dtype=torch.int32, device=device)}
    options: dict[str, Any] = {"deterministic": deterministic}
    expected = attention(inputs, case, **options)
    got = attention(inputs._replace(sequences=shared), case, **options)
    assert all(map(torch.equal, got, expected)) and all(each[8].any() for each in got)


@pytest.mark.parametrize("scale", [0.01, 0.7])
def test_scale(scale, device):
    case = Case((40,))
    inputs = make_inputs(case, device)
    exact = run_with_gradients(reference_attention, inputs, torch.float64, **inputs.sequences, scale=scale)
    for got, expected in zip(attention(inputs, case, scale=scale), exact, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


SDPA_CASES = [
    Case((70, 0, 33)),
    Case((70, 1, 33), layout="padded", slack=10, strides="fused"),
    Case((40, 64), causal=True, layout="padded", strides="heads_first", head_dim=24),
    Case((40, 0, 64), causal=True, dtype=torch.bfloat16, strides="d_strided", spread=4.0),
    Case((50, 20), dtype=HALF, layout="padded", head_dim=136, heads=1),  # wider than the kernels take
]


@pytest.mark.parametrize("case", SDPA_CASES, ids=str)
def test_sdpa_within_budget(case):
    """On the CPU: the budget allows for the order in which our kernels sum, not for PyTorch's on a GPU in fp32."""
    assert_within_budget(case, torch.device("cpu"), "sdpa")


def test_sdpa_dropout_has_the_same_distribution(device):
    """Uniform weights and one-hot values show the mask: dropped at the rounded rate, scaled by the true keep rate."""
    torch.manual_seed(0)
    n = 64
    value = torch.eye(n, device=device).expand(50, 2, n, n).transpose(1, 2)
    out = flash_attention(torch.zeros_like(value), value, value, dropout=0.1, impl="sdpa") * n
    dropped = out == 0
    torch.testing.assert_close(out[~dropped], torch.full_like(out[~dropped], 256 / 230))
    p = 26 / 256
    assert abs(dropped.double().mean().item() - p) < 4 * (p * (1 - p) / out.numel()) ** 0.5
