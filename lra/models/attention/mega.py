"""Mega: attention of one head between gates, whose queries and keys come from an exponential moving average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.errors import UsageError
from lra.kernels.convolution import convolve
from lra.kernels.impl import resolve_impl
from lra.kernels.moving_average import moving_average
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention, AttentionSpec, Mixer
from lra.models.attention.options import check_option_counts, parse_inner_attention
from lra.models.positions import position_angles, rotate

LANES = 64  # powers of a factor are computed at this distance, and between two of these
WEIGHT_STD = 0.02  # of all projections at first, as in the authors' code
NO_DECAY = {"weight_decay": 0.0}  # of what is no matrix: coefficients of the average, scales and shifts


class MovingAverage(nn.Module):
    """Multi-dimensional damped exponential moving average of each feature (section 3.2), then SiLU.

    Feature j is spread over `expansion` dimensions, u = β_j x_j. Each keeps h_t = α u_t + (1 - α δ) h_{t-1}, with α and
    δ in (0, 1), and the output is y_j = η_j · h_j + ω_j x_j. A bidirectional one adds the average of the reversed
    sequence, with other parameters. Both count the token itself. All is in fp32: by Triton kernels, which go from token
    to token, or as a convolution, by FFT.
    """

    def __init__(self, width: int, expansion: int, causal: bool, impl: str):
        super().__init__()
        self.impl = impl
        shape = (1 if causal else 2, width, expansion)
        self.alpha = nn.Parameter(0.2 * torch.randn(shape))  # before the sigmoid, as δ
        self.delta = nn.Parameter(0.2 * torch.randn(shape))
        signs = 1.0 - 2 * (torch.arange(expansion) % 2)  # β alternates, so that averages cancel at first
        self.beta = nn.Parameter(signs + 0.02 * torch.randn(shape))
        self.eta = nn.Parameter(torch.randn(shape))
        self.omega = nn.Parameter(torch.randn(width))
        for parameter in self.parameters():
            parameter._optim = NO_DECAY  # type: ignore[attr-defined]

    def choose_impl(self, device: torch.device) -> str:
        """Returns triton or fft. UsageError if it can't run on the device."""
        try:
            return resolve_impl(self.impl, device, fallback="fft", section="attn.")
        except ValueError as error:
            raise UsageError(str(error)) from None

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Maps `[T, width]` to the same. What is past a length influences no token."""
        with torch.autocast(x_TD.device.type, enabled=False):
            if self.choose_impl(x_TD.device) == "triton":
                log_XED, weight_XED = (y_XDE.transpose(1, 2) for y_XDE in self.coefficients())
                y_TD = moving_average(
                    x_TD, batch.start, batch.length, log_XED.exp(), weight_XED, max_length=batch.max_length,
                    padded=batch.padded,
                )  # fmt: skip
                return F.silu(y_TD + self.omega * x_TD).to(x_TD.dtype)
            precise = torch.promote_types(x_TD.dtype, self.omega.dtype)
            x_BND = batch.pad(x_TD).to(precise).masked_fill(~batch.mask()[..., None], 0)
            y_BND = convolve(x_BND, self.taps(batch.max_length).to(precise)) + self.omega * x_BND
            return batch.unpad(F.silu(y_BND)).to(x_TD.dtype)

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Returns log(1 - α δ) and η · α β, `[directions, width, expansion]` each.

        η is divided by the root of the expansion, as in the authors' code.
        """
        alpha_XDE = self.alpha.sigmoid()
        weight_XDE = self.eta * alpha_XDE * self.beta * self.eta.shape[-1] ** -0.5
        return torch.log1p(-alpha_XDE * self.delta.sigmoid()), weight_XDE

    def taps(self, n: int) -> Tensor:
        """Returns the filter of each feature for sequences of n tokens, as `convolve` reads it.

        The sum of η · α β (1 - α δ)^t is the tap at distance t (section 3.2). With t = iM + j the power is a product of
        two, so a matrix product sums over the expansion, and there is no tensor of all dimensions at every distance.
        """
        log_XDE, weight_XDE = self.coefficients()  # X: directions, E: expansion
        fine = torch.arange(LANES, device=log_XDE.device)
        coarse = LANES * torch.arange((n + LANES - 1) // LANES, device=log_XDE.device)
        left_XDIE = weight_XDE[:, :, None] * (log_XDE[:, :, None] * coarse[:, None]).exp()
        taps_XDN = (left_XDIE @ (log_XDE[..., None] * fine).exp()).flatten(-2)[..., :n]
        if len(taps_XDN) == 1:
            return taps_XDN[0]
        before_DN, after_DN = taps_XDN.unbind()
        own_D1 = before_DN[:, :1] + after_DN[:, :1]
        return torch.cat((after_DN[:, 1:].flip(-1), own_D1, before_DN[:, 1:]), -1)


@ATTENTIONS.register(
    "mega",
    mixes=True,
    exact=False,
    cost="that of attn.inner",
    causal=True,
    reads_residual=True,
    paper="Ma et al. 2022, arXiv 2209.10655",
)
class Mega(Mixer):
    """Mega mixer: a moving average, then attention of one head between gates.

    X' is the moving average of the block's rows X, with `expansion` dimensions for each feature. Queries and keys are
    Z = SiLU(X' W_z), scaled and shifted apart. Values are SiLU(X W_v). A reset gate SiLU(X' W_γ) multiplies what
    attention returns, O, and the candidate is H = SiLU(X' W_h + (γ ⊙ O) U). An update gate φ = sigmoid(X' W_φ) blends
    it with the residual R: the block goes on with φ ⊙ H + (1 - φ) ⊙ R (section 3.3).

    `inner` is the attention inside, any one of lra whose options may follow its name: `attn.inner=butterfly`, or
    `attn.inner="local pattern=blocks window=128"`, which is Mega-chunk (section 3.4). Kernels take values as wide as
    keys, so values are cut into heads of `key_dim` features that share queries and keys. The last head is filled up
    with zeros. The kernels for Hopper GPUs take 32, 64 and 128.

    It differs from the paper in four points. Positions are rotary in place of a learned bias. There is no Laplace
    attention, which the authors use for images. The average is not cut off after 1,024 tokens. Nothing is dropped
    within the mixer, as the block drops what is added. The average is in fp32. Coefficients of the average, scales and
    shifts do not decay. Heads of the model mean nothing to it.
    """

    @dataclass(frozen=True)
    class Config:
        inner: str = "flash"  # attention inside, with its options after its name: "local window=128"
        # dimensions of the moving average for each feature, h in the paper; 0: no average, for comparison
        expansion: int = 16
        key_dim: int = 64  # features of queries and keys, z in the paper
        value_dim: int | None = None  # features of values, v in the paper; null: twice model.d_model
        impl: Literal["auto", "triton", "fft"] = "auto"  # of the average; auto: triton on a GPU, fft elsewhere
        rotary: bool = True  # rotary positions of queries and keys

        def __post_init__(self) -> None:
            check_option_counts(self, 0, "expansion")
            check_option_counts(self, 1, "key_dim", "value_dim")
            if not self.expansion and self.impl != "auto":
                raise UsageError(f"attn.impl={self.impl} is of the average, and attn.expansion=0 leaves none: drop one")
            if self.rotary and self.key_dim % 2:
                raise UsageError(f"attn.key_dim={self.key_dim} must be even, or attn.rotary=false")
            parse_inner_attention(self.inner)

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        d, keys, values = spec.d_model, config.key_dim, config.value_dim or 2 * spec.d_model
        self.sizes = d, values, keys, d  # of the update gate, the reset gate, Z and the candidate
        self.average: MovingAverage | None = None
        if config.expansion:
            self.average = MovingAverage(d, config.expansion, spec.causal, config.impl)
        self.value, self.gates, self.output = nn.Linear(d, values), nn.Linear(d, sum(self.sizes)), nn.Linear(values, d)
        for layer in (self.value, self.gates, self.output):
            nn.init.normal_(layer.weight, std=WEIGHT_STD)
            nn.init.zeros_(layer.bias)
        self.scale = nn.Parameter(WEIGHT_STD * torch.randn(2, keys))  # of queries and of keys
        self.shift = nn.Parameter(torch.zeros(2, keys))
        for parameter in (self.scale, self.shift):
            parameter._optim = NO_DECAY  # type: ignore[attr-defined]
        name, options = parse_inner_attention(config.inner)
        heads = (values + keys - 1) // keys
        try:
            inside = AttentionSpec(heads, keys, spec.max_length, 0.0, spec.layer, spec.causal)
            self.inner: Attention = ATTENTIONS.get(name)(options, inside)
        except UsageError as error:
            raise UsageError(f"attn.inner, with attn.key_dim={keys}: {error}") from None

    def resolve(self, device: torch.device, precision: str) -> str:
        spec, inner = self.inner.spec, self.inner.resolve(device, precision)
        heads = f"{spec.heads} head{'s' if spec.heads > 1 else ''} of {spec.head_dim}"
        average = f"by {self.average.choose_impl(device)}" if self.average is not None else "without average"
        direction = "causal" if spec.causal else "bidirectional"
        return f"{super().resolve(device, precision)} {average} around {inner}, {heads}, {direction}"

    def mix(self, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        averaged_TD = x if self.average is None else self.average(x, batch)
        update_TD, reset_TV, z_TK, candidate_TD = self.gates(averaged_TD).split(self.sizes, -1)
        z_T1K = F.silu(z_TK)[:, None]
        q_T1K, k_T1K = (z_T1K * scale + shift for scale, shift in zip(self.scale, self.shift, strict=True))
        if self.config.rotary:
            angles = position_angles(batch.token_positions()[:, None], self.config.key_dim)
            q_T1K, k_T1K = rotate(q_T1K, angles.cos(), angles.sin()), rotate(k_T1K, angles.cos(), angles.sin())
        v_TV = F.silu(self.value(x))
        heads, keys = self.inner.spec.heads, self.config.key_dim
        if empty := heads * keys - v_TV.shape[1]:
            v_TV = F.pad(v_TV, (0, empty))
        v_THK = v_TV.unflatten(1, (heads, keys))
        # copies of queries and keys, as Hopper's kernels read heads side by side
        q_THK, k_THK = (rows.to(v_THK.dtype).repeat(1, heads, 1) for rows in (q_T1K, k_T1K))
        o_TV = self.inner.attend(q_THK, k_THK, v_THK, batch).flatten(1)[:, : reset_TV.shape[1]]
        candidate_TD = F.silu(candidate_TD + self.output(o_TV * F.silu(reset_TV)))
        return update_TD.sigmoid() * (candidate_TD - residual)
