"""Queries and keys of a fixed length: what their norm computes, where it stands, and what else treats it as a norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lra.config.optim import OptimConfig
from lra.models.positions import rotate
from lra.models.transformer import Encoder, EncoderBlock, HeadNorm
from lra.training.optim import parameter_groups
from tests.models.test_transformer import encoder, sequences

# PyTorch says so once where it can't use its fused kernel
pytestmark = pytest.mark.filterwarnings("error:Mismatch dtype")


def normalised(attn: str = "flash", **fields: Any) -> Encoder:
    """An encoder whose scales are not 1."""
    model = encoder(attn, positions="rotary", qk_norm=True, **fields)
    for module in model.modules():
        if isinstance(module, HeadNorm):
            torch.nn.init.uniform_(module.weight, 0.5, 2)
    return model


def first_block(model: Encoder) -> EncoderBlock:
    return model.blocks[0]  # type: ignore[return-value]


def test_each_head_is_divided_by_its_root_mean_square_and_scaled():
    norm = HeadNorm(8)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 2, 8, dtype=torch.float64) * torch.tensor([1e-2, 1e2])[:, None]
    x.requires_grad_()
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    found = norm(x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    sums = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad((each * sums).sum(), (x, norm.weight)) for each in (found, wanted)),
                          strict=True):  # fmt: skip
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_it_is_in_fp32_and_keeps_the_dtype_under_autocast(scale):
    norm, x = HeadNorm(8), (scale * torch.randn(5, 2, 8)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.bfloat16 and torch.equal(found, norm(x.float()).bfloat16())


@pytest.mark.parametrize("attn", ["flash", "reformer"])
def test_attention_sees_queries_and_keys_of_one_length_normalised_before_they_turn(attn):
    model, seen = normalised(attn), []
    block, batch = first_block(model), sequences((9, 4), model)
    block.attention.register_forward_hook(lambda _, given, out: seen.extend(given[:3]))
    entered: list[Any] = []
    block.register_forward_pre_hook(lambda _, given: entered.extend(given))
    model(batch)
    x_TD, _, rotary, *_ = entered
    qkv = block.qkv(block.attn_norm(x_TD)).unflatten(-1, (-1, 2, 16))
    assert block.q_norm is not None and (block.k_norm is None) == (attn == "reformer")
    keys = block.q_norm if block.k_norm is None else block.k_norm
    for part, norm, there in zip(seen, (block.q_norm, keys), (qkv[:, 0], qkv[:, -2]), strict=False):
        torch.testing.assert_close(part, rotate(norm(there), *rotary))
    torch.testing.assert_close(seen[2], qkv[:, -1])


def test_without_it_a_model_has_no_norm_more():
    assert not any(isinstance(module, HeadNorm) for module in encoder().modules())


@pytest.mark.parametrize("attn", ["flash", "reformer"])
def test_its_scales_decay_where_those_of_norms_do(attn):
    model = normalised(attn)
    scales = {id(each.weight) for each in model.modules() if isinstance(each, HeadNorm | torch.nn.LayerNorm)}
    assert len(scales) == 2 * 2 + 1 + 2 * (2 if attn == "flash" else 1)
    decays = {
        id(parameter): group.get("weight_decay", 0.1)
        for group in parameter_groups(OptimConfig(weight_decay=0.1, decay="matrices"), model)
        for parameter in group["params"]
    }
    assert {decays[scale] for scale in scales} == {0.0} and 0.1 in decays.values()
