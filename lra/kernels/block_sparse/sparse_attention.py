"""`block_sparse_attention`: the public function. It uses the kernels of `lra.kernels.flash`."""

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

    Block-sparse FlashAttention (arXiv 2205.14135, Algorithm 5). The kernels neither load nor compute tiles without a
    visible pair, in the forward and in the backward. A query that sees no key of its sequence gives zeros, and so are
    its gradients.

    Args:
        layout: the visible pairs, by their positions in a sequence. Make one with `lra.kernels.block_sparse.layouts`,
            or build a `Layout`. It must cover max_length tokens. For Triton the sides of blocks must be multiples of
            16. Hopper's faster kernels need a layout without rules, with sides that are multiples of 64.
        impl: "triton" (CUDA, D up to 128), "gather" (any device) or "auto" (the default: Triton on CUDA, gather
            elsewhere). Gather is plain PyTorch, which gathers the keys that each row of blocks sees. Its dropout has
            the same distribution, but draws from PyTorch's generator.

    All other arguments, and the forms `[T, H, D]` and `[B, N, H, D]`, are those of `flash_attention`.

    Returns:
        A tensor of the shape and dtype of q.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Layout, got {type(layout).__name__}: flash_attention needs none")
    return attend_sequences(
        q, k, v, layout, gather_attention, start=start, length=length, max_length=max_length, causal=False, scale=scale,
        dropout=dropout, seed=seed, index=index, impl=impl, fallback_name="gather", deterministic=deterministic,
    )  # fmt: skip
