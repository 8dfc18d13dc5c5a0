"""Compile what the launchers would launch for a GPU that is not here, and print what each kernel uses as JSON.

In a process of its own (compiling.py), because Triton decides at import whether it compiles or interprets. The
launchers run for real on CPU tensors, so the signature, the specialisation and the tiles are those of a GPU run; only
the launch itself is left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lra.kernels import device
from lra.kernels.block_sparse.layouts import butterfly
from lra.kernels.dropout import dropout_threshold
from lra.kernels.flash import tuning
from lra.kernels.flash.launch_attention import launch_flash_backward, launch_flash_forward
from lra.kernels.flash.problem import Problem

INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.sync\.aligned\.m16n8k16",
    "tcgen05": r"tcgen05\.mma",
    "atomics": r"\b(?:red|atom)(?:\.[\w:]+)*\.add|cp\.reduce\.async\.bulk",
    "draws": r"m(?:ul|ad)\.lo\.s32[^;]*-1028477387",  # one of reference.ROW_FACTORS
    "waits": r"griddepcontrol\.wait",
    "shuffles": r"shfl\.sync",
}


class CompileOnlyDriver:
    """As much of a Triton driver as compiling asks for."""

    arch = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # compiled kernels are remembered for each device

    def get_current_stream(self, device: int) -> int:
        return 0


def capture(run: Any, kernels: list[Any]) -> Any:
    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    return compile_only


def choose(arch: int, hopper: bool) -> None:
    """Let the launchers see this GPU, and take the kernels that Hopper alone has or the ones for every GPU."""
    CompileOnlyDriver.arch = arch
    device.compute_capability = lambda device=None: divmod(arch, 10)
    device.hopper_refusal = lambda capability: None if hopper else "the others are compiled"
    tuning.forget_tables()


def launch(
    dtype: str,
    head_dim: int,
    dropout: float,
    causal: bool,
    deterministic: bool,
    block: list[int] | None,
    rules: bool,
    shared: str = "",
) -> None:
    """One forward and backward of a fused projection; with a butterfly of blocks of this size, if one is given.

    `shared`: whose tile groups have that share keys; such batches are too large to make here.
    """
    layout = None
    if block:
        rule: dict[str, Any] = dict(band=20, globals=3, causal=True) if rules else {}
        layout = butterfly(max(block) * 16, (block[0], block[1]), **rule)
    lengths = torch.tensor([100, 128], dtype=torch.int32)
    q, k, v = torch.zeros(256, 3, 2, head_dim, dtype=getattr(torch, dtype)).unbind(1)
    problem = Problem(
        start=torch.arange(2, dtype=torch.int32) * 128, length=lengths, max_length=128, padded=True, causal=causal,
        scale=head_dim**-0.5, threshold=dropout_threshold(dropout),
        seed=torch.zeros((), dtype=torch.int64) if dropout else None,
        index=torch.arange(2, dtype=torch.int32) if dropout else None,
        deterministic=deterministic, layout=layout and layout.key,
    )  # fmt: skip
    with (
        tuning.force_tile(shared, tuning.find_tile(shared, q.dtype, head_dim, dropout > 0)) if shared else nullcontext()
    ):
        out, lse = launch_flash_forward(q, k, v, problem)
    launch_flash_backward(q, k, v, out, lse, torch.zeros_like(out), problem)


def describe(kernel: Any) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "name": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "overlaps": kernel.metadata.launch_pdl,  # its launch may begin before the kernel before it has ended
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[-1]),  # bytes; registers are spilled there
        **{name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()},
    }


def launch_case(case: dict[str, Any]) -> None:
    choose(case["arch"], case["hopper"])
    launch(**{name: value for name, value in case.items() if name not in ("arch", "hopper")})


def print_compiled(cases: list[dict[str, Any]], launch_case: Callable[[dict[str, Any]], None]) -> None:
    """A line for each case: what the kernels use that it launches."""
    driver.set_active(cast(Any, CompileOnlyDriver()))
    kernels: list[Any] = []
    JITFunction.run = capture(JITFunction.run, kernels)
    for case in cases:
        kernels.clear()
        launch_case(case)
        print(json.dumps([describe(kernel) for kernel in kernels]), flush=True)
