"""What the LSH attentions share: rows sorted by their hash, attended to in chunks, and rounds of hashing merged.

Shape suffixes: B sequences, H heads, R rounds, C chunks of S rows each, K keys that a chunk sees, M = C S rows of a
padded sequence, D head dimension. Sorted, the real rows of a sequence come first: its first `length` places.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lra.batch import Batch
from lra.kernels.operators import define_operator


def pad_rows(x: Tensor, batch: Batch, size: int) -> Tensor:
    """Token rows `[T, H, D]` to `[B, H, M, D]`, whole chunks of `size` rows, zeros past each length."""
    x_BNHD = batch.pad(x).masked_fill(~batch.mask()[:, :, None, None], 0)
    return F.pad(x_BNHD.transpose(1, 2), (0, 0, 0, -batch.max_length % size))


def unpad_rows(x_BHMD: Tensor, batch: Batch) -> Tensor:
    """The inverse of `pad_rows`, zeros past each length."""
    x_BNHD = x_BHMD[:, :, : batch.max_length].transpose(1, 2)
    return batch.unpad(x_BNHD.masked_fill(~batch.mask()[:, :, None, None], 0))


def real_row_mask(batch: Batch, rows: int) -> Tensor:
    """Which of so many rows are real, before and after sorting, bool `[B, rows]`."""
    return torch.arange(rows, device=batch.length.device) < batch.length[:, None]


def sort_rows(hashes_BHRM: Tensor, batch: Batch) -> Tensor:
    """The row at each place, int64 `[B, H, R, M]`: in the order of finite hashes, then of position; padding last."""
    padding_BM = ~real_row_mask(batch, hashes_BHRM.shape[-1])
    return stable_order(hashes_BHRM.masked_fill(padding_BM[:, None, None], torch.inf))


# `argsort`, which torch.compile does not see: up to 512 numbers it would sort in a kernel that takes long to compile
stable_order = define_operator(
    "stable_order", "(Tensor x) -> Tensor",
    lambda x: x.contiguous().argsort(stable=True), lambda x: x.new_empty(x.shape, dtype=torch.int64),
)  # fmt: skip


def sorted_chunks(x_BHMD: Tensor, order_BHRM: Tensor, size: int) -> Tensor:
    """The rows in each round's order, cut into chunks: `[B, H, R, C, S, D]`."""
    return x_BHMD[:, :, None].take_along_dim(order_BHRM[..., None], 3).unflatten(3, (-1, size))


def attend_chunks(scores_BHRCSK: Tensor, v_BHRCKD: Tensor, seen: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of each chunk to its keys.

    Args:
        scores_BHRCSK: fp32.
        seen: which keys are real, bool `[B, C, K]`.

    Returns:
        The averages `[B, H, R, C, S, D]` in the dtype of v and log-sum-exps of the scores `[B, H, R, C, S]` in fp32.
    """
    # the smallest finite number, not -inf: a chunk without a real row must not make NaN
    scores_BHRCSK = scores_BHRCSK.masked_fill(~seen[:, None, None, :, None], torch.finfo(scores_BHRCSK.dtype).min)
    total_BHRCS1 = scores_BHRCSK.logsumexp(-1, keepdim=True)
    p_BHRCSK = F.dropout((scores_BHRCSK - total_BHRCS1).exp(), dropout)
    return p_BHRCSK.to(v_BHRCKD.dtype) @ v_BHRCKD, total_BHRCS1.squeeze(-1)


def merge_rounds(o_BHRCSD: Tensor, total_BHRCS: Tensor, order_BHRM: Tensor) -> Tensor:
    """Rows back in their places, and rounds averaged by the sums of their exponentials: `[B, H, M, D]`."""
    o_BHRMD, total_BHRM = o_BHRCSD.flatten(3, 4), total_BHRCS.flatten(3)
    o_BHRMD = torch.zeros_like(o_BHRMD).scatter(3, order_BHRM[..., None].expand_as(o_BHRMD), o_BHRMD)
    total_BHRM = torch.zeros_like(total_BHRM).scatter(3, order_BHRM, total_BHRM)
    weights_BHRM = total_BHRM.softmax(2)  # a key that is seen in two rounds counts twice
    return (weights_BHRM[..., None] * o_BHRMD).sum(2).to(o_BHRMD.dtype)
