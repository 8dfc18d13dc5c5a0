"""ListOps: nested list operations on digits (LRA, 501 to 1999 tokens), generated or read from LRA's files.

Grammar and distribution are those of LRA's generator. Length counts operators, digits and closing brackets. The
parentheses of the TSV files carry no information and are dropped.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lra.data import checks, lra_release
from lra.data.writer import StoreWriter
from lra.errors import UsageError

VOCABULARY = tuple(sorted([*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]))  # id = place; a digit is its own id
GENERATOR = "lra.data.listops@1"
# The second test set is drawn from this seed on. Seeds of stores are smaller, so no split is drawn from there.
FRESH_SEED_OFFSET = 1 << 32
PUBLISHED = {"train": 96_000, "val": 2_000, "test": 2_000}  # rows of LRA's files
CHUNK = 512  # expressions per call: 1 MB of tokens
_IDS = {token: number for number, token in enumerate(VOCABULARY)}


def tokenize(text: str) -> np.ndarray:
    """Token ids uint8 `[T]` of an expression, with or without parentheses. UsageError names an unknown token."""
    tokens = text.replace("(", " ").replace(")", " ").split()
    try:
        return np.array([_IDS[token] for token in tokens], np.uint8)
    except KeyError as error:
        raise UsageError(f"unknown ListOps token {error}: expected one of {' '.join(VOCABULARY)} ( )") from None


def decode(ids: Sequence[int] | np.ndarray) -> str:
    """The expression of token ids, without parentheses."""
    return " ".join(VOCABULARY[i] for i in ids)


def build_listops(
    writer: StoreWriter,
    *,
    seed: int = 0,
    train: int,
    val: int,
    test: int,
    fresh: int,
    min_length: int = 501,
    max_length: int = 1999,
) -> None:
    """Generate the splits train, val and test, and `fresh`, a larger test set of another seed.

    The counts are expressions per split. No expression occurs twice in all of them.
    """
    draw = partial(generate_expressions, min_length=min_length, max_length=max_length)
    sequences, labels = draw(train + val + test, seed=seed)
    for split, start, end in (("train", 0, train), ("val", train, train + val), ("test", train + val, len(labels))):
        writer.add(split, sequences[start:end], labels[start:end])
    writer.add("fresh", *draw(fresh, seed=seed + FRESH_SEED_OFFSET, exclude=fingerprints(sequences)))


def generate_expressions(
    count: int,
    *,
    seed: int,
    min_length: int = 501,
    max_length: int = 1999,
    max_depth: int = 10,
    max_args: int = 10,
    exclude: Collection[bytes] = (),
    workers: int | None = None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """The first `count` different expressions of `seed`, and their values: uint8 arrays `[T]`, int64 `[count]`.

    Above depth `max_depth` (the root has depth 1) a node is an operator with probability 1/4, else a digit. An operator
    has 2 to `max_args` arguments. All choices are uniform. Expressions with `min_length <= T <= max_length` are kept.

    Args:
        exclude: fingerprints of expressions that must not occur.
        workers: threads, by default one per core. The result does not depend on them.

    Raises:
        UsageError: if the limits admit too few expressions.
    """
    if not (1 <= min_length <= max_length and max_depth >= 1 and max_args >= 2):
        raise UsageError("ListOps limits need 1 <= min_length <= max_length, max_depth >= 1 and max_args >= 2")
    law = (min_length, max_length, max_depth, max_args)
    seen, sequences, labels = set(exclude), [], []
    patience = 10 * (count + len(seen)) + 1000  # repeats are practically nil at LRA's lengths
    workers = min(workers or os.cpu_count() or 1, count // CHUNK + 1)
    with ThreadPoolExecutor(workers) as pool:
        for tried, (tokens, value) in enumerate(_candidates(pool, workers, seed, law)):
            if len(sequences) == count:
                break
            if value is None or tried > patience:
                raise UsageError(f"ListOps limits admit fewer than {count} expressions: widen min_length to max_length")
            fingerprint = _fingerprint(tokens)
            if fingerprint not in seen:
                seen.add(fingerprint)
                sequences.append(tokens.copy())  # a view would keep its chunk
                labels.append(value)
    return sequences, np.array(labels, np.int64)


def _candidates(
    pool: ThreadPoolExecutor, workers: int, seed: int, law: tuple[int, int, int, int]
) -> Iterator[tuple[np.ndarray, int | None]]:
    """The endless stream of expressions of `seed` with their values; None where the limits admit none."""
    from lra.data.expressions import draw_expressions

    for first in itertools.count(0, workers):  # a wave of one chunk each: the whole stream would not fit in memory
        wave = range(first, first + workers)
        drawn = pool.map(lambda chunk: draw_expressions(seed, chunk * CHUNK, CHUNK, *law), wave)
        for tokens, lengths, values in drawn:
            for row, length, value in zip(tokens, lengths.tolist(), values.tolist(), strict=True):
                yield row[:length], value if length else None


def fingerprints(sequences: Sequence[np.ndarray]) -> set[bytes]:
    """The set that `exclude` of `generate_expressions` takes."""
    return {_fingerprint(tokens) for tokens in sequences}


def _fingerprint(tokens: np.ndarray) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=16).digest()


def build_released_listops(
    writer: StoreWriter,
    source: str | Path,
    *,
    seed: int = 0,
    fresh: int,
    min_length: int = 501,
    max_length: int = 1999,
) -> None:
    """Import LRA's own files, `basic_train.tsv`, `basic_val.tsv` and `basic_test.tsv`, and generate `fresh`.

    Args:
        source: the folder of the files, or LRA's release around it, unpacked or not (`lra_release.release_files`).
        seed: of the split `fresh`, which is generated as in `build_listops`, likewise the other arguments.
    """
    splits = {f"basic_{split}.tsv": split for split in PUBLISHED}
    parts = {
        file.name: read_tsv(file.stream, file.path, max_length=max_length)
        for file in lra_release.release_files(source, "listops-1000", *splits)
    }
    writer.compare(source)
    for name, split in splits.items():
        writer.add(split, *parts[name])
        writer.find(checks.check_row_count(name, len(parts[name][1]), PUBLISHED[split]))
    known = {fingerprint for sequences, _ in parts.values() for fingerprint in fingerprints(sequences)}
    limits = {"min_length": min_length, "max_length": max_length}
    drawn = generate_expressions(fresh, seed=seed + FRESH_SEED_OFFSET, exclude=known, **limits)
    writer.add("fresh", *drawn)
    test, new = (np.array([len(tokens) for tokens in some]) for some in (parts["basic_test.tsv"][0], drawn[0]))
    writer.find(_compare_lengths(test, new, **limits))


def _compare_lengths(test: np.ndarray, fresh: np.ndarray, min_length: int, max_length: int) -> Iterator[checks.Finding]:
    """Notes lengths of `test`, int64 `[n]`, that cannot be of the distribution of those of `fresh`."""
    outside = np.mean((test < min_length) | (test > max_length))
    error = fresh.std() * np.sqrt(1 / len(test) + 1 / len(fresh))
    apart = abs(test.mean() - fresh.mean())
    # a published file may count a little differently; a mean that is off must be so beyond chance, and by some share
    if outside > checks.FEW_ROWS or apart > max(6 * error, 0.05 * fresh.mean()):
        of = [f"{some.min():,} to {some.max():,}, on average {some.mean():,.0f}" for some in (test, fresh)]
        mend = f"task.min_length={test.min()} and task.max_length={test.max()} draw such as test has"
        text = f"test and fresh are of different laws: test has {of[0]} tokens, fresh {of[1]}; {mend}"
        yield checks.Finding(text, True)


def read_tsv(stream: BinaryIO, path: str, *, max_length: int = 1999) -> tuple[list[np.ndarray], np.ndarray]:
    """One of LRA's ListOps files: uint8 arrays `[T]` and labels int64 `[n]`.

    A header names the columns Source (an expression) and Target (its value, 0 to 9). They are tab-separated, and lines
    end in LF or CRLF.

    Args:
        path: for messages.

    Raises:
        UsageError: names the line that does not have this form, whose T exceeds `max_length`, or whose expression is
            not whole or has another value.
    """
    sequences, labels = [], []
    lines = (line.decode(errors="replace").rstrip("\r\n").split("\t") for line in stream)
    header = next(lines, [])
    if not {"Source", "Target"} <= set(header):
        raise UsageError(f"{path}:1: the first line must name the tab-separated columns Source and Target")
    source, target = header.index("Source"), header.index("Target")
    for number, fields in enumerate(lines, start=2):
        if len(fields) != len(header):
            raise UsageError(f"{path}:{number}: {len(fields)} columns instead of {len(header)}; get the file again")
        if fields[target] not in VOCABULARY[:10]:
            raise UsageError(f"{path}:{number}: Target is '{fields[target]}', not 0 to 9; get the file again")
        try:
            tokens = tokenize(fields[source])
        except UsageError as error:
            raise UsageError(f"{path}:{number}: {error}") from None
        if not 1 <= len(tokens) <= max_length:
            raise UsageError(f"{path}:{number}: {len(tokens)} tokens, not 1 to {max_length}; raise max_length")
        sequences.append(tokens)
        labels.append(int(fields[target]))
    if not labels:
        raise UsageError(f"{path}: no line after the header; get the file again")
    lines = zip(sequences, labels, evaluate_expressions(sequences), strict=True)
    for number, (tokens, label, value) in enumerate(lines, start=2):
        if label != value:
            wrong = f"Target is {label}, and the value of the expression {value}"
            if value < 0:
                wrong = f"'{decode(tokens[:8])}{' …' if len(tokens) > 8 else ''}' is not one whole expression"
            raise UsageError(f"{path}:{number}: {wrong}; get the file again")
    return sequences, np.array(labels, np.int64)


def evaluate_expressions(sequences: Sequence[np.ndarray]) -> list[int]:
    """The values of expressions, token ids uint8 `[T]`; -1 where the tokens are not one whole expression."""
    from lra.data import expressions

    offsets = np.cumsum([0, *map(len, sequences)])
    return expressions.evaluate_tokens(np.concatenate([np.empty(0, np.uint8), *sequences]), offsets).tolist()


def format_tree(ids: Sequence[int] | np.ndarray, max_lines: int = 24) -> str:
    """An expression as lines: operators with their values, and their arguments indented.

    An operator whose arguments are all digits takes one line, `MAX 2 9 = 9`.

    Args:
        max_lines: of a longer tree, the last line says how many more lines there are.

    Raises:
        UsageError: if `ids` is not one whole expression.
    """
    tokens = [VOCABULARY[i] for i in reversed(ids)]
    try:
        _, lines = _branch(tokens)
        if tokens:
            raise ValueError("tokens after the end")
    except (IndexError, ValueError) as error:
        begin = f"{len(ids)} tokens that begin '{decode(ids[:8])}'"
        raise UsageError(f"{begin} are not one whole ListOps expression: prepare the data again") from error
    if len(lines) > max_lines:
        lines[max_lines - 1 :] = [f"… {len(lines) - max_lines + 1} more lines"]
    return "\n".join(lines)


def _branch(tokens: list[str]) -> tuple[int, list[str]]:
    """Value and lines of the expression at the end of a reversed list of tokens. It is removed from the list."""
    token = tokens.pop()
    if token not in _FUNCTIONS:
        return int(token), [token]
    values, lines, flat, follows = [], [], True, False  # `follows`: the last line is one of digits
    while tokens[-1] != "]":
        digit = tokens[-1] not in _FUNCTIONS
        value, below = _branch(tokens)
        values.append(value)
        if digit and follows:
            lines[-1] += f" {value}"
        else:
            lines += [f"  {line}" for line in below]
        flat, follows = flat and digit, digit
    tokens.pop()
    if not values:
        raise ValueError("an operator without arguments")
    operator, value = token.removeprefix("["), _FUNCTIONS[token](values)
    return value, [f"{operator}{lines[0][1:]} = {value}"] if flat else [f"{operator} = {value}", *lines]


_FUNCTIONS = {
    "[MAX": max,
    "[MED": lambda values: int(np.median(values)),
    "[MIN": min,
    "[SM": lambda values: sum(values) % 10,
}
