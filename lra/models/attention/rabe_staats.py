"""Exact attention in chunks of queries and keys, recomputed in the backward pass: no N x N matrix in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lra.batch import Batch
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention
from lra.models.attention.options import check_option_counts


@ATTENTIONS.register(
    "rabe_staats", exact=True, cost="N²", causal=True, ragged=False, paper="Rabe and Staats 2021, arXiv 2112.05682"
)
class RabeStaatsAttention(Attention):
    """Softmax attention whose largest matrix is `query_chunk` x `key_chunk` for each head and sequence.

    A chunk of keys is summarised for a chunk of queries by three sums: the weighted values, the weights, and the
    maximum by which the exponents are shifted. The summaries of all chunks of keys are then combined.
    """

    @dataclass(frozen=True)
    class Config:
        query_chunk: int = 1024  # queries at a time
        key_chunk: int = 4096  # keys at a time

        def __post_init__(self) -> None:
            check_option_counts(self, 1, "query_chunk", "key_chunk")

    def resolve(self, device: torch.device, precision: str) -> str:
        config = self.config
        chunks = f"{config.query_chunk} queries by {config.key_chunk} keys"
        return f"{super().resolve(device, precision)} in chunks of {chunks}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q_BHND, k_BHND, v_BHND = (batch.pad(x).transpose(1, 2) for x in (q * self.spec.head_dim**-0.5, k, v))
        past_BN, place_N = ~batch.mask(), torch.arange(batch.max_length, device=q.device)
        # split, not sliced: the gradient of a slice is as large as the whole
        rows, columns = self.config.query_chunk, self.config.key_chunk
        tensors = k_BHND.split(columns, 2), v_BHND.split(columns, 2), past_BN.split(columns, 1), place_N.split(columns)
        keys, queries = list(zip(*tensors, strict=True)), zip(q_BHND.split(rows, 2), place_N.split(rows), strict=True)
        o_BHND = torch.cat([self._attend(q_BHMD, place_M, keys) for q_BHMD, place_M in queries], 2)
        o_BHND = o_BHND.to(v.dtype).masked_fill(past_BN[:, None, :, None], 0)
        return o_BHND.transpose(1, 2).flatten(0, 1)

    def _attend(self, q_BHMD: Tensor, place_M: Tensor, keys: list[Any]) -> Tensor:
        """One chunk of queries, `[B, H, M, D]` in fp32."""
        dropout, last_M = self.dropout_rate, place_M if self.spec.causal else None
        # The generator's state is kept, so that the backward pass draws the mask again. The kernels' mask, a function
        # of the place alone, would need no state, but draws in int64 tensors take many times longer than the rest.
        summaries = [
            checkpoint(_summarise, q_BHMD, last_M, *chunk, dropout, use_reentrant=False, preserve_rng_state=dropout > 0)
            for chunk in keys
        ]
        values_CBHMD, total_CBHM1, highest_CBHM1 = (torch.stack(parts) for parts in zip(*summaries, strict=True))
        scale_CBHM1 = (highest_CBHM1 - highest_CBHM1.amax(0)).exp()
        return (values_CBHMD * scale_CBHM1).sum(0) / (total_CBHM1 * scale_CBHM1).sum(0)


def _summarise(
    q_BHMD: Tensor, last_M: Tensor | None, k_BHND: Tensor, v_BHND: Tensor, past_BN: Tensor, place_N: Tensor,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Weighted values in the dtype of v, the sum of the weights and the highest score, in fp32.

    `last_M` is the last key that each query sees; None: it sees all.
    """
    scores_BHMN = (q_BHMD @ k_BHND.transpose(2, 3)).to(torch.promote_types(q_BHMD.dtype, torch.float32))
    hidden = past_BN[:, None, None, :]
    if last_M is not None:
        hidden = hidden | (place_N > last_M[:, None])
    # the smallest finite number, not -inf: a chunk that is all padding must not make NaN
    scores_BHMN = scores_BHMN.masked_fill(hidden, torch.finfo(scores_BHMN.dtype).min)
    highest_BHM1 = scores_BHMN.detach().amax(-1, keepdim=True)  # no gradient: the result does not depend on it
    weights_BHMN = (scores_BHMN - highest_BHM1).exp()
    total_BHM1 = weights_BHMN.sum(-1, keepdim=True)
    if dropout:
        weights_BHMN = F.dropout(weights_BHMN, dropout)
    return weights_BHMN.to(v_BHND.dtype) @ v_BHND, total_BHM1, highest_BHM1
