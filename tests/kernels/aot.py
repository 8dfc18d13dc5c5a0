"""Compile what the launchers would launch for sm_90, without a GPU, and print what each kernel uses as JSON.

Run as a program, `python aot.py '[{"dtype": "bfloat16", "head_dim": 64, ...}, ...]'`, because Triton decides at
import whether it compiles or interprets. The launchers run for real on CPU tensors, so the signature, the
specialisation and the tiles are those of a GPU run; only the launch itself is left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any, cast

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lra.kernels.flash.backward import launch_backward
from lra.kernels.flash.forward import launch_forward
from lra.kernels.flash.problem import Problem, dropout_threshold


class CompileOnlyDriver:
    """As much of a Triton driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def capture(run: Any, kernels: list[Any]) -> Any:
    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    return compile_only


def launch(dtype: str, head_dim: int, dropout: float, causal: bool) -> None:
    """One forward and backward of a fused projection."""
    lengths = torch.tensor([100, 128], dtype=torch.int32)
    q, k, v = torch.zeros(256, 3, 2, head_dim, dtype=getattr(torch, dtype)).unbind(1)
    problem = Problem(
        start=torch.arange(2, dtype=torch.int32) * 128, length=lengths, max_length=128, padded=True, causal=causal,
        scale=head_dim**-0.5, threshold=dropout_threshold(dropout),
        seed=torch.zeros((), dtype=torch.int64) if dropout else None,
        index=torch.arange(2, dtype=torch.int32) if dropout else None,
    )  # fmt: skip
    out, lse = launch_forward(q, k, v, problem)
    launch_backward(q, k, v, out, lse, torch.zeros_like(out), problem)


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
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[-1]),  # bytes; registers are spilled there
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "philox": len(re.findall(r"mul\.(?:hi|wide|lo)\.[us](?:32|64)[^;]*(?:-845247145|-766435501)", ptx)),
    }


def main(cases: list[dict[str, Any]]) -> None:
    driver.set_active(cast(Any, CompileOnlyDriver()))
    kernels: list[Any] = []
    JITFunction.run = capture(JITFunction.run, kernels)
    for case in cases:
        kernels.clear()
        launch(**case)
        print(json.dumps({**case, "kernels": [describe(kernel) for kernel in kernels]}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
