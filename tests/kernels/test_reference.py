"""The definition itself: Philox against published answers, draws, the dropout mask, the reference against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lra.kernels.dropout import dropout_threshold
from lra.kernels.flash.reference import draw_words, keep_mask, philox, reference_attention

# Random123's known-answer tests of philox4x32-7 and -10: rounds, counter, key, result
KNOWN_ANSWERS = [
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("rounds", "counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(rounds, counter, key, result):
    k0, k1 = words(key)
    assert philox(words(counter), (k0, k1), rounds) == words(result)


# by a program in C: key, row, column, result
DRAWS = [
    ("5f6fb709 0d893f64 4f121f81 4f730a48", 0, 0, "4bc3d129 d6e669ba 747cc6de 23941c2b"),
    ("4dfccaba 190a87f0 c47362ba b6b5242a", 0x05A308D3, 0x043F6A88, "45a58044 54691777 f3addbde ed1a88bd"),
    ("00000000 00000000 00000000 00000000", 1, 0, "c2f4d65b 40cbb27f 7c29a9d2 84520067"),
    ("00000000 00000000 00000000 00000000", 1, 2, "9f0f4aec 3da83c84 51a549f7 f8c2ab49"),
    ("ffffffff ffffffff ffffffff ffffffff", 0xFFFFFFFF, 0xFFFFFFFE, "fcc0f39d d108f25b 95b1bd26 30963882"),
]


@pytest.mark.parametrize(("key", "row", "column", "result"), DRAWS)
def test_draw_known_answers(key, row, column, result):
    assert draw_words(words(key), torch.tensor(row), torch.tensor(column)) == words(result)


# The 16 weights of a draw, in the order of its bytes when halves are rotated: word, then column and row within it.
PLACES = [(8 * below, 8 * word + right) for word in range(4) for right in range(2) for below in range(2)]


@pytest.mark.parametrize("threshold", [0x28, 0x57, 0x86, 0xCD])
def test_keep_mask_reads_the_bytes_of_a_draw_in_order(threshold):
    """With seed 0, index 0 and head 0 the key is Philox's first known answer, and the first draw's."""
    zero = torch.tensor(0)
    row, column = torch.tensor(PLACES).unbind(1)
    mask = keep_mask(zero, 0, zero, row, column, threshold)
    stream = bytes.fromhex("53a28697 74d3cdad bd8df8e8 56382847")
    assert mask.tolist() == [byte >= threshold for byte in stream]


def test_keep_mask_places_seed_index_head_row_and_column():
    seed, index, head = torch.tensor((0x299F31D0 << 32) | 0xA4093822), torch.tensor(5), torch.tensor(7)
    row, column = torch.tensor(PLACES).unbind(1)
    row += 16 * (0x05A308D3 // 8) + 0x05A308D3 % 8
    column += 32 * (0x043F6A8A // 8) + 0x043F6A8A % 8
    key = philox((index, head, torch.tensor(0), torch.tensor(0)), words("a4093822 299f31d0"))
    drawn = draw_words(key, torch.tensor(0x05A308D3), torch.tensor(0x043F6A8A))
    halves = [f"{half:016b}" for word in drawn for half in (int(word) & 0xFFFF, int(word) >> 16)]
    stream = b"".join(int(bits[1:] + bits[0], 2).to_bytes(2, "little") for bits in halves)
    for threshold in (0x1E, 0x4A, 0xD2):
        mask = keep_mask(seed, int(index), head, row, column, threshold)
        assert mask.tolist() == [byte >= threshold for byte in stream]


@pytest.mark.parametrize("threshold", [26, 128, 129])
def test_masks_have_no_structure(threshold):
    """As matrices of independent elements: in the rate of each row and column, over shifts, and in rank.

    The largest singular value of such a matrix is 2 sqrt(n) standard deviations; a relation between the elements of
    two rows and two columns, as a cheap function of row and column has, would show in it.
    """
    n, heads = 1024, torch.arange(2)[:, None, None]
    rows = torch.arange(n)
    p = threshold / 256
    dropped = ~keep_mask(torch.tensor(11), 2, heads, rows[:, None], rows, threshold)
    x = (dropped.double() - p) / (p * (1 - p)) ** 0.5
    for sums in (x.sum(1), x.sum(2)):
        assert sums.abs().max() < 5.5 * n**0.5
    spectrum = torch.fft.fft2(x)
    for a, b in ((0, 0), (0, 1)):
        shifted = torch.fft.ifft2(spectrum[a] * spectrum[b].conj()).real
        assert (shifted.flatten()[int(a == b) :].abs() < 6 * n).all()
    assert (torch.linalg.matrix_norm(x, 2) < 2.05 * n**0.5).all()


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
