"""Exact attention in linear memory (FlashAttention, arXiv 2205.14135)."""

from lra.kernels.flash.dense_attention import flash_attention

__all__ = ["flash_attention"]
