"""Linear attention with rotary positions: its features are turned, its normaliser is not."""

from __future__ import annotations

import pytest
import torch

from lra.bench.cases import make_batch
from lra.models.attention import Capabilities
from tests.models.test_linear_attentions import CPU, LENGTHS, build, elu_features, qkv


@pytest.mark.parametrize("padded", [False, True])
def test_features_are_turned_and_the_normaliser_is_not(padded):
    """Equation 19 of RoFormer, arXiv 2104.09864: pairs of features as complex numbers, in float64."""
    attention, batch = build("linear"), make_batch(LENGTHS, padded, CPU)
    q, k, v = qkv(batch.tokens.numel())
    angles_TP = torch.rand(len(q), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 6
    turn = torch.polar(torch.ones_like(angles_TP), angles_TP)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True):
        rows = slice(start, start + length)
        for head in range(2 if length else 0):
            a, b = (elu_features(x[rows, head].double()) for x in (q, k))
            queries, keys = (torch.complex(x[:, :8], x[:, 8:]) * turn[rows] for x in (a, b))
            weights = (queries @ keys.conj().T).real / (a @ b.T).sum(1, keepdim=True)
            expected[rows, head] = weights @ v[rows, head].double()
    out = attention(q, k, v, batch, (angles_TP.cos().float(), angles_TP.sin().float()))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    sums = torch.randn_like(out)
    exact = torch.autograd.grad((expected * sums).sum(), (q, k, v))
    for grad, grad_exact in zip(torch.autograd.grad((out * sums).sum(), (q, k, v)), exact, strict=True):
        torch.testing.assert_close(grad, grad_exact, atol=1e-4, rtol=1e-4)


def test_what_reads_padded_batches_can_not_turn_its_features():
    with pytest.raises(ValueError, match="rotates=True needs ragged=True"):
        Capabilities(exact=False, paper="", ragged=False, rotates=True)
