"""By which implementation a call is computed: Triton's kernels, or the one that each family has for any device."""

from __future__ import annotations

import os

import torch


def resolve_impl(
    impl: str, device: torch.device, deterministic: bool = False, fallback: str = "sdpa", section: str = ""
) -> str:
    """The path that `impl` names on `device`: "triton", or the one for any device, `fallback`.

    "auto" is Triton on CUDA and the other elsewhere. An explicit "triton" that cannot run, and an explicit other that
    cannot be deterministic, raise a ValueError; nothing falls back. It names arguments as its reader gives them: with
    a `section` before them, "attn.", where they are fields of a configuration.
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
    """What Triton decides by, read here so that torch.compile can trace it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")
