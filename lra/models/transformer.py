"""The Transformer encoder that every task shares: attention by name, GELU, pre-norm or post-norm.

Shape suffixes: T token rows of the ragged batch, B sequences, N rows of a padded sequence, D model width or
head dimension, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.config.model import ModelConfig
from lra.errors import UsageError
from lra.kernels.dropout import dropout_threshold
from lra.kernels.layers.fused_layers import (
    feed_forward,
    pooled_feed_forward,
    product_dtype,
    project,
    supports_feed_forward,
    supports_projection,
)
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.models.dropout import BRANCH_SITE, branch_keys, drop, drop_branch, keep_scale, row_keys
from lra.models.embedding import Embedding
from lra.models.norms import make_norm, normalise
from lra.models.pixels import PixelEmbedding
from lra.models.positions import (
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
    axis_sizes,
    rotate,
    token_coordinates,
)


class HeadNorm(nn.RMSNorm):
    """RMS normalisation of the features of each head, in fp32, with a learned scale for each feature.

    Normalised queries and keys bound the logits of attention: Henry et al. 2020 (arXiv 2010.04245) divide by the
    Euclidean norm, Dehghani et al. 2023 (arXiv 2302.05442, section 2) use LayerNorm. Heads share the scale.
    """

    def __init__(self, head_dim: int):
        super().__init__(head_dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[T, H, D]` to `[T, H, D]` of the same dtype."""
        # PyTorch's kernel takes rows of the scale's dtype alone
        return super().forward(x.float()).to(x.dtype)


class NoProjection(nn.Module):
    """The identity where attention has a projection: a mixer has its own.

    The kernel after attention always projects, so it is given a matrix. With dropout it rounds the scale of kept
    elements to 16 bits, as it does with each weight.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, features: int):
        super().__init__()
        self.register_buffer("weight", torch.eye(features), persistent=False)
        self.register_buffer("bias", torch.zeros(features), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)).

    With `post_norm` norm(x + attention(x)), then norm(x + feed-forward(x)) (Vaswani et al. 2017, arXiv 1706.03762,
    section 3.1). With `d_ff=0` the second part is left out.
    """

    def __init__(self, config: ModelConfig, attn: Any, max_length: int, layer: int, causal: bool):
        super().__init__()
        d = config.d_model
        self.heads, self.dropout, self.site = config.heads, config.dropout, 1 + 3 * layer
        self.post_norm, self.attn_norm = config.post_norm, make_norm(config)
        self.ff_norm: Any = make_norm(config) if config.d_ff else None
        attention = ATTENTIONS.get(attn.name)
        self.layer_drop, self.branch_site = config.layer_drop * (layer + 1) / config.layers, BRANCH_SITE - 2 * layer
        shared_qk = attention.facts.shared_qk
        self.qkv: Any = None  # a mixer has its own projections
        if not attention.facts.mixes:
            self.qkv = nn.Linear(d, (2 if shared_qk else 3) * d)
        elif config.positions == "rotary" or config.qk_norm:
            field, mend = ("qk_norm=true", "false") if config.qk_norm else ("positions=rotary", "none")
            raise UsageError(
                f"model.{field} changes queries and keys, and attn={attn.name} is a mixer without them: "
                f"set model.{field.partition('=')[0]}={mend}"
            )
        self.out: Any = NoProjection(d) if attention.facts.mixes else nn.Linear(d, d)
        self.q_norm = HeadNorm(config.head_dim) if config.qk_norm else None
        self.k_norm = HeadNorm(config.head_dim) if config.qk_norm and not shared_qk else None
        spec = AttentionSpec(config.heads, config.head_dim, max_length, config.attn_dropout, layer, causal)
        self.attention = attention(attn, spec)
        if config.d_ff:
            self.up, self.down = nn.Linear(d, config.d_ff), nn.Linear(config.d_ff, d)
        self.fused = True  # one kernel before attention and one after it, where they support the case
        self.fusible = config.norm == "layer" and not config.post_norm  # the kernels have a LayerNorm before a branch

    def forward(
        self,
        x_TD: Tensor,
        batch: Batch,
        rotary: tuple[Tensor, Tensor] | None,
        keys_T: Tensor | None = None,
        branch_keys_T: Tensor | None = None,
    ) -> Tensor:
        """Maps `[T, d_model]` to `[T, d_model]`. The keys are those of `after_attention`."""
        return self.after_attention(*self.attend(x_TD, batch, rotary), keys_T, branch_keys_T, batch)

    def attend(self, x_TD: Tensor, batch: Batch, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Returns the output of attention or of a mixer, and x: both `[T, d_model]`."""
        if self.qkv is None:
            mixed_TD = self.attention.mix_ragged(self._before(self.attn_norm, x_TD, batch), batch, x_TD)
            return mixed_TD.to(product_dtype(x_TD)), x_TD
        turned = None if self.attention.facts.rotates else rotary  # the model rotates, not the attention
        if self._fuses_projection(x_TD, turned):
            x_TD, q_THD, k_THD, v_THD = project(x_TD, self.attn_norm, self.qkv, self.heads, turned)
        else:
            read_TD = self._before(self.attn_norm, x_TD, batch)
            qkv = self.qkv(read_TD).unflatten(-1, (-1, self.heads, x_TD.shape[-1] // self.heads))
            # views, which the attention reads by stride; with two projections, the first is for queries and keys
            q_THD, k_THD, v_THD = qkv[:, 0], qkv[:, -2], qkv[:, -1]
            if self.q_norm is not None:
                q_THD = self.q_norm(q_THD)
                k_THD = q_THD if self.k_norm is None else self.k_norm(k_THD)
            if turned is not None:
                q_THD = rotate(q_THD, *turned)
                k_THD = q_THD if self.attention.facts.shared_qk else rotate(k_THD, *turned)
        if rotary is not None and turned is None:
            o_THD = self.attention(q_THD, k_THD, v_THD, batch, rotary)
        else:
            o_THD = self.attention.attend(q_THD, k_THD, v_THD, batch)
        return o_THD.flatten(1), x_TD

    def _fuses_projection(self, x_TD: Tensor, turned: tuple[Tensor, Tensor] | None) -> bool:
        """Whether one kernel computes the part before attention. `turned`: what rotates queries and keys there."""
        # the kernel has one table of angles for all heads, and rotates without a norm before it
        fused = self.fused and self.fusible and self.q_norm is None and (turned is None or turned[0].ndim == 2)
        return fused and supports_projection(x_TD, self.qkv, x_TD.shape[-1] // self.heads, turned)

    def is_fused(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor] | None) -> bool:
        """Whether kernels compute the whole block: one before attention, those of attention, and one after it."""
        if self.qkv is None or not self.attention.fallback or self.attention.choose_impl(x_TD.device) != "triton":
            return False
        turned = None if self.attention.facts.rotates else rotary
        return self._fuses_projection(x_TD, turned) and self.fuses(x_TD.to(product_dtype(x_TD)), x_TD)

    def after_attention(
        self, o_TD: Tensor, x_TD: Tensor, keys_T: Tensor | None, branch_keys_T: Tensor | None, batch: Batch
    ) -> Tensor:
        """Computes the part of the block after attention, `[T, d_model]`.

        Args:
            o_TD, x_TD: the result of `attend`.
            keys_T: the dropout key of each row; None: nothing is dropped.
            branch_keys_T: the key of each row's sequence, for `layer_drop`; None: no branch is dropped.
            batch: the batch of these rows.
        """
        if self.fuses(o_TD, x_TD):
            layers, dropout = self._fusing(keys_T)
            return feed_forward(o_TD, x_TD, *layers, **dropout)
        added = drop(self.out(o_TD), self.dropout, keys_T, self.site)
        x_TD = x_TD + drop_branch(added, self.layer_drop, branch_keys_T, self.branch_site)
        x_TD = self._after(self.attn_norm, x_TD, batch)
        if self.ff_norm is None:
            return x_TD
        read_TD = self._before(self.ff_norm, x_TD, batch)
        hidden = drop(F.gelu(self.up(read_TD)), self.dropout, keys_T, self.site + 1)
        added = drop(self.down(hidden), self.dropout, keys_T, self.site + 2)
        x_TD = x_TD + drop_branch(added, self.layer_drop, branch_keys_T, self.branch_site - 1)
        return self._after(self.ff_norm, x_TD, batch)

    def _before(self, norm: nn.Module, x_TD: Tensor, batch: Batch) -> Tensor:
        """Returns what a branch reads of the residual."""
        return x_TD if self.post_norm else normalise(norm, x_TD, batch)

    def _after(self, norm: nn.Module, x_TD: Tensor, batch: Batch) -> Tensor:
        """Returns what the block goes on with after a branch is added."""
        return normalise(norm, x_TD, batch) if self.post_norm else x_TD

    def after_attention_pooled(
        self, o_TD: Tensor, x_TD: Tensor, keys_T: Tensor | None, norm: nn.LayerNorm, batch: Batch
    ) -> Tensor:
        """Returns the mean of `norm(after_attention(...))` over each sequence, `[B, d_model]`. Needs `fuses`."""
        layers, dropout = self._fusing(keys_T)
        where = batch.start, batch.length, batch.padded_length
        return pooled_feed_forward(o_TD, x_TD, *layers, norm, *where, **dropout)

    def _fusing(
        self, keys_T: Tensor | None
    ) -> tuple[tuple[nn.Linear, nn.LayerNorm, nn.Linear, nn.Linear], dict[str, Any]]:
        """Returns the layers after attention and their dropout, as arguments of one kernel."""
        dropped = dropout_threshold(self.dropout)
        dropout: dict[str, Any] = dict(scale=keep_scale(dropped), threshold=dropped, keys=keys_T, site=self.site)
        return (self.out, self.ff_norm, self.up, self.down), dropout

    def fuses(self, o_TD: Tensor, x_TD: Tensor) -> bool:
        """Whether one kernel computes the part after attention."""
        if not self.fusible or self.ff_norm is None:  # the kernel has a feed-forward
            return False
        if self.training and self.layer_drop:  # the kernel adds both branches of every sequence
            return False
        return self.fused and supports_feed_forward(o_TD, x_TD, self.up, dropout_threshold(self.dropout))


class Encoder(nn.Module):
    """Token ids of a ragged batch to one vector per sequence, `[B, d_model]`.

    Args:
        config, attn: the model's and the attention's configuration.
        vocabulary: number of token ids. With `cls` pooling the next id is the CLS token.
        max_length: longest sequence, without a CLS token.
        grid: height and width if the tokens are pixels in row-major order. Default: None.
        masked: whether the last id is MASK, which stands for a hidden token. Default: False.
        causal: whether attention is causal even if the configuration says nothing of it. Default: False.
    """

    def __init__(
        self,
        config: ModelConfig,
        attn: Any,
        *,
        vocabulary: int,
        max_length: int,
        grid: tuple[int, int] | None = None,
        masked: bool = False,
        causal: bool = False,
    ):
        super().__init__()
        self.config, self.grid = config, grid
        self.prefix = vocabulary if config.pooling == "cls" else None
        prefixed = int(self.prefix is not None)
        self.mask = vocabulary + prefixed if masked else None
        longest = max_length + prefixed
        if config.pixels == "numbers":
            if grid is None:
                raise UsageError("model.pixels=numbers needs an image task: use model.pixels=ids here")
            self.embedding = PixelEmbedding(vocabulary, config.d_model, config.embedding_std, self.prefix, self.mask)
        else:
            self.embedding = Embedding(vocabulary + prefixed + masked, config.d_model)
            nn.init.normal_(self.embedding.weight, std=config.embedding_std)
        sizes = axis_sizes(config.axes, longest, grid)
        self.positions: Any
        if config.positions == "learned":
            self.positions = LearnedPositions(sizes, config.d_model, config.embedding_std)
        elif config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(config.d_model, config.axes)
        elif config.positions == "none":
            self.positions = None
        else:
            bands = config.heads if config.rotary_bands == "heads" else 1
            self.positions = RotaryPositions(
                config.head_dim, config.axes, config.rotary_base, config.turned_pairs, bands
            )
        causal = causal or config.causal
        self.blocks = nn.ModuleList(
            EncoderBlock(config, attn, longest, layer, causal) for layer in range(config.layers)
        )
        self.norm: Any = nn.Identity() if config.post_norm else make_norm(config)

    def forward(self, batch: Batch) -> Tensor:
        o_TD, x_TD, keys_T, branch_keys_T = self.run_blocks(batch)
        last: EncoderBlock = self.blocks[-1]  # type: ignore[assignment]
        if self.config.pooling == "mean" and last.fuses(o_TD, x_TD):
            return last.after_attention_pooled(o_TD, x_TD, keys_T, self.norm, batch)
        x_TD = last.after_attention(o_TD, x_TD, keys_T, branch_keys_T, batch)
        return self.pool(normalise(self.norm, x_TD, batch), batch)

    def rows(self, batch: Batch) -> Tensor:
        """Returns a vector for each token, `[T, d_model]`, with arbitrary values past a length."""
        last: EncoderBlock = self.blocks[-1]  # type: ignore[assignment]
        return normalise(self.norm, last.after_attention(*self.run_blocks(batch), batch), batch)

    def is_fused(self) -> bool:
        """Whether kernels compute all blocks, so that torch.compile has little to fuse. Asked where rows would be."""
        device, rotary = next(self.parameters()).device, None
        x_TD = torch.empty(0, self.config.d_model, device=device)
        if isinstance(self.positions, RotaryPositions):
            rotary = self.positions(torch.zeros(0, self.config.axes, device=device))
        return all(block.is_fused(x_TD, rotary) for block in self.blocks)  # type: ignore[operator]

    def run_blocks(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns the arguments of the last block's `after_attention`, but for the batch."""
        rotary = added_TD = places = None
        if self.positions is not None:
            place_TA = token_coordinates(batch, self.config.axes, self.grid and self.grid[1], self.prefix is not None)
            if isinstance(self.positions, RotaryPositions):
                rotary = self.positions(place_TA)
            elif isinstance(self.positions, LearnedPositions):
                places = self.positions.places(place_TA, batch)
            if rotary is None and places is None:
                added_TD = self.positions(place_TA)
        keys_T = row_keys(batch) if self.training and self.config.dropout else None
        branch_keys_T = branch_keys(batch) if self.training and self.config.layer_drop else None
        x_TD = self.embedding(batch.tokens, added_TD, self.config.dropout, keys_T, places)
        *blocks, last = self.blocks
        for block in blocks:
            x_TD = block(x_TD, batch, rotary, keys_T, branch_keys_T)
        return *last.attend(x_TD, batch, rotary), keys_T, branch_keys_T  # type: ignore[operator]

    def pool(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Returns the mean, maximum, first or last vector of the real tokens, fp32 `[B, d_model]`.

        A sequence of length 0 has zeros.
        """
        x_TD = x_TD.float()
        if self.config.pooling in ("cls", "last"):
            row_B = batch.start if self.config.pooling == "cls" else batch.start + batch.length - 1
            return x_TD.index_select(0, row_B.clamp(0, len(x_TD) - 1)).where(batch.length[:, None] > 0, 0)
        x_BND, real_BN1 = batch.pad(x_TD), batch.mask()[:, :, None]
        if self.config.pooling == "mean":
            return x_BND.where(real_BN1, 0).sum(1) / batch.length.clamp(min=1)[:, None]
        return x_BND.where(real_BN1, -torch.inf).amax(1).where(batch.length[:, None] > 0, 0)


class Transformer(nn.Module):
    """An encoder and a head: `[B, classes]` scores of a ragged batch."""

    def __init__(self, encoder: Encoder, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.encoder(batch))
