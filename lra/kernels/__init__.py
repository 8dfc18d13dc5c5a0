"""Attention kernels; `flash/reference.py` defines what they compute."""

from lra.kernels.block_sparse.api import block_sparse_attention
from lra.kernels.flash import flash_attention
from lra.kernels.flash.problem import dropout_threshold

__all__ = ["block_sparse_attention", "effective_dropout", "flash_attention"]


def effective_dropout(dropout: float) -> float:
    """The dropout that is used for a requested one: the nearest multiple of 1/256."""
    return dropout_threshold(dropout) / 256
