"""The rows of each optimisation step: a pure function of seed and step, the same on every machine."""

from __future__ import annotations

import functools

import numpy as np

from lra.errors import UsageError

ORDER, HELD_OUT, SHARE = 1, 2, 3  # purposes of a permutation: one seed gives each purpose another one


@functools.lru_cache(maxsize=8)
def _permutation(purpose: int, seed: int, number: int, count: int) -> np.ndarray:
    """A random order of `count` rows, int64 `[count]`. It is cached, and therefore read-only.

    It sorts the raw 64-bit stream, which NumPy keeps stable across versions, unlike `Generator.permutation`.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose, number)))
    permutation = np.argsort(bits.random_raw(count), kind="stable")
    permutation.setflags(write=False)
    return permutation


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of all `count` rows in one epoch: a permutation, int64 `[count]`, read-only."""
    return _permutation(ORDER, seed, epoch, count)


def step_rows(seed: int, step: int, size: int, count: int) -> np.ndarray:
    """The rows of optimisation step `step` (from 0), int64 `[size]`.

    They come from the endless stream `epoch_order(seed, 0) + epoch_order(seed, 1) + ...`. No row is dropped, and a
    batch may cross the border of two epochs. Any step can be computed without those before it.
    """
    if count < 1:
        raise UsageError("no training rows: prepare the data again (lra data prepare ... force=true)")
    parts, place, end = [], step * size, (step + 1) * size
    while place < end:
        epoch, first = divmod(place, count)
        part = epoch_order(seed, epoch, count)[first : first + end - place]
        parts.append(part)
        place += len(part)
    return np.concatenate(parts)


def hold_out(seed: int, count: int, part: float) -> tuple[np.ndarray, np.ndarray]:
    """Hold out a random share `part` (0 to 1) of `count` rows.

    Returns (kept, held out), sorted int64 indices; UsageError if either would be empty.
    """
    held = round(count * part)
    if not 0 < held < count:
        raise UsageError(f"cannot hold out a share of {part:g} of {count} rows: choose one that leaves both parts")
    permutation = _permutation(HELD_OUT, seed, 0, count)
    return np.sort(permutation[held:]), np.sort(permutation[:held])


def share_rows(seed: int, count: int, part: float) -> np.ndarray:
    """A random share `part` (0 to 1) of `count` rows, at least one: sorted int64 indices.

    A larger share of the same seed contains a smaller one.
    """
    return np.sort(_permutation(SHARE, seed, 0, count)[: max(1, round(count * part))])
