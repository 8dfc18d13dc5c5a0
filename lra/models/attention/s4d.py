"""S4D: each feature is filtered by a linear recurrence with a diagonal state, in both directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.errors import UsageError
from lra.kernels.convolution import convolve
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec, Mixer
from lra.models.attention.options import check_option_counts

LANES = 64  # powers of a state's factor are computed at this distance, and between two of these
OWN_RATE = {"lr": 1e-3, "weight_decay": 0.0}  # of A and the step size, as in the authors' code


@ATTENTIONS.register(
    "s4d",
    mixes=True,
    exact=False,
    cost="N log N",
    causal=True,
    initial=("init", "frequency", "dt_min", "dt_max"),
    paper="Gu et al. 2022, arXiv 2206.11893",
)
class S4D(Mixer):
    """S4D mixer: a diagonal state space model, computed as a convolution.

    Each feature u of a sequence drives `state // 2` complex states: x' = A x + u, in steps of its own size by the
    zero-order hold, and y = 2 Re(C x) + D u. C starts as complex normal numbers, and A as -1/2 + iω. Section 4 has
    three series of frequencies ω for a state of N numbers: `lin` is πn, `inv` is N/π (N/(2n + 1) - 1), and `legs` are
    the eigenvalues of the normal part of HiPPO-LegS, which `inv` approximates. The highest is near πN/2 in the first,
    and near N²/π in the others. `frequency` multiplies all (Yu et al. 2025, arXiv 2410.02035): above 1 the model is
    more sensitive to what changes fast.

    The model is bidirectional, with another C for the reversed sequence, unless `model.causal=true`. GELU and a gated
    linear layer follow, as in the blocks of S4. There is no other projection, and heads mean nothing to it.

    Recurrence and FFT are in fp32. A and the step size have their own learning rate, 1e-3, and no weight decay.
    """

    @dataclass(frozen=True)
    class Config:
        state: int = 64  # real numbers of a feature's state, N in the paper: an even number
        init: Literal["lin", "inv", "legs"] = "lin"  # initial frequencies of the states
        frequency: float = 1.0  # factor of the initial frequencies
        dt_min: float = 0.001  # smallest and largest initial step size; the distribution is uniform in their logarithm
        dt_max: float = 0.1  # largest initial step size

        def __post_init__(self) -> None:
            check_option_counts(self, 2, "state")
            if self.state % 2:
                raise UsageError(f"attn.state={self.state} must be even, as states are pairs of complex conjugates")
            if not 0 < self.frequency < math.inf:
                raise UsageError(f"attn.frequency={self.frequency} must be finite and above 0")
            if not 0 < self.dt_min <= self.dt_max < math.inf:
                raise UsageError(
                    f"attn.dt_min={self.dt_min} and attn.dt_max={self.dt_max} must be above 0, and in this order"
                )

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        d, states, directions = spec.d_model, config.state // 2, 1 if spec.causal else 2
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        self.log_step = nn.Parameter(low + (high - low) * torch.rand(d))
        self.log_decay = nn.Parameter(torch.full((d, states), math.log(0.5)))  # of -Re A
        frequency_S = config.frequency * initial_frequencies(config.init, config.state)
        self.frequency = nn.Parameter(frequency_S.float().repeat(d, 1))  # Im A
        self.output = nn.Parameter(torch.randn(2, directions, d, states) * 0.5**0.5)  # C: real and imaginary part
        self.skip = nn.Parameter(torch.randn(d))  # D
        self.gated = nn.Linear(d, 2 * d)
        for parameter in (self.log_step, self.log_decay, self.frequency):
            parameter._optim = OWN_RATE  # type: ignore[attr-defined]

    def resolve(self, device: torch.device, precision: str) -> str:
        direction = "causal" if self.spec.causal else "bidirectional"
        return f"{super().resolve(device, precision)} with state {self.config.state}, {direction}"

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            precise = torch.promote_types(x.dtype, self.skip.dtype)
            u_BND = batch.pad(x).to(precise).masked_fill(~batch.mask()[..., None], 0)
            y_BND = convolve(u_BND, self.taps(batch.max_length).to(precise)) + self.skip * u_BND
            y_TD = F.gelu(batch.unpad(y_BND)).to(x.dtype)
        return F.glu(self.gated(y_TD), -1)

    def taps(self, n: int) -> Tensor:
        """Returns the filter of each feature for sequences of n tokens, as `convolve` reads it.

        C (e^{ΔA} - 1) / A · e^{ΔA l} is the tap at distance l (section 3 of the paper). With l = iM + j
        its power is a product of two, so a matrix product sums over the states, and there is no tensor of every state
        at every distance. All is in real arithmetic.
        """
        step_D1 = self.log_step.exp()[:, None]
        decay_DS, frequency_DS = -self.log_decay.exp(), self.frequency
        re_DS, im_DS = _powers(step_D1 * decay_DS, step_D1 * frequency_DS)
        # (e^{ΔA} - 1) / A
        square_DS = decay_DS**2 + frequency_DS**2
        held_re_DS = ((re_DS - 1) * decay_DS + im_DS * frequency_DS) / square_DS
        held_im_DS = (im_DS * decay_DS - (re_DS - 1) * frequency_DS) / square_DS
        c_re, c_im = self.output
        b_re, b_im = c_re * held_re_DS - c_im * held_im_DS, c_re * held_im_DS + c_im * held_re_DS

        exponent = (step_D1 * decay_DS)[..., None], (step_D1 * frequency_DS)[..., None]
        fine = torch.arange(LANES, device=step_D1.device)
        coarse = LANES * torch.arange((n + LANES - 1) // LANES, device=step_D1.device)
        re_DSI, im_DSI = _powers(exponent[0] * coarse, exponent[1] * coarse)
        re_DSJ, im_DSJ = _powers(exponent[0] * fine, exponent[1] * fine)
        b_re, b_im = b_re[..., None], b_im[..., None]  # X: directions
        left_XDIS = torch.cat((b_re * re_DSI - b_im * im_DSI, -b_re * im_DSI - b_im * re_DSI), -2).transpose(-1, -2)
        taps_XDN = 2 * (left_XDIS @ torch.cat((re_DSJ, im_DSJ), -2)).flatten(-2)[..., :n]
        if self.spec.causal:
            return taps_XDN[0]
        before_DN, after_DN = taps_XDN.unbind()  # the reversed sequence begins one token later
        return torch.cat((after_DN[:, : n - 1].flip(-1), before_DN), -1)


def initial_frequencies(init: str, state: int) -> Tensor:
    """Returns the imaginary parts of A for a state of N numbers: float64 `[N / 2]`, all positive but `lin`'s first."""
    n = torch.arange(state // 2, dtype=torch.float64)
    if init == "lin":
        return math.pi * n
    if init == "inv":
        return state / math.pi * (state / (2 * n + 1) - 1)
    root_N = (torch.arange(state, dtype=torch.float64) + 0.5).sqrt()
    lower_NN = torch.outer(root_N, root_N).tril(-1)  # the normal part is -1/2 I + (lower^T - lower)
    return torch.linalg.eigvalsh(1j * (lower_NN - lower_NN.T))[state // 2 :].flip(0)


def _powers(decay: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """e^{decay + i angle}: real and imaginary part."""
    size = decay.exp()
    return size * angle.cos(), size * angle.sin()
