"""Kernels as PyTorch operators, `lra::<name>`, and a record of those that ran.

The operators use the lower level of PyTorch's `library`: `custom_op` with `register_autograd` costs about 35 us more
per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

# names of the kernels that ran since `clear_kernels_run`, for attention's two passes and for the layers around it
kernels_run: dict[str, set[str]] = {"forward": set(), "backward": set(), "layers": set()}
LIBRARY = library.Library("lra", "FRAGMENT")


def define_operator(name: str, signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `lra::<name>`. `run` computes it; `fake` returns empty tensors of the result's shapes."""
    LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    library.register_fake(f"lra::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lra, name).default


def runs_eagerly() -> bool:
    """Whether operators compute what they return, and nothing records, replaces or transforms them."""
    return not (
        torch.compiler.is_compiling()  # first, because torch.compile does not know the others
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
    )


def needs_no_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether the code of an operator may be called instead of the operator, which costs about 20 us less.

    It may not if another mechanism of PyTorch takes part: one that `runs_eagerly` names, a subclass, or a negation that
    the tensor has not stored.
    """
    return runs_eagerly() and all([x is None or (type(x) is Tensor and not x.is_neg()) for x in tensors])


class FirstDerivativeOnly(torch.autograd.Function):
    """The first `count` tensors, which are gradients, as functions of the tensors that follow.

    Their derivative is an error. PyTorch's `once_differentiable` treats them as constants if only the result's gradient
    needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("this kernel can't be differentiated twice: use plain PyTorch")


def forbid_second_derivative(gradients: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients, which depend on `inputs`. If autograd records them, their own derivative is an error."""
    return FirstDerivativeOnly.apply(len(gradients), *gradients, *inputs) if torch.is_grad_enabled() else gradients  # type: ignore[no-any-return]


def record_kernel(part: str, kernel: str) -> None:
    """Add a kernel's name to `kernels_run`."""
    kernels_run[part].add(kernel)


def clear_kernels_run() -> None:
    """Empty `kernels_run`. A second run in this process must not report the kernels of the first."""
    for kernels in kernels_run.values():
        kernels.clear()
