"""What sees padding, other sequences or later tokens fails the checks, in training alone, too; rounding does not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lra.models.attention.base import Attention
from tests.models.test_conformance import CAUSAL, NEIGHBOURS, ORDER, PADDING, ReadsOwnRowBefore, failures


class AveragesRowsInTraining(ReadsOwnRowBefore):
    """With those past a length, as a BatchNorm does."""

    def mix(self, x, batch):
        return super().mix(x, batch) + x.mean(0) * self.training


class KnowsItsPlaceInTraining(ReadsOwnRowBefore):
    def mix(self, x, batch):
        place = torch.arange(len(x), device=x.device)[:, None]
        return super().mix(x, batch) * (1 + 0.01 * place * self.training)


class SeesLaterInTraining(ReadsOwnRowBefore):
    def mix(self, x, batch):
        later = batch.unpad(F.pad(batch.pad(x), (0, 0, 0, 1))[:, 1:])
        return super().mix(x, batch) + later * self.training


@pytest.mark.parametrize(
    ("broken", "properties"),
    [
        (AveragesRowsInTraining, {PADDING, NEIGHBOURS, ORDER, CAUSAL}),
        (KnowsItsPlaceInTraining, {ORDER}),
        (SeesLaterInTraining, {PADDING, CAUSAL}),
    ],
)
def test_what_leaks_in_training_alone_fails_too(registered, broken, properties):
    found = failures(registered(broken, mixes=True, exact=False))
    assert found.keys() == properties and all("in training " in why for why in found.values())


class DropsAndCounts(ReadsOwnRowBefore):
    """Draws its own dropout in training, and keeps a state there that its next step reads."""

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.register_buffer("steps", torch.tensor(0))

    def mix(self, x, batch):
        self.steps += self.training
        return F.dropout(super().mix(x, batch), 0.1, self.training) * (1 + self.steps * self.training)


def test_a_layer_may_draw_and_keep_a_state_in_training(registered):
    assert failures(registered(DropsAndCounts, mixes=True, exact=False)) == {}


class SumsByFourierTransforms(Attention):
    def forward(self, q, k, v, batch):
        rows = batch.pad(k * v).masked_fill(~batch.mask()[:, :, None, None], 0).float()
        size = 2 * batch.max_length
        decay = torch.exp(-0.1 * torch.arange(batch.max_length, device=v.device))[:, None, None]
        product = torch.fft.rfft(rows, size, 1) * torch.fft.rfft(decay, size, 0)
        return q * batch.unpad(torch.fft.irfft(product, size, 1)[:, : batch.max_length]).to(v.dtype)


class SeesALittleOfTheNext(ReadsOwnRowBefore):
    def mix(self, x, batch):
        return super().mix(x, batch) + 1e-6 * batch.unpad(F.pad(batch.pad(x), (0, 0, 0, 1))[:, 1:])


def test_rounding_of_a_fourier_transform_is_no_later_token(registered):
    subject = registered(SumsByFourierTransforms, exact=False, dropout=False)
    assert failures(subject) == {}


def test_a_mixer_may_see_no_more_than_rounding_of_later_tokens(registered):
    assert CAUSAL in failures(registered(SeesALittleOfTheNext, mixes=True, exact=False))
