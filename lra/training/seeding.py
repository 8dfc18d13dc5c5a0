"""Randomness as a function of (seed, purpose, step), so that a resumed run draws what an unbroken one would."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, purpose: str, *step: int) -> int:
    """A 62-bit seed of its own for every purpose and step; adding a layer number to it can't overflow an int64."""
    text = "/".join((str(seed), purpose, *map(str, step)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def seed_generators(seed: int) -> None:
    """Seeds PyTorch's generators of the CPU and of the current GPU.

    torch.manual_seed also queues a call, with its stack, for each kind of device that is not there: half a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
