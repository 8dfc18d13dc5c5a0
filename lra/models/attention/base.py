"""What every attention declares and receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lra.batch import Batch
from lra.errors import UsageError
from lra.kernels import effective_dropout
from lra.kernels.flash.layout import Layout
from lra.kernels.impl import resolve_impl
from lra.models.attention import ATTENTIONS, Capabilities


@dataclass(frozen=True)
class AttentionSpec:
    """What the model asks of one layer's attention."""

    heads: int
    head_dim: int
    max_length: int  # longest sequence, a prefixed CLS token included
    dropout: float = 0.0
    layer: int = 0


MOST = 1 << 16  # tokens, blocks or features that an option counts: a whole sequence of Path-256


def check_count(config: Any, least: int, *names: str) -> None:
    """UsageError if an option of `attn.*` is smaller than `least` or larger than MOST; null is neither."""
    for name in names:
        if (value := getattr(config, name)) is not None and not least <= value <= MOST:
            raise UsageError(f"attn.{name}={value} must be at least {least} and at most {MOST}")


class Attention(nn.Module):
    """Base class: `forward(q, k, v, batch)` maps three `[T, H, D]` tensors of any strides to `[T, H, D]`."""

    name: ClassVar[str]
    facts: ClassVar[Capabilities]
    layout: Layout | None = None  # which keys a query sees; None: all
    elsewhere: ClassVar[str] = ""  # where `attn.impl` chooses triton on a GPU: the path for any device
    decides_on_host: str = ""  # why its training steps can't be captured in a CUDA graph

    @dataclass(frozen=True)
    class Config:
        """Options of `attn.*`; a subclass declares its own."""

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__()
        self.config, self.spec = config, spec
        (low, high), multiple = self.facts.head_dims, self.facts.head_dim_multiple
        if not low <= spec.head_dim <= high:
            self._refuse(f"head dimensions {low} to {high}, not {spec.head_dim}")
        if spec.dropout and not self.facts.dropout:
            self._refuse("no dropout on its probabilities: set model.attn_dropout=0")
        if spec.head_dim % multiple:
            self._refuse(f"head dimensions that are multiples of {multiple}, not {spec.head_dim}")

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        """Options with which a query costs about what `keys` keys do; none where its cost is no option.

        So attentions are compared at equal compression (appendix E.6 of FlashAttention, arXiv 2205.14135).
        """
        return {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """As `forward`, in the padded form where that is the only one it reads."""
        if self.facts.ragged or batch.padded:
            return self._shaped(self(q, k, v, batch), v)
        q, k, v = (batch.pad(x).flatten(0, 1) for x in (q, k, v))
        padded = batch.to_padded()
        return batch.unpad(padded.pad(self._shaped(self(q, k, v, padded), v)))

    def _shaped(self, out: Tensor, v: Tensor) -> Tensor:
        """`out`; UsageError where it has not the heads and features of v, as the residual would take some others."""
        if out.shape[1:] != v.shape[1:]:
            rows, wanted = ("[T, " + ", ".join(map(str, x.shape[1:])) + "]" for x in (out, v))
            raise UsageError(f"attn={self.name} returns {rows} for values of {wanted}: its forward must return that")
        return out

    def resolve(self, device: torch.device, precision: str) -> str:
        """What computes this attention on the device, for the user; UsageError if nothing does in this precision."""
        if self.facts.needs_gpu and device.type != "cuda":
            self._refuse("GPUs only", lambda facts: not facts.needs_gpu)
        if precision not in self.facts.dtypes:
            supported = f"trainer.precision={'|'.join(self.facts.dtypes)}, not {precision}"
            self._refuse(supported, lambda facts: precision in facts.dtypes)
        return self.name

    def path(self, device: torch.device) -> str:
        """What `attn.impl` comes to on the device, triton or `elsewhere`; UsageError if it can't run there."""
        try:
            deterministic = getattr(self.config, "deterministic", False)
            return resolve_impl(self.config.impl, device, deterministic, self.elsewhere, "attn.")
        except ValueError as error:
            raise UsageError(str(error)) from None

    @property
    def dropout_rate(self) -> float:
        """The share of probabilities that is dropped now: 0 at evaluation."""
        return effective_dropout(self.spec.dropout) if self.training else 0.0

    def dropout_seed(self, batch: Batch) -> Tensor | None:
        """The seed of this layer's dropout in this step, int64 on the device; None where nothing is dropped."""
        if not self.training or not self.spec.dropout:
            return None
        assert batch.seed is not None, "a training batch carries its step's seed"
        return batch.seed + self.spec.layer

    def _refuse(self, supports: str, able: Callable[[Capabilities], bool] = lambda facts: True) -> None:
        """UsageError, with those that are installed and can do all that this one is asked for."""
        there = {e.name: ATTENTIONS.facts_of(e) for e in ATTENTIONS.catalogue().values() if not e.missing}
        fit = (name for name, facts in there.items() if facts.fits(self.spec.head_dim, self.spec.dropout))
        others = [name for name in fit if able(there[name])]
        raise UsageError(
            f"attn={self.name} supports {supports}" + (f", or use attn={'|'.join(others)}" if others else "")
        )
