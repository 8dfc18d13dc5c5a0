"""The peers: what is unavailable says why, and what joins them to ragged batches is right without their kernels."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lra.bench.cases import make_batch
from lra.errors import UsageError
from lra.kernels.flash.reference import reference_attention
from lra.kernels.testing import max_abs
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.models.attention.flash_attn import FlashAttention3, import_flash_attn
from lra.models.attention.flex import length_mask
from lra.models.attention.sdpa import attend_packed

LENGTHS = (5, 0, 17, 16)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def build(name: str, **changes):
    cls = ATTENTIONS.get(name)
    return cls(cls.Config(), AttentionSpec(**{"heads": 2, "head_dim": 16, "max_length": 20, **changes}))


def qkv(total: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(total, 2, 16, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]


def test_sdpa_is_exact_where_all_lengths_are_equal():
    q, k, v = qkv(3 * 20)
    out = build("sdpa").dense(*(x.view(3, 20, 2, 16) for x in (q, k, v))).flatten(0, 1)
    batch = make_batch((20, 20, 20), True, CPU)
    expected = reference_attention(q, k, v, start=batch.start, length=batch.length)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for grad, exact in zip(*(torch.autograd.grad(o.pow(2).sum(), (q, k, v)) for o in (out, expected)), strict=True):
        torch.testing.assert_close(grad, exact, atol=1e-5, rtol=1e-5)


def test_sdpa_on_a_gpu_refuses_what_flash_attention_2_lacks():
    assert build("sdpa").resolve(GPU, "bf16") == "sdpa by FlashAttention-2"
    assert build("sdpa", head_dim=12).resolve(CPU, "fp32") == "sdpa by PyTorch's CPU kernels"
    with pytest.raises(UsageError, match="no fp32: set trainer.precision=bf16"):
        build("sdpa").resolve(GPU, "fp32")
    with pytest.raises(UsageError, match="multiples of 8 on a GPU, not 12"):
        build("sdpa", head_dim=12).resolve(GPU, "bf16")


@pytest.mark.parametrize("padded", [False, True])
def test_packed_kernels_serve_both_layouts(padded):
    """The rows past the last sequence are NaN in what the kernel returns: they reach neither result nor gradients."""
    batch = make_batch(LENGTHS, padded, CPU)
    q, k, v = qkv(batch.tokens.numel())

    def varlen(q, k, v, bounds, max_length):
        assert bounds.tolist() == [0, 5, 5, 22, 38] and max_length == 17
        out = reference_attention(q, k, v, start=bounds[:-1], length=bounds.diff())
        owned = (torch.arange(len(q)) < bounds[-1])[:, None, None]
        return out.where(owned, float("nan"))

    out = attend_packed(varlen, q, k, v, batch)
    expected = reference_attention(q, k, v, start=batch.start, length=batch.length)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
    for grad, exact in zip(grads, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(grad, exact)


@pytest.mark.parametrize("lengths", [(300, 0, 128, 129, 1), (5, 3), (256, 256), (0,)])
def test_flex_masks_the_columns_past_each_length(lengths):
    length, n = torch.tensor(lengths, dtype=torch.int32), max(*lengths, 1)
    mask = length_mask(length, n)
    blocks = torch.arange(0, -(-n // 128) * 128, 128)
    sees_rows, sees_columns = blocks[:, None] < length[:, None, None], blocks < length[:, None, None]
    assert torch.equal(mask.to_dense()[:, 0].bool(), sees_rows & sees_columns)

    with torch.no_grad():  # PyTorch has FlexAttention's forward only on a CPU
        q, k, v = (torch.randn(len(lengths), 2, n, 16) for _ in range(3))
        usual = create_block_mask(lambda b, h, i, j: j < length[b], len(lengths), None, n, n, device="cpu")
        out, expected = (flex_attention(q, k, v, block_mask=m) for m in (mask, usual))
    real = (torch.arange(n) < length[:, None])[:, None, :, None]
    torch.testing.assert_close(out.where(real, 0), expected.where(real, 0))


@pytest.mark.parametrize("name", ["cudnn", "flex"])
def test_gpu_only_peers_say_so(name):
    with pytest.raises(UsageError, match=rf"attn={name} supports GPUs only, or use attn=.*flash"):
        build(name).resolve(CPU, "bf16")


@pytest.mark.parametrize("name", ["cudnn", "flex"])
def test_peers_without_dropout_refuse_it(name):
    with pytest.raises(UsageError, match=rf"attn={name} supports no dropout .*attn=.*flash\|.*sdpa\|.*standard"):
        build(name, dropout=0.1)


def test_cudnn_takes_multiples_of_8_and_no_fp32():
    with pytest.raises(UsageError, match="multiples of 8, not 20"):
        build("cudnn", head_dim=20)
    with pytest.raises(UsageError, match=r"trainer.precision=bf16, not fp32, or use attn=.*flash"):
        build("cudnn").resolve(GPU, "fp32")


def test_flash_attn_is_unavailable_with_a_reason(monkeypatch):
    monkeypatch.delenv("FA3_LIB", raising=False)
    entry = ATTENTIONS.catalogue()["flash_attn"]
    if not entry.missing:
        pytest.skip("flash-attn is installed")
    assert entry.missing == ("flash_attn or flash_attn_interface or $FA3_LIB",)
    monkeypatch.setenv("FA3_LIB", "/somewhere/_C.so")
    assert not ATTENTIONS.catalogue()["flash_attn"].missing


def test_an_extension_that_is_named_but_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("FA3_LIB", "/nowhere/_C.so")
    import_flash_attn.cache_clear()
    with pytest.raises(UsageError, match=r"attn=flash_attn can't be imported \(FlashAttention-3: .*/nowhere/_C.so"):
        import_flash_attn()


@pytest.mark.parametrize("sequences", [{}, {"cu_seqlens_q": 1, "max_seqlen_q": 20}])
def test_flash_attention_3_is_called_by_its_schema(monkeypatch, sequences):
    """The operators' arguments in their order, as the extension declares them."""
    calls = {}

    def fwd(q, k, v, *, softmax_scale, num_splits, **given):
        calls["fwd"] = given
        return torch.full_like(q, 2.0), q.new_zeros(1), None, None

    def bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, *, softmax_scale, **given):
        calls["bwd"] = given
        for x in (dq, dk, dv):
            x.fill_(3.0)
        return dq, dk, dv

    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=fwd, bwd=bwd), raising=False)
    q, k, v = qkv(20)
    out = FlashAttention3.apply(q, k, v, sequences)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert calls == {"fwd": sequences, "bwd": sequences}
    assert max_abs(out) == 2 and all(max_abs(g) == 3 for g in grads)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "cudnn", "flex", "flash_attn"])
def test_peers_are_exact_on_ragged_batches(name, padded):
    if missing := ATTENTIONS.catalogue()[name].missing:
        pytest.skip(f"needs {', '.join(missing)}")
    attention = build(name)
    if not attention.facts.ragged and not padded:
        pytest.skip("takes padded batches only")
    lengths = (300, 0, 17, 128, random.Random(0).randint(100, 300))
    batch = make_batch(lengths, padded, GPU)
    q, k, v = qkv(batch.tokens.numel(), GPU, torch.bfloat16)
    out = attention(q, k, v, batch)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference_attention(*exact, start=batch.start, length=batch.length)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
    for grad, reference in zip(grads, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        torch.testing.assert_close(grad.double(), reference, atol=0.05, rtol=0.05)


def test_attentions_without_options_do_not_share_a_configuration():
    names = [cls.Config().name for cls in (ATTENTIONS.get("cudnn"), ATTENTIONS.get("sdpa"), ATTENTIONS.get("standard"))]
    assert names == ["cudnn", "sdpa", "standard"]
