"""The choice of an implementation: Triton's kernels, or the fallback in PyTorch that each family has for any device."""

from __future__ import annotations

import os

import torch


def resolve_impl(
    impl: str, device: torch.device, deterministic: bool = False, fallback: str = "sdpa", section: str = ""
) -> str:
    """The implementation that `impl` means on `device`: "triton" or the name in `fallback`.

    "auto" means Triton on CUDA and the fallback on other devices.

    Args:
        impl: "auto", "triton" or the name of the fallback.
        device: the device of q.
        deterministic: whether gradients must be bitwise equal over runs.
        fallback: the name of the implementation for any device.
        section: what error messages put before the names of arguments: "attn." for fields of a configuration.

    Raises:
        ValueError: `impl` is unknown, "triton" cannot run, or the fallback cannot be deterministic. No explicit choice
            is replaced by another.
    """
    if impl == "auto":
        return "triton" if device.type == "cuda" else fallback
    if impl not in ("triton", fallback):
        raise ValueError(f"unknown impl {impl!r}: use 'auto', 'triton' or '{fallback}'")
    if impl == "triton" and device.type != "cuda" and not _interpreted():
        raise ValueError(
            f"{section}impl='triton' needs CUDA tensors, got {device.type}: use {section}impl='{fallback}', or set "
            "TRITON_INTERPRET=1 before Triton is imported to run the kernels slowly on the CPU"
        )
    if impl == fallback and deterministic and device.type == "cuda" and not _strictly_deterministic():
        raise ValueError(
            f"{section}impl='{fallback}' is deterministic on CUDA only in PyTorch's own mode: for "
            f"{section}deterministic=True use {section}impl='triton', or call torch.use_deterministic_algorithms(True)"
        )
    return impl


def _strictly_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _interpreted() -> bool:
    """Whether Triton interprets its kernels. It reads the variable of Triton, so that torch.compile can trace it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")
