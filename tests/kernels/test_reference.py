"""The definition itself: Philox against published answers, the dropout mask, the reference against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lra.kernels.flash.problem import dropout_threshold
from lra.kernels.flash.reference import keep_mask, philox, reference_attention

# Random123's known-answer tests of philox4x32-10: counter, key, result
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, result):
    k0, k1 = words(key)
    assert philox(words(counter), (k0, k1)) == words(result)


@pytest.mark.parametrize("threshold", [0x28, 0x67, 0x9B, 0xDB])
def test_keep_mask_reads_the_bytes_of_a_call_in_order(threshold):
    """At the origin with seed 0 the 16 bytes are those of the first known answer, each word's lowest byte first."""
    zero = torch.tensor(0)
    mask = keep_mask(zero, 0, zero, zero, torch.arange(16), threshold)
    stream = bytes.fromhex("d5e82766 8dc569e1 4cac57bc d8db009b")
    assert mask.tolist() == [byte >= threshold for byte in stream]


def test_keep_mask_places_seed_index_head_row_and_column():
    """The third known answer: counter (column // 16, row, index, head), the key's low word is the seed's low half."""
    seed = torch.tensor((0x299F31D0 << 32) | 0xA4093822)
    head, row = torch.tensor(0x03707344), torch.tensor(0x85A308D3)
    column = 16 * 0x243F6A88 + torch.arange(16)
    stream = bytes.fromhex("09fe6cd1 ebccfd94 20e40150 a16e1224")
    for threshold in (0x21, 0x95, 0xEB):
        mask = keep_mask(seed, 0x13198A2E, head, row, column, threshold)
        assert mask.tolist() == [byte >= threshold for byte in stream]


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_keep_rate(dropout):
    """1/256 times the threshold is dropped, up to four standard deviations of a binomial."""
    n, threshold = 256, dropout_threshold(dropout)
    rows = torch.arange(n)
    mask = keep_mask(torch.tensor(7), 3, torch.arange(4)[:, None, None], rows[:, None], rows, threshold)
    p = threshold / 256
    assert abs((~mask).double().mean().item() - p) < 4 * (p * (1 - p) / mask.numel()) ** 0.5
    assert torch.unique(mask.flatten(1), dim=0).shape[0] == 4  # heads differ


@pytest.mark.parametrize(("dropout", "threshold"), [(0.0, 0), (0.001, 0), (0.1, 26), (0.5, 128), (0.998, 255)])
def test_dropout_threshold(dropout, threshold):
    assert dropout_threshold(dropout) == threshold


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 0.999, float("nan")])
def test_dropout_out_of_range(dropout):
    with pytest.raises(ValueError, match="dropout"):
        dropout_threshold(dropout)


@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_softmax_attention(causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 12, 2, 8, dtype=torch.float64)
    start, length = torch.tensor([0, 5, 5]), torch.tensor([5, 0, 6])
    out = reference_attention(q, k, v, start=start, length=length, causal=causal, scale=0.7)
    for rows in (slice(0, 5), slice(5, 11)):
        q_one, k_one, v_one = (x[rows].transpose(0, 1) for x in (q, k, v))
        expected = scaled_dot_product_attention(q_one, k_one, v_one, is_causal=causal, scale=0.7).transpose(0, 1)
        torch.testing.assert_close(out[rows], expected)
    assert not out[11:].any()


def test_reference_dropout_scales_what_is_kept_by_the_true_keep_rate():
    v = torch.eye(8, dtype=torch.float64)[:, None, :]
    seed, rows = torch.tensor(5), torch.arange(8)
    start, length, index = torch.tensor([0]), torch.tensor([8]), torch.tensor([2])
    q = torch.zeros_like(v)
    out = reference_attention(q, v, v, start=start, length=length, dropout=0.5, seed=seed, index=index)[:, 0]
    keep = keep_mask(seed, 2, torch.tensor(0), rows[:, None], rows, 128)
    torch.testing.assert_close(out, keep.double() / 8 * 2.0)
