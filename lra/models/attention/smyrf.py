"""SMYRF: queries and keys hashed so that those of large products meet, and sorted into clusters of equal size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lra.batch import Batch
from lra.models.attention import ATTENTIONS, lsh
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.options import check_option_counts


@ATTENTIONS.register(
    "smyrf", exact=False, cost="N · (log N + cluster · hashes)", paper="Daras et al. 2020, arXiv 2010.05315"
)
class SmyrfAttention(Attention):
    """SMYRF: softmax attention within balanced clusters of queries and keys.

    In each round the queries of a sequence are sorted by their hash, and so are its keys; the i-th `cluster` queries
    see the i-th `cluster` keys. Only the order of hashes counts, so they are plain projections, neither shifted nor
    rounded. Projections are drawn once and saved with the model; heads share them.
    """

    projections: Tensor  # [head_dim + 2, hashes]

    @dataclass(frozen=True)
    class Config:
        cluster: int = 64  # queries of a cluster, and as many keys
        hashes: int = 2  # rounds of hashing

        def __post_init__(self) -> None:
            check_option_counts(self, 1, "cluster", "hashes")

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        self.register_buffer("projections", torch.randn(spec.head_dim + 2, config.hashes))

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        """One cluster is seen in each round."""
        hashes = cls.Config().hashes
        return {"cluster": max(keys // hashes, 1), "hashes": hashes}

    def resolve(self, device: torch.device, precision: str) -> str:
        name = super().resolve(device, precision)
        return f"{name} of {self.config.hashes} hashes into clusters of {self.config.cluster}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        size = min(self.config.cluster, batch.max_length)
        with torch.autocast(q.device.type, enabled=False):  # hashes, norms, softmax and merging are in fp32
            q, k, v = (lsh.pad_rows(x, batch, size) for x in (q, k, v))
            q_order, k_order = (lsh.sort_rows(hashes, batch) for hashes in self._hash(q, k))
            q = lsh.sorted_chunks(q.to(v.dtype), q_order, size)
            k, v = (lsh.sorted_chunks(x.to(v.dtype), k_order, size) for x in (k, v))
            scores = (q @ k.mT).float() * self.spec.head_dim**-0.5
            real_BCS = lsh.real_row_mask(batch, q_order.shape[-1]).unflatten(1, (-1, size))
            o, total = lsh.attend_chunks(scores, v, real_BCS, self.dropout_rate)
            o = lsh.merge_rounds(o, total, q_order)
        return lsh.unpad_rows(o, batch)

    @torch.no_grad()
    def _hash(self, q_BHMD: Tensor, k_BHMD: Tensor) -> tuple[Tensor, Tensor]:
        """Projections of [q, 0, √(m - |q|²)] and of [k, √(m - |k|²), 0], m = max |q|² + max |k|²: fp32 `[B, H, R, M]`.

        These, the paper's F(q) and G(k), are all of one length, so that nearest to a query is the key of the largest
        product with it. Rows past a length are zeros, which no maximum sees.
        """
        w_DR, for_k_R, for_q_R = self.projections.float().tensor_split([-2, -1])
        q_BHMD, k_BHMD = q_BHMD.float(), k_BHMD.float()
        q_BHM1, k_BHM1 = (x.square().sum(-1, keepdim=True) for x in (q_BHMD, k_BHMD))
        m_BH11 = q_BHM1.amax(2, keepdim=True) + k_BHM1.amax(2, keepdim=True)
        q_hashes = q_BHMD @ w_DR + (m_BH11 - q_BHM1).sqrt() * for_q_R
        k_hashes = k_BHMD @ w_DR + (m_BH11 - k_BHM1).sqrt() * for_k_R
        return q_hashes.transpose(2, 3), k_hashes.transpose(2, 3)
