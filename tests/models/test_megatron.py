"""attn=megatron: its plain path is softmax attention, both paths agree, and explicit choices are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lra.bench.cases import make_batch
from lra.errors import UsageError
from lra.kernels.flash.reference import reference_attention
from lra.models.attention.base import AttentionSpec
from lra.models.attention.megatron import MegatronAttention
from lra.models.attention.standard import StandardAttention
from tests.sampling import sampled

N, LENGTHS = 21, (21, 0, 13, 1)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
BATCH = make_batch(LENGTHS, True, CPU)


def build(cls: Any = MegatronAttention, dropout: float = 0.0, layer: int = 0, **options: Any) -> Any:
    return cls(cls.Config(**options), AttentionSpec(2, 16, N, dropout, layer))


def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4 * N, 2, 16, generator=generator).requires_grad_() for _ in range(3)]


def with_gradients(attention: Any) -> tuple[Tensor, ...]:
    inputs = qkv()
    out = attention(*inputs, BATCH)
    return out, *torch.autograd.grad(out.square().sum(), inputs)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_it_is_standard_attention(impl):
    if impl == "triton" and torch.cuda.is_available():
        pytest.skip("Triton compiles here, and these tensors are on the CPU")
    for actual, expected in zip(*map(with_gradients, (build(impl=impl), build(StandardAttention))), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_plain_dropout_draws_as_standard_attention_does():
    """From PyTorch's generator, the weights in the same order."""
    drawn = []
    for attention in (build(dropout=0.5), build(StandardAttention, dropout=0.5)):
        torch.manual_seed(0)
        drawn.append(with_gradients(attention.train()))
    for actual, expected in zip(*drawn, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here, and these tensors are on the CPU")
def test_triton_drops_what_the_reference_drops():
    pytest.importorskip("triton")
    attention = build(dropout=0.3, layer=4, impl="triton").train()
    q, k, v = qkv()
    assert BATCH.seed is not None
    options: dict[str, Any] = dict(
        start=BATCH.start, length=BATCH.length, index=BATCH.index, dropout=0.3, seed=BATCH.seed + 4
    )
    expected = reference_attention(q, k, v, **options)
    torch.testing.assert_close(attention(q, k, v, BATCH), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dropout", sampled([0.5, 0.0]))
def test_plain_path_compiles_to_one_graph(dropout):
    torch.compiler.reset()
    attention = build(dropout=dropout).train()
    compiled: Any = torch.compile(attention, fullgraph=True, backend="aot_eager")
    made = []
    for function in (attention, compiled):
        torch.manual_seed(0)
        made.append(with_gradients(function))
    for eager, traced in zip(*made, strict=True):
        torch.testing.assert_close(eager, traced)


def test_autocast_as_in_training():
    with torch.autocast("cpu", torch.bfloat16):
        out = build()(*(x.bfloat16() for x in qkv()), BATCH)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), build()(*qkv(), BATCH), atol=0.03, rtol=0.03)


def test_what_computes_it_is_said_and_kept(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert build().resolve(CPU, "fp32") == "megatron by torch"
    assert build().resolve(GPU, "bf16") == "megatron by triton"
    assert build(impl="torch").resolve(GPU, "bf16") == "megatron by torch"
    with pytest.raises(UsageError, match=r"attn\.impl='triton' needs CUDA tensors, got cpu: use attn\.impl='torch'"):
        build(impl="triton").resolve(CPU, "fp32")


def test_no_number_of_keys_is_an_option():
    assert MegatronAttention.budget(64) == {}
