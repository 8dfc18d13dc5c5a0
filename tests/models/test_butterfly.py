"""attn=butterfly: what it sees is its layout, options that mean nothing are refused, and runs say what was built."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import lra
from lra.bench.cases import make_batch
from lra.config.compose import compose, restore
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.kernels.flash.layout import Layout
from lra.kernels.flash.reference import reference_attention
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.models.attention.butterfly import ButterflyAttention
from lra.tasks import TASKS
from lra.training.evaluate import test as score
from tests.training.conftest import arguments
from tests.training.test_fit import interrupt_at

REGISTRIES = {"task": TASKS, "attn": ATTENTIONS}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def build(n: int, **options: Any) -> ButterflyAttention:
    return ButterflyAttention(ButterflyAttention.Config(**options), AttentionSpec(heads=2, head_dim=16, max_length=n))


def layout_of(attention: Any) -> Layout:
    assert isinstance(attention, ButterflyAttention) and attention.layout is not None
    return attention.layout


def qkv(total: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(total, 2, 16, generator=generator).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (64, {"block": "8"}),
        (64, {"block": "8", "factors": 1}),
        (64, {"block": "8", "factors": 0, "local": 1}),
        (100, {"block": "16", "globals": 3, "local": 1}),  # neither a power of two nor a multiple of the block
        (45, {"block": "2x8", "factors": 2, "globals": 1}),
        (45, {"block": "8x2"}),
        (5, {"block": "8"}),  # shorter than a block
    ],
)
def test_each_query_sees_what_the_layout_says(n, options, padded):
    attention, batch = build(n, **options).eval(), make_batch((n, 0, n // 2 + 1, 1), padded, CPU)
    q, k, v = qkv(batch.tokens.numel())
    out = attention(q, k, v, batch)
    expected = reference_attention(q, k, v, start=batch.start, length=batch.length, layout=attention.layout)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
    for grad, exact in zip(grads, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(grad, exact, atol=1e-5, rtol=1e-5)


def test_the_layout_is_that_of_the_options():
    position = torch.arange(64)
    seen = layout_of(build(64, block="8", factors=2, local=1, globals=3)).token_mask(position, position)[0]
    a, b = position[:, None] // 8, position // 8
    first = (position < 3)[:, None] | (position < 3)
    assert torch.equal(seen, ((a ^ b) < 3) | ((a - b).abs() <= 1) | first)


def test_all_factors_of_one_block_are_dense_attention():
    batch = make_batch((20, 0, 17), False, CPU)
    q, k, v = qkv(batch.tokens.numel())
    flash = ATTENTIONS.get("flash")
    dense = flash(flash.Config(), AttentionSpec(heads=2, head_dim=16, max_length=20))(q, k, v, batch)
    torch.testing.assert_close(build(20)(q, k, v, batch), dense, atol=1e-6, rtol=1e-6)


def test_resolve_says_what_was_built():
    attention = build(512, factors=1)
    assert attention.resolve(CPU, "fp32") == "butterfly by gather, 1 of 2 factors in blocks of 128x128, density 0.5000"
    assert attention.resolve(GPU, "bf16") == "butterfly by triton, 1 of 2 factors in blocks of 128x128, density 0.5000"
    assert "8 of 8 factors in blocks of 16x64, density " in build(16384, block="16x64").resolve(CPU, "fp32")
    assert build(100).resolve(CPU, "fp32").endswith("0 of 0 factors in blocks of 128x128, density 1.0000")


@pytest.mark.parametrize(
    ("n", "options", "factors"),
    [
        (64, {"density": 0.5}, 3),
        (64, {"density": 0.499}, 2),
        (64, {"density": 1.0}, 3),
        (64, {"density": 0.125}, 0),
        (64, {"density": 0.5, "local": 1}, 2),
        (64, {"density": 0.5, "globals": 4}, 2),
        (60, {"density": 0.4}, 2),
    ],
)
def test_density_picks_the_most_factors_within_it(n, options, factors):
    attention = build(n, block="8", **options)
    assert f" {factors} of 3 factors" in attention.resolve(CPU, "fp32")
    rules = {name: value for name, value in options.items() if name != "density"}
    assert layout_of(attention).key == layout_of(build(n, block="8", factors=factors, **rules)).key
    assert layout_of(attention).density(n) <= options["density"]


def test_triton_takes_multiples_of_16():
    with pytest.raises(UsageError, match=r"attn.block=16x8: Triton takes multiples of 16; .* attn.impl=gather"):
        build(64, block="16x8").resolve(GPU, "bf16")
    with pytest.raises(UsageError, match="attn.block=12: Triton takes multiples of 16"):
        build(64, block="12", impl="triton").resolve(GPU, "bf16")
    assert "by gather" in build(64, block="12").resolve(CPU, "fp32")
    assert "by gather" in build(64, block="12", impl="gather").resolve(GPU, "bf16")
    assert "by triton" in build(64, block="16x32").resolve(GPU, "bf16")


def test_what_cannot_run_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match=r"attn.impl='triton' needs CUDA tensors, got cpu: use attn\.impl='gather'"):
        build(64, impl="triton").resolve(CPU, "fp32")
    with pytest.raises(
        UsageError, match=r"attn.impl='gather' is .*: for attn.deterministic=True use attn.impl='triton'"
    ):
        build(64, impl="gather", deterministic=True).resolve(GPU, "bf16")
    assert "by triton" in build(64, deterministic=True).resolve(GPU, "bf16")
    with pytest.raises(UsageError, match="attn=butterfly supports head dimensions 1 to 128, not 130"):
        ButterflyAttention(ButterflyAttention.Config(), AttentionSpec(heads=2, head_dim=130, max_length=64))


def configure(*fields: str) -> Any:
    return compose(RunConfig, REGISTRIES, ["task=listops", "attn=butterfly", "recipe=demo", *fields]).config


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("block=0", "attn.block=0 is no block: give a side, 128, or queries by keys, 16x256"),
        ("block=-16", "attn.block=-16 is no block"),
        ("block=big", "attn.block=big is no block"),
        ("block=16x", "attn.block=16x is no block"),
        ("block=1x2x3", "attn.block=1x2x3 is no block"),
        ("block=16x24", "attn.block=16x24: one side must divide the other"),
        ("factors=-1", "attn.factors=-1 must be at least 0"),
        ("local=-1", "attn.local=-1 must be at least 0"),
        ("globals=-1", "attn.globals=-1 must be at least 0"),
        ("density=0", "attn.density=0.0 must be above 0 and at most 1"),
        ("density=1.5", "attn.density=1.5 must be above 0 and at most 1"),
        ("density=.nan", "attn.density=.nan: write a number or null"),
        ("impl=sdpa", "attn.impl=sdpa: write auto, triton or gather$"),
    ],
)
def test_bad_values_are_refused_by_name(field, message):
    with pytest.raises(UsageError, match=message) as caught:
        configure(f"attn.{field}")
    assert "\n" not in str(caught.value)


def test_factors_and_density_exclude_each_other():
    with pytest.raises(UsageError, match=r"attn.density picks the factors: give it or attn.factors, not both"):
        configure("attn.factors=1", "attn.density=0.5")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factors": 4}, "attn.factors must be 0 to 3, got 4, with 64 tokens and attn.block=8$"),
        ({"density": 0.1}, "attn.density 0.1 cannot be reached: .* it is 0.125"),
        ({"density": 0.2, "local": 1}, "attn.density 0.2 cannot be reached"),
    ],
)
def test_what_the_length_does_not_allow_is_refused_by_name(options, message):
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        build(64, block="8", **options)
    assert "\n" not in str(caught.value)


def test_blocks_are_written_as_numbers_or_as_words():
    assert configure().attn.sides == (128, 128) and configure("attn.block=64").attn.sides == (64, 64)
    run = configure("attn.block=16x256", "attn.density=1", "attn.globals=2")
    assert run.attn.sides == (16, 256) and run.attn.density == 1.0
    assert restore(RunConfig, REGISTRIES, run.to_saved_dict()) == run


def test_copies_see_the_same_and_weigh_nothing():
    attention, batch = build(64, block="8", factors=1).eval(), make_batch((64, 30), False, CPU)
    assert not attention.state_dict() and not list(attention.buffers())
    q, k, v = qkv(batch.tokens.numel())
    assert torch.equal(copy.deepcopy(attention)(q, k, v, batch), attention(q, k, v, batch))
    assert build(64, block="8", factors=1).layout is attention.layout  # of every layer


def test_dropout_keeps_the_mean():
    n = 2048
    attention = ButterflyAttention(ButterflyAttention.Config(factors=1), AttentionSpec(1, 16, n, dropout=0.5))
    ones = torch.ones(n, 1, 16)
    torch.manual_seed(0)
    out = attention(ones, ones, ones, make_batch((n,), False, CPU))
    assert abs(float(out.mean()) - 1) < 0.01 < float(out.std())
    assert torch.allclose(attention.eval()(ones, ones, ones, make_batch((n,), False, CPU)), ones)


def test_a_run_trains_resumes_and_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sparse = ("attn=butterfly", "attn.block=4", "attn.density=0.4", "attn.globals=1")
    result = lra.fit(*arguments(*sparse, "name=unbroken"))
    built = "attention butterfly by gather, 1 of 3 factors in blocks of 4x4, density 0."
    assert built in capsys.readouterr().out
    assert result["status"] == "finished" and result["config"]["attn"]["density"] == 0.4
    with monkeypatch.context() as patch:
        interrupt_at(7, patch)
        with pytest.raises(RuntimeError, match="power cut"):
            lra.fit(*arguments(*sparse, "name=broken"))
    resumed = lra.fit(*arguments(*sparse, "name=broken", "resume=auto"))
    assert all(resumed[split] == result[split] for split in ("val", "test", "fresh"))

    module = lra.load(result["directory"])
    assert layout_of(module.get_submodule("model.encoder.blocks.0.attention")).density(32) <= 0.4
    assert score(f"init={result['directory']}")["test"] == result["test"]
    dense = score(f"init={result['directory']}", "attn=flash")  # the weights are any attention's
    assert dense["test"]["n"] == result["test"]["n"] and dense["test"]["loss"] != result["test"]["loss"]
