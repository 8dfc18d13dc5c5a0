"""What the compiled generators share: numba's compiler, and random bits that are a function of (seed, number).

Item `i` of a seed begins at `start_stream(seed, i)`. So it does not depend on the number of cores or on chunks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np

from lra import environment

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # a stream goes on with state += GOLDEN; its bits are mix_bits(state)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(bits) for bits in (27, 30, 31, 32))
_LOW32 = np.uint64(0xFFFFFFFF)


def cached_njit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function with numba. It runs without the interpreter's lock, so threads run it in parallel.

    numba decides by the date of one file whether a cached function is stale. But functions here call each other across
    files. So the cache lies in a folder that is named after the content of all these files.
    """
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, _cache()  # type: ignore[attr-defined]
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # nowhere to write
        return numba.njit(nogil=True)(function)
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


@cache
def _cache() -> str:
    here = Path(__file__).parent
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(here.rglob("*.py")))).hexdigest()[:16]
    return str((here / "__pycache__" if os.access(here, os.W_OK) else environment.cache_folder("numba")) / sources)


@cached_njit
def mix_bits(bits):
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): uint64 to uint64."""
    bits = (bits ^ (bits >> _S30)) * _MIX1
    bits = (bits ^ (bits >> _S27)) * _MIX2
    return bits ^ (bits >> _S31)


@cached_njit
def start_stream(seed, number):
    """The state in which item `number` of `seed` begins, uint64."""
    return mix_bits(mix_bits(np.uint64(seed) + GOLDEN) + np.uint64(number))


@cached_njit
def draw_below(bits, limit):
    """A uniform integer in 0 .. limit - 1, from the low half of 64 random bits."""
    return np.int64(((bits & _LOW32) * np.uint64(limit)) >> _S32)
