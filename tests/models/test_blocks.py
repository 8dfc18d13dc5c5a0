"""Blocks of other norms and their places, without feed-forward layers, and models without positions."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.config.model import ModelConfig
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.models.norms import BatchNorm, batch_norms, make_norm, normalise, update_statistics
from lra.models.transformer import Encoder
from tests.models.test_transformer import HERE, POOLING, encoder, sequences
from tests.tasks.test_hiding import LAYOUTS, gathered, pairs, split

NORMS, TAKEN = ("layer", "rms", "batch"), torch.zeros(())
GRID = list(itertools.product(NORMS, (False, True), (0, 48)))
PLAIN: dict[str, Any] = {"dropout": 0.0, "attn_dropout": 0.0}


def built(norm: str, post_norm: bool, d_ff: int, attn: str = "flash", **fields: Any) -> Encoder:
    """An encoder none of whose weights and running statistics is where it began."""
    how: Any = {"norm": norm, "post_norm": post_norm, "d_ff": d_ff, "classifier": "linear"}
    model = encoder(attn, **how, **fields)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape) * (1 if weight.dim() == 1 else weight.shape[-1] ** -0.5))
        for each in batch_norms(model):
            each.running_mean.normal_(std=0.3)
            each.running_var.uniform_(0.5, 2)
    return model


def check_gradients(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """They agree within a share of the largest: some are 0 but for rounding, as that of a bias before a batch norm."""
    largest = max(float(each.abs().max()) for each in wanted)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5 * largest), place


def by_hand(model: Encoder, tokens: Tensor) -> Tensor:
    """The rows of one sequence, by PyTorch's layers in float64; batch norms are trained on this sequence alone."""
    weights = {name: value.double() for name, value in model.state_dict(keep_vars=True).items()}
    config = model.config

    def layer(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        gain, shape = weights[f"{name}.weight"], x.shape[-1:]
        if config.norm == "rms":
            return F.rms_norm(x, shape, gain, 1e-5)
        if config.norm == "layer":
            return F.layer_norm(x, shape, gain, weights[f"{name}.bias"])
        mean, var = (weights[f"{name}.{part}"].detach() for part in ("running_mean", "running_var"))
        return F.batch_norm(x, mean, var, gain, weights[f"{name}.bias"], training=model.training)

    def attend(x: Tensor, block: str) -> Tensor:
        q, k, v = layer(x, f"{block}.qkv").unflatten(-1, (3, config.heads, -1)).permute(1, 2, 0, 3)
        return layer(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1), f"{block}.out")

    def feed(x: Tensor, block: str) -> Tensor:
        return layer(F.gelu(layer(x, f"{block}.up")), f"{block}.down")

    x = weights["embedding.weight"][tokens]
    if config.positions == "learned":
        x = x + weights["positions.tables.0"][: len(tokens)]
    for number in range(config.layers):
        for branch, name in ((attend, "attn_norm"), (feed, "ff_norm"))[: 2 if config.d_ff else 1]:
            block = f"blocks.{number}"
            if config.post_norm:
                x = norm(x + branch(x, block), f"{block}.{name}")
            else:
                x = x + branch(norm(x, f"{block}.{name}"), block)
    return x if config.post_norm else norm(x, "norm")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("positions", ["learned", "none"])
@pytest.mark.parametrize(("norm", "post_norm", "d_ff"), GRID)
def test_a_model_is_what_its_fields_say(norm, post_norm, d_ff, positions, training):
    model = built(norm, post_norm, d_ff, positions=positions, **PLAIN).train(training)
    batch = sequences((13,), model)
    wanted, found = by_hand(model, batch.tokens.long()), model.rows(batch)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
    drawn = torch.randn(found.shape)
    check_gradients(*(torch.autograd.grad((rows * drawn).sum(), [*model.parameters()]) for rows in (found, wanted)))


@pytest.mark.parametrize("attn", HERE)
@pytest.mark.parametrize(("norm", "post_norm", "d_ff"), GRID)
def test_evaluation_does_not_depend_on_the_batch_or_layout(norm, post_norm, d_ff, attn):
    model = built(norm, post_norm, d_ff, attn, positions="none")
    together = model(sequences((5, 12, 1, 16), model))
    for layout in ("packed", "padded"):
        batch = sequences((5, 12, 1, 16), model, layout)
        torch.testing.assert_close(model(batch), together, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(sequences((5,), model)), together[:1], atol=1e-5, rtol=1e-5)


MORE: tuple[dict[str, Any], ...] = (
    *({"pooling": pooling} for pooling in POOLING), {"positions": "rotary", "qk_norm": True}, {"causal": True},
    {"positions": "none", "layer_drop": 0.5, "dropout": 0.2}, {"pixels": "numbers", "grid": (4, 4), "axes": 2},
)  # fmt: skip


@pytest.mark.parametrize("fields", MORE, ids=str)
@pytest.mark.parametrize(("norm", "post_norm", "d_ff"), GRID)
def test_training_is_the_same_packed_filled_and_padded(norm, post_norm, d_ff, fields):
    """Its results, its gradients, and the running statistics that it leaves."""
    model = built(norm, post_norm, d_ff, **PLAIN | fields).train()
    found: dict[str, list[Tensor]] = {}
    learned: dict[str, Sequence[Tensor]] = {}
    for name, layout in LAYOUTS.items():
        trained = copy.deepcopy(model)
        batch = gathered(split(vocabulary=9), max_length=15, prefix=trained.prefix, **layout)
        pooled = trained(batch)[:12]  # without what fills it up
        gradients = torch.autograd.grad((pooled * torch.arange(32)).sum(), [*trained.parameters()])
        update_statistics(batch_norms(trained), TAKEN)
        found[name] = [pooled, *trained.buffers()]
        learned[name] = gradients
    for name in ("filled", "padded"):
        for one, other in zip(found[name], found["packed"], strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        check_gradients(learned[name], learned["packed"])


@pytest.mark.parametrize("examples", [split(), pairs()], ids=["sequences", "pairs"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_norm_is_that_of_pytorch_over_the_real_tokens(layout, examples):
    batch = gathered(examples, **LAYOUTS[layout])
    own, theirs = BatchNorm(5), nn.BatchNorm1d(5).double()
    with torch.no_grad():
        for one, other in zip(own.parameters(), theirs.parameters(), strict=True):
            other.copy_(one.normal_())
    count = 12  # sequences; what fills a batch up follows them
    places = list(zip(batch.start.tolist(), batch.length.tolist(), strict=True))[:count]
    rows = torch.cat([torch.arange(start, start + length) for start, length in places])
    x = torch.empty(0)
    for _ in range(3):
        x = 3 * torch.randn(len(batch.tokens), 5) + torch.randn(5)
        x[~torch.zeros(len(x), dtype=torch.bool).index_fill(0, rows, True)] = 1e4
        x.requires_grad_()
        found, wanted = own(x, batch)[rows], theirs(x[rows].double())
        update_statistics([own], TAKEN)
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
        drawn = torch.randn(found.shape)
        for one, other in zip(*(
            torch.autograd.grad((each * drawn).sum(), [x, *norm.parameters()])
            for each, norm in ((found, own), (wanted, theirs))
        ), strict=True):  # fmt: skip
            torch.testing.assert_close(one.double(), other.double(), atol=1e-4, rtol=1e-4)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(own, name).double(), getattr(theirs, name), atol=1e-5, rtol=1e-5)
    assert torch.equal(own.eval()(x, batch)[0], own(x[:1], batch)[0])
    torch.testing.assert_close(own(x, batch).double(), theirs.eval()(x.double()), atol=1e-4, rtol=1e-4)


def test_running_statistics_are_of_a_whole_step_and_of_none_that_is_left_out():
    whole, parts = BatchNorm(4), BatchNorm(4)
    examples, before = split(), {name: value.clone() for name, value in BatchNorm(4).state_dict().items()}
    x = 2 * torch.randn(len(gathered(examples).tokens), 4) + 100  # a mean that is large beside the deviation
    whole(x, gathered(examples))
    lengths = examples.lengths.clip(max=32).cumsum()
    ends = [0, 5, 9, 12]
    for first, last in itertools.pairwise(ends):
        begin, end = (int(lengths[place - 1]) if place else 0 for place in (first, last))
        parts(x[begin:end], gathered(examples, range(first, last)))
    update_statistics([whole, parts], TAKEN)
    for one, other in zip(whole.buffers(), parts.buffers(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole.running_var, 0.9 + 0.1 * x.var(0), atol=1e-5, rtol=1e-5)
    poisoned = BatchNorm(4)
    poisoned(x.clone().fill_(torch.nan), gathered(examples))
    update_statistics([poisoned], torch.ones(()))
    assert all(torch.equal(value, before[name]) for name, value in poisoned.state_dict().items())
    assert not poisoned.sums.any(), "the next step begins with nothing"
    update_statistics([poisoned], TAKEN)
    assert torch.equal(poisoned.running_var, before["running_var"]), "nothing was seen"


@pytest.mark.parametrize("lengths", [(0, 0), (1, 0)])
def test_a_batch_of_one_token_or_of_none_leaves_finite_numbers(lengths):
    for norm, post_norm, d_ff in GRID:
        model = built(norm, post_norm, d_ff).train()
        pooled = model(sequences(lengths, model).with_seed(torch.tensor(0)))
        assert all(each.isfinite().all() for each in torch.autograd.grad(pooled.sum(), [*model.parameters()]))
        update_statistics(batch_norms(model), TAKEN)
        assert pooled.isfinite().all() and all(each.isfinite().all() for each in model.buffers())


@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_in_fp32_under_autocast(norm):
    module, batch = make_norm(ModelConfig(d_model=64, norm=norm)), gathered(split())
    x = torch.randn(len(batch.tokens), 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = normalise(module, x, batch)
    assert found.dtype == torch.float32 and torch.equal(found, normalise(module, x, batch))


def test_only_what_is_asked_for_is_in_a_model():
    keys = {tuple(each): built(*each, positions="none").state_dict().keys() for each in GRID}  # type: ignore[misc]
    plain = encoder().state_dict().keys()
    assert {*plain} - keys["layer", False, 48] == {"positions.tables.0"}
    assert not [key for key in keys["layer", False, 0] if ".up." in key or ".down." in key or "ff_norm" in key]
    assert not [key for key in keys["rms", True, 48] if key.startswith("norm.") or key.endswith("_norm.bias")]
    statistics = {key for key in keys["batch", False, 48] if "running" in key}
    assert len(statistics) == 10 and not [key for key in keys["batch", False, 48] if "sums" in key]


def test_without_positions_a_sequence_is_a_bag_of_tokens():
    model = encoder(positions="none", pooling="mean")
    batch = sequences((16, 9), model)
    order = torch.cat((torch.randperm(16), 16 + torch.randperm(9)))
    moved = dataclasses.replace(batch, tokens=batch.tokens[order])
    torch.testing.assert_close(model(moved), model(batch), atol=1e-6, rtol=1e-5)
    anywhere = dataclasses.replace(batch, positions=torch.randint(99, (25,)))
    assert torch.equal(model(anywhere), model(batch))


@pytest.mark.parametrize("field", ["norm", "post_norm", "d_ff"])
def test_all_norms_and_blocks_are_drawn_alike(field):
    """A field that adds no matrix changes no other matrix's first weights."""
    plain = encoder(layers=1).state_dict()
    fields: dict[str, Any] = {"norm": "batch", "post_norm": True, "d_ff": 0}
    other = encoder(layers=1, classifier="linear", **{field: fields[field]}).state_dict()
    shared = [name for name in plain.keys() & other.keys() if plain[name].ndim > 1]
    assert shared and all(torch.equal(plain[name], other[name]) for name in shared)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_ff": 0}, "model.d_ff=0 leaves the first layer of the classifier no width: set model.classifier=linear"),
        ({"d_ff": -1}, "model.d_ff=-1 must be at least 0"),
        ({"positions": "none", "axes": 2}, "model.axes=2: model.positions=none has no axes; set model.axes=1"),
        ({"positions": "none", "rotary_base": 5.0}, "model.positions=none does not rotate; set model.positions=rotary"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(UsageError, match=message) as error:
        ModelConfig(**fields)
    assert "\n" not in str(error.value)


def gpu_batch() -> Batch:
    batch = gathered(split(vocabulary=9), max_length=15, multiple=64)
    given = {name: value.cuda() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **given)


@pytest.mark.gpu
@pytest.mark.parametrize(("norm", "post_norm", "d_ff"), GRID)
def test_a_gpu_learns_what_a_cpu_learns(norm, post_norm, d_ff):
    """With widths that the fused kernels take where they can, so that a wrong use of them would show."""
    torch.manual_seed(0)
    how: Any = {"d_model": 64, "d_ff": d_ff and 64, "norm": norm, "post_norm": post_norm, "classifier": "linear"}
    model = Encoder(ModelConfig(**how, **PLAIN), ATTENTIONS.get("flash").Config(), vocabulary=9, max_length=15)
    wanted = torch.autograd.grad(
        model(gathered(split(vocabulary=9), max_length=15))[:12].square().sum(), [*model.parameters()]
    )
    update_statistics(batch_norms(model), TAKEN)
    there = copy.deepcopy(model).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        pooled = there(gpu_batch())[:12]
    found = torch.autograd.grad(pooled.square().sum(), [*there.parameters()])
    one, other = (torch.cat([each.cpu().flatten() for each in each]) for each in (found, wanted))
    assert (one - other).norm() < 0.05 * other.norm()
