"""The kernels as PyTorch operators: their contracts, torch.compile, strides, derivatives, determinism."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, library

from lra.batch import Batch
from lra.errors import UsageError
from lra.kernels import flash_attention
from lra.kernels.flash.problem import Problem
from lra.kernels.impl import resolve_impl
from lra.kernels.testing import Case, make_inputs
from lra.models.attention.base import AttentionSpec
from lra.models.attention.flash import FlashAttention

FIELDS = [field.name for field in dataclasses.fields(Problem)]


@pytest.fixture(autouse=True)
def forget_graphs():
    torch.compiler.reset()


def problem_of(case: Case, inputs) -> tuple[Any, ...]:
    """The fields of its `Problem`, as the operators take them."""
    start, length, index = (inputs.sequences[name] for name in ("start", "length", "index"))
    threshold = round(256 * case.dropout)
    seed, index = (inputs.seed, index) if threshold else (None, None)
    return (
        start, length, case.max_length, case.layout == "padded", case.causal, case.head_dim**-0.5, threshold,
        seed, index, True, case.sparse and case.sparse.key,
    )  # fmt: skip


def attend(qkv: Tensor, inputs, max_length: int, dropout: float, **options: Any) -> Tensor:
    """Attention of a fused projection `[T, 3, H, D]`."""
    sequences = {**inputs.sequences, "max_length": max_length}
    return flash_attention(
        *qkv.unbind(1), **sequences, dropout=dropout, seed=inputs.seed, impl="triton", deterministic=True, **options
    )


def forward_backward(function: Any, case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs = make_inputs(case, device)
    qkv = torch.stack(inputs[:3], 1).requires_grad_()
    out = function(qkv, inputs, case.max_length, case.dropout)
    return out, torch.autograd.grad(out, qkv, inputs.do)[0]


@pytest.mark.parametrize("name", ["flash_forward", "flash_backward"])
def test_schema_ends_with_the_fields_of_a_problem(name):
    arguments = [argument.name for argument in getattr(torch.ops.lra, name).default._schema.arguments]
    assert arguments[-len(FIELDS) :] == FIELDS


@pytest.mark.parametrize(("dropout", "strides"), [(0.0, "d_strided"), (0.3, "fused")])
def test_operators_keep_their_contracts(dropout, strides, device):
    """Schema, fake implementation (shapes, dtypes, strides), autograd and tracing with dynamic shapes."""
    case = Case((17, 5), dropout=dropout, strides=strides, head_dim=16)
    inputs = make_inputs(case, device)
    problem = problem_of(case, inputs)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    library.opcheck(torch.ops.lra.flash_forward.default, (*leaves, *problem))
    out, lse = torch.ops.lra.flash_forward(*inputs[:3], *problem)
    library.opcheck(torch.ops.lra.flash_backward.default, (*inputs[:3], out, lse, inputs.do, *problem))


@pytest.mark.parametrize(
    "case",
    [
        Case((20, 0, 13), dropout=0.3),
        Case((20, 3, 9), dropout=0.3, layout="padded", slack=2),
        Case((33, 7), dtype=torch.float16),
    ],
    ids=str,
)
def test_compiled_equals_eager(case, device):
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(*(forward_backward(f, case, device) for f in (attend, compiled)), strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.slow
@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_graph_serves_all_lengths(device):
    """Other numbers of rows and sequences and another longest length, without compiling again."""
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((20, 0, 13, 5), (7, 31), (9, 4, 3, 2, 17)):  # first no three: PyTorch would tie that to q, k and v
        case = Case(lengths, dropout=0.3)
        for eager, traced in zip(*(forward_backward(f, case, device) for f in (attend, compiled)), strict=True):
            assert torch.equal(eager, traced)


def test_batched_form_compiles(device):
    """With what it fills in itself: start, length and index."""

    def step(qkv: Tensor, seed: Tensor) -> Tensor:
        seed.add_(1)
        return flash_attention(*qkv.unbind(2), dropout=0.5, seed=seed, impl="triton")

    qkv = torch.randn(2, 19, 3, 2, 16, device=device)
    seeds = [torch.tensor(5, device=device) for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    first, second = ([f(qkv, seed) for _ in range(2)] for f, seed in zip((step, compiled), seeds, strict=True))
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("traced", [False, True])
def test_strided_inputs_reach_the_kernels_uncopied(traced, device, monkeypatch):
    from lra.kernels.flash import launch_attention

    seen: list[tuple[int, tuple[int, ...]]] = []
    launch_forward = launch_attention.launch_flash_forward

    def spy(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        seen.extend((x.data_ptr(), x.stride()) for x in (q, k, v))
        return launch_forward(q, k, v, problem)

    monkeypatch.setattr(launch_attention, "launch_flash_forward", spy)
    case = Case((12, 9), strides="fused")
    inputs = make_inputs(case, device)
    qkv = torch.stack(inputs[:3], 1)
    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if traced else attend
    function(qkv, inputs, case.max_length, 0.0)
    assert seen == [(x.data_ptr(), x.stride()) for x in qkv.unbind(1)]


def test_there_is_no_second_derivative(device):
    inputs = make_inputs(Case((9,)), device)
    qkv = torch.stack(inputs[:3], 1).requires_grad_()
    out = attend(qkv, inputs, 9, 0.0)
    for loss in (out.square().sum(), out.sum()):  # of the second, only q, k and v make it depend on anything
        (gradient,) = torch.autograd.grad(loss, qkv, create_graph=True, retain_graph=True)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            gradient.sum().backward(retain_graph=True)


def test_no_gradient_of_the_result_gives_none(device):
    """As when what follows the attention has no derivative with respect to it."""

    class Ignored(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    qkv = torch.randn(3, 1, 8, 1, 16, device=device, requires_grad=True)
    total: Any = Ignored.apply(flash_attention(*qkv, impl="triton"))
    assert torch.autograd.grad(total, qkv, allow_unused=True) == (None,)


def test_log_sum_exp_is_not_differentiable(device):
    case = Case((9,))
    inputs = make_inputs(case, device)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = torch.ops.lra.flash_forward(*leaves, *problem_of(case, inputs))
    assert out.requires_grad and not lse.requires_grad


@pytest.fixture
def pytorchs_mode():
    """Restores PyTorch's own deterministic mode."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("asked", "mode"), [(False, False), (True, False), (False, True)])
def test_deterministic_reaches_both_kernels(asked, mode, device, monkeypatch, pytorchs_mode):
    from lra.kernels.flash import launch_attention

    seen = []

    def spy(function: Any) -> Any:
        def launch_and_note(*arguments: Any) -> Any:
            seen.append(arguments[-1].deterministic)
            return function(*arguments)

        return launch_and_note

    for name in ("launch_flash_forward", "launch_flash_backward"):
        monkeypatch.setattr(launch_attention, name, spy(getattr(launch_attention, name)))
    pytorchs_mode(mode)
    qkv = torch.randn(3, 1, 8, 1, 16, device=device, requires_grad=True)
    flash_attention(*qkv, impl="triton", deterministic=asked).sum().backward()
    assert seen == [asked or mode] * 2


def test_sdpa_on_cuda_is_deterministic_only_in_pytorchs_mode(pytorchs_mode):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_impl("sdpa", cpu, deterministic=True) == "sdpa"
    assert resolve_impl("auto", cuda, deterministic=True) == "triton"
    with pytest.raises(ValueError, match="impl='triton'"):
        resolve_impl("sdpa", cuda, deterministic=True)
    pytorchs_mode(True, warn_only=True)
    with pytest.raises(ValueError, match="use_deterministic_algorithms"):
        resolve_impl("sdpa", cuda, deterministic=True)
    pytorchs_mode(True)
    assert resolve_impl("sdpa", cuda, deterministic=True) == "sdpa"


def test_attention_module_hands_determinism_on(monkeypatch):
    seen = {}
    monkeypatch.setattr("lra.models.attention.flash.flash_attention", lambda *_, **options: seen.update(options))
    length = torch.tensor([4], dtype=torch.int32)
    batch = Batch(torch.zeros(4).int(), length - 4, length, 4, torch.zeros(1).long(), length - 4)
    module = FlashAttention(FlashAttention.Config(deterministic=True), AttentionSpec(2, 16, 4))
    module(*torch.zeros(3, 4, 2, 16), batch)
    assert seen["deterministic"] is True

    refused = FlashAttention(FlashAttention.Config(impl="sdpa", deterministic=True), AttentionSpec(2, 16, 4))
    with pytest.raises(UsageError, match=r"attn\.impl='sdpa' is deterministic on CUDA only"):
        refused.resolve(torch.device("cuda"), "bf16")
