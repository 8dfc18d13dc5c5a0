"""Causal attention: every attention that can be causal hides later tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lra.batch import Batch
from lra.config.model import ModelConfig
from lra.errors import UsageError
from lra.kernels.flash.reference import reference_attention
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.flex import length_mask
from lra.models.attention.megatron import MegatronAttention
from lra.models.attention.rabe_staats import RabeStaatsAttention
from lra.models.transformer import Encoder
from tests.models.test_attention import FACTS, LENGTHS, LONG, Subject, attend, rows, subjects

LENGTHS_OF_CAUSAL = pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["short", "long"])


def causal_subjects(**options: Any) -> Any:
    return subjects(lambda facts: facts.causal, **options)


def in_layout(batch: Batch, layout: str, *tensors: Tensor) -> tuple[Batch, list[Tensor]]:
    """The batch and its rows in a layout. Rows past a length are 7."""
    if layout == "packed":
        return batch, list(tensors)
    padded = batch.to_padded()
    real = padded.mask().flatten()[:, None, None]
    return padded, [batch.pad(x).flatten(0, 1).where(real, 7.0) for x in tensors]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@LENGTHS_OF_CAUSAL
@causal_subjects()
def test_a_later_token_changes_no_earlier_row(subject, lengths, layout):
    """Of a model that is not causal it changes them."""
    for causal in (True, False):
        attention = subject.build(max_length=130, causal=causal).eval()
        batch, qkv = in_layout(subject.batch(lengths), layout, *subject.inputs(lengths))
        out = attend(attention, batch, *qkv)
        for sequence in (number for number, length in enumerate(lengths) if length > 1):
            own = rows(batch, sequence)
            for place in {own.stop - 1, (own.start + own.stop) // 2}:
                changed = [x.clone() for x in qkv]
                for x in changed:
                    x[place : own.stop] = 3.0
                found = attend(attention, batch, *changed)
                assert torch.equal(found[own.start : place], out[own.start : place]) == causal
                assert not torch.equal(found[place : own.stop], out[place : own.stop])


@pytest.mark.parametrize("layout", ["packed", "padded"])
@LENGTHS_OF_CAUSAL
@causal_subjects()
def test_result_and_gradients_are_those_of_the_reference_in_float64(subject, lengths, layout):
    """A pattern of blocks shows what its layout shows, and of that no later token. Nothing past a length acts."""
    attention = subject.build(max_length=130, causal=True).eval()
    batch, qkv = in_layout(subject.batch(lengths), layout, *subject.inputs(lengths))
    weights = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(1)).to(qkv[0])
    if layout == "padded":
        weights = weights.where(batch.mask().flatten()[:, None, None], 0)
    sequences = {"start": batch.start, "length": batch.length, "layout": attention.layout}

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference_attention(q, k, v, **sequences, causal=attention.layout is None)

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
        out = function(*leaves)
        grads = torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)
        return [x.double() for x in (out.where(weights != 0, 0), *grads)]

    found = results(lambda *given: attend(attention, batch, *given), subject.dtype)
    for actual, expected in zip(found, results(exact, torch.float64), strict=True):
        subject.assert_near(actual, expected)


@causal_subjects(slow=("bigbird", "local", "longformer", "openai_sparse"))  # their code is butterfly's
def test_torch_compile_makes_one_graph_for_all_lengths(subject):
    if subject.name in ("flex", "flash_attn"):
        pytest.skip("tests/models/test_attention.py says why")
    attention: Any = subject.build(max_length=130, causal=True).eval()
    torch.compiler.reset()
    try:
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
        for lengths in (LENGTHS, (3, 9, 2, 1, 4)):
            batch, qkv = subject.batch(lengths), subject.inputs(lengths)
            subject.assert_near(compiled(attention, batch, *qkv), attend(attention, batch, *qkv))
    finally:
        torch.compiler.reset()


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here, and these tensors are on the CPU")
@pytest.mark.parametrize("name", ["butterfly", "flash", "megatron"])
def test_the_kernels_are_causal_too(name):
    pytest.importorskip("triton")
    subject, options = Subject(name, "cpu"), {"block": "16"} if name == "butterfly" else {}
    cls: Any = type(subject.build())
    attention: Attention = cls(cls.Config(impl="triton", **options), AttentionSpec(2, 16, 20, 0.25, 3, causal=True))
    batch, qkv = subject.batch(), subject.inputs()
    assert batch.seed is not None
    expected = reference_attention(
        *qkv, start=batch.start, length=batch.length, layout=attention.layout, causal=attention.layout is None,
        dropout=0.25, seed=batch.seed + 3, index=batch.index,
    )  # fmt: skip
    torch.testing.assert_close(attend(attention.train(), batch, *qkv), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [(4, 3), (3, 4), (5, 5), (1, 20)])
def test_chunks_do_not_change_it(chunks):
    subject = Subject("rabe_staats", "cpu")
    batch, qkv = subject.batch(), subject.inputs()
    spec = AttentionSpec(2, 16, 20, causal=True)
    expected = reference_attention(*qkv, start=batch.start, length=batch.length, causal=True)
    found = attend(RabeStaatsAttention(RabeStaatsAttention.Config(*chunks), spec), batch, *qkv)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_megatron_drops_weights_of_earlier_tokens_alone(impl):
    """Its gradients, by both paths: what is hidden has no weight and passes no gradient."""
    if impl == "triton" and torch.cuda.is_available():
        pytest.skip("Triton compiles here, and these tensors are on the CPU")
    subject = Subject("megatron", "cpu")
    spec = AttentionSpec(2, 16, 20, 0.5, causal=True)
    attention = MegatronAttention(MegatronAttention.Config(impl=impl), spec).train()
    batch, qkv = subject.batch(), [x.requires_grad_() for x in subject.inputs()]
    own = rows(batch, 2)
    middle = own.start + 7
    out = attend(attention, batch, *qkv)
    grads = torch.autograd.grad(out[own.start : middle].square().sum(), qkv)
    for grad in grads:
        assert grad[own.start : middle].any() and not grad[middle:].any() and grad.isfinite().all()


@pytest.mark.parametrize("lengths", [(300, 0, 128, 129, 1), (5, 3), (256, 256), (0,)])
def test_flex_skips_blocks_of_later_columns(lengths):
    length, n = torch.tensor(lengths, dtype=torch.int32), max(*lengths, 1)
    mask = length_mask(length, n, causal=True)
    block = torch.arange(-(-n // 128))
    has_rows = block[:, None] * 128 < length[:, None, None]
    assert torch.equal(mask.to_dense()[:, 0].bool(), has_rows & (block <= block[:, None]))
    assert mask.full_kv_num_blocks is not None
    assert torch.equal(mask.full_kv_num_blocks[:, 0], (block * has_rows[:, :, 0]).int())
    place = torch.arange(4)
    assert torch.equal(mask.mask_mod(place, place, place[:, None], place), place <= place[:, None])


def test_what_is_not_causal_is_refused_and_what_is_named_is():
    able = {name for name, facts in FACTS.items() if facts.causal}
    assert able >= {"flash", "standard", "sdpa", "cudnn", "flash_attn", "flex", "megatron", "rabe_staats", "butterfly"}
    assert not able & {"linformer", "reformer", "smyrf", "lsformer", "linear", "performer"}
    for name in FACTS.keys() - able:
        with pytest.raises(
            UsageError, match=rf"^attn={name} supports no causal attention \(model.causal=true"
        ) as error:
            Subject(name, "cpu").build(causal=True)
        others = str(error.value).rpartition("or use attn=")[2].split("|")
        assert "flash" in others and set(others) <= able
    with pytest.raises(UsageError, match="head dimensions") as error:  # another reason: the others are causal too
        Subject("flash", "cpu").build(head_dim=192, causal=True)
    assert set(str(error.value).rpartition("or use attn=")[2].split("|")) <= able


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("config", "asked"), [({"causal": True}, False), ({}, True), ({}, False)])
def test_no_layer_of_a_causal_model_sees_a_later_token(config, asked, layout):
    """By its configuration, or because it is asked for."""
    model = ModelConfig(d_model=32, layers=3, positions="rotary", pooling="last", attn_dropout=0.0, **config)
    torch.manual_seed(0)
    encoder = Encoder(model, ATTENTIONS.get("flash").Config(), vocabulary=9, max_length=17, causal=asked).eval()
    batch = Subject("flash", "cpu").batch()
    batch = batch if layout == "packed" else batch.to_padded()
    own, before = rows(batch, 2), encoder.rows(batch)
    place = own.start + 9
    batch.tokens[place : own.stop] = 5
    changed = encoder.rows(batch)
    causal = bool(config) or asked
    assert torch.equal(before[own.start : place], changed[own.start : place]) == causal
    torch.testing.assert_close(encoder(batch)[2], changed[own.stop - 1], atol=1e-6, rtol=1e-5)


def test_the_first_token_of_a_causal_model_is_no_pooling():
    with pytest.raises(UsageError, match="model.pooling=cls: the first token of a causal model sees only itself, set"):
        ModelConfig(causal=True, pooling="cls")
