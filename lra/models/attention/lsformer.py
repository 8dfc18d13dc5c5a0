"""Long-Short Transformer: a window of tokens beside a few rows that all keys and values are compressed to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.options import check_option_counts


@ATTENTIONS.register(
    "lsformer", exact=False, cost="N · (2 window + landmarks)", paper="Zhu et al. 2021, arXiv 2107.02192"
)
class LongShortAttention(Attention):
    """Transformer-LS, bidirectional: one softmax over the keys near a query and over landmarks of all keys.

    A sequence is cut into segments of `window` tokens. A query sees its own segment, `window // 2` tokens before it and
    as many after it, or one more after it if the window is odd: 2 `window` tokens in all. Landmarks are P^T K and
    P^T V, where each column of P = softmax(K W) is a distribution over the sequence (the dynamic projection). Here K
    are the head's keys; in the paper the layer's input takes their place in P. Tokens have one LayerNorm and landmarks
    another (DualLN), each over all heads together and the same for keys and values. Landmarks are made of keys and
    values before their norm, as in the paper; the authors' code compresses normalised ones. The norms come after
    rotary positions are applied, so scores depend on places, not on distances alone.
    """

    @dataclass(frozen=True)
    class Config:
        landmarks: int = 32  # rows that keys and values are compressed to, r in the paper
        window: int = 8  # tokens of a segment, w in the paper; a query sees twice as many

        def __post_init__(self) -> None:
            check_option_counts(self, 1, "landmarks", "window")

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        bound = spec.head_dim**-0.5  # as that of nn.Linear
        self.projection = nn.Parameter(torch.empty(spec.heads, spec.head_dim, config.landmarks).uniform_(-bound, bound))
        self.token_norm, self.landmark_norm = (nn.LayerNorm([spec.heads, spec.head_dim]) for _ in range(2))

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        return {"landmarks": max(keys // 2, 1), "window": max(keys // 4, 1)}

    def resolve(self, device: torch.device, precision: str) -> str:
        config = self.config
        return f"{super().resolve(device, precision)} with {config.landmarks} landmarks, window {config.window}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        n, real_BN = batch.max_length, batch.mask()
        past_BN11 = ~real_BN[:, :, None, None]
        q_BNHD = batch.pad(q) * self.spec.head_dim**-0.5
        # X: keys and values, which are treated alike
        kv_XBNHD = torch.stack([batch.pad(k), batch.pad(v)]).masked_fill(past_BN11, 0)
        p_BHRN = self._distributions(kv_XBNHD[0], real_BN).to(v.dtype)
        landmarks_XBRHD = torch.einsum("bhrn,xbnhd->xbrhd", p_BHRN, kv_XBNHD)
        k_BRHD, v_BRHD = _normalise(landmarks_XBRHD, self.landmark_norm).unbind()

        w = min(self.config.window, n)  # one segment holds all; a longer one would show no more
        rest = -n % w
        before, after = w // 2, rest + w - w // 2
        # S segments of W queries, each with the J = 2 W tokens that it sees
        kv_XBNHD = F.pad(_normalise(kv_XBNHD, self.token_norm), (0, 0, 0, 0, before, after))
        k_BSHDJ, v_BSHDJ = kv_XBNHD.unfold(2, 2 * w, w).unbind()
        seen_BSJ = F.pad(real_BN, (before, after)).unfold(1, 2 * w, w)
        q_BSWHD = F.pad(q_BNHD, (0, 0, 0, 0, 0, rest)).unflatten(1, (-1, w))

        near_BSHWJ = torch.einsum("bswhd,bshdj->bshwj", q_BSWHD, k_BSHDJ)
        near_BSHWJ = near_BSHWJ.masked_fill(~seen_BSJ[:, :, None, None], torch.finfo(near_BSHWJ.dtype).min)
        far_BSHWR = torch.einsum("bswhd,brhd->bshwr", q_BSWHD, k_BRHD)
        p_BSHWC = torch.cat([near_BSHWJ, far_BSHWR], -1).to(_precise(q)).softmax(-1)
        p_BSHWC = F.dropout(p_BSHWC, self.dropout_rate)
        near_BSHWJ, far_BSHWR = p_BSHWC.to(v.dtype).split((2 * w, self.config.landmarks), -1)
        o_BSWHD = torch.einsum("bshwj,bshdj->bswhd", near_BSHWJ, v_BSHDJ)
        o_BSWHD = o_BSWHD + torch.einsum("bshwr,brhd->bswhd", far_BSHWR, v_BRHD)
        return batch.unpad(o_BSWHD.flatten(1, 2)[:, :n].masked_fill(past_BN11, 0))

    def _distributions(self, k_BNHD: Tensor, real_BN: Tensor) -> Tensor:
        """Each landmark's weights of the real tokens, `[B, H, landmarks, N]`."""
        scores_BHRN = torch.einsum("bnhd,hdr->bhrn", k_BNHD, self.projection.to(k_BNHD.dtype)).to(_precise(k_BNHD))
        # the smallest finite number, not -inf: a sequence of length 0 must not make NaN
        scores_BHRN = scores_BHRN.masked_fill(~real_BN[:, None, None, :], torch.finfo(scores_BHRN.dtype).min)
        return scores_BHRN.softmax(-1)


def _precise(x: Tensor) -> torch.dtype:
    """fp32, or what is more."""
    return torch.promote_types(x.dtype, torch.float32)


def _normalise(x_XBNHD: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm over all heads together, in fp32."""
    dtype = _precise(x_XBNHD)
    weight, bias = norm.weight.to(dtype), norm.bias.to(dtype)
    return F.layer_norm(x_XBNHD.to(dtype), norm.normalized_shape, weight, bias, norm.eps).to(x_XBNHD.dtype)
