"""Every registered attention: what is past a length influences nothing, layouts agree, exact ones are exact."""

import dataclasses

import pytest
import torch

from lra.batch import Batch
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec

LENGTHS = (5, 0, 17, 1, 16)
CATALOGUE = ATTENTIONS.catalogue()
FACTS = {name: ATTENTIONS.declared(entry) for name, entry in CATALOGUE.items()}


def parameter(name: str):
    """The name with what it needs to run: a GPU, or a package."""
    missing = CATALOGUE[name].missing
    marks = [pytest.mark.skip(reason=f"{name} needs {', '.join(missing)}")] if missing else []
    return pytest.param(name, marks=[*marks, *([pytest.mark.gpu] if FACTS[name].needs_gpu else [])])


ALL = [parameter(name) for name in FACTS]
EXACT = [parameter(name) for name, facts in FACTS.items() if facts.exact]
WITH_DROPOUT = [parameter(name) for name, facts in FACTS.items() if facts.dropout]


def assert_near(name: str, actual, expected, fp32: float):
    """Within `fp32`, or what bf16 allows an attention that has no fp32."""
    allowed = fp32 if "fp32" in FACTS[name].dtypes else 0.03
    torch.testing.assert_close(actual, expected, atol=allowed, rtol=allowed)


def build(name: str, **changes):
    cls = ATTENTIONS.get(name)
    return cls(cls.Config(), AttentionSpec(**({"heads": 2, "head_dim": 16, "max_length": 20} | changes)))


def device_of(name: str) -> str:
    return "cuda" if FACTS[name].needs_gpu else "cpu"


def packed_batch(name: str) -> Batch:
    length = torch.tensor(LENGTHS, dtype=torch.int32, device=device_of(name))
    start, total = (length.cumsum(0) - length).int(), sum(LENGTHS)
    index = torch.arange(len(LENGTHS), dtype=torch.int32, device=length.device)
    tokens, label = length.new_zeros(total), length.new_zeros(len(LENGTHS)).long()
    return Batch(tokens, start, length, max(LENGTHS), label, index)


def inputs(name: str):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if "fp32" in FACTS[name].dtypes else torch.bfloat16
    return [torch.randn(sum(LENGTHS), 2, 16, generator=generator).to(device_of(name), dtype) for _ in range(3)]


def attend(attention, batch, q, k, v):
    """The attention as the model calls it: padded unless it is ragged."""
    if attention.facts.ragged or batch.padded:
        return attention(q, k, v, batch)
    padded = batch.to_padded()
    out = attention(*(batch.pad(x).flatten(0, 1) for x in (q, k, v)), padded)
    return batch.unpad(padded.pad(out))


@pytest.mark.parametrize("name", EXACT)
def test_exact_attention_is_softmax_attention_of_each_sequence(name):
    q, k, v = inputs(name)
    batch = packed_batch(name)
    out = attend(build(name).eval(), batch, q, k, v)
    for start, length in zip(batch.start.tolist(), LENGTHS, strict=True):
        rows = slice(start, start + length)
        scores = torch.einsum("ihd,jhd->hij", q[rows].double(), k[rows].double()) / 4
        expected = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[rows].double())
        assert_near(name, out[rows].double(), expected, 1e-5)


@pytest.mark.parametrize("name", ALL)
def test_what_is_past_a_length_influences_nothing(name):
    attention, batch = build(name).eval(), packed_batch(name)
    padded = batch.to_padded()
    real = padded.mask().flatten()[:, None, None]
    q, k, v = (batch.pad(x).flatten(0, 1).requires_grad_() for x in inputs(name))
    other = [x.detach().where(real, 7.0).requires_grad_() for x in (q, k, v)]
    out, out_other = attention(q, k, v, padded), attention(*other, padded)
    assert torch.equal(out, out_other)
    weights = torch.randn_like(out).where(real, 0)
    grads = torch.autograd.grad((out * weights).sum(), (q, k, v), materialize_grads=True)
    grads_other = torch.autograd.grad((out_other * weights).sum(), other, materialize_grads=True)
    for grad, grad_other in zip(grads, grads_other, strict=True):
        assert torch.equal(grad, grad_other)
        assert grad.isfinite().all() and not grad.where(~real, 0).any()


@pytest.mark.parametrize("name", ALL)
def test_packed_and_padded_agree(name):
    attention, batch = build(name).eval(), packed_batch(name)
    q, k, v = inputs(name)
    packed = attend(attention, batch, q, k, v)
    padded = batch.to_padded()
    again = batch.unpad(padded.pad(attention(*(batch.pad(x).flatten(0, 1) for x in (q, k, v)), padded)))
    assert_near(name, packed, again, 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_sequences_do_not_see_each_other(name):
    attention, batch = build(name).eval(), packed_batch(name)
    q, k, v = inputs(name)
    out = attend(attention, batch, q, k, v)
    first = batch.start[2]
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[first:] = 3.0
    assert torch.equal(attend(attention, batch, *changed)[:first], out[:first])


@pytest.mark.parametrize("name", ALL)
def test_strided_views_give_the_same_as_copies(name):
    attention, batch = build(name).eval(), packed_batch(name)
    fused = torch.stack(inputs(name), 1)
    views = attend(attention, batch, *fused.unbind(1))
    assert torch.equal(views, attend(attention, batch, *(x.contiguous() for x in fused.unbind(1))))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_acts_in_training_alone_and_follows_the_seed(name):
    attention = build(name, dropout=0.5)
    batch = packed_batch(name).with_seed(torch.tensor(1))
    q, k, v = inputs(name)

    def draw():
        torch.manual_seed(0)
        return attend(attention, batch, q, k, v)

    attention.train()
    assert torch.equal(draw(), draw())
    attention.eval()
    evaluated = draw()
    assert torch.equal(evaluated, attend(attention, dataclasses.replace(batch, seed=None), q, k, v))
    attention.train()
    assert not torch.allclose(draw(), evaluated)


@pytest.mark.parametrize("name", ALL)
def test_half_precision_runs_forward_and_backward(name):
    attention, batch = build(name).eval(), packed_batch(name)
    q, k, v = (x.bfloat16().requires_grad_() for x in inputs(name))
    out = attend(attention, batch, q, k, v)
    assert out.dtype == torch.bfloat16
    out.float().pow(2).sum().backward()
    read = (q, v) if attention.facts.shared_qk else (q, k, v)
    assert all(x.grad is not None and x.grad.isfinite().all() for x in read)
    exact = attend(attention, batch, *inputs(name))
    torch.testing.assert_close(out.float(), exact.float(), atol=0.05, rtol=0.05)


def test_a_head_dimension_outside_the_range_names_the_alternative():
    with pytest.raises(
        UsageError, match=r"attn=flash supports head dimensions 16 to 128, not 8, or use attn=.*standard"
    ):
        build("flash", head_dim=8)


def test_an_attention_that_needs_a_gpu_says_so_before_training():
    attention = build("standard")
    attention.facts = dataclasses.replace(attention.facts, needs_gpu=True)
    assert attention.resolve(torch.device("cuda"), "bf16") == "standard"
    with pytest.raises(UsageError, match=r"attn=standard supports GPUs only, or use attn=.*flash"):
        attention.resolve(torch.device("cpu"), "bf16")
