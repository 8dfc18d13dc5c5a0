"""Randomness as a function of (seed, purpose, step), so that a resumed run draws what an unbroken one would."""

from __future__ import annotations

import hashlib


def derive(seed: int, purpose: str, *step: int) -> int:
    """A 62-bit seed of its own for every purpose and step; adding a layer number to it can't overflow an int64."""
    text = "/".join((str(seed), purpose, *map(str, step)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2
