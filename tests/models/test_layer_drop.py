"""Stochastic depth: which branches are left out of which sequences, in training alone."""

from __future__ import annotations

import copy
import hashlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lra.batch import Batch
from lra.bench.cases import make_batch
from lra.models import transformer
from lra.models.dropout import BRANCH_SITE, branch_keys, drop_branch
from lra.models.transformer import Encoder, EncoderBlock
from lra.tasks.hiding import HIDING_SITE, REPLACING_SITE, SPAN_SITE
from tests.models.test_transformer import encoder, sequences

COUNT, SEED = 6000, 0x123456789ABCDEF


def many(padded: bool = False, seed: int = SEED) -> Batch:
    lengths = tuple(1 + n % 3 for n in range(COUNT))
    return make_batch(lengths, padded, torch.device("cpu"), seed=torch.tensor(seed))


def factors(rate: float = 0.5, site: int = BRANCH_SITE, **of_batch: Any) -> Tensor:
    """What the branch of each sequence is multiplied by, all its rows and features alike."""
    batch = many(**of_batch)
    out_TD = drop_branch(torch.ones(batch.tokens.numel(), 3), rate, branch_keys(batch), site)
    found_B = out_TD[batch.start.long(), 0]
    assert torch.equal(out_TD, batch.per_row(found_B)[:, None].expand(-1, 3))
    return found_B


@pytest.mark.parametrize("rate", [0.125, 0.5, 0.75])
def test_a_share_of_sequences_loses_a_branch_and_that_of_the_others_is_scaled(rate):
    found_B = factors(rate)
    assert found_B.unique().tolist() == [0.0, pytest.approx(1 / (1 - rate))]
    deviation = (rate * (1 - rate) / COUNT) ** 0.5
    assert abs(float((found_B == 0).double().mean()) - rate) < 4 * deviation


def test_seeds_layers_and_branches_are_independent():
    first, half = factors() > 0, pytest.approx(0.5, abs=0.03)
    others = [factors(site=BRANCH_SITE - site) for site in range(1, 5)]
    others += [factors(seed=1), factors(seed=SEED + (1 << 40))]
    assert all((first == (other > 0)).double().mean() == half for other in others)
    assert (first[1:] == first[:-1]).double().mean() == half


def test_the_layout_changes_nothing_and_the_draws_are_those_of_this_version():
    found_B = factors(0.25)
    assert torch.equal(factors(0.25, padded=True), found_B)
    kept = bytes((found_B > 0).tolist())
    assert hashlib.sha256(kept).hexdigest()[:16] == "7320f88784265b08", "as resumed runs need"


def test_nothing_to_drop_leaves_all_as_it_is():
    x_TD = torch.randn(many().tokens.numel(), 3)
    assert drop_branch(x_TD, 0.0, branch_keys(many()), -4) is x_TD and drop_branch(x_TD, 0.5, None, -4) is x_TD
    assert drop_branch(x_TD.bfloat16(), 0.5, branch_keys(many()), -4).dtype == torch.bfloat16


def blocks(model: Encoder) -> list[EncoderBlock]:
    return list(model.blocks)  # type: ignore[arg-type]


def branches(monkeypatch: pytest.MonkeyPatch, model: Encoder, batch: Batch) -> list[tuple[float, int]]:
    """Rate and site of each branch of a forward pass."""
    seen: list[tuple[float, int]] = []
    monkeypatch.setattr(transformer, "drop_branch", lambda x, rate, keys, site: (seen.append((rate, site)), x)[1])
    model(batch)
    return seen


def test_later_layers_drop_more_and_each_branch_has_a_site_of_its_own(monkeypatch):
    model = encoder(layers=4, layer_drop=0.5, attn_dropout=0.0).train()
    seen = branches(monkeypatch, model, sequences((9, 4), model).with_seed(torch.tensor(0)))
    assert [rate for rate, _ in seen] == pytest.approx([0.125, 0.125, 0.25, 0.25, 0.375, 0.375, 0.5, 0.5])
    sites = [site for _, site in seen]
    assert len({*sites}) == 8 and max(sites) < min(HIDING_SITE, REPLACING_SITE, SPAN_SITE)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_sequence_goes_through_the_branches_that_are_kept(layout, pooling):
    """As through a model whose branches are multiplied by their factors, each sequence by itself."""
    model = encoder(layers=3, layer_drop=0.6, dropout=0.0, attn_dropout=0.0, pooling=pooling)
    lengths = (5, 12, 1, 16, 7, 3)
    batch = sequences(lengths, model, layout).with_seed(torch.tensor(SEED))
    found = model.train()(batch)
    combinations = set()
    for place, vector in enumerate(found):
        alone = copy.deepcopy(model).eval()
        factor_of: list[float] = []
        for block, branch in itertools.product(blocks(alone), (0, 1)):
            rows = torch.ones(batch.tokens.numel(), 1)
            kept = drop_branch(rows, block.layer_drop, branch_keys(batch), block.branch_site - branch)
            factor_of.append(float(kept[batch.start[place]]))
            for parameter in (block.down if branch else block.out).parameters():
                parameter.data *= factor_of[-1]
        combinations.add(tuple(factor_of))
        own = sequences(lengths, model)  # evaluated: sequences do not see each other
        torch.testing.assert_close(vector, alone(own)[place], atol=1e-5, rtol=1e-4)
    assert len(combinations) > 3


def test_evaluation_runs_all_and_other_seeds_leave_out_others():
    model, plain = (encoder(layer_drop=share, dropout=0.0, attn_dropout=0.0) for share in (0.5, 0.0))
    batch = sequences((5, 12, 1, 16), model)
    assert torch.equal(model(batch), plain(batch))
    model.train()
    first, again, other = (model(batch.with_seed(torch.tensor(seed))) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_branch_that_no_sequence_keeps_learns_nothing():
    model = encoder(layers=1, layer_drop=0.9, dropout=0.0, attn_dropout=0.0).train()
    batch = next(
        batch
        for seed in range(99)
        if not drop_branch(torch.ones(9, 1), 0.9, branch_keys(batch := sequences((5, 4), model).with_seed(
            torch.tensor(seed))), BRANCH_SITE).any()
    )  # fmt: skip
    (block,) = blocks(model)
    assert not torch.autograd.grad(model(batch).square().sum(), block.out.weight)[0].any()
