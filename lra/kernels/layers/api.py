"""The public functions: the kernels for what `takes` accepts, plain PyTorch for the rest.

Rows are the T tokens of a batch. The parameters, fp32, are those of nn.LayerNorm (gain, shift; eps 1e-5) and of
nn.Linear (weight, bias). Under autocast both paths multiply in its dtype and return fp32 where a row of x is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lra.kernels.layers import ops, reference

WIDTH = 64  # of the model; at 128 torch.compile's kernels are faster, as weights and gradients leave rows no registers
HIDDEN = (64, 128)  # features of the feed-forward's hidden layer


def takes(x: Tensor, d_ff: int) -> bool:
    """Whether the kernels take rows x and a feed-forward of `d_ff` hidden features.

    That is fp32 `[T, 64]` and `d_ff` 64 or 128 under autocast to bfloat16 on a GPU of compute capability 9.0, where
    they were measured to be faster.
    """
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and x.dim() == 2
        and x.shape[1] == WIDTH
        and d_ff in HIDDEN
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) == (9, 0)
    )


def project(x: Tensor, gain: Tensor, shift: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values: LayerNorm(x) W^T + b (pre-norm, Xiong et al. 2020, arXiv 2002.04745).

    Args:
        x: rows `[T, D]`.
        gain, shift: of the LayerNorm, `[D]`.
        w, b: `[kD, D]` and `[kD]`: k projections, one after the other. The kernels have three.

    Returns:
        k tensors `[T, D]`, in autocast's dtype where it is on. By the kernels they are contiguous, and the gradients
        are bitwise repeatable.

    Raises:
        ValueError: shapes that do not belong together.
    """
    d, n = _width(x), b.numel()
    _check(gain=(gain, (d,)), shift=(shift, (d,)), w=(w, (n - n % d, d)))
    if n == 3 * d and takes(x, WIDTH):
        return ops.project(*_contiguous(x, gain, shift, w, b), torch.bfloat16)
    return reference.project(x, gain, shift, w, b)


def project_out(
    x: Tensor, o: Tensor, w: Tensor, b: Tensor, rate: float = 0.0, keys: Tensor | None = None, site: int = 0
) -> Tensor:
    """x + drop(o W^T + b): what attention gives, projected and added to the residual stream.

    Args:
        x, o: rows `[T, D]`; o may be of any floating dtype, and has its gradient in it. o is copied if it is not
            contiguous.
        w, b: `[D, D]` and `[D]`.
        rate: the share of elements that is dropped, at least 0 and below 1, exact to 2^-24.
        keys: int32 `[T]`, a hash for each row, of which `lra.models.dropout.drop` makes the same mask; None: no
            dropout.
        site: a number for the place in the model.

    Returns:
        `[T, D]` in the dtype of x. By the kernels the gradients are bitwise repeatable.

    Raises:
        ValueError: a rate out of range, or shapes that do not belong together.
    """
    d = _width(x)
    _check(o=(o, x.shape), w=(w, (d, d)), b=(b, (d,)))
    _check_dropout(x, rate, keys)
    if takes(x, WIDTH):
        return ops.project_out(*_contiguous(x, o, w, b), rate, keys, site, torch.bfloat16)
    return reference.project_out(x, o, w, b, rate, keys, site)


def feed_forward(
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    rate: float = 0.0,
    keys: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """x + drop(W2 drop(gelu(W1 LayerNorm(x) + b1)) + b2), gelu the exact one (Hendrycks and Gimpel, arXiv 1606.08415).

    By the kernels the hidden layer is never in memory, and the distribution function in gelu is exact to 1e-7.

    Args:
        x: rows `[T, D]`.
        gain, shift: of the LayerNorm, `[D]`.
        w1, b1, w2, b2: `[F, D]`, `[F]`, `[D, F]` and `[D]`.
        rate, keys: as in `project_out`.
        site: of the first dropout; that of the second is site + 1.

    Returns:
        `[T, D]` in the dtype of x. By the kernels the gradients are bitwise repeatable.

    Raises:
        ValueError: a rate out of range, or shapes that do not belong together.
    """
    d, f = _width(x), b1.numel()
    _check(gain=(gain, (d,)), shift=(shift, (d,)), w1=(w1, (f, d)), b1=(b1, (f,)), w2=(w2, (d, f)), b2=(b2, (d,)))
    _check_dropout(x, rate, keys)
    if takes(x, f):
        rows = _contiguous(x, gain, shift, w1, b1, w2, b2)
        return ops.feed_forward(*rows, rate, keys, site, torch.bfloat16)
    return reference.feed_forward(x, gain, shift, w1, b1, w2, b2, rate, keys, site)


def _width(x: Tensor) -> int:
    if x.dim() != 2:
        raise ValueError(f"x must be [T, D], got {list(x.shape)}")
    return x.shape[1]


def _check(**expected: tuple[Tensor, tuple[int, ...]]) -> None:
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def _check_dropout(x: Tensor, rate: float, keys: Tensor | None) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"rate must be at least 0 and below 1, got {rate}")
    if keys is not None and (keys.dtype != torch.int32 or keys.shape != x.shape[:1]):
        raise ValueError(f"keys must be int32 [{x.shape[0]}], one for each row, got {keys.dtype} {list(keys.shape)}")


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]
