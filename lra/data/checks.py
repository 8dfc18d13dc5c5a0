"""What is imported is compared with what it should be: how many rows, which splits share some, which labels there are.

What cannot be the data set is refused. What differs is noted, and where it matters a run on the data says so, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from lra.errors import UsageError

# a share of rows that may be a fact of the published data: 123 of IMDB's 25,000 test reviews are in train
FEW_ROWS = 0.01

ENOUGH_ROWS = 10  # rows that hardly have one label by chance


class Finding(NamedTuple):
    """Something that a user of the data should know."""

    text: str
    matters: bool  # scores may not mean what they are taken for


def hash_rows(sequences: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """What identifies each sequence, uint64 `[n]`: among a million two differ, by chance 1 to 10^7."""
    digests = (blake2b(np.ascontiguousarray(tokens).data, digest_size=8).digest() for tokens in sequences)
    return np.frombuffer(b"".join(digests), np.uint64)


def check_row_count(name: str, rows: int, published: int) -> Iterator[Finding]:
    """Whether a copy has as many rows as are published: nothing else tells a part from the whole."""
    if rows != published:
        yield Finding(f"{name} has {rows:,} rows, where {published:,} are published", True)


def compare_splits(source: str, rows: Mapping[str, np.ndarray], labels: Mapping[str, np.ndarray]) -> Iterator[Finding]:
    """The splits with one another, by `hash_rows` of their rows; UsageError if another one is the same as train."""
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
    """Whether there are sequences without a token."""
    if none := int((lengths == 0).sum()):
        yield Finding(f"{none:,} of {len(lengths):,} sequences of {name} are empty", none > FEW_ROWS * len(lengths))
