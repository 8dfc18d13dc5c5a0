"""Reformer: tokens sorted by the bucket that a random rotation puts them in, and chunks of them that attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lra.batch import Batch
from lra.models.attention import ATTENTIONS, lsh
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.options import check_option_counts

SELF_LOGIT = -5e4  # logit of a token with itself: it counts only where nothing else is seen
HASHED_ROWS = 4096  # at a time: a row is compared with all buckets, so all rows at once would take N^2 / bucket memory


@ATTENTIONS.register(
    "reformer",
    exact=False,
    cost="N · (log N + 2 bucket · hashes)",
    shared_qk=True,
    paper="Kitaev et al. 2020, arXiv 2001.04451",
)
class ReformerAttention(Attention):
    """Reformer: each token sees those that a random rotation hashes near it.

    Keys are the queries, scaled to length 1. In each round a sequence is sorted by bucket and cut into chunks of
    `bucket` tokens. A chunk sees itself and the chunk before it: all their tokens, as in reformer-pytorch, not only
    those of one bucket. The first chunk sees itself alone, as in the paper's equation 5; in reformer-pytorch it sees
    the last chunk of the round before, which may be padding. A sequence has about as many buckets as chunks, whatever
    the batch. Rotations are drawn once and saved with the model; heads share them. A key that several rounds show
    counts in each of them, as in reformer-pytorch. The paper divides by their number (appendix A), so here more rounds
    do not approach softmax attention.
    """

    rotations: Tensor  # [head_dim, hashes, half the buckets of the longest sequence]

    @dataclass(frozen=True)
    class Config:
        bucket: int = 64  # tokens of a chunk, and of a bucket on average
        hashes: int = 2  # rounds of hashing

        def __post_init__(self) -> None:
            check_option_counts(self, 1, "bucket", "hashes")

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        pairs = -(-spec.max_length // (2 * config.bucket))
        self.register_buffer("rotations", torch.randn(spec.head_dim, config.hashes, pairs))

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        """Two chunks are seen in each round."""
        hashes = cls.Config().hashes
        return {"bucket": max(keys // (2 * hashes), 1), "hashes": hashes}

    def resolve(self, device: torch.device, precision: str) -> str:
        name = super().resolve(device, precision)
        return f"{name} of {self.config.hashes} hashes into buckets of {self.config.bucket}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        size = min(self.config.bucket, batch.max_length)
        with torch.autocast(q.device.type, enabled=False):  # hashes, norms, softmax and merging are in fp32
            q, v = (lsh.pad_rows(x, batch, size) for x in (q, v))
            order = lsh.sort_rows(self._hash(q, batch), batch)
            k = F.normalize(q.float(), dim=-1)
            q, k, v = (lsh.sorted_chunks(x.to(v.dtype), order, size) for x in (q, k, v))
            k, v = _with_previous(k), _with_previous(v)
            real_BCS1 = lsh.real_row_mask(batch, order.shape[-1]).unflatten(1, (-1, size))[..., None]
            scores = (q @ k.mT).float() * self.spec.head_dim**-0.5
            place = torch.arange(2 * size, device=q.device)
            scores = scores.masked_fill(place == place[size:, None], SELF_LOGIT)
            o, total = lsh.attend_chunks(scores, v, _with_previous(real_BCS1).squeeze(-1), self.dropout_rate)
            o = lsh.merge_rounds(o, total, order)
        return lsh.unpad_rows(o, batch)

    @torch.no_grad()
    def _hash(self, q_BHMD: Tensor, batch: Batch) -> Tensor:
        """The bucket of each row in each round, fp32 `[B, H, R, M]`: the largest of [xW, -xW] (Section 2)."""
        pairs_B111 = -(-batch.length // (2 * self.config.bucket))[:, None, None, None]
        w_DRP = self.rotations[..., : -(-batch.max_length // (2 * self.config.bucket))].float()
        beyond_B111P = torch.arange(w_DRP.shape[-1], device=q_BHMD.device) >= pairs_B111[..., None]
        buckets = []
        for rows in q_BHMD.float().split(HASHED_ROWS, 2):
            rotated_BHMRP = (rows @ w_DRP.flatten(1)).unflatten(-1, w_DRP.shape[1:]).masked_fill(beyond_B111P, 0)
            pair = rotated_BHMRP.abs().argmax(-1, keepdim=True)
            negative = rotated_BHMRP.gather(-1, pair) < 0
            buckets.append(pair.squeeze(-1) + pairs_B111 * negative.squeeze(-1))
        return torch.cat(buckets, 2).transpose(2, 3).float()


def _with_previous(x: Tensor) -> Tensor:
    """Chunks `[..., C, S, D]` each behind the one before it, zeros before the first: `[..., C, 2 S, D]`."""
    return torch.cat([F.pad(x[..., :-1, :, :], (0, 0, 0, 0, 1, 0)), x], -2)
