"""Other libraries' kernels under the layouts of butterfly: its peers, for `lra bench attention` alone.

They take butterfly's options, except for those of its own kernels, and full batches only.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lra.batch import Batch
from lra.config.override import parse_overrides
from lra.config.registry import Registry
from lra.errors import UsageError
from lra.kernels.flash.layout import FULL, PARTIAL, Layout
from lra.models.attention import Capabilities
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.butterfly import ButterflyAttention
from lra.models.attention.flex import MASK_BLOCK, FlexAttention
from lra.models.attention.sdpa import last_dim_contiguous

PEERS = Registry("attention", "lra.bench", Capabilities)  # of an attention `name`, each called `name@library`
OWN_OPTIONS = ("impl", "deterministic")  # options of butterfly that choose among its own kernels
LEAST_FLEX_TILE = 64  # the smallest side of the tiles that FlexAttention's autotuning tries in the forward pass
FA4_BLOCK = (128, 128)  # what FlashAttention-4 has a backward for on Hopper


def with_peers(attention: str) -> tuple[str, ...]:
    """The attentions to measure for `name[:field=value…]`: with flash and its peers if it has any, else it alone."""
    name, *options = attention.split(":")
    pattern = [str(option) for option in parse_overrides(options, f"attns={name}: ") if option.field not in OWN_OPTIONS]
    peers = [peer for peer in PEERS.catalogue() if peer.partition("@")[0] == name]
    return (attention, "flash", *(":".join((peer, *pattern)) for peer in reversed(peers))) if peers else (attention,)


class Peer(Attention):
    """Attention under butterfly's layout, for sequences that all have N tokens. `dense` maps `[B, N, H, D]` to the
    same.
    """

    layout: Layout

    @dataclass(frozen=True)
    class Config(ButterflyAttention.Config):
        def __post_init__(self) -> None:
            super().__post_init__()
            for name in OWN_OPTIONS:
                if getattr(self, name) != getattr(ButterflyAttention.Config, name):
                    raise UsageError(f"{name}= is an option of butterfly's own kernels: leave it out for a peer")

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        self.layout = ButterflyAttention(config, spec).layout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        raise UsageError(f"attn={self.name} supports sequences of one length, no ragged batches: use attn=butterfly")


@PEERS.register(
    "butterfly@flex",
    exact=False,
    dropout=False,
    ragged=False,
    head_dims=(16, 128),
    needs_gpu=True,  # PyTorch has no backward of it on the CPU
    paper="Dong et al. 2024, arXiv 2412.05496",
)
class FlexButterfly(Peer):
    """PyTorch's FlexAttention, compiled, with the layout as a BlockMask."""

    @dataclass(frozen=True)
    class Config(Peer.Config):
        # of torch.compile; auto: default where the tiles that are its default divide the blocks, else autotuned ones
        mode: Literal["auto", "default", "max-autotune-no-cudagraphs"] = "auto"

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        coarse = not any(side % MASK_BLOCK for side in config.sides)
        mode = ("default" if coarse else "max-autotune-no-cudagraphs") if config.mode == "auto" else config.mode
        self.flex = FlexAttention(FlexAttention.Config(mode), spec)

    def resolve(self, device: torch.device, precision: str) -> str:
        name = super().resolve(device, precision)
        least = MASK_BLOCK if self.config.mode == "default" else LEAST_FLEX_TILE
        if any(side % least for side in self.config.sides):
            raise UsageError(f"attn={self.name} supports blocks of multiples of {least}, not {self.config.block}")
        return name

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.flex.dense(q, k, v, block_mask(self.layout, q.shape[1], q.device))


@functools.lru_cache(maxsize=1)  # another mask is compiled anew: the check and the measurement share one
def block_mask(layout: Layout, n: int, device: torch.device) -> BlockMask:
    """The layout of n tokens for FlexAttention. `mask_mod` is asked in blocks that a rule may show in part."""
    (rows, columns), blocks = layout.block, layout.blocks.to(device)
    band, first, causal, heads = layout.band, layout.globals, layout.causal, len(blocks)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = blocks[h % heads, i // rows, j // columns]
        if band is not None:
            visible = visible | ((i - j).abs() <= band)
        if first:
            visible = visible | (i < first) | (j < first)
        return visible & (j <= i) if causal else visible

    lists = (*_listed(layout, PARTIAL, n, device), *_listed(layout, FULL, n, device))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=layout.block, mask_mod=seen, seq_lengths=(n, n))


@PEERS.register(
    "butterfly@fa4",
    exact=False,
    dropout=False,
    ragged=False,
    head_dims=(16, 128),
    head_dim_multiple=16,
    dtypes=("bf16",),
    needs_gpu=True,
    paper="github.com/Dao-AILab/flash-attention, flash_attn/cute",
)
class FlashAttention4Butterfly(Peer):
    """FlashAttention-4 with lists of the blocks that are seen."""

    def resolve(self, device: torch.device, precision: str) -> str:
        name = super().resolve(device, precision)
        if self.layout.block != FA4_BLOCK or self.layout.ruled:
            raise UsageError(f"attn={self.name} supports blocks of 128x128 without globals, not {self.config.block}")
        _flash_attention_4()
        return name

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend, lists = _flash_attention_4()
        forward, backward = (
            lists(
                *_listed(self.layout, PARTIAL, q.shape[1], q.device, by_key),
                *_listed(self.layout, FULL, q.shape[1], q.device, by_key),
                block_size=FA4_BLOCK,
            )
            for by_key in (False, True)
        )
        qkv = (last_dim_contiguous(x) for x in (q, k, v))
        return attend(*qkv, block_sparse_tensors=forward, block_sparse_tensors_bwd=backward)[0]


def _flash_attention_4() -> tuple[Any, Any]:
    """`flash_attn_func` and `BlockSparseTensorsTorch` of flash-attn-4. UsageError if it is not installed."""
    try:
        attend = importlib.import_module("flash_attn.cute").flash_attn_func
        lists = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    except (ImportError, OSError, AttributeError) as error:
        raise UsageError(f"attn=butterfly@fa4 needs flash_attn.cute ({error}): pip install flash-attn-4") from None
    if "block_sparse_tensors_bwd" not in inspect.signature(attend).parameters:
        raise UsageError("attn=butterfly@fa4 needs a flash-attn-4 with a block-sparse backward, as 4.0.0b16 has")
    return attend, lists


@functools.lru_cache(maxsize=4)  # those of one layout, so that a pass that is timed makes none
def _listed(layout: Layout, kind: int, n: int, device: torch.device, by_key: bool = False) -> tuple[Tensor, Tensor]:
    """The blocks of one kind, as int32 `[1, H or 1, rows]` and `[1, H or 1, rows, columns]`.

    The first says how many there are in each row, the second which ones, ascending. `by_key` swaps rows and columns.
    """
    rows, columns = (-(-n // side) for side in layout.block)
    found = (layout.kinds(*layout.block)[:, :rows, :columns] == kind).to(device)
    found = found.transpose(1, 2) if by_key else found
    which = found.int().sort(stable=True, dim=2, descending=True).indices
    return found.sum(2, dtype=torch.int32)[None], which.int()[None].contiguous()
