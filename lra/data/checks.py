"""Compares imported data with what is published: how many rows it has, which rows its splits share, which labels.

Data that cannot be the data set is refused. Other differences are noted, and runs repeat those that matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from lra.errors import UsageError

# The published data may have this share of odd rows: 123 of IMDB's 25,000 test reviews are in train.
FEW_ROWS = 0.01

ENOUGH_ROWS = 10  # so many rows hardly have one label by chance


class Finding(NamedTuple):
    """A fact that a user of the data should know."""

    text: str
    matters: bool  # whether scores may mislead


def hash_rows(sequences: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """A hash of each sequence, uint64 `[n]`. The chance of a collision among a million sequences is 1 in 10^7."""
    digests = (blake2b(np.ascontiguousarray(tokens).data, digest_size=8).digest() for tokens in sequences)
    return np.frombuffer(b"".join(digests), np.uint64)


def check_row_count(name: str, rows: int, published: int) -> Iterator[Finding]:
    """Notes a copy that has another number of rows than is published. Nothing else tells a part from the whole."""
    if rows != published:
        yield Finding(f"{name} has {rows:,} rows, where {published:,} are published", True)


def compare_splits(source: str, rows: Mapping[str, np.ndarray], labels: Mapping[str, np.ndarray]) -> Iterator[Finding]:
    """Compares the splits with one another by `hash_rows` of their rows.

    Raises:
        UsageError: if another split has the same rows as train.
    """
    for one, other in itertools.combinations(rows, 2):
        if one == "train" and np.array_equal(np.sort(rows[one]), np.sort(rows[other])):
            raise UsageError(
                f"{source}: {other} has the same rows as {one}, so a score there would say nothing: "
                "name a copy that has the splits of the data set"
            )
        if shared := int(np.isin(rows[other], rows[one]).sum()):
            text = f"{shared:,} of {len(rows[other]):,} rows of {other} are in {one}, too"
            yield Finding(text, shared > FEW_ROWS * len(rows[other]))
    for split, found in labels.items():
        if len(found) >= ENOUGH_ROWS and len(values := np.unique(found)) == 1:
            yield Finding(f"all {len(found):,} rows of {split} have the label {values[0]}", True)


def check_lengths(name: str, lengths: np.ndarray) -> Iterator[Finding]:
    """Notes sequences without a token."""
    if none := int((lengths == 0).sum()):
        yield Finding(f"{none:,} of {len(lengths):,} sequences of {name} are empty", none > FEW_ROWS * len(lengths))
