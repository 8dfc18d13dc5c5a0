"""Exact attention in linear memory (FlashAttention, arXiv 2205.14135)."""

from lra.kernels.flash.api import flash_attention

__all__ = ["flash_attention"]
