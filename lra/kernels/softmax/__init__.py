"""Exact attention with the scores in memory. One kernel does scale, mask, softmax and dropout (arXiv 1909.08053)."""
