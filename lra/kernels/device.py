"""Facts about a GPU: its compute capability, its multiprocessors, and the ptxas that compiles for it."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

# An older ptxas miscompiles for Hopper: it may reuse registers that an asynchronous wgmma still reads (12.8, 12.9), or
# write shared memory out of bounds (12.8, 13.0).
TRUSTED_PTXAS = (13, 3)


class Ptxas(NamedTuple):
    """The assembler that Triton calls for a GPU."""

    path: str
    version: tuple[int, ...]  # (12, 8)
    variable: str  # the environment variable that selects another ptxas


class Gpu(NamedTuple):
    """The facts of a GPU on which the choice of a kernel depends."""

    capability: tuple[int, int]
    multiprocessors: int
    refusal: str | None  # why the Gluon kernels for Hopper do not run on it; None where they run


def compute_capability(device: torch.device | None = None) -> tuple[int, int]:
    """The compute capability of a device, by default the current one. The CPU, which interprets kernels, has (0, 0)."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def describe_gpu(device: torch.device) -> Gpu:
    """The facts of a device, which may also be the CPU."""
    capability = compute_capability(device)
    return Gpu(capability, count_multiprocessors(device), hopper_refusal(capability))


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors: programs that run at a time if each fills one. The CPU counts as 2."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch options that let a kernel begin before the previous one has ended. The kernel has the constant OVERLAP.

    Without overlap a launch costs 2 to 3 microseconds. The previous kernel allows the overlap
    (`gdc_launch_dependents`). Every program of this kernel waits for its end (`gdc_wait`) before it touches what that
    kernel writes, and before it returns. See "Programmatic Dependent Launch" in the CUDA programming guide: it needs
    compute capability 9.0 or later.
    """
    return {"OVERLAP": True, "launch_pdl": True} if compute_capability(device) >= (9, 0) else {"OVERLAP": False}


def hopper_refusal(capability: tuple[int, int]) -> str | None:
    """The reason why the Gluon kernels do not run on GPUs of this compute capability; None where they run."""
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
    """The ptxas that Triton calls for GPUs of this compute capability. It differs between versions of Triton."""
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    used = get_ptxas(10 * capability[0] + capability[1])
    blackwell = used.path == knobs.nvidia.ptxas_blackwell.path
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if blackwell else "TRITON_PTXAS_PATH"
    return Ptxas(used.path, tuple(int(part) for part in used.version.split(".")), variable)


def format_version(version: tuple[int, ...]) -> str:
    """A version as people write it: (12, 8) becomes 12.8."""
    return ".".join(map(str, version))
