"""rabe_staats: softmax attention whatever the chunks, one mask for both passes, and no matrix of all the scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lra.bench.cases import make_batch
from lra.config.compose import compose
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.tasks import TASKS
from tests.sampling import sampled

CPU = torch.device("cpu")
N, LENGTHS = 20, (20, 0, 13, 1, 8)
CHUNKS = [(1024, 4096), (20, 20), (7, 6), (4, 5), (6, 13), (1, 3), (3, 1)]  # queries and keys at a time


def build(query_chunk: int = 7, key_chunk: int = 6, *, n: int = N, dropout: float = 0.0) -> Any:
    cls: Any = ATTENTIONS.get("rabe_staats")
    return cls(cls.Config(query_chunk, key_chunk), AttentionSpec(2, 16, n, dropout))


def qkv(total: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        (scale * torch.randn(total, 2, 16, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for _ in range(3)
    ]


def softmax_attention(inputs: list[Tensor], lengths: tuple[int, ...], kept_BHNN: Tensor | None = None) -> Tensor:
    """By the textbook, of each sequence in its N rows; the probabilities times a mask, if there is one."""
    q, k, v = inputs
    out = torch.zeros_like(q)
    for b, n in enumerate(lengths):
        rows = slice(b * max(lengths), b * max(lengths) + n)
        p = (torch.einsum("ihd,jhd->hij", q[rows], k[rows]) / 4).softmax(-1)
        if kept_BHNN is not None:
            p = p * kept_BHNN[b, :, :n, :n]
        out[rows] = torch.einsum("hij,jhd->ihd", p, v[rows])
    return out


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_result_and_gradients_are_those_of_softmax_attention(chunks, scale):
    batch, inputs = make_batch(LENGTHS, True, CPU), qkv(len(LENGTHS) * N, scale=scale)
    out, expected = build(*chunks).train()(*inputs, batch), softmax_attention(inputs, LENGTHS)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    for grad, exact in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(grad, exact, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("chunks", [(7, 6), (4, 5)])
def test_chunks_with_no_key_change_nothing(chunks):
    """All scores below zero by far, so that a masked one, if it counted, would be the highest."""
    batch, (q, k, v) = make_batch((N, 3), True, CPU), qkv(2 * N)
    k = -200 * q.detach().sign() + k
    torch.testing.assert_close(build(*chunks)(q, k, v, batch), softmax_attention([q, k, v], (N, 3)))


def kept(attention: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """The mask of one sequence of N <= 16 with its scale, `[1, H, N, N]`: equal weights, one value for each key."""
    n = attention.spec.max_length
    zeros, values = torch.zeros(n, 2, 16, dtype=dtype), torch.eye(n, 16, dtype=dtype)[:, None].expand(n, 2, 16)
    torch.manual_seed(5)
    return n * attention(zeros, zeros, values, make_batch((n,), True, CPU))[..., :n].transpose(0, 1)[None]


def test_dropout_zeroes_weights_and_scales_the_kept_ones_by_the_seed():
    attention = build(n=16, dropout=0.25).train()
    mask = kept(attention)
    assert torch.equal(mask, kept(attention))
    dropped = mask == 0
    assert torch.allclose(mask[~dropped], torch.tensor(1 / 0.75, dtype=mask.dtype))  # 1/4 is a multiple of 1/256
    assert 0.15 < dropped.double().mean() < 0.35
    assert not torch.equal(mask[0, 0], mask[0, 1])  # of each head its own
    assert not torch.equal(dropped[..., :7, :6], dropped[..., 7:14, :6])  # and of each chunk
    assert not torch.equal(dropped[..., :7, :6], dropped[..., :7, 6:12])
    torch.testing.assert_close(kept(attention.eval()), torch.ones_like(mask))


def test_both_passes_drop_the_same_weights():
    attention, batch, inputs = build(n=16, dropout=0.25).train(), make_batch((16,), True, CPU), qkv(16)
    mask = kept(attention)
    torch.manual_seed(5)
    out = attention(*inputs, batch)
    torch.rand(100)  # others draw between the passes
    before = torch.get_rng_state()
    grads = gradients(out, inputs)
    assert torch.equal(torch.get_rng_state(), before)  # and go on after them as if nothing had been drawn again
    expected = softmax_attention(inputs, (16,), mask)
    torch.testing.assert_close(out, expected)
    for grad, exact in zip(grads, gradients(expected, inputs), strict=True):
        torch.testing.assert_close(grad, exact)


class Sizes(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() * x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_no_tensor_of_either_pass_is_larger_than_chunks_make_it(dropout):
    def passes(n: int, name: str = "rabe_staats", **options: Any) -> tuple[int, int]:
        """The largest tensor, and what is kept for the backward pass."""
        cls: Any = ATTENTIONS.get(name)
        saved: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        attention = cls(cls.Config(**options), AttentionSpec(2, 16, n, dropout)).train()
        inputs, batch = qkv(n, torch.float32), make_batch((n,), True, CPU)
        with Sizes() as sizes:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = attention(*inputs, batch)
            kept_bytes = sum(saved.values())
            torch.autograd.grad(out.sum(), inputs)
        return sizes.largest, kept_bytes

    n, scores = 512, 2 * 512 * 512 * 4
    largest, saved = passes(n, query_chunk=32, key_chunk=256)
    assert largest == max(2 * 32 * 256, n * 2 * 16) * 4  # a chunk's scores, or q
    assert passes(n, query_chunk=128, key_chunk=256)[0] == 2 * 128 * 256 * 4
    assert passes(n, "standard")[0] >= scores and saved < scores / 4
    longer, more = passes(2 * n, query_chunk=32, key_chunk=256)
    assert longer == 2 * largest  # q
    assert more < 2.5 * saved  # twice, and a number for every query and chunk of keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_costs_no_more_than_rounding(dtype, autocast):
    batch, inputs = make_batch(LENGTHS, True, CPU), qkv(len(LENGTHS) * N, dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = build()(*inputs, batch)
    assert out.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = softmax_attention(exact, LENGTHS)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    for grad, of_exact in zip(gradients(out, inputs), gradients(expected, exact), strict=True):
        torch.testing.assert_close(grad.double(), of_exact, atol=0.06, rtol=0.06)


def test_weights_of_many_keys_are_summed_in_fp32():
    """In bf16 a sum of ones stays at 256."""
    n = 3000
    x = torch.ones(n, 2, 16, dtype=torch.bfloat16)
    out = build(1024, 4096, n=n)(x, x, x, make_batch((n,), True, CPU))
    torch.testing.assert_close(out, x)


@pytest.mark.parametrize("dropout", sampled([0.25, 0.0]))
def test_it_compiles(dropout):
    attention, batch, inputs = (
        build(dropout=dropout).train(), make_batch(LENGTHS, True, CPU), qkv(len(LENGTHS) * N, torch.float32)
    )  # fmt: skip
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    results = []
    for module in (compiled, attention):
        torch.manual_seed(0)
        out = module(*inputs, batch)
        results.append((out, *gradients(out, inputs)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("field", ["query_chunk", "key_chunk"])
def test_bad_values_are_refused_by_name(field):
    with pytest.raises(UsageError, match=f"attn.{field}=0 must be at least 1"):
        compose(
            RunConfig, {"task": TASKS, "attn": ATTENTIONS},
            ["task=listops", "attn=rabe_staats", "recipe=demo", f"attn.{field}=0"],
        )  # fmt: skip


def test_it_is_exact_with_the_chunks_of_the_paper():
    cls: Any = ATTENTIONS.get("rabe_staats")
    assert cls.budget(256) == {}
    attention = cls(cls.Config(), AttentionSpec(2, 16, N))
    assert attention.resolve(CPU, "bf16") == "rabe_staats in chunks of 1024 queries by 4096 keys"
