"""Convolution of whole sequences with long filters, by FFT.

It is an operator, as torch.compile has no code for complex numbers, and warns of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lra.kernels.operators import define_operator, forbid_second_derivative


def convolve(x_BND: Tensor, taps_DP: Tensor) -> Tensor:
    """Convolves each feature of each sequence with its own filter: `[B, N, D]` to the same.

    Args:
        x_BND: fp32 or float64, with zeros past each length.
        taps_DP: of the same dtype. The filter has N taps, for 0 to N - 1 places before a token, or 2 N - 1, for
            N - 1 places after it to N - 1 before it.
    """
    return _Convolution.apply(x_BND, taps_DP)  # type: ignore[no-any-return]


def fft_length(least: int) -> int:
    """Returns the smallest length of at least `least` that is 1, 3, 5 or 7 times a power of two."""
    return min(odd << ((least - 1) // odd).bit_length() for odd in (1, 3, 5, 7))


def _spectra(x_BND: Tensor, taps_DP: Tensor, ahead: int = 0) -> tuple[int, int, Tensor, Tensor]:
    """The FFT's length, the number of taps for places after a token, and both spectra; those of x delayed by `ahead`.

    2 N - 1 places hold every product of a token and a tap that ends in the sequence. Others may wrap around.
    """
    n, after = x_BND.shape[1], taps_DP.shape[1] - x_BND.shape[1]
    size = fft_length(2 * n - 1)
    x_BDN = x_BND.transpose(1, 2)
    if ahead:
        x_BDN = torch.nn.functional.pad(x_BDN, (ahead, 0))
    return size, after, torch.fft.rfft(x_BDN, size), torch.fft.rfft(taps_DP, size)


def _convolve(x_BND: Tensor, taps_DP: Tensor) -> Tensor:
    size, after, x, taps = _spectra(x_BND, taps_DP)
    y_BDN = torch.fft.irfft(x * taps, size)[..., after : after + x_BND.shape[1]]
    return y_BDN.transpose(1, 2).contiguous()


def _convolve_backward(grad_BND: Tensor, x_BND: Tensor, taps_DP: Tensor) -> tuple[Tensor, Tensor]:
    n, p = x_BND.shape[1], taps_DP.shape[1]
    size, _, grad, taps = _spectra(grad_BND, taps_DP, p - n)
    x = torch.fft.rfft(x_BND.transpose(1, 2), size)
    dx_BDN = torch.fft.irfft(grad * taps.conj(), size)[..., :n]
    dtaps_DP = torch.fft.irfft((grad * x.conj()).sum(0), size)[..., :p]
    return dx_BDN.transpose(1, 2).contiguous(), dtaps_DP.contiguous()


convolve_forward = define_operator(
    "convolve", "(Tensor x, Tensor taps) -> Tensor", _convolve, lambda x, taps: x.new_empty(x.shape)
)
convolve_backward = define_operator(
    "convolve_backward", "(Tensor grad, Tensor x, Tensor taps) -> (Tensor, Tensor)", _convolve_backward,
    lambda grad, x, taps: (x.new_empty(x.shape), taps.new_empty(taps.shape)),
)  # fmt: skip


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BND: Tensor, taps_DP: Tensor) -> Tensor:
        ctx.save_for_backward(x_BND, taps_DP)
        return convolve_forward(x_BND, taps_DP)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_BND: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x_BND, taps_DP = ctx.saved_tensors
        return forbid_second_derivative(convolve_backward(grad_BND, x_BND, taps_DP), grad_BND, x_BND, taps_DP)
