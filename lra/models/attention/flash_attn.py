"""The authors' own kernels, for comparison: FlashAttention-3, 4 or 2, the first of them that is there.

FlashAttention-3 may also be its compiled extension alone: the environment variable FA3_LIB names that file, and
FA3_CUDART the libcudart it was linked with, where the loader does not find it by itself.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lra.batch import Batch
from lra.errors import UsageError, first_line
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention
from lra.models.attention.sdpa import attend_packed, last_dim_contiguous


class FlashAttnLibrary(NamedTuple):
    """One version of FlashAttention."""

    name: str
    dense: Callable[..., Tensor]  # (q, k, v [B, N, H, D], causal) -> [B, N, H, D]
    varlen: Callable[..., Tensor]  # a VarlenFunction with one more argument, causal


@ATTENTIONS.register(
    "flash_attn",
    exact=True,
    cost="N²",
    causal=True,
    dropout=False,  # versions 3 and 4 have none; version 2, which has, is attn=sdpa
    head_dims=(8, 256),
    head_dim_multiple=8,
    dtypes=("bf16",),
    needs_gpu=True,
    paper="Shah et al. 2024, arXiv 2407.08608",
    requires=("flash_attn|flash_attn_interface|$FA3_LIB",),
)
class FlashAttnAttention(Attention):
    """The flash-attn package: FlashAttention-3, 4 or 2, the first that is there."""

    @dataclass(frozen=True)
    class Config:
        """It has no options."""

    def resolve(self, device: torch.device, precision: str) -> str:
        return f"{super().resolve(device, precision)} by {import_flash_attn().name}"

    @torch.compiler.disable  # version 3's operators have no meta kernels to trace with
    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q, k, v = (last_dim_contiguous(x) for x in (q, k, v))
        return attend_packed(functools.partial(import_flash_attn().varlen, causal=self.spec.causal), q, k, v, batch)

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of sequences that all have N tokens, `[B, N, H, D]` to the same."""
        q, k, v = (last_dim_contiguous(x) for x in (q, k, v))
        return import_flash_attn().dense(q, k, v, self.spec.causal)


@functools.cache
def import_flash_attn() -> FlashAttnLibrary:
    """What is installed; UsageError with each one's reason if nothing can be imported. FA3_LIB allows no other."""
    reasons = []
    for load in (_version_3,) if os.environ.get("FA3_LIB") else (_version_3, _version_4, _version_2):
        try:
            return load()
        except (ImportError, OSError, AttributeError) as error:
            # torch.ops.load_library hides what the loader said
            reasons.append(f"{load.__doc__}: {first_line(error.__cause__ or error)}")
    raise UsageError(f"attn=flash_attn can't be imported ({'; '.join(reasons)}): use attn=sdpa, or install another")


def _version_3() -> FlashAttnLibrary:
    """FlashAttention-3"""
    if extension := os.environ.get("FA3_LIB"):
        if runtime := os.environ.get("FA3_CUDART"):
            ctypes.CDLL(runtime, ctypes.RTLD_GLOBAL)
        torch.ops.load_library(extension)
    else:
        importlib.import_module("flash_attn_interface")
    assert torch.ops.flash_attn_3.fwd and torch.ops.flash_attn_3.bwd  # AttributeError where they are not

    def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, max_length: int, causal: bool) -> Tensor:
        options = {
            "cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": max_length, "max_seqlen_k": max_length,
            "is_causal": causal,
        }  # fmt: skip
        return FlashAttention3.apply(q, k, v, options)

    def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return FlashAttention3.apply(q, k, v, {"is_causal": causal})

    return FlashAttnLibrary("FlashAttention-3", dense, varlen)


def _version_4() -> FlashAttnLibrary:
    """FlashAttention-4"""
    package = importlib.import_module("flash_attn.cute")

    def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, max_length: int, causal: bool) -> Tensor:
        sequences = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=max_length, max_seqlen_k=max_length)
        return _first(package.flash_attn_varlen_func(q, k, v, **sequences, causal=causal))

    def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _first(package.flash_attn_func(q, k, v, causal=causal))

    return FlashAttnLibrary("FlashAttention-4", dense, varlen)


def _version_2() -> FlashAttnLibrary:
    """FlashAttention-2"""
    package = importlib.import_module("flash_attn")
    if not hasattr(package, "flash_attn_func"):  # the namespace that version 4 alone leaves
        raise ImportError("no flash_attn_func in flash_attn")

    def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, max_length: int, causal: bool) -> Tensor:
        return package.flash_attn_varlen_func(q, k, v, bounds, bounds, max_length, max_length, causal=causal)

    def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return package.flash_attn_func(q, k, v, causal=causal)

    return FlashAttnLibrary("FlashAttention-2", dense, varlen)


class FlashAttention3(torch.autograd.Function):
    """The operators of FlashAttention-3 with their derivative; `options`: `is_causal`, and what ragged batches need.

    Not their `seqused_*`, for padded rows: version 3's gradients of short sequences are wrong with it.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        scale = q.shape[-1] ** -0.5
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, softmax_scale=scale, num_splits=1, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.options = scale, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        torch.ops.flash_attn_3.bwd(
            last_dim_contiguous(do), q, k, v, out, lse, dq, dk, dv, softmax_scale=ctx.scale, **ctx.options
        )
        return dq, dk, dv, None


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
