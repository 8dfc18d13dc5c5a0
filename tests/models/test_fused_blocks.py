"""Blocks whose layers around attention are computed by the fused operators."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from lra.batch import Batch
from lra.bench.cases import make_batch
from lra.config.model import ModelConfig
from lra.kernels.layers.fused_layers import on_hopper, supports_feed_forward, supports_projection
from lra.models import transformer
from lra.models.attention import ATTENTIONS
from lra.models.transformer import Encoder


def encoder(
    positions: Literal["learned", "rotary", "none"] = "rotary", attn: str = "flash", **fields: Any
) -> Encoder:  # fmt: skip
    torch.manual_seed(0)
    shared: dict[str, Any] = dict(d_model=64, d_ff=64, heads=2, layers=2, dropout=0.2, attn_dropout=0.0)
    model = ModelConfig(positions=positions, **shared | fields)
    return Encoder(model, ATTENTIONS.get(attn).Config(), vocabulary=9, max_length=40)


def drawn_batch(lengths: tuple[int, ...] = (40, 3, 17), device: str = "cpu", seed: int | None = 5) -> Batch:
    """Packed; in training with a seed."""
    place = torch.device(device)
    batch = make_batch(lengths, False, place, seed=None if seed is None else torch.tensor(seed, device=place))
    return dataclasses.replace(batch, tokens=batch.tokens % 9)


def trained(model: Encoder, compiled: bool = False) -> list[Tensor]:
    """The result of a batch in training, and the gradient of every parameter."""
    batch = drawn_batch()
    found = (torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model)(batch)
    return [found.detach(), *torch.autograd.grad((found * torch.arange(64)).sum(), list(model.parameters()))]


@pytest.fixture
def taken(monkeypatch):
    """Blocks call the operators on a CPU, too, where these are their definition, in fp32; how often, and pooled."""
    calls: list[int] = []
    for name in ("supports_projection", "supports_feed_forward"):
        monkeypatch.setattr(transformer, name, lambda *_: calls.append(1) or True)
    pooled = transformer.pooled_feed_forward
    monkeypatch.setattr(transformer, "pooled_feed_forward", lambda *a, **b: calls.append(1) or pooled(*a, **b))
    yield calls
    torch.compiler.reset()


def by_layers(model: Encoder, function: Any) -> Any:
    """What the function finds with PyTorch's layers in the model."""
    blocks: Any = model.blocks
    for block in blocks:
        block.fused = False
    found = function(model)
    for block in blocks:
        block.fused = True
    return found


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_use_them_and_compute_the_same(positions, compiled, taken):
    """With dropout, a function of the place."""
    model = encoder(positions)
    expected = by_layers(model, trained)
    for actual, wanted in zip(trained(model, compiled), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)
    assert len(taken) == 5


@pytest.mark.parametrize("attn", ["s4d", "mega"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_feed_forward_after_a_mixer_is_fused(attn, compiled, taken):
    """It projects by an identity, which is no parameter."""
    model = encoder("none", attn)
    expected = by_layers(model, trained)
    for actual, wanted in zip(trained(model, compiled), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)
    assert len(taken) == 3
    assert not any(".out." in name for name in model.state_dict())


@pytest.mark.parametrize("pooling", ["max", "cls", "last"])
def test_another_pooling_than_the_mean_is_not_fused(pooling, taken):
    model = encoder("learned", pooling=pooling).eval()  # the tokens are all alike, their places are not
    batch = drawn_batch(seed=None)
    expected = by_layers(model, lambda model: model(batch).detach())
    torch.testing.assert_close(model(batch).detach(), expected, atol=1e-4, rtol=1e-4)
    assert taken


UNFUSED: dict[str, tuple[dict[str, Any], int]] = {  # fields, and how many fused calls they leave in training
    "share": ({"rotary_share": 0.5}, 5),  # a table of the same form
    "bands": ({"rotary_bands": "heads"}, 3),
    "norm": ({"qk_norm": True}, 3),
    "depth": ({"layer_drop": 0.4}, 2),
    "rms": ({"norm": "rms"}, 0),
    "batch": ({"norm": "batch"}, 0),
    "post": ({"post_norm": True}, 0),
    "alone": ({"d_ff": 0, "classifier": "linear"}, 2),
}
ALL = {"rotary_share": 0.5, "rotary_bands": "heads", "qk_norm": True, "layer_drop": 0.4}


@pytest.mark.parametrize("fields", UNFUSED)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_do_not_use_them_for_what_they_do_not_compute(fields, compiled, taken):
    given, calls = UNFUSED[fields]
    model = encoder("rotary", **given)
    expected = by_layers(model, trained)
    for actual, wanted in zip(trained(model, compiled), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)
    assert len(taken) == calls


@pytest.mark.parametrize(("fields", "fused"), [
    ({}, True), ({"positions": "learned"}, True), ({"layer_drop": 0.4}, True), ({"rotary_share": 0.5}, True),
    ({"rotary_bands": "heads"}, False), ({"qk_norm": True}, False), ({"norm": "rms"}, False),
    ({"post_norm": True}, False), ({"d_ff": 0, "classifier": "linear"}, False),
])  # fmt: skip
def test_a_model_says_whether_kernels_compute_all_its_blocks(fields, fused, taken, monkeypatch):
    model = encoder(**fields).eval()
    assert not model.is_fused(), "attention is PyTorch's on a CPU"
    monkeypatch.setattr(ATTENTIONS.get("flash"), "choose_impl", lambda *_: "triton")
    assert model.is_fused() == fused


def test_an_attention_in_pytorch_is_no_kernel(taken):
    assert not Encoder(
        ModelConfig(d_model=64, d_ff=64, attn_dropout=0.0),
        ATTENTIONS.get("linear").Config(),
        vocabulary=9,
        max_length=40,
    ).is_fused()


def test_an_attention_that_turns_its_own_features_leaves_the_projection_fused(taken):
    """Its table of angles may be one for each head: the kernel rotates nothing."""
    torch.manual_seed(0)
    config = ModelConfig(d_model=64, d_ff=64, attn_dropout=0.0, positions="rotary", rotary_bands="heads")
    model = Encoder(config, ATTENTIONS.get("linear").Config(), vocabulary=9, max_length=40).eval()
    batch = drawn_batch(seed=None)
    expected = by_layers(model, lambda model: model(batch).detach())
    torch.testing.assert_close(model(batch).detach(), expected, atol=1e-4, rtol=1e-4)
    assert len(taken) == 5


@pytest.mark.parametrize("fields", [
    {"positions": "none", "norm": "batch"},
    *(
        pytest.param(fields, marks=pytest.mark.slow)
        for fields in ({"positions": "rotary"}, {"positions": "learned"}, ALL, {"post_norm": True})
    ),
])  # fmt: skip
@torch._dynamo.config.patch(error_on_recompile=True)  # pyright: ignore[reportPrivateImportUsage]
def test_what_is_compiled_once_serves_any_number_of_rows(fields, monkeypatch):
    """As `lra.training.step.Step.compile` has it: a packed batch of another size waits for no compiler."""
    for name in ("supports_projection", "supports_feed_forward"):  # a count would be compiled into it
        monkeypatch.setattr(transformer, name, lambda *_: True)
    model = encoder(**fields)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for lengths in ((40, 3, 17), (40, 20, 25), (40, 5, 31)):
        batch = drawn_batch(lengths)
        torch._dynamo.mark_dynamic(batch.tokens, 0)
        compiled(batch).sum().backward()
    torch.compiler.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_evaluation_drops_nothing(compiled, taken):
    model = encoder().eval()
    batch = drawn_batch(seed=None)
    expected = by_layers(model, lambda model: model(batch).detach())
    evaluate = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with torch.inference_mode():
        torch.testing.assert_close(evaluate(batch), expected, atol=1e-4, rtol=1e-4)
    assert len(taken) == 5


@pytest.mark.gpu
def test_a_gpu_says_whether_kernels_compute_all_blocks():
    model = encoder().cuda().eval()
    with torch.autocast("cuda", torch.bfloat16):
        assert model.is_fused() == on_hopper()
    assert not model.is_fused(), "the kernels multiply in 16 bits"


@pytest.mark.gpu
@pytest.mark.parametrize(("fields", "answers"), [
    ({"positions": "learned"}, [True] * 5), ({}, [True] * 5), ({"rotary_share": 0.5}, [True] * 5),
    ({"rotary_bands": "heads"}, [True] * 3), ({"qk_norm": True}, [True] * 3), ({"layer_drop": 0.4}, [True] * 2),
    ({"positions": "none", "attn": "s4d"}, [True] * 3), ({"positions": "none", "attn": "mega"}, [True] * 3),
    ({"norm": "rms"}, []), ({"norm": "batch"}, []), ({"post_norm": True}, []),
    ({"d_ff": 0, "classifier": "linear"}, [True] * 2), ({"positions": "none"}, [True] * 5),
])  # fmt: skip
def test_a_model_on_a_gpu_learns_the_same(fields, answers, monkeypatch):
    """Under autocast and with dropout the gradients by the kernels are the layers', but for rounding."""
    model = encoder(**fields).cuda()
    batch = drawn_batch(device="cuda")
    if not on_hopper():
        pytest.skip("the kernels are for Hopper")
    calls: list[bool] = []
    for takes in (supports_projection, supports_feed_forward):
        monkeypatch.setattr(
            transformer, takes.__name__, lambda *given, takes=takes: calls.append(takes(*given)) or calls[-1]
        )
    pooled = transformer.pooled_feed_forward
    monkeypatch.setattr(transformer, "pooled_feed_forward", lambda *a, **b: calls.append(True) or pooled(*a, **b))

    def gradients(model: Encoder) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            found = model(batch)
        return torch.cat([g.flatten() for g in torch.autograd.grad(found.square().sum(), list(model.parameters()))])

    actual = gradients(model)
    assert calls == answers
    expected = by_layers(model, gradients)
    assert (actual - expected).norm() < 0.03 * expected.norm()
