"""A mixer: each token sees its neighbours through a convolution."""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Mixer


@ATTENTIONS.register("convolution", mixes=True, exact=False, cost="N", paper="Gehring et al. 2017, arXiv 1705.03122")
class Convolution(Mixer):
    """A gated linear layer, a convolution of each feature over neighbouring tokens, and a linear layer."""

    @dataclass(frozen=True)
    class Config:
        width: int = 7  # tokens that a token sees, an odd number

    def __init__(self, config, spec):
        super().__init__(config, spec)
        d = spec.d_model
        self.before, self.after = nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.filter = nn.Conv1d(d, d, config.width, padding=config.width // 2, groups=d)

    def mix(self, x, batch):
        rows = batch.pad(F.glu(self.before(x)))  # [T, d_model] to [B, N, d_model]
        rows = rows.masked_fill(~batch.mask()[:, :, None], 0)  # nothing past the end of a sequence is seen
        return self.after(F.gelu(batch.unpad(self.filter(rows.mT).mT)))
