"""Exponential moving averages of the rows of sequences: a recurrence that Triton kernels compute token by token."""

from lra.kernels.moving_average.average_ops import moving_average

__all__ = ["moving_average"]
