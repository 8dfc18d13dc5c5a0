"""Exact attention with the scores in memory; scale, mask, softmax and dropout are one kernel (arXiv 1909.08053)."""
