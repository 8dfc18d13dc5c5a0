"""The fields of the Transformer, `model.*`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lra.config.checks import check_at_least, check_at_most, check_dropout_rate
from lra.errors import UsageError


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer encoder. Its attention is `attn=`, its input and classes come from the task."""

    d_model: int = 64  # width: features of each token, a multiple of model.heads
    heads: int = 2  # attention heads of a layer
    layers: int = 2  # Transformer blocks
    d_ff: int = 128  # hidden width of the feed-forward layers, and of the classifier if it has two layers
    dropout: float = 0.1  # share that is dropped between layers, in steps of 1/256
    attn_dropout: float = 0.1  # share of the attention weights that is dropped, in steps of 1/256
    # learned or sinusoidal vectors, added to the tokens; rotary: queries and keys are rotated
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    rotary_base: float = 10000.0  # base of the frequencies of rotary positions; a larger one turns more slowly
    axes: Literal[1, 2] = 1  # 1: a place in the sequence; 2: row and column of an image
    causal: bool = False  # each token attends to itself and to earlier ones alone
    # what the classifier sees: the mean or maximum over tokens, an added first token, or the last token
    pooling: Literal["mean", "max", "cls", "last"] = "mean"
    classifier: Literal["two_layers", "linear"] = "two_layers"  # between the pooled sequence and the class scores
    embedding_std: float = 0.02  # standard deviation of the initial token and learned position embeddings

    def __post_init__(self) -> None:
        check_at_least(1, "model", self, "d_model", "heads", "layers", "d_ff")
        check_at_most(1 << 14, "model", self, "d_model")  # GPT-3 has 12,288
        check_at_most(1 << 16, "model", self, "d_ff")
        check_at_most(1 << 10, "model", self, "layers")
        if self.d_model % self.heads:
            raise UsageError(f"model.d_model={self.d_model} is not a multiple of model.heads={self.heads}")
        if self.positions == "rotary" and self.head_dim % (2 * self.axes):
            raise UsageError(
                f"rotary positions need a head dimension divisible by {2 * self.axes}, not {self.head_dim}"
            )
        if not 1 < self.rotary_base < math.inf:
            raise UsageError(f"model.rotary_base={self.rotary_base} must be finite and above 1")
        if self.positions != "rotary" and self.rotary_base != ModelConfig.rotary_base:
            raise UsageError(
                f"model.rotary_base={self.rotary_base}: model.positions={self.positions} does not rotate; "
                "set model.positions=rotary, or leave it out"
            )
        if self.causal and self.pooling == "cls":
            raise UsageError(
                "model.pooling=cls: the first token of a causal model sees only itself, set model.pooling=last"
            )
        if self.positions == "sinusoidal" and self.d_model % (2 * self.axes):
            raise UsageError(
                f"sinusoidal positions need model.d_model divisible by {2 * self.axes}, not {self.d_model}"
            )
        for name in ("dropout", "attn_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"model.{name}={getattr(self, name)} must be at least 0 and below 1")
            check_dropout_rate(f"model.{name}", getattr(self, name))
        if not 0 <= self.embedding_std < math.inf:
            raise UsageError(f"model.embedding_std={self.embedding_std} must be finite and at least 0")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def d_hidden(self) -> int | None:
        """Hidden width of the classifier; None if it has one layer."""
        return self.d_ff if self.classifier == "two_layers" else None
