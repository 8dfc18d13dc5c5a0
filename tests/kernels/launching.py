"""Launches what attention's passes launch on a GPU that is not here, twice each, and prints both as JSON.

In a process of its own (compiling.py). Kernels are compiled. Triton's driver is one that notes its launches.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from lra.kernels.dropout import dropout_threshold
from lra.kernels.flash.launch_attention import launch_flash_backward, launch_flash_forward
from lra.kernels.flash.problem import Problem
from lra.kernels.plans import forget_plans
from tests.kernels.aot import CompileOnlyDriver, choose

launches: list[Any] = []
hooked: list[str] = []


class NotingLauncher:
    """In the place of what calls CUDA's driver."""

    def __init__(self, src: Any, metadata: Any):
        self.hash = metadata.hash

    def __call__(self, *given: Any) -> None:
        x, y, z, stream, _function, _packed, described, enter, _leave, *arguments = given
        if enter is not None and described is not None:
            enter(described)
        launches.append([self.hash, x, y, z, stream, *map(describe, arguments)])


class NotingDriver(CompileOnlyDriver):
    launcher_cls = NotingLauncher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
    )


def note_name(metadata: Any) -> None:
    hooked.append(metadata.get()["name"])


def describe(x: Any) -> Any:
    """What two launches with other tensors must agree in."""
    if isinstance(x, Tensor):
        x = x.data_ptr()
    if isinstance(x, TensorDescriptor):
        return ["descriptor", *map(list, (x.shape, x.strides, x.block_shape)), x.padding, str(x.base.dtype)]
    return ["pointer", x % 16] if isinstance(x, int) and x >= 2**32 else str(x)


def run(case: dict[str, Any], passes: int) -> list[list[Any]]:
    """The launches of each of `passes` forward and backward passes, with new tensors each time."""
    found = []
    total, dtype = sum(case["lengths"]), getattr(torch, case["dtype"])
    padding = [0] * case["length_offset"]  # so that it begins at no multiple of 16 bytes
    dropout = case["dropout"]
    for _ in range(passes):
        launches.clear()
        memory = torch.zeros(total * 3 * 2 * case["head_dim"] + case["offset"], dtype=dtype)[case["offset"] :]
        q, k, v = memory.view(total, 3, 2, -1).unbind(1)
        length = torch.tensor([*padding, *case["lengths"]], dtype=torch.int32)[len(padding) :]
        problem = Problem(
            start=(length.cumsum(0) - length).int(), length=length, max_length=max(case["lengths"]),
            padded=False, causal=False, scale=0.125, threshold=dropout_threshold(dropout),
            seed=torch.zeros((), dtype=torch.int64) if dropout else None,
            index=torch.arange(len(length), dtype=torch.int32) if dropout else None,
        )  # fmt: skip
        out, softmax = launch_flash_forward(q, k, v, problem)
        launch_flash_backward(q, k, v, out, softmax, torch.zeros_like(out), problem)
        found.append(list(launches))
    return found


def main(cases: list[dict[str, Any]]) -> None:
    """For each case a line: the launches of a plan's first, second and third run, and those of a new plan.

    The third run has a launch hook. All cases run before any plan is forgotten.
    """
    driver.set_active(cast(Any, NotingDriver()))
    choose(90, True)
    planned = []
    for case in cases:
        first = run(case, 2)
        hooked.clear()
        knobs.runtime.launch_enter_hook.add(note_name)
        first += run(case, 1)
        knobs.runtime.launch_enter_hook.remove(note_name)
        planned.append((first, list(hooked)))
    for case, (runs, names) in zip(cases, planned, strict=True):
        forget_plans()
        print(json.dumps({"runs": runs, "hooked": names, "fresh": run(case, 1)[0]}), flush=True)


def list_cases() -> list[dict[str, Any]]:
    """A case for each family of kernels, then others that differ from it in what Triton compiles another kernel for."""
    families = (
        ({"head_dim": 64}, {"head_dim": 32}, {"dropout": 0.1}, {"length_offset": 1}),
        ({"head_dim": 48}, {"offset": 4}, {"length_offset": 1}, {"dtype": "float32"}),
    )
    usual = {"dtype": "float16", "dropout": 0.0, "lengths": [100, 28], "offset": 0, "length_offset": 0}
    return [usual | first | other for first, *others in families for other in ({}, *others)]
