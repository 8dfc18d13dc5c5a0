"""Joins the forward and backward kernels to autograd."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lra.kernels.flash.backward import launch_backward
from lra.kernels.flash.forward import launch_forward
from lra.kernels.flash.problem import Problem


class TritonAttention(torch.autograd.Function):
    """Attention of `[T, H, D]` rows by the Triton kernels, `[T, H, D]`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        out, lse = launch_forward(q, k, v, problem)
        # The tensors of the problem too, so that autograd notices if the caller overwrites one before the backward.
        ctx.save_for_backward(q, k, v, out, lse, problem.start, problem.length, problem.seed, problem.index)
        ctx.problem = problem
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse, start, length, seed, index = ctx.saved_tensors
        problem = dataclasses.replace(ctx.problem, start=start, length=length, seed=seed, index=index)
        return *launch_backward(q, k, v, out, lse, do, problem), None
