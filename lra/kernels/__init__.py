"""Attention kernels. `flash/reference.py` defines what they compute."""

from lra.kernels.block_sparse.sparse_attention import block_sparse_attention
from lra.kernels.dropout import effective_dropout
from lra.kernels.flash import flash_attention

__all__ = ["block_sparse_attention", "effective_dropout", "flash_attention"]
