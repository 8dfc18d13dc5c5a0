"""What kernels ask about a GPU: compute capability, multiprocessors, and the ptxas that compiles for it."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

# Before 13.3, ptxas may reuse registers that an asynchronous wgmma still reads (12.8, 12.9), or write shared memory out
# of bounds (12.8, 13.0), for Hopper.
TRUSTED_PTXAS = (13, 3)


class Ptxas(NamedTuple):
    """The assembler that Triton calls for a GPU."""

    path: str
    version: tuple[int, ...]  # (12, 8)
    variable: str  # the environment variable that names another one


class Gpu(NamedTuple):
    """What the choice of a kernel depends on."""

    capability: tuple[int, int]
    multiprocessors: int
    refusal: str | None  # why the Gluon kernels for Hopper do not run there


def compute_capability(device: torch.device | None = None) -> tuple[int, int]:
    """Compute capability of a device, by default the current one; (0, 0) of the CPU, where kernels are interpreted."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def describe_gpu(device: torch.device) -> Gpu:
    """The facts of a device, also where it is the CPU."""
    its = compute_capability(device)
    return Gpu(its, count_multiprocessors(device), hopper_refusal(its))


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """How many programs run at a time if a program takes all of a multiprocessor; 2 on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Options of a launch that may begin before the previous kernel has ended; the kernel takes OVERLAP.

    A launch in turn costs 2 to 3 microseconds. The previous kernel allows the overlap (`gdc_launch_dependents`), and
    every program of this one waits for its end (`gdc_wait`) before it touches what that kernel writes, or returns.
    See "Programmatic Dependent Launch" in the CUDA programming guide: compute capability 9.0 and later.
    """
    return {"OVERLAP": True, "launch_pdl": True} if compute_capability(device) >= (9, 0) else {"OVERLAP": False}


def hopper_refusal(capability: tuple[int, int]) -> str | None:
    """Why the Gluon kernels do not run on GPUs of this capability; None where they do."""
    from triton import knobs

    if capability != (9, 0):
        return f"the faster kernels are for compute capability 9.0, not {format_version(capability)}"
    if knobs.runtime.interpret:
        return "Triton interprets (TRITON_INTERPRET=1)"
    used = find_ptxas(capability)
    if used.version < TRUSTED_PTXAS:
        installed = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "ptxas")
        return (
            f"ptxas {format_version(used.version)} is known to miscompile for Hopper: "
            f"pip install 'nvidia-cuda-nvcc>=13.4', then set {used.variable}={installed}"
        )
    return None


def find_ptxas(capability: tuple[int, int]) -> Ptxas:
    """The ptxas that Triton calls for GPUs of this capability, which differs between its versions."""
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    used = get_ptxas(10 * capability[0] + capability[1])
    blackwell = used.path == knobs.nvidia.ptxas_blackwell.path
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if blackwell else "TRITON_PTXAS_PATH"
    return Ptxas(used.path, tuple(int(part) for part in used.version.split(".")), variable)


def format_version(version: tuple[int, ...]) -> str:
    """As people write it: (12, 8) is 12.8."""
    return ".".join(map(str, version))
