"""How kernels become PyTorch operators, `lra::<name>`, and which ones have run.

Defined by the lower level of PyTorch's `library`, because `custom_op` with `register_autograd` costs about 35 us more
per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

# the kernels that ran since `clear_kernels_run`: of attention's two passes, and of the layers around it
kernels_run: dict[str, set[str]] = {"forward": set(), "backward": set(), "layers": set()}
LIBRARY = library.Library("lra", "FRAGMENT")


def define_operator(name: str, signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    library.register_fake(f"lra::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lra, name).default


class FirstDerivativeOnly(torch.autograd.Function):
    """The first `count` tensors, gradients, as functions of those that follow; their own derivative is an error.

    PyTorch's `once_differentiable` lets them pass for constants where only the gradient of the result has none.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("this kernel can't be differentiated twice: use plain PyTorch")


def forbid_second_derivative(gradients: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients, which depend on `inputs`; where a graph of them is made, without a derivative."""
    return FirstDerivativeOnly.apply(len(gradients), *gradients, *inputs) if torch.is_grad_enabled() else gradients  # type: ignore[no-any-return]


def record_kernel(part: str, kernel: str) -> None:
    """Add to `kernels_run`."""
    kernels_run[part].add(kernel)


def clear_kernels_run() -> None:
    """Empty `kernels_run`: what another run in this process launched is not the next one's."""
    for kernels in kernels_run.values():
        kernels.clear()
