"""The base classes of mixers and attentions, and what a layer tells them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lra.batch import Batch
from lra.config.sources import name_line
from lra.errors import UsageError
from lra.kernels import effective_dropout
from lra.kernels.flash.layout import Layout
from lra.kernels.impl import resolve_impl
from lra.models.attention import ATTENTIONS, Capabilities


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer of the model requires of its attention."""

    heads: int
    head_dim: int
    max_length: int  # longest sequence, including a CLS token
    dropout: float = 0.0
    layer: int = 0
    causal: bool = False  # each token attends to itself and to earlier ones alone

    @property
    def d_model(self) -> int:
        return self.heads * self.head_dim


class Mixer(nn.Module):
    """Base class of what mixes the tokens of each sequence.

    A subclass defines `mix(x, batch)`, which maps the block's normalised rows `[T, d_model]` to the rows that are added
    to the residual. It has its own projections, and may use `spec.heads`. It registers with `mixes=True`, and with
    `reads_residual=True` if it defines `mix(x, residual, batch)`. An `Attention` is a mixer whose projections the block
    makes.

    `resolve` describes for the user what will compute. `recipe_section` has fields of `lra fit`, by task or under
    `all`, for recipes that say nothing of this mixer, such as
    `{"all": {"model": {"positions": "learned"}}, "text": {"attn": {"k": 256}}}`.
    """

    name: ClassVar[str]
    facts: ClassVar[Capabilities]
    recipe_section: ClassVar[Mapping[str, Any]] = {}  # the form of a recipe's attns: <task or all>: {field: value}
    decides_on_host: str = ""  # why a CUDA graph can't capture its training steps

    @dataclass(frozen=True)
    class Config:
        """Options of `attn.*`; a subclass declares its own."""

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__()
        self.config, self.spec = config, spec
        if self.facts.mixes == isinstance(self, Attention):
            how = "subclasses Attention: leave out mixes=True" if self.facts.mixes else "is a Mixer: add mixes=True"
            raise UsageError(f"attn={self.name} {how}, where {type(self).__module__} registers it")
        dims, multiple = self.facts.head_dims, self.facts.head_dim_multiple
        if dims and not dims[0] <= spec.head_dim <= dims[1]:
            self._refuse(f"head dimensions {dims[0]} to {dims[1]}, not {spec.head_dim}")
        if spec.dropout and not self.facts.dropout:
            self._refuse("no dropout on its probabilities: set model.attn_dropout=0")
        if spec.causal and not self.facts.causal:
            self._refuse("no causal attention (model.causal=true, pretrain=causal)")
        if spec.head_dim % multiple:
            self._refuse(f"head dimensions that are multiples of {multiple}, not {spec.head_dim}")

    @classmethod
    def method_flaw(cls, facts: Capabilities) -> str:
        """Says which method lra can't call, and how to mend it; empty if it can call all."""
        base = Attention if issubclass(cls, Attention) else Mixer
        method = "forward" if base is Attention else "mix"
        rows = ("q", "k", "v") if base is Attention else ("x", "residual") if facts.reads_residual else ("x",)
        for name, given in (("__init__", ("config", "spec")), (method, (*rows, "batch"))):
            function, wanted = getattr(cls, name), f"{name}({', '.join(('self', *given))})"
            if function is getattr(base, name) and name == method:
                return f"lacks {wanted}: add it"
            bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
            try:
                inspect.signature(function).bind(*given if bound else (cls, *given))
            except TypeError:
                return f"has {name}{inspect.signature(function)}: write {wanted}"
        return ""

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        """Returns options with which a query costs about as much as `keys` keys; empty if no option sets the cost.

        They serve to compare attentions at equal compression (appendix E.6 of FlashAttention, arXiv 2205.14135).
        """
        return {}

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        """Maps `[T, d_model]` to the same. What is past a length may be anything, and must influence no real row."""
        raise NotImplementedError

    def mix_ragged(self, x: Tensor, batch: Batch, residual: Tensor | None = None) -> Tensor:
        """Calls `mix`, with padded rows if the mixer reads no packed ones.

        Args:
            x, batch: the block's normalised rows, and where sequences lie in them.
            residual: what `mix` is added to, for a mixer that reads it. None: x, as with `model.post_norm`.
        """
        rows = (x, x if residual is None else residual) if self.facts.reads_residual else (x,)
        return self._mixed(self.mix, rows, batch)

    def _mixed(self, mix: Callable[..., Tensor], rows: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """Returns `mix(*rows, batch)`, by way of the padded form if need be."""
        if self.facts.ragged or batch.padded:
            return self._shaped(mix(*rows, batch), rows[-1])
        rows = tuple(batch.pad(x).flatten(0, 1) for x in rows)
        padded = batch.to_padded()
        return batch.unpad(padded.pad(self._shaped(mix(*rows, padded), rows[-1])))

    def _shaped(self, out: Any, x: Tensor) -> Tensor:
        """Returns `out`. UsageError if its shape is not that of x, as some others could still be added to x."""
        if isinstance(out, Tensor) and out.shape == x.shape:
            return out
        what, method = ("rows", "mix") if self.facts.mixes else ("values", "forward")
        found = [*out.shape] if isinstance(out, Tensor) else None if out is None else f"a {type(out).__name__}"
        code = inspect.unwrap(getattr(type(self), method)).__code__
        line = name_line(Path(code.co_filename), code.co_firstlineno)
        raise UsageError(
            f"{line}: {method} of {type(self).__name__} (attn={self.name}) returns {found} for {what} of {[*x.shape]}: "
            "return a tensor of that shape, by batch.unpad if it is padded"
        )

    def resolve(self, device: torch.device, precision: str) -> str:
        """Describes what computes this attention on a device. UsageError if nothing does in this precision."""
        if self.facts.needs_gpu and device.type != "cuda":
            self._refuse("GPUs only", lambda facts: not facts.needs_gpu)
        if precision not in self.facts.dtypes:
            supported = f"trainer.precision={'|'.join(self.facts.dtypes)}, not {precision}"
            self._refuse(supported, lambda facts: precision in facts.dtypes)
        return self.name

    def _refuse(self, supports: str, able: Callable[[Capabilities], bool] = lambda facts: True) -> None:
        """Raises a UsageError that names the installed attentions which can do what was asked."""
        there = {e.name: ATTENTIONS.facts_of(e) for e in ATTENTIONS.catalogue().values() if not e.missing}
        spec, kind = self.spec, self.facts.mixes  # no mixer stands for an attention, nor the other way round
        same = {name: facts for name, facts in there.items() if facts.mixes == kind}
        fit = (name for name, facts in same.items() if facts.fits(spec.head_dim, spec.dropout, spec.causal))
        others = [name for name in fit if able(there[name])]
        raise UsageError(
            f"attn={self.name} supports {supports}" + (f", or use attn={'|'.join(others)}" if others else "")
        )


class Attention(Mixer):
    """Base class of attentions: mixers of queries, keys and values, whose projections the block makes.

    A subclass defines `forward(q, k, v, batch)`, which maps three `[T, H, D]` tensors of any strides to one. The model
    calls `attend`. An attention with an option `impl` names its path for all devices in `fallback`, and `choose_impl`
    decides between Triton and that path.
    """

    layout: Layout | None = None  # the keys that a query sees; None: all
    fallback: ClassVar[str] = ""  # for attentions with `attn.impl`: the path that runs on any device

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Calls `forward`, with padded tensors if the attention reads no packed ones."""
        return self._mixed(self, (q, k, v), batch)

    def choose_impl(self, device: torch.device) -> str:
        """Returns the path that `attn.impl` gives: triton or `fallback`. UsageError if it can't run on the device."""
        try:
            deterministic = getattr(self.config, "deterministic", False)
            return resolve_impl(self.config.impl, device, deterministic, self.fallback, "attn.")
        except ValueError as error:
            raise UsageError(str(error)) from None

    @property
    def dropout_rate(self) -> float:
        """The share of probabilities that is dropped. It is 0 in evaluation."""
        return effective_dropout(self.spec.dropout) if self.training else 0.0

    def dropout_seed(self, batch: Batch) -> Tensor | None:
        """Returns the seed of this layer's dropout in this step, int64 on the device; None without dropout."""
        if not self.training or not self.spec.dropout:
            return None
        assert batch.seed is not None, "a training batch carries its step's seed"
        return batch.seed + self.spec.layer
