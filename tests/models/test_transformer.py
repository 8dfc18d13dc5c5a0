"""The encoder: padding invariance for every position and pooling, CLS, two axes, options that act."""

import dataclasses
import itertools
from typing import Any, Literal

import pytest
import torch
from torch.nn import functional as F

from lra.batch import Batch
from lra.bench.cases import make_batch
from lra.config.model import ModelConfig
from lra.data.split import Split
from lra.errors import UsageError
from lra.models import embedding, transformer
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention
from lra.models.positions import LearnedPositions, position_angles, rotate, token_coordinates
from lra.models.transformer import Encoder

HERE = sorted(  # the attentions that run on a CPU
    entry.name
    for entry in ATTENTIONS.catalogue().values()
    if not entry.missing and not ATTENTIONS.facts_of(entry).needs_gpu
)
MIXERS = [name for name in HERE if ATTENTIONS.facts_of(ATTENTIONS.catalogue()[name]).mixes]
POSITIONS, POOLING = ("learned", "sinusoidal", "rotary"), ("mean", "max", "cls", "last")


def encoder(attn: str = "flash", grid=None, **fields: Any) -> Encoder:
    torch.manual_seed(0)
    small: dict[str, Any] = {"d_model": 32, "d_ff": 48}
    attention = ATTENTIONS.get(attn)
    if not attention.facts.dropout:
        small["attn_dropout"] = 0.0
    config = ModelConfig(**(small | fields))
    return Encoder(config, attention.Config(), vocabulary=9, max_length=16, grid=grid).eval()


def sequences(
    lengths: tuple[int, ...], model: Encoder, layout: Literal["packed", "padded"] = "packed", max_length: int = 16
) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(9, (n,), generator=generator).numpy().astype("uint8") for n in lengths]
    offsets = torch.tensor([0, *lengths]).cumsum(0).numpy()
    split = Split.from_offsets(
        torch.tensor([t for s in tokens for t in s], dtype=torch.uint8).numpy(), offsets, offsets[:-1] * 0
    )
    rows = range(len(lengths))
    return split.collate(rows, layout=layout, max_length=max_length, prefix=model.prefix).to("cpu")


@pytest.mark.parametrize(("positions", "pooling"), list(itertools.product(POSITIONS, POOLING)))
@pytest.mark.parametrize("attn", HERE)
def test_a_sequence_does_not_depend_on_its_batch_or_layout(attn, positions, pooling):
    if attn in MIXERS and positions == "rotary":
        with pytest.raises(UsageError, match=rf"positions=rotary changes .* attn={attn} is a mixer .*positions=none$"):
            encoder(attn, positions=positions)
        return
    model = encoder(attn, positions=positions, pooling=pooling)
    lengths = (5, 12, 1, 16)
    together = model(sequences(lengths, model))
    torch.testing.assert_close(model(sequences(lengths, model, "padded")), together, atol=1e-5, rtol=1e-5)
    alone = model(sequences(lengths[:1], model))
    torch.testing.assert_close(alone, together[:1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", POOLING)
def test_an_empty_sequence_pools_to_zeros(pooling):
    model = encoder(pooling=pooling)
    for layout in ("packed", "padded"):
        for lengths in ((4, 0), (0, 4)):
            pooled = model(make_batch(lengths, layout == "padded", torch.device("cpu")))
            assert pooled.isfinite().all() and [bool(row.any()) for row in pooled] == [n > 0 for n in lengths]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("attn", HERE)
def test_a_batch_may_have_no_token_at_all(attn, layout):
    model = encoder(attn)
    pooled = model(sequences((0, 0), model, layout))
    pooled.sum().backward()
    assert pooled.shape == (2, 32) and not pooled.any()


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("axes", [1, 2])
def test_order_matters(positions, axes):
    model = encoder(positions=positions, axes=axes, grid=(4, 4))
    batch = sequences((16,), model)
    swapped = Batch(batch.tokens.flip(0), batch.start, batch.length, batch.max_length, batch.label, batch.index)
    assert not torch.allclose(model(batch), model(swapped), atol=1e-5)


def test_explicit_positions_replace_the_count():
    model = encoder()
    batch = sequences((3, 2), model)
    counted = dataclasses.replace(batch, positions=torch.tensor([0, 1, 2, 0, 1]))
    moved = dataclasses.replace(batch, positions=torch.tensor([3, 1, 2, 0, 1]))
    assert torch.equal(model(batch), model(counted))
    assert not torch.allclose(model(batch)[0], model(moved)[0]) and torch.allclose(model(batch)[1], model(moved)[1])


def test_two_axes_need_an_image():
    with pytest.raises(UsageError, match=r"model.axes=2 needs an image task"):
        encoder(axes=2)


def test_two_axes_place_a_token_by_its_row_and_column():
    model = encoder(axes=2, grid=(4, 4), positions="learned")
    assert isinstance(model.positions, LearnedPositions)
    rows, columns = model.positions.tables
    one = torch.zeros(1, dtype=torch.int32)
    batch = Batch(one, one, one + 1, 1, one, one, positions=one + 2 * 4 + 3)
    found = model.positions(token_coordinates(batch, 2, 4, False))
    assert torch.equal(found[0], rows[2] + columns[3])


def test_an_image_may_be_wider_than_it_is_high():
    model, seen = encoder(axes=2, grid=(2, 8)), []
    model.positions.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(sequences((16,), model))
    assert seen[0].tolist() == [[row, column] for row in range(2) for column in range(8)]


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 16).double()

    def score(i: int, j: int) -> torch.Tensor:
        a, b = (position_angles(torch.tensor([[n]]), 16) for n in (i, j))
        return (rotate(q, a.cos(), a.sin()) * rotate(k, b.cos(), b.sin())).sum()

    torch.testing.assert_close(score(3, 8), score(103, 108), atol=1e-4, rtol=1e-4)
    assert not torch.isclose(score(3, 8), score(3, 9))


@pytest.mark.parametrize("attn", ["flash", "linear"])
def test_a_rotary_model_sees_distances_alone(attn):
    model = encoder(attn, positions="rotary", pooling="mean")
    batch = sequences((9, 4), model)
    place = torch.cat([torch.arange(9), torch.arange(4)])
    here, there, stretched = (
        model(dataclasses.replace(batch, positions=place_T)) for place_T in (place, place + 100, 2 * place)
    )
    torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(stretched, here, atol=1e-3)


def by_hand(model: Encoder, tokens: torch.Tensor) -> torch.Tensor:
    """One sequence's rows after the last norm: pre-norm blocks whose two branches are added to what they read."""
    weights = model.state_dict()

    def layer(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = weights["embedding.weight"][tokens] + weights["positions.tables.0"][: len(tokens)]
    for number in range(model.config.layers):
        block = f"blocks.{number}"
        qkv = layer(norm(x, f"{block}.attn_norm"), f"{block}.qkv").unflatten(-1, (3, model.config.heads, -1))
        q, k, v = qkv.permute(1, 2, 0, 3)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = x + layer(seen, f"{block}.out")
        x = x + layer(F.gelu(layer(norm(x, f"{block}.ff_norm"), f"{block}.up")), f"{block}.down")
    return norm(x, "norm")


@pytest.mark.parametrize("attn", ["flash", "standard"])
def test_a_block_adds_attention_and_a_feed_forward_to_the_residual_each_of_its_norm(attn):
    model = encoder(attn, layers=2)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # no norm, bias or table is where it began
            weight.add_(0.3 * torch.randn(weight.shape) * (1 if weight.dim() == 1 else weight.shape[-1] ** -0.5))
            assert weight.std() > 0, name
    batch = sequences((9,), model)
    expected = by_hand(model, batch.tokens.long())
    torch.testing.assert_close(model.rows(batch), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(batch), expected.mean(0, keepdim=True), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", POOLING)
def test_a_sequence_is_the_mean_the_maximum_the_first_or_the_last_of_its_rows(pooling):
    model = encoder(pooling=pooling)
    for layout in ("packed", "padded"):
        batch = sequences((5, 9), model, layout)
        rows, found = model.rows(batch), model(batch)
        for start, length, vector in zip(batch.start.tolist(), batch.length.tolist(), found, strict=True):
            own = rows[start : start + length]
            expected = {"mean": own.mean(0), "max": own.amax(0), "cls": own[0], "last": own[-1]}[pooling]
            torch.testing.assert_close(vector, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("pooling", "masked", "ids", "places"), [
    ("mean", False, (None, None), (9, 16)), ("cls", False, (9, None), (10, 17)),
    ("mean", True, (None, 9), (10, 16)), ("cls", True, (9, 10), (11, 17)),
])  # fmt: skip
def test_cls_and_mask_follow_the_vocabulary_and_cls_has_a_place(pooling, masked, ids, places):
    model = Encoder(ModelConfig(pooling=pooling), ATTENTIONS.get("flash").Config(), vocabulary=9, max_length=16,
                    masked=masked)  # fmt: skip
    assert (model.prefix, model.mask) == ids
    assert (len(model.embedding.weight), len(model.state_dict()["positions.tables.0"])) == places
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    assert {attention.spec.max_length for attention in attentions} == {places[1]}


def test_dropout_acts_in_training_alone():
    model = encoder(dropout=0.5, attn_dropout=0.0)
    batch = sequences((9, 4), model)
    assert torch.equal(model(batch), model(batch))
    evaluated = model(batch)
    model.train()
    first, again, other = (model(batch.with_seed(torch.tensor(seed))) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, evaluated)


def test_attention_sees_views_of_one_projection():
    model, seen = encoder(), []
    model.blocks[0].get_submodule("attention").register_forward_hook(lambda _, args, out: seen.append(args[:3]))
    model(sequences((9, 4), model))
    q, k, v = seen[0]
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_each_place_of_dropout_has_a_mask_of_its_own(monkeypatch):
    sites: list[int] = []
    for module in (embedding, transformer):
        monkeypatch.setattr(module, "drop", lambda x, rate, keys, site: (sites.append(site), x)[1])
    model = encoder(layers=3, dropout=0.1, attn_dropout=0.0).train()
    model(sequences((9, 4), model).with_seed(torch.tensor(0)))
    assert sites == list(range(10)), "of the embedding, and of each layer's three results"


def test_attention_gets_its_dropout_and_the_embedding_its_deviation():
    model = encoder(attn_dropout=0.25, dropout=0.5, embedding_std=3.0, d_model=64)
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    assert attentions and {attention.spec.dropout for attention in attentions} == {0.25}
    assert [attention.spec.layer for attention in attentions] == [0, 1], "each draws its own"
    assert float(model.embedding.weight.detach().std()) == pytest.approx(3.0, rel=0.15)


ROTARY: tuple[dict[str, Any], ...] = ({"rotary_share": 0.5}, {"rotary_bands": "heads"}, {"qk_norm": True})


@pytest.mark.parametrize("fields", ROTARY, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("attn", [name for name in HERE if name not in MIXERS])
def test_every_attention_has_other_rotations_and_normalised_queries(attn, fields):
    """They act, alike in packed and padded batches."""
    plain, model = (encoder(attn, positions="rotary", **given) for given in ({}, fields))
    model.load_state_dict(plain.state_dict(), strict=False)  # the norms alone are new, and draw nothing
    batch = sequences((5, 12, 1, 16), model)
    found = model(batch)
    assert not torch.allclose(found, plain(batch), atol=1e-4)
    padded = model(sequences((5, 12, 1, 16), model, "padded"))
    torch.testing.assert_close(padded, found, atol=1e-5, rtol=1e-5)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.sum(), [*model.parameters()]))


@pytest.mark.parametrize("fields", ROTARY[:2], ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("attn", ["flash", "linear"])
def test_other_rotations_see_distances_alone(attn, fields):
    model = encoder(attn, positions="rotary", **fields)
    batch, place_T = sequences((9, 4), model), torch.cat([torch.arange(9), torch.arange(4)])
    here, there, stretched = (
        model(dataclasses.replace(batch, positions=moved_T)) for moved_T in (place_T, place_T + 100, 2 * place_T)
    )
    torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(stretched, here, atol=1e-3)
