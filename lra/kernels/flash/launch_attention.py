"""The work of the operators: choose a kernel, plan its launches and run them.

The tensors q, k and v are `[T, H, D]`, or `[B, N, H, D]` whose first two dimensions can be flattened without a copy.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lra.kernels import device
from lra.kernels.device import Gpu
from lra.kernels.flash.backward import plan_plain_backward
from lra.kernels.flash.dispatch import KernelChoice, choose_backward, choose_forward, has_contiguous_heads
from lra.kernels.flash.forward import plan_plain_forward
from lra.kernels.flash.hopper.backward import plan_hopper_backward
from lra.kernels.flash.hopper.forward import plan_hopper_forward
from lra.kernels.flash.hopper.forward_shared import plan_hopper_shared
from lra.kernels.flash.padding import as_rows, flattens
from lra.kernels.flash.problem import Problem
from lra.kernels.operators import record_kernel
from lra.kernels.plans import Plans, tensor_facts

FORWARD_PLANNERS = {
    "forward": plan_plain_forward,
    "hopper_forward": plan_hopper_forward,
    "hopper_shared": plan_hopper_shared,
    "hopper_shared_short": plan_hopper_shared,
}
BACKWARD_PLANNERS = {
    "dkdv": plan_plain_backward,
    "dkdv_dq": plan_plain_backward,
    "hopper_backward": plan_hopper_backward,
    "hopper_specialized": plan_hopper_backward,
}


class PassPlan(NamedTuple):
    """How a pass of attention is computed."""

    kernel: str
    run: Any  # a ForwardPass or a BackwardPass
    copies_do: bool = False  # whether the kernels need a copy of the gradient of the result


_forward_plans, _backward_plans = Plans[PassPlan](), Plans[PassPlan]()


def launch_flash_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """(Result, contiguous, of the shape of q; two statistics of the softmax of each row of scores, fp32 `[2, H, T]`).

    `tiles.store_softmax` describes the statistics: the maximum of the raw scores, and a number that normalises the
    weights relative to it. A single log-sum-exp would lose the sum behind a large maximum. Rows past a length are never
    read.
    """
    sequences = problem.sequences
    facts = (tensor_facts(q, k, v, *sequences), problem.numbers)
    with torch.cuda.device_of(q):
        plan = _forward_plans.find(facts, lambda: _plan_forward(q, k, v, problem))
        record_kernel("forward", plan.kernel)
        return plan.run(q, k, v, sequences)


def launch_flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax: Tensor, do: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, of the shape of q. `do` is the gradient of the result and may have any strides."""
    sequences = problem.sequences
    facts = (tensor_facts(q, k, v, out, softmax, do, *sequences), problem.numbers)
    with torch.cuda.device_of(q):
        plan = _backward_plans.find(facts, lambda: _plan_backward(q, k, v, out, softmax, do, problem))
        record_kernel("backward", plan.kernel)
        if plan.copies_do:
            do = do.clone(memory_format=torch.contiguous_format)
        return plan.run(q, k, v, out, softmax, do, sequences)


def _plan_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> PassPlan:
    assert all(map(flattens, (q, k, v)))
    q, k, v = map(as_rows, (q, k, v))
    gpu = device.describe_gpu(q.device)
    choice = choose_forward(problem, q, k, v, gpu)
    _warn_of_refusal(choice, gpu)
    return PassPlan(choice.kernel, FORWARD_PLANNERS[choice.kernel](q, k, v, problem, choice))


def _plan_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax: Tensor, do: Tensor, problem: Problem
) -> PassPlan:
    assert out.is_contiguous() and softmax.is_contiguous() and all(map(flattens, (q, k, v)))
    q, k, v = map(as_rows, (q, k, v))
    gpu = device.describe_gpu(q.device)
    choice = choose_backward(problem, q, k, v, gpu)
    _warn_of_refusal(choice, gpu)
    # for example the expanded gradient of a sum
    copies = not flattens(do) or (choice.kernel.startswith("hopper") and not has_contiguous_heads(as_rows(do)))
    do = as_rows(torch.empty(do.shape, dtype=do.dtype, device="meta") if copies else do)
    return PassPlan(choice.kernel, BACKWARD_PLANNERS[choice.kernel](q, k, v, do, problem, choice), copies)


def _warn_of_refusal(choice: KernelChoice, gpu: Gpu) -> None:
    """Warn once if a Hopper GPU could run its kernels but for `gpu.refusal`."""
    if choice.reason == gpu.refusal and gpu.capability[0] == 9:
        _warn(gpu.refusal)


@functools.cache
def _warn(refusal: str) -> None:
    warnings.warn(f"attention runs on the slower plain Triton kernels: {refusal}", stacklevel=4)
