"""Block-sparse FlashAttention (arXiv 2205.14135, Algorithm 5): the dense kernels visit only the tiles of a layout."""
