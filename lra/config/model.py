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
    # hidden width of the feed-forward layers, and of the classifier if it has two layers; 0: no feed-forward layers
    d_ff: int = 128
    # kind of all norms; batch: statistics over the real tokens of a micro-batch, in evaluation running ones
    norm: Literal["layer", "rms", "batch"] = "layer"
    post_norm: bool = False  # normalise the sums in a block, not what its branches read; there is no last norm then
    dropout: float = 0.1  # share that is dropped between layers, in steps of 1/256
    attn_dropout: float = 0.1  # share of the attention weights that is dropped, in steps of 1/256
    # share of sequences that skip a branch of the last layer in training; l/L of it in layer l of L (1/256 steps)
    layer_drop: float = 0.0
    qk_norm: bool = False  # RMS normalisation of each head's queries and keys, with a learned scale for each feature
    # learned or sinusoidal vectors, added to the tokens; rotary: queries and keys are rotated; none: no positions
    positions: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    rotary_base: float = 10000.0  # base of the frequencies of rotary positions; a larger one turns more slowly
    # share of a head's pairs of features that turn, rounded to whole pairs; their frequencies span the whole range
    rotary_share: float = 1.0
    # all: every head has all frequencies; heads: the first head has the highest, and the last the lowest
    rotary_bands: Literal["all", "heads"] = "all"
    axes: Literal[1, 2] = 1  # 1: a place in the sequence; 2: row and column of an image
    pixels: Literal["ids", "numbers"] = "ids"  # ids: a vector for each grey value; numbers: a linear layer of it
    causal: bool = False  # each token attends to itself and to earlier ones alone
    # what the classifier sees: the mean or maximum over tokens, an added first token, or the last token
    pooling: Literal["mean", "max", "cls", "last"] = "mean"
    classifier: Literal["two_layers", "linear"] = "two_layers"  # between the pooled sequence and the class scores
    embedding_std: float = 0.02  # standard deviation of the initial token and learned position embeddings

    def __post_init__(self) -> None:
        check_at_least(1, "model", self, "d_model", "heads", "layers")
        check_at_least(0, "model", self, "d_ff")
        check_at_most(1 << 14, "model", self, "d_model")  # GPT-3 has 12,288
        check_at_most(1 << 16, "model", self, "d_ff")
        check_at_most(1 << 10, "model", self, "layers")
        if self.d_model % self.heads:
            raise UsageError(f"model.d_model={self.d_model} is not a multiple of model.heads={self.heads}")
        if not self.d_ff and self.classifier == "two_layers":
            raise UsageError(
                "model.d_ff=0 leaves the first layer of the classifier no width: set model.classifier=linear, "
                "or a larger model.d_ff"
            )
        if self.positions == "none" and self.axes == 2:
            raise UsageError("model.axes=2: model.positions=none has no axes; set model.axes=1, or other positions")
        if self.positions == "rotary" and self.head_dim % (2 * self.axes):
            raise UsageError(
                f"rotary positions need a head dimension divisible by {2 * self.axes}, not {self.head_dim}"
            )
        if not 1 < self.rotary_base < math.inf:
            raise UsageError(f"model.rotary_base={self.rotary_base} must be finite and above 1")
        for name in ("rotary_base", "rotary_share", "rotary_bands"):
            if self.positions != "rotary" and (value := getattr(self, name)) != getattr(ModelConfig, name):
                raise UsageError(
                    f"model.{name}={value}: model.positions={self.positions} does not rotate; "
                    "set model.positions=rotary, or leave it out"
                )
        if not 0 < self.rotary_share <= 1:
            raise UsageError(f"model.rotary_share={self.rotary_share} must be above 0 and at most 1")
        pairs = self.head_dim // 2 // self.axes
        if self.rotary_share < 1 and self.turned_pairs in (0, pairs):
            what, mend = ("all", "use 1") if self.turned_pairs else ("none", f"use at least {1 / pairs:.3g}")
            raise UsageError(
                f"model.rotary_share={self.rotary_share} turns {what} of the {pairs} pairs of a head on an axis: {mend}"
            )
        if self.rotary_bands == "heads" and self.heads == 1:
            raise UsageError(
                "model.rotary_bands=heads does nothing with model.heads=1: set model.heads=2 or more, or leave it out"
            )
        if self.causal and self.pooling == "cls":
            raise UsageError(
                "model.pooling=cls: the first token of a causal model sees only itself, set model.pooling=last"
            )
        if self.positions == "sinusoidal" and self.d_model % (2 * self.axes):
            raise UsageError(
                f"sinusoidal positions need model.d_model divisible by {2 * self.axes}, not {self.d_model}"
            )
        for name in ("dropout", "attn_dropout", "layer_drop"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"model.{name}={getattr(self, name)} must be at least 0 and below 1")
            check_dropout_rate(f"model.{name}", getattr(self, name))
        if not 0 <= self.embedding_std < math.inf:
            raise UsageError(f"model.embedding_std={self.embedding_std} must be finite and at least 0")
        drawn = self.pixels == "ids" or self.positions == "learned" or self.pooling == "cls"
        if not drawn and self.embedding_std != ModelConfig.embedding_std:
            raise UsageError(
                f"model.embedding_std={self.embedding_std}: model.pixels=numbers leaves no table to draw, nor a CLS "
                f"token; set model.embedding_std={ModelConfig.embedding_std}"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def turned_pairs(self) -> int:
        """Pairs of features of a head that rotary positions turn on each axis."""
        return round(self.rotary_share * (self.head_dim // 2 // self.axes))

    @property
    def d_hidden(self) -> int | None:
        """Hidden width of the classifier; None if it has one layer."""
        return self.d_ff if self.classifier == "two_layers" else None
