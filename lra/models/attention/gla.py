"""Gated linear attention: a matrix state that each token fades by gates of its own and adds to, by chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec, Mixer
from lra.models.attention.options import check_option_counts

CHUNK = 16  # tokens between which pairs are computed
LEAST_LOG_GATE = -5.0  # a factor of a decay within a chunk is at most e^40, which leaves room for gradients in fp32


@ATTENTIONS.register("gla", mixes=True, exact=False, cost="N", causal=True, paper="Yang et al. 2024, arXiv 2312.06635")
class GatedLinearAttention(Mixer):
    """GLA mixer: gated linear attention, a recurrence with gates that depend on the token.

    A head's state is S_t = diag(α_t) S_{t-1} + k_t v_t^T, and its output q_t^T S_t, with keys half as wide as values.
    The gates are α = sigmoid(x W_1 W_2 + b)^(1/temperature). The output has RMSNorm within each head, a SiLU gate and a
    projection. The model is bidirectional unless `model.causal=true`: the reversed sequence has gates of its own and
    shares the rest, as in ViG (Liao et al. 2024, arXiv 2405.18425), and both outputs are added.

    The state is computed in fp32: within chunks of 16 tokens as attention with decays (section 4 of the paper), between
    chunks by a scan. A gate is at least e^-5, so that fp32 holds the decays of a chunk.
    """

    @dataclass(frozen=True)
    class Config:
        gate_rank: int = 16  # features between the two layers of the gates
        temperature: float = 16.0  # a larger one makes states fade more slowly, τ in the paper

        def __post_init__(self) -> None:
            check_option_counts(self, 1, "gate_rank")
            if not 0 < self.temperature < math.inf:
                raise UsageError(f"attn.temperature={self.temperature} must be finite and above 0")

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        d, self.key_dim = spec.d_model, max(1, spec.head_dim // 2)
        keys = spec.heads * self.key_dim
        self.query, self.key = nn.Linear(d, keys, bias=False), nn.Linear(d, keys, bias=False)
        self.value, self.output = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.fades = nn.ModuleList(
            nn.Sequential(nn.Linear(d, config.gate_rank, bias=False), nn.Linear(config.gate_rank, keys))
            for _ in range(1 if spec.causal else 2)
        )
        self.norm = nn.RMSNorm(spec.head_dim, eps=1e-5)
        self.gate = nn.Linear(d, d)

    def resolve(self, device: torch.device, precision: str) -> str:
        return f"{super().resolve(device, precision)}, {'causal' if self.spec.causal else 'bidirectional'}"

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        past_BN11 = ~batch.mask()[:, :, None, None]
        precise = torch.promote_types(x.dtype, self.norm.weight.dtype)

        def split(rows_TD: Tensor) -> Tensor:
            padded = batch.pad(rows_TD.to(precise)).unflatten(-1, (self.spec.heads, -1))
            return padded.masked_fill(past_BN11, 0).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        fades = [fade(x) for fade in self.fades]
        with torch.autocast(x.device.type, enabled=False):
            q = q * self.key_dim**-0.5
            logs = [F.logsigmoid(fade.to(precise)) / self.config.temperature for fade in fades]
            logs = [split(log_TK.clamp(min=LEAST_LOG_GATE)) for log_TK in logs]
            o_BHNV = fade_and_add(q, k, v, logs[0])
            if len(logs) > 1:  # past rows come first then, and leave the state 0
                o_BHNV = o_BHNV + fade_and_add(*(each.flip(2) for each in (q, k, v, logs[1]))).flip(2)
            o_THV = self.norm(batch.unpad(o_BHNV.transpose(1, 2)))
        return self.output(o_THV.flatten(1).to(x.dtype) * F.silu(self.gate(x)))


def fade_and_add(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, log_BHNK: Tensor) -> Tensor:
    """Returns q_t^T S_t of the recurrence S_t = diag(e^{log_t}) S_{t-1} + k_t v_t^T, `[B, H, N, V]`.

    It is the chunkwise form of section 4 of the paper. Decays between two tokens of a chunk are factors of the query
    and the key, relative to the middle of the chunk.
    """
    n = q_BHNK.shape[2]
    count = (n + CHUNK - 1) // CHUNK

    def cut(x: Tensor) -> Tensor:
        """In C chunks of W tokens."""
        return F.pad(x, (0, 0, 0, CHUNK * count - n)).unflatten(2, (count, CHUNK))

    q, k, v = cut(q_BHNK), cut(k_BHNK), cut(v_BHNV)
    sum_BHCWK = cut(log_BHNK).cumsum(3)
    middle, last = sum_BHCWK[..., CHUNK // 2, None, :], sum_BHCWK[..., -1:, :]
    seen_BHCWW = (q * (sum_BHCWK - middle).exp()) @ (k * (middle - sum_BHCWK).exp()).transpose(-1, -2)
    later_WW = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    o_BHCWV = seen_BHCWW.masked_fill(later_WW, 0) @ v
    added_BHCKV = (k * (last - sum_BHCWK).exp()).transpose(-1, -2) @ v
    state_BHCKV = _scan(last.squeeze(-2).exp(), added_BHCKV, count)
    before_BHCKV = F.pad(state_BHCKV, (0, 0, 0, 0, 1, 0))[:, :, :count]
    o_BHCWV = o_BHCWV + (q * sum_BHCWK.exp()) @ before_BHCKV
    return o_BHCWV.flatten(2, 3)[:, :, :n]


def _scan(kept_BHCK: Tensor, added_BHCKV: Tensor, count: int) -> Tensor:
    """Returns the states S_c = diag(kept_c) S_{c-1} + added_c, in log C steps (Hillis and Steele 1986)."""
    shift = 1
    while shift < count:
        earlier_BHCKV = F.pad(added_BHCKV, (0, 0, 0, 0, shift, 0))[:, :, :count]
        added_BHCKV = added_BHCKV + kept_BHCK[..., None] * earlier_BHCKV
        kept_BHCK = kept_BHCK * F.pad(kept_BHCK, (0, 0, shift, 0))[:, :, :count]
        shift *= 2
    return added_BHCKV
