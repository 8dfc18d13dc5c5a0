"""Seeds as a function of (seed, purpose, step), so that a resumed run draws the same numbers as an unbroken one."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, purpose: str, *step: int) -> int:
    """Returns a 62-bit seed for a purpose and step. Adding a layer number to it can't overflow an int64."""
    text = "/".join((str(seed), purpose, *map(str, step)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def seed_generators(seed: int) -> None:
    """Seeds PyTorch's generators of the CPU and of the current GPU.

    torch.manual_seed takes half a millisecond more: it queues a call, with its stack, for each kind of missing device.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
