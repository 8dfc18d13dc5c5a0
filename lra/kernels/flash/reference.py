"""The definition of attention in plain PyTorch. Tests compare every kernel and every fallback with this file."""

from __future__ import annotations

import torch
from torch import Tensor

from lra.kernels.dropout import dropout_threshold
from lra.kernels.flash.layout import Layout

LOW_32_BITS = 0xFFFFFFFF
PHILOX_ROUNDS = 7  # the fewest that pass every test of BigCrush (Salmon et al., SC 2011, table 2)
ROW_FACTORS = (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1)  # odd, and otherwise arbitrary


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    start: Tensor,
    length: Tensor,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    index: Tensor | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """Attention of ragged rows `[T, H, D]` that writes out the scores. The arguments are those of `flash_attention`.

    It works in any dtype (float64 for tests), and autograd differentiates it. Rows that no sequence owns give zeros. So
    does a query that sees no key of its sequence, which only happens with a `layout`.
    """
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    threshold = dropout_threshold(dropout)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for b, (first, count) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        rows = slice(first, first + count)
        if count == 0:
            continue
        s_HMN = torch.einsum("mhd,nhd->hmn", q[rows], k[rows]) * scale
        position = torch.arange(count, device=q.device)
        if causal:
            s_HMN = s_HMN.masked_fill(position > position[:, None], float("-inf"))
        sees = torch.ones((), dtype=s_HMN.dtype, device=q.device)  # 0 for queries that see nothing
        if layout is not None:
            seen = layout.token_mask(position, position).to(q.device)
            seen = seen[torch.arange(q.shape[1], device=q.device) % len(seen)]
            sees = seen.any(-1, keepdim=True)
            s_HMN = s_HMN.masked_fill(~seen, float("-inf")).masked_fill(~sees, 0.0)
        p_HMN = s_HMN.softmax(dim=-1) * sees
        if threshold:
            assert seed is not None
            head = torch.arange(q.shape[1], device=q.device)[:, None, None]
            which = b if index is None else int(index[b])
            keep_HMN = keep_mask(seed, which, head, position[:, None], position, threshold)
            p_HMN = p_HMN * keep_HMN * (256 / (256 - threshold))
        out[rows] = torch.einsum("hmn,nhd->mhd", p_HMN, v[rows])
    return out


def keep_mask(seed: Tensor, index: int, head: Tensor, row: Tensor, column: Tensor, threshold: int) -> Tensor:
    """Whether dropout keeps the weight at (head, row, column) of sequence `index`; bool, the arguments broadcast.

    Each head of a sequence has a key, four words by Philox-4x32-7 of the counter (index, head, 0, 0) with the halves of
    `seed`, the low one first. One `draw_words` serves 16 weights: two rows, 8 apart, by eight columns, two neighbours
    in each of four groups of 8, as one thread has them in the accumulator of a tensor-core product. That of (row,
    column) is at (row // 16 * 8 + row % 8, column // 32 * 8 + column % 8 // 2 * 2); its word column % 32 // 8 has a
    half for each of the two columns, the lower one first, and that, rotated by one bit, a byte for each of the two
    rows. A weight is dropped when its byte is below `threshold`. Rotated, because the other 15 bits of a half, and of
    the half with its bytes swapped, are then compared as they are by instructions for two fp16 magnitudes.
    """
    zero = torch.zeros_like(head)
    key = philox((zero + index, head, zero, zero), (seed & LOW_32_BITS, (seed >> 32) & LOW_32_BITS))
    words = torch.stack(draw_words(key, row // 16 * 8 + row % 8, column // 32 * 8 + column % 8 // 2 * 2))
    word = words.gather(0, torch.broadcast_to(column % 32 // 8, words.shape[1:])[None])[0]
    half = word >> 16 * (column % 2) & 0xFFFF
    return ((half << 1 | half >> 15) >> 8 * (row % 16 // 8)) & 0xFF >= threshold


def draw_words(key: tuple[Tensor, ...], row: Tensor, column: Tensor) -> tuple[Tensor, ...]:
    """Four random words of 32 bits for each (row, column), all in int64 tensors that broadcast; columns are even.

    The words are a hash of the place in the manner of pcg4d (Jarzynski and Olano, JCGT 9(3), 2020). Sums with products
    carry bits upwards, and swapping the halves of each word brings them down again. On a GPU it takes less time than
    Philox. `benchmarks/studies/randomness` applies the tests of TestU01 to it. If the distance between columns were a
    constant, and not words that depend on the row, it would need one more round to pass them. An even multiple of a
    word, added to another word, loses no information of either.
    """
    words = [(k + row * r) & LOW_32_BITS for k, r in zip(key, ROW_FACTORS, strict=True)]
    words = [(words[i] + column * words[(i + 2) % 4]) & LOW_32_BITS for i in range(4)]
    _mix_round(words)
    words = [word >> 16 | (word << 16) & LOW_32_BITS for word in words]
    _mix_round(words)
    return tuple(words)


def _mix_round(words: list[Tensor]) -> None:
    """Add to each word, in turn, the product of two others."""
    for i, j, k in ((0, 1, 3), (1, 2, 0), (2, 0, 1), (3, 1, 2)):
        words[i] = (words[i] + words[j] * words[k]) & LOW_32_BITS


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...], rounds: int = PHILOX_ROUNDS) -> tuple[Tensor, ...]:
    """Philox-4x32 (Salmon et al., SC 2011, section 3.3): four words of 32 bits from four, all held in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # overflow wraps at 2^64 and leaves all 64 bits right
        c0, c1, c2, c3 = _high(b) ^ c1 ^ k0, b & LOW_32_BITS, _high(a) ^ c3 ^ k1, a & LOW_32_BITS
        k0, k1 = (k0 + 0x9E3779B9) & LOW_32_BITS, (k1 + 0xBB67AE85) & LOW_32_BITS
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & LOW_32_BITS
