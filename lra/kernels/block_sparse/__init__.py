"""Block-sparse FlashAttention (arXiv 2205.14135, Algorithm 5): the dense kernels, which visit the tiles of a layout."""
