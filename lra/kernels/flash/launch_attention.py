"""The work of the operators: choose a kernel and launch it."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from lra.kernels import device
from lra.kernels.device import Gpu
from lra.kernels.flash.backward import launch_plain_backward
from lra.kernels.flash.dispatch import KernelChoice, choose_backward, choose_forward
from lra.kernels.flash.forward import launch_plain_forward
from lra.kernels.flash.hopper.backward import launch_hopper_backward
from lra.kernels.flash.hopper.forward import launch_hopper_forward
from lra.kernels.flash.hopper.forward_shared import launch_hopper_shared
from lra.kernels.flash.problem import Problem
from lra.kernels.library import record_kernel

FORWARD_LAUNCHERS = {
    "forward": launch_plain_forward,
    "hopper_forward": launch_hopper_forward,
    "hopper_shared": launch_hopper_shared,
    "hopper_shared_short": launch_hopper_shared,
}
BACKWARD_LAUNCHERS = {
    "dkdv": launch_plain_backward,
    "dkdv_dq": launch_plain_backward,
    "hopper_backward": launch_hopper_backward,
    "hopper_specialized": launch_hopper_backward,
}


def launch_flash_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """(Result, contiguous `[T, H, D]`; two statistics of the softmax of each row of scores, fp32 `[2, H, T]`).

    `tiles.store_softmax` describes the statistics: the maximum of the raw scores, and a number that normalises the
    weights relative to it. A single log-sum-exp would lose the sum behind a large maximum. Rows past a length are never
    read.
    """
    with torch.cuda.device_of(q):
        gpu = device.describe_gpu(q.device)
        choice = choose_forward(problem, q, k, v, gpu)
        _note("forward", choice, gpu)
        return FORWARD_LAUNCHERS[choice.kernel](q, k, v, problem, choice)


def launch_flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax: Tensor, do: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each contiguous `[T, H, D]`. `do` is the gradient of the result and may have any strides."""
    with torch.cuda.device_of(q):
        gpu = device.describe_gpu(q.device)
        choice = choose_backward(problem, q, k, v, gpu)
        _note("backward", choice, gpu)
        return BACKWARD_LAUNCHERS[choice.kernel](q, k, v, out, softmax, do, problem, choice)


def _note(part: str, choice: KernelChoice, gpu: Gpu) -> None:
    """Record the kernel for the run's result. Warn once if a Hopper GPU could run its kernels but for `gpu.refusal`."""
    record_kernel(part, choice.kernel)
    if choice.reason == gpu.refusal and gpu.capability[0] == 9:
        _warn(gpu.refusal)


@functools.cache
def _warn(refusal: str) -> None:
    warnings.warn(f"attention runs on the slower plain Triton kernels: {refusal}", stacklevel=4)
