"""What only a GPU can show: compiled code in every dtype, long sequences, offsets beyond 2^31, graphs, memory."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from lra.kernels import flash_attention
from lra.kernels.block_sparse.layouts import butterfly
from lra.kernels.flash import tuning
from lra.kernels.flash.reference import keep_mask, reference_attention
from lra.kernels.softmax.materialized_attention import softmax_attention
from lra.kernels.testing import Case, Inputs, check_case, measure_error, run_with_gradients
from tests.kernels.cases import random_case, random_hopper_case

pytestmark = pytest.mark.gpu


def memory(gib: int) -> pytest.MarkDecorator:
    have = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0
    return pytest.mark.skipif(have < gib, reason=f"needs {gib} GiB of GPU memory, found {have:.0f}")


@pytest.mark.parametrize("seed", range(8))
def test_random_cases(seed):
    """25 cases each. All are run before failing: which ones fail says more than the first."""
    rng = random.Random(seed)
    check_all(random_case(rng) for _ in range(25))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fields", [{}, {"head_dim": 64, "dropout": 0.0}], ids=["all", "specialised warps"])
def test_random_cases_for_hopper(fields, seed):
    """Few of the others are what its kernels take."""
    rng = random.Random(seed)
    cases = (random_hopper_case(rng, (torch.bfloat16, torch.float16)) for _ in range(25))
    strides = ("contiguous", "fused")
    check_all(dataclasses.replace(case, strides=rng.choice(strides), **fields) for case in cases)


def check_all(cases: Iterable[Case]) -> None:
    failures = []
    for case in cases:
        for name, error in check_case(case, "cuda", "triton").items():
            if not error.ok:
                failures.append(f"{name} of {case}: error {error.error:.3g}, budget {error.budget:.3g}")
        torch.cuda.empty_cache()
    assert not failures, "\n" + "\n".join(failures)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_far_above_those_of_the_first_tile(dtype, head_dim):
    """Hopper's forward sweeps over the keys again."""
    for dropout, sparse in itertools.product((0.0, 0.1), (None, butterfly(2048, (128, 128)))):
        case = Case(
            (1000, 129, 1, 2000), head_dim=head_dim, dtype=dtype, strides="fused", dropout=dropout, spread=60.0,
            sparse=sparse,
        )  # fmt: skip
        for name, error in check_case(case, "cuda", "triton").items():
            assert error.ok, f"{name} of {case}: error {error.error:.3g}, budget {error.budget:.3g}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [(32, (192, 128, 12, 3)), (32, (256, 64, 16, 5)), (64, (192, 128, 12, 3)), (128, (128, 64, 8, 4))],
)
def test_groups_that_share_keys(head_dim, tile, dtype):
    """Few of the others are large enough for them. Programs take many tiles, and with the spread sweep many again."""
    lengths = tuple(random.Random(head_dim).randint(1, 2048) for _ in range(40))
    batches = ((1024,) * 24, "packed", 0), (lengths, "packed", 0), ((500, 0, 70), "padded", 300)
    with tuning.force_tile("hopper_shared", tuning.Tile(*tile)) as launched:
        check_all(
            Case(
                rows, heads=4, head_dim=head_dim, dtype=dtype, strides="fused", dropout=dropout, spread=spread,
                layout=layout, slack=slack,
            )
            for rows, layout, slack in batches
            for dropout in (0.0, 0.1)
            for spread in (1.0, 60.0)
        )  # fmt: skip
        assert "hopper_shared" in launched


@memory(40)
@pytest.mark.parametrize(("heads", "d", "dropout"), [(8, 128, 0.1), (16, 64, 0.0)])
def test_more_than_2_to_the_31_elements(heads, d, dropout):
    """8,448 sequences of 256 rows, 1,024 numbers wide: the last two sequences lie past 2^31 in every tensor."""
    size, n, dtype = 8448, 256, torch.bfloat16
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
    out = flash_attention(
        q, k, v, start=index * n, length=length, max_length=n, dropout=dropout, seed=seed, impl="triton"
    )
    do = out.detach()  # any non-zero gradient
    results = [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]

    last = slice(-2 * n, None)
    options = dict(start=index[:2] * n, length=length[-2:], index=index[-2:], dropout=dropout, seed=seed)

    inputs = Inputs(q[last], k[last], v[last], do[last], {}, seed)
    exact, plain = (
        run_with_gradients(reference_attention, inputs, precision, **options) for precision in (torch.float64, dtype)
    )
    for a, e, p in zip(results, exact, plain, strict=True):
        error = measure_error(a[last], e, p)
        assert error.ok, error


@memory(70)
def test_more_than_2_to_the_31_weights_in_memory():
    """Of `softmax_attention`, whose N × N weights are: those of the last two sequences lie past 2^31."""
    size, n, heads, d, dtype, device = 17, 4352, 8, 32, torch.bfloat16, "cuda"
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, size, n, heads, d, device=device, dtype=dtype))
    length = torch.full((size,), n, dtype=torch.int32, device=device)
    length[-1] = n - n // 3
    index = torch.arange(size, dtype=torch.int32, device=device)
    seed = torch.tensor(1, device=device)
    assert (size - 2) * heads * n * n > 2**31
    out = softmax_attention(q, k, v, length=length, dropout=0.1, seed=seed, impl="triton")
    do = out.detach()  # any non-zero gradient
    results = [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]

    options = dict(start=index[:2] * n, length=length[-2:], index=index[-2:], dropout=0.1, seed=seed)

    q, k, v, gradient = (x[-2:].flatten(0, 1) for x in (q, k, v, do))
    inputs = Inputs(q, k, v, gradient, {}, seed)
    exact, plain = (
        run_with_gradients(reference_attention, inputs, precision, **options) for precision in (torch.float64, dtype)
    )
    for a, e, p in zip(results, exact, plain, strict=True):
        error = measure_error(a[-2:].flatten(0, 1), e, p)
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
        error = measure_error(actual, exact, plain)
        assert error.ok, error


def fused_inputs(size: int, n: int, heads: int = 2, d: int = 32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(size, n, 3, heads, d, device="cuda", dtype=torch.bfloat16).requires_grad_()


def forward_backward(function: Callable[[Tensor], Tensor], qkv: Tensor) -> tuple[Tensor, Tensor]:
    out = function(qkv)
    return out, torch.autograd.grad(out.float().square().sum(), qkv)[0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_dropout_advances(deterministic):
    """A captured step that adds 1 to its seed draws a new mask in every replay, that of an eager step, in both passes.

    Without determinism dq may differ by rounding; another mask would differ by as much as the gradient.
    """
    qkv, seed = fused_inputs(2, 300), torch.tensor(0, device="cuda")

    def attend(qkv: Tensor) -> Tensor:
        return flash_attention(*qkv.unbind(2), dropout=0.5, seed=seed, impl="triton", deterministic=deterministic)

    def step() -> tuple[Tensor, Tensor]:
        seed.add_(1)
        return forward_backward(attend, qkv)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    seed.fill_(2**32 - 2)  # the second replay carries into the upper half
    results = []
    for replay in range(1, 4):
        graph.replay()
        assert seed.item() == 2**32 - 2 + replay
        results.append(captured[0].detach().clone())
        out, gradient = forward_backward(attend, qkv)
        assert torch.equal(captured[0], out)
        if deterministic:
            assert torch.equal(captured[1], gradient)
        else:
            torch.testing.assert_close(captured[1], gradient, rtol=0.02, atol=0.002)
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


class Dropping(nn.Module):
    """Attention that advances a seed of its own."""

    seed: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("seed", torch.tensor(0, device="cuda"))

    def forward(self, qkv: Tensor) -> Tensor:
        self.seed.add_(1)
        return flash_attention(*qkv.unbind(2), dropout=0.5, seed=self.seed, impl="triton", deterministic=True)


def test_compiled_dropout_advances():
    """The same for torch.compile with CUDA graphs, which records in the second or third call and replays after it."""
    from torch._dynamo.utils import counters  # here, because it imports the whole compiler

    counters.clear()
    torch.compiler.reset()
    eager, compiled = Dropping(), Dropping()
    graphed = torch.compile(compiled, mode="reduce-overhead", fullgraph=True)
    qkv = fused_inputs(2, 300)
    previous = None
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        actual = [x.detach().clone() for x in forward_backward(graphed, qkv)]
        assert all(map(torch.equal, actual, forward_backward(eager, qkv)))
        assert previous is None or not torch.equal(actual[0], previous)
        previous = actual[0]
    assert compiled.seed.item() == 6
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] and not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("compiled", [False, True])
def test_fused_projection_is_not_copied(compiled):
    """Forward allocates its result and its statistics, far from the 64 MiB that a copy of q, k or v would take."""
    size, n, heads, d = 8, 8192, 8, 64
    qkv = fused_inputs(size, n, heads, d).detach()

    def attend(qkv: Tensor) -> Tensor:
        return flash_attention(*qkv.unbind(2), impl="triton")

    torch.compiler.reset()
    function = torch.compile(attend, fullgraph=True) if compiled else attend
    function(qkv)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function(qkv)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    assert out.numel() * out.element_size() == 64 * 2**20
    assert extra < 16 * 2**20, f"{extra / 2**20:.1f} MiB beside the result"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_deterministic_gradients_are_equal_over_runs(dtype, dropout):
    """Many programs add to each row of dq, ragged ones too."""
    generator = torch.Generator("cuda").manual_seed(0)
    size, n, heads, d = 16, 2048, 4, 64
    qkv = torch.randn(size * n, 3, heads, d, generator=generator, device="cuda").to(dtype).requires_grad_()
    do = torch.randn(size * n, heads, d, generator=generator, device="cuda").to(dtype)
    start = torch.arange(size, dtype=torch.int32, device="cuda") * n
    length = torch.randint(n // 2, n + 1, (size,), generator=generator, dtype=torch.int32, device="cuda")
    seed = torch.tensor(3, device="cuda")

    def gradients() -> tuple[Tensor, Tensor]:
        out = flash_attention(
            *qkv.unbind(1), start=start, length=length, max_length=n, dropout=dropout, seed=seed, impl="triton",
            deterministic=True,
        )  # fmt: skip
        return out, torch.autograd.grad(out, qkv, do)[0]

    first = gradients()
    for _ in range(10):
        assert all(map(torch.equal, gradients(), first))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("n", [128, 300, 1024])
def test_full_gpu_repeats_itself(n, dropout, head_dim):
    """All but dq, a sum in any order, is equal over runs in any mode. Thousands of programs: races need company."""
    size, heads = 2**16 // n, 8
    torch.manual_seed(0)
    q, k, v, do = torch.randn(4, size, n, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seed = torch.tensor(3, device="cuda")

    def run() -> list[Tensor]:
        out = flash_attention(*leaves, dropout=dropout, seed=seed, impl="triton")
        return [out, *torch.autograd.grad(out, leaves, do)]

    out, dq, dk, dv = run()
    for _ in range(10):
        again = run()
        assert torch.equal(again[0], out) and torch.equal(again[2], dk) and torch.equal(again[3], dv)
        torch.testing.assert_close(again[1], dq, rtol=0.02, atol=0.02)
