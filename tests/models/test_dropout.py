"""Dropout between layers: its rate, its independence, and that it depends on the place alone."""

import dataclasses

import pytest
import torch

from lra.batch import Batch
from lra.bench.cases import make_batch
from lra.kernels import effective_dropout
from lra.models.dropout import drop, mix_bits, row_keys

LENGTHS, FEATURES = (300, 0, 700, 24), 256


def batch(lengths=LENGTHS, padded: bool = False, seed: int = 0x123456789ABCDEF, **changes) -> Batch:
    made = make_batch(lengths, padded, torch.device("cpu"), seed=torch.tensor(seed))
    return dataclasses.replace(made, **changes)


def dropped(rate: float = 0.5, site: int = 0, **of_batch) -> torch.Tensor:
    made = batch(**of_batch)
    return drop(torch.ones(made.tokens.numel(), FEATURES), rate, row_keys(made), site) == 0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_holds_for_all_for_each_row_and_for_each_feature(rate):
    found, rate = dropped(rate).double(), effective_dropout(rate)
    rows, features = found.shape
    variance = rate * (1 - rate)
    assert abs(found.mean() - rate) < 4 * (variance / found.numel()) ** 0.5
    assert found.mean(0).std() / (variance / rows) ** 0.5 == pytest.approx(1, abs=0.2)
    assert found.mean(1).std() / (variance / features) ** 0.5 == pytest.approx(1, abs=0.1)


def test_what_is_kept_is_scaled_and_the_gradient_is_the_same_mask():
    made = batch()
    x = torch.randn(1024, FEATURES, requires_grad=True)
    out = drop(x, 0.1, row_keys(made), 2)
    kept = out != 0
    scale = 256 / (256 - 26)  # the rate is a multiple of 1/256, and the mean is kept exactly
    torch.testing.assert_close(out[kept], x[kept] * scale)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, kept * scale)


def test_seeds_sites_sequences_positions_and_features_are_independent():
    first = dropped()
    half = pytest.approx(0.5, abs=0.01)
    others = [dropped(site=1), dropped(site=2), dropped(seed=1), dropped(seed=0x123456789ABCDEF + (1 << 40))]
    others += [dropped(index=torch.tensor([4, 5, 6, 7], dtype=torch.int32))]
    assert all((first == other).double().mean() == half for other in others)
    assert (first[1:] == first[:-1]).double().mean() == half
    assert (first[:, 1:] == first[:, :-1]).double().mean() == half
    signs = 2 * first.double() - 1
    products = (signs.T @ signs / len(signs)).fill_diagonal_(0)
    assert products.abs().max() < 6 / len(signs) ** 0.5


def test_layout_order_and_company_change_nothing():
    packed, padded = batch(), batch(padded=True)
    found, expected = dropped(padded=True), dropped()
    torch.testing.assert_close(found[padded.mask().flatten()], expected)
    alone = dropped(lengths=(700,), index=torch.tensor([2], dtype=torch.int32))
    assert torch.equal(alone, expected[packed.start[2] : packed.start[2] + 700])


def test_no_rate_and_no_keys_leave_all_as_it_is():
    x = torch.randn(1024, FEATURES)
    assert drop(x, 0.0, row_keys(batch()), 0) is x and drop(x, 0.5, None, 0) is x


def test_bf16_stays_bf16():
    x = torch.ones(1024, 8, dtype=torch.bfloat16)
    assert drop(x, 0.5, row_keys(batch()), 0).dtype == torch.bfloat16


def test_the_hash_is_a_bijection_that_spreads_every_bit():
    x = torch.arange(-(1 << 16), 1 << 16, dtype=torch.int32)
    assert len(mix_bits(x).unique()) == len(x)
    for bit in range(31):
        changed = mix_bits(x) ^ mix_bits(x ^ (1 << bit))
        flips = torch.stack([(changed >> b & 1).double().mean() for b in range(32)])
        assert (flips - 0.5).abs().max() < 0.05
