"""How kernels become PyTorch operators, `lra::<name>`, and which ones have run.

Defined by the lower level of PyTorch's `library`, because `custom_op` with `register_autograd` costs about 35 us more
per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

# the kernels that ran since `forget_kernels`: of attention's two passes, and of the layers around it
ran: dict[str, set[str]] = {"forward": set(), "backward": set(), "layers": set()}
LIBRARY = library.Library("lra", "FRAGMENT")


def define(name: str, signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    library.register_fake(f"lra::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lra, name).default


class Once(torch.autograd.Function):
    """The first `count` tensors, gradients, as functions of those that follow; their own derivative is an error.

    PyTorch's `once_differentiable` lets them pass for constants where only the gradient of the result has none.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("this kernel can't be differentiated twice: use plain PyTorch")


def once(gradients: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients, which depend on `inputs`; where a graph of them is made, without a derivative."""
    return Once.apply(len(gradients), *gradients, *inputs) if torch.is_grad_enabled() else gradients  # type: ignore[no-any-return]


def note_kernel(part: str, kernel: str) -> None:
    """Add to `ran`."""
    ran[part].add(kernel)


def forget_kernels() -> None:
    """Empty `ran`: what another run in this process launched is not the next one's."""
    for kernels in ran.values():
        kernels.clear()
