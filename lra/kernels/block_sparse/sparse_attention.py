"""`block_sparse_attention`: the public function. The kernels are those of `lra.kernels.flash`."""

from __future__ import annotations

from torch import Tensor

from lra.kernels.block_sparse.gather import gather_attention
from lra.kernels.flash.dense_attention import attend_sequences
from lra.kernels.flash.layout import Layout


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    start: Tensor | None = None,
    length: Tensor | None = None,
    max_length: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    index: Tensor | None = None,
    impl: str = "auto",
    deterministic: bool = False,
) -> Tensor:
    """Softmax attention of each sequence with itself over the pairs that `layout` shows, differentiable in q, k and v.

    Block-sparse FlashAttention (arXiv 2205.14135, Algorithm 5): tiles without a visible pair are neither loaded nor
    computed, forward and backward. A query that sees no key of its sequence gives zeros, as its gradients are.

    Args:
        layout: what is seen, over the order of each sequence: of `lra.kernels.block_sparse.layouts`, or your own. It
            covers max_length tokens or more. Triton takes blocks with sides that are multiples of 16, and Hopper's
            faster kernels layouts without rules whose sides are multiples of 64.
        impl: "triton" (CUDA, D up to 128); "gather" (any device: PyTorch, each row of blocks with the keys it sees;
            dropout has the same distribution but draws from PyTorch's generator); "auto", Triton on CUDA and gather
            elsewhere.
        Others: as in `flash_attention`, which also says what the forms `[T, H, D]` and `[B, N, H, D]` are.

    Returns:
        A tensor of the shape and dtype of q.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Layout, got {type(layout).__name__}: without one it is flash_attention")
    return attend_sequences(
        q, k, v, layout, gather_attention, start=start, length=length, max_length=max_length, causal=False, scale=scale,
        dropout=dropout, seed=seed, index=index, impl=impl, fallback_name="gather", deterministic=deterministic,
    )  # fmt: skip
