"""Causal attention: every attention that can be causal hides later tokens, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lra.config.model import ModelConfig
from lra.errors import UsageError
from lra.kernels.flash.reference import reference_attention
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.flex import length_mask
from lra.models.attention.megatron import MegatronAttention
from lra.models.attention.rabe_staats import RabeStaatsAttention
from lra.models.conformance.expectations import expect_near
from lra.models.conformance.subject import LENGTHS, ROUNDING, Subject, rows_of
from lra.models.transformer import Encoder
from tests.models.test_attention import FACTS, UNCOMPILED, attend, subjects


def causal_subjects(**options: Any) -> Any:
    return subjects(lambda facts: facts.causal, **options)


@causal_subjects()
def test_a_model_that_is_not_causal_sees_later_tokens(subject):
    """And a causal one its own token."""
    batch, given = subject.batch(), subject.inputs()
    own = rows_of(batch, 2)
    middle = own.start + 7
    changed = [x.clone() for x in given]
    for x in changed:
        x[middle : own.stop] = 3.0
    for causal in (True, False):
        module = subject.build(causal=causal).eval()
        out, found = (subject.call(module, batch, *each) for each in (given, changed))
        assert torch.equal(found[own.start : middle], out[own.start : middle]) == causal
        assert not torch.isclose(found[middle : own.stop], out[middle : own.stop]).all(-1).any()


@causal_subjects(slow=("bigbird", "butterfly", "local", "longformer", "megatron", "openai_sparse", "rabe_staats"))
def test_torch_compile_makes_one_graph_for_all_lengths(subject):
    if subject.name in UNCOMPILED:
        pytest.skip(f"{subject.name} {UNCOMPILED[subject.name]}")
    attention: Any = subject.build(max_length=130, causal=True).eval()
    torch.compiler.reset()
    try:
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
        for lengths in (LENGTHS, (3, 9, 2, 1, 4)):
            batch, qkv = subject.batch(lengths), subject.inputs(lengths)
            found, expected = (call(attention, batch, *qkv) for call in (compiled, attend))
            expect_near(found, expected, "the compiled result", ROUNDING[subject.dtype])
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
    own = rows_of(batch, 2)
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
    own, before = rows_of(batch, 2), encoder.rows(batch)
    place = own.start + 9
    batch.tokens[place : own.stop] = 5
    changed = encoder.rows(batch)
    causal = bool(config) or asked
    assert torch.equal(before[own.start : place], changed[own.start : place]) == causal
    torch.testing.assert_close(encoder(batch)[2], changed[own.stop - 1], atol=1e-6, rtol=1e-5)


def test_the_first_token_of_a_causal_model_is_no_pooling():
    with pytest.raises(UsageError, match="model.pooling=cls: the first token of a causal model sees only itself, set"):
        ModelConfig(causal=True, pooling="cls")
