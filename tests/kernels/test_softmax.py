"""`softmax_attention`: kernels, interpreted or compiled, operators and plain path, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library

from lra.kernels.block_sparse import layouts
from lra.kernels.block_sparse.sparse_attention import block_sparse_attention
from lra.kernels.flash.dense_attention import flash_attention
from lra.kernels.flash.reference import keep_mask, reference_attention
from lra.kernels.softmax.materialized_attention import softmax_attention
from lra.kernels.testing import (
    RESULT_NAMES,
    Case,
    Inputs,
    make_inputs,
    measure_error,
    poisoned_empty,
    run_with_gradients,
)
from tests.kernels.compiling import compiled
from tests.sampling import sampled

HALF, BF16 = torch.float16, torch.bfloat16


def attend(q: Tensor, k: Tensor, v: Tensor, *, start: Tensor, length: Tensor, n: int, **options: Any) -> Tensor:
    """`softmax_attention` of rows `[B * n, H, D]`, as `reference_attention` takes them."""
    batched = (x.unflatten(0, (len(length), n)) for x in (q, k, v))
    return softmax_attention(*batched, length=length, **options).flatten(0, 1)


def results(inputs: Inputs, case: Case, impl: str = "triton", **changes: Any) -> tuple[Tensor, ...]:
    options = {**inputs.sequences, "n": case.max_length, "dropout": case.dropout, "seed": inputs.seed}
    options["causal"] = case.causal
    with poisoned_empty():
        return run_with_gradients(attend, inputs, case.dtype, impl=impl, **{**options, **changes})


def assert_within_budget(case: Case, device: torch.device | str, impl: str = "triton", **changes: Any) -> None:
    inputs = make_inputs(case, device)
    actual = results(inputs, case, impl, **changes)
    options = {**inputs.sequences, "causal": case.causal, "dropout": case.dropout, "seed": inputs.seed, **changes}
    exact, plain = (
        run_with_gradients(reference_attention, inputs, dtype, **options) for dtype in (torch.float64, case.dtype)
    )
    for name, a, e, p in zip(RESULT_NAMES, actual, exact, plain, strict=True):
        assert a.shape == inputs.q.shape and a.dtype == case.dtype and a.is_contiguous(), f"{name} {a.shape} {a.dtype}"
        error = measure_error(a, e, p)
        assert error.ok, f"{name} of {case}: error {error.error:.3g}, budget {error.budget:.3g}"


def padded(lengths: tuple[int, ...], **fields: Any) -> Case:
    return Case(lengths, layout="padded", **fields)


CASES = [
    padded((70, 0, 33)),
    padded((70, 1, 33), dropout=0.5, slack=10, strides="fused"),
    padded((64, 17), dtype=HALF, strides="heads_first"),
    padded((45, 20), dtype=HALF, dropout=0.1, head_dim=24, heads=3, strides="d_strided", spread=4.0),
    padded((5, 3), head_dim=8, dropout=0.3),
    padded((37, 9), dtype=BF16, head_dim=136, dropout=0.2),
    padded((70, 0, 33), causal=True),
    padded((37, 9), dtype=HALF, dropout=0.3, slack=5, causal=True),
]


@pytest.mark.parametrize("case", sampled(CASES, every=2))
def test_within_budget(case, device):
    assert_within_budget(case, device)


@pytest.mark.parametrize("case", [case for case in CASES if not case.dropout] + [padded((20, 0), dtype=BF16)], ids=str)
def test_plain_path_within_budget(case):
    """On the CPU: the budget does not allow for the order in which PyTorch sums on a GPU in fp32."""
    assert_within_budget(case, "cpu", "torch")


@pytest.mark.parametrize("columns", sampled([32, 64]))
@pytest.mark.parametrize("dtype", sampled([torch.float32, HALF]))
def test_rows_of_many_chunks(columns, dtype, device, monkeypatch):
    from lra.kernels.softmax import softmax_kernels

    monkeypatch.setattr(softmax_kernels, "MAX_COLUMNS", columns)
    case = padded((2 * columns + 3, columns, 17), heads=1, dtype=dtype, dropout=0.3, causal=dtype == HALF)
    assert_within_budget(case, device)


def test_rows_longer_than_a_chunk(device):
    assert_within_budget(padded((300,), heads=1, head_dim=16, dropout=0.1), device)


@pytest.mark.parametrize("scale", [0.01, 0.7])
def test_scale(scale, device):
    assert_within_budget(padded((40,)), device, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_dropout_is_the_references_mask(dtype, device):
    """Uniform weights and one-hot values show the mask: equal, bit for bit, also beyond a chunk's first 32 columns."""
    n, size, dropout = 77, 2, 0.3
    v = torch.eye(n, dtype=dtype, device=device).expand(size, 3, n, n).transpose(1, 2)
    seed = torch.tensor(2**40 + 5, device=device)
    index = torch.tensor([7, 2], dtype=torch.int32, device=device)
    zeros = torch.zeros_like(v)
    out = softmax_attention(zeros, zeros, v, dropout=dropout, seed=seed, index=index, impl="triton")
    head, row = torch.arange(3, device=device)[:, None, None], torch.arange(n, device=device)
    for b, which in enumerate(index.tolist()):
        keep = keep_mask(seed, which, head, row[:, None], row, round(256 * dropout))
        assert torch.equal(out[b].transpose(0, 1) != 0, keep)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_padding_influences_nothing(impl, device):
    """NaN, infinities or ordinary numbers past a length: the same result, bit for bit, and zeros there."""
    case = padded((20, 0, 34), heads=1, slack=6, dropout=0.1 if impl == "triton" else 0.0)
    inputs = make_inputs(case, device)
    expected = results(inputs, case, impl)
    past = inputs.q[:, 0, 0].isnan()
    assert past.any() and not any(x[past].any() for x in expected)
    for filling in (float("inf"), 3.0):
        other = inputs._replace(**{n: getattr(inputs, n).nan_to_num(nan=filling) for n in ("q", "k", "v", "do")})
        assert all(map(torch.equal, results(other, case, impl), expected))


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(("size", "n"), [(2, 0), (0, 4), (2, 5)])
def test_nothing_to_attend_to(impl, size, n, device):
    """Empty batches, and sequences that all have length 0."""
    qkv = torch.full((3, size, n, 2, 16), float("nan"), device=device, requires_grad=True)
    length = torch.zeros(size, dtype=torch.int32, device=device)
    out = softmax_attention(*qkv, length=length, impl=impl)
    (gradient,) = torch.autograd.grad(out.sum(), qkv)
    assert out.shape == (size, n, 2, 16) and not out.any() and not gradient.any()


def test_plain_dropout_has_the_same_distribution(device):
    torch.manual_seed(0)
    n = 64
    v = torch.eye(n, device=device).expand(50, 2, n, n).transpose(1, 2)
    out = softmax_attention(torch.zeros_like(v), torch.zeros_like(v), v, dropout=0.1, impl="torch") * n
    dropped = out == 0
    torch.testing.assert_close(out[~dropped], torch.full_like(out[~dropped], 256 / 230))
    p = 26 / 256
    assert abs(dropped.double().mean().item() - p) < 4 * (p * (1 - p) / out.numel()) ** 0.5


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_one_matrix_is_kept_for_the_backward(dropout, device):
    case = padded((33, 20), dropout=dropout)
    inputs = make_inputs(case, device)
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attend(*leaves, **inputs.sequences, n=33, dropout=dropout, seed=inputs.seed, impl="triton")
    assert [x.shape for x in kept if x.dim() == 4 and x.shape[-2:] == (48, 48)] == [(2, 2, 48, 48)]


@pytest.mark.parametrize(("dropout", "strides"), [(0.0, "d_strided"), (0.3, "fused")])
def test_operators_keep_their_contracts(dropout, strides, device):
    """Schema, fake implementation (shapes, dtypes, strides), autograd and tracing with dynamic shapes."""
    case = padded((13, 5), dropout=dropout, strides=strides, head_dim=16)
    inputs = make_inputs(case, device)
    rows = [x.detach().unflatten(0, (2, 13)) for x in (*inputs[:3], inputs.do)]
    threshold = round(256 * dropout)
    random = (inputs.seed, inputs.sequences["index"]) if threshold else (None, None)
    problem = (inputs.sequences["length"], 0.25, threshold, *random)
    causal = not dropout
    leaves = [x.clone().requires_grad_() for x in rows[:3]]
    library.opcheck(torch.ops.lra.softmax_forward.default, (*leaves, *problem, causal))
    out, p = torch.ops.lra.softmax_forward(*leaves, *problem, causal)
    assert out.requires_grad and not p.requires_grad
    library.opcheck(torch.ops.lra.softmax_backward.default, (*rows[:3], p, rows[3], *problem))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_compiled_equals_eager(impl, device):
    torch.compiler.reset()
    compiled: Any = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((12, 0, 9, 5), (7, 19)):
        case = padded(lengths, dropout=0.3 if impl == "triton" else 0.0)
        inputs = make_inputs(case, device)
        options: dict[str, Any] = dict(dropout=case.dropout, seed=inputs.seed, impl=impl, **inputs.sequences)
        eager, traced = (
            run_with_gradients(function, inputs, case.dtype, n=case.max_length, **options)
            for function in (attend, compiled)
        )
        assert all(map(torch.equal, eager, traced))


def test_seed_overwritten_before_backward_is_noticed(device):
    q = torch.randn(1, 16, 2, 16, device=device, requires_grad=True)
    seed = torch.tensor(3, device=device)
    out = softmax_attention(q, q, q, dropout=0.5, seed=seed, impl="triton")
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_autocast_does_not_reach_inside(device):
    """The result has the dtype of q, and its gradient too."""
    case = padded((20,))
    inputs = make_inputs(case, device)
    expected = results(inputs, case)
    with torch.autocast(device.type, torch.bfloat16):
        actual = results(inputs, case)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        (softmax_attention, {"impl": "torch"}),
        (flash_attention, {"impl": "sdpa"}),
        (block_sparse_attention, {"impl": "gather", "layout": layouts.butterfly(40, 8)}),
    ],
    ids=["torch", "sdpa", "gather"],
)
def test_nor_into_the_paths_for_any_device(attention, options):
    q = torch.randn(2, 40, 2, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        inside = attention(q, q, q, **options)
    assert inside.dtype == torch.float32 and torch.equal(inside, attention(q, q, q, **options))


ROWS = torch.zeros(2, 3, 2, 16)
MISTAKES = [
    (dict(q=ROWS[0], k=ROWS[0], v=ROWS[0]), ValueError, r"must be \[B, N, H, D\]"),
    (dict(k=ROWS[:1]), ValueError, "one shape"),
    (dict(q=ROWS.double(), k=ROWS.double(), v=ROWS.double()), TypeError, "float16, bfloat16 or float32"),
    (dict(length=torch.tensor([3, 3])), TypeError, "length must be int32"),
    (dict(scale=-0.5), ValueError, "scale must be positive"),
    (dict(dropout=1.5), ValueError, "dropout must be in"),
    (dict(dropout=0.1), ValueError, "needs seed"),
    (dict(impl="sdpa"), ValueError, "'auto', 'triton' or 'torch'"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES)
def test_mistakes(change, error, message, device):
    arguments: dict[str, Any] = {"q": ROWS, "k": ROWS, "v": ROWS, "impl": "triton", **change}
    arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        softmax_attention(**arguments)


def test_triton_is_not_replaced(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="impl='torch'"):
        softmax_attention(ROWS, ROWS, ROWS, impl="triton")
    assert not softmax_attention(ROWS, ROWS, ROWS).any()


COMPILED: list[dict[str, Any]] = [
    dict(arch=arch, dtype=dtype, dropout=dropout, n=n)
    for arch, dtype, dropout, n in (
        (80, "bfloat16", 0.1, 1000),
        (80, "float32", 0.1, 200),
        (86, "bfloat16", 0.1, 1000),
        (120, "float32", 0.1, 1000),
        (90, "bfloat16", 0.1, 1000),
        (90, "bfloat16", 0.0, 1000),
        (90, "float32", 0.1, 1000),
        (90, "float16", 0.1, 70),
        (90, "bfloat16", 0.1, 20),
    )
]


@pytest.mark.slow
def test_kernels_compile_without_spills():
    for case, kernels in compiled(COMPILED, "tests.kernels.test_softmax"):
        assert [kernel["name"] for kernel in kernels] == ["softmax_forward_kernel", "softmax_backward_kernel"]
        for kernel in kernels:
            assert not kernel["stack"] and not kernel["atomics"], f"{case}: {kernel}"
            assert kernel["shared"] <= 48 * 1024, f"{case}: {kernel}"
            assert bool(kernel["draws"]) == (case["dropout"] > 0), f"{case}: {kernel}"


def launch_case(case: dict[str, Any]) -> None:
    from lra.kernels.softmax.softmax_kernels import launch_softmax_backward, launch_softmax_forward
    from lra.kernels.softmax.softmax_ops import padded_side
    from tests.kernels.aot import choose

    choose(case["arch"], hopper=False)
    scores = torch.zeros(2, 1, padded_side(case["n"]), padded_side(case["n"]), dtype=getattr(torch, case["dtype"]))
    sequences = torch.zeros(2, dtype=torch.int32)
    problem = (sequences, 0.125, round(256 * case["dropout"]))
    random = (torch.tensor(0), sequences) if case["dropout"] else (None, None)
    launch_softmax_forward(scores, *problem, *random)
    launch_softmax_backward(scores, scores, *problem, *random)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, HALF, torch.float32])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("n", [1000, 1025])
def test_long_rows(n, dropout, dtype):
    assert_within_budget(padded((n, 0, 613), head_dim=64, dtype=dtype, dropout=dropout, strides="fused"), "cuda")


@pytest.mark.gpu
def test_16384_rows():
    assert_within_budget(padded((16384,), heads=1, head_dim=64, dtype=BF16), "cuda")


@pytest.mark.gpu
def test_captured_dropout_advances():
    """A captured step that adds 1 to its seed draws a new mask in every replay, that of an eager step, both ways."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 300, 3, 2, 32, device="cuda", dtype=BF16).requires_grad_()
    seed = torch.tensor(0, device="cuda")

    def step(advance: int = 1) -> tuple[Tensor, Tensor]:
        seed.add_(advance)
        out = softmax_attention(*qkv.unbind(2), dropout=0.5, seed=seed, impl="triton")
        return out, torch.autograd.grad(out.float().square().sum(), qkv)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    seed.fill_(2**32 - 2)  # the second replay carries into the upper half
    previous = None
    for replay in range(1, 4):
        graph.replay()
        assert seed.item() == 2**32 - 2 + replay
        assert all(map(torch.equal, captured, step(0)))
        assert previous is None or not torch.equal(captured[0], previous)
        previous = captured[0].detach().clone()
