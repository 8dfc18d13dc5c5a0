"""Writes the splits of a store in chunks, so that a store may exceed memory."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lra.data import checks
from lra.errors import UsageError

DOCUMENTS = "documents"  # the sequences that pairs refer to


class StoreWriter:
    """Appends labelled examples to the splits of a store. `lra.data.store.prepare_store` makes and finishes it.

    An example is a sequence (`add`), or a pair of sequences out of one collection (`add_documents`, `add_pairs`).
    What a store can't hold is a UsageError.
    """

    def __init__(self, folder: Path, vocabulary_size: int, count: Callable[[int], None] = lambda _: None):
        if not 1 <= vocabulary_size <= 1 << 16:
            raise UsageError(f"a store holds 1 to 65536 different tokens, not {vocabulary_size}")
        self.count = count  # is called with the number of examples that were written
        self.vocabulary_size = vocabulary_size
        self.dtype = np.dtype("u1" if vocabulary_size <= 256 else "<u2")
        self._folder = folder
        self._lengths: dict[str, list[np.ndarray]] = {}
        self._labels: dict[str, list[np.ndarray]] = {}
        self._pairs: dict[str, list[np.ndarray]] = {}
        self._baselines: dict[str, dict[str, float]] = {}
        self._rows: dict[str, list[np.ndarray]] = {}  # hashes of the rows of each split, if they are compared
        self._compared: str | None = None
        self._notes: list[str] = []
        self._differences: list[str] = []

    def add(self, split: str, sequences: Sequence[np.ndarray] | np.ndarray, labels: Sequence[int] | np.ndarray) -> None:
        """Append sequences to a split, which begins when it is first named.

        Args:
            sequences: integer arrays `[length]`, or one array `[n, length]`.
            labels: integers `[n]`.
        """
        if len(sequences) != len(labels):
            raise UsageError(f"{split}: {len(sequences)} sequences with {len(labels)} labels")
        self._append(split, sequences)
        self.count(len(labels))
        self._label(split, sequences, labels)

    def add_documents(self, sequences: Sequence[np.ndarray] | np.ndarray) -> None:
        """Append sequences, as in `add`, to the collection that pairs refer to by place."""
        self._append(DOCUMENTS, sequences)

    def add_pairs(self, split: str, pairs: np.ndarray, labels: Sequence[int] | np.ndarray) -> None:
        """Append pairs of documents to a split. `pairs`: integers `[n, 2]`, places of documents already added."""
        count = sum(map(len, self._lengths.get(DOCUMENTS, ())))
        if len(pairs) != len(labels):
            raise UsageError(f"{split}: {len(pairs)} pairs with {len(labels)} labels")
        pairs = _integers(pairs, f"{split}: pairs").reshape(-1, 2)
        if len(pairs) and not 0 <= np.min(pairs) <= np.max(pairs) < count:
            raise UsageError(f"{split}: a pair names a document outside 0 to {count - 1}")
        self._pairs.setdefault(split, []).append(pairs)
        self._label(split, pairs, labels)

    def baseline(self, name: str, accuracy: Mapping[str, float]) -> None:
        """State the accuracy, as a share, that a predictor with one simple feature reaches on each split."""
        self._baselines[name] = dict(accuracy)

    def note(self, text: str) -> None:
        """State a fact that a user of the data should know, in the manifest."""
        self._notes.append(text)

    def differ(self, text: str) -> None:
        """State how the data differs from what is published: a note that every run on it repeats."""
        self.note(text)
        self._differences.append(text)

    def compare(self, source: str | Path) -> None:
        """Let `finish` compare the splits of imported data (`checks.compare_splits`). Call it first."""
        self._compared = str(source)

    def find(self, findings: Iterable[checks.Finding]) -> None:
        """State what checks have found."""
        for finding in findings:
            (self.differ if finding.matters else self.note)(finding.text)

    def scratch(self) -> Path:
        """A folder for temporary files of the builder. It goes when the store is finished or fails."""
        path = self._folder / "scratch"
        path.mkdir(exist_ok=True)
        return path

    def finish(self) -> dict[str, Any]:
        """Complete the files and return the manifest's part on their content; UsageError as `compare_splits`."""
        if self._compared:
            rows, labels = (
                {split: np.concatenate(parts) for split, parts in kept.items()} for kept in (self._rows, self._labels)
            )
            self.find(checks.compare_splits(self._compared, rows, labels))
            for split in self._labels.keys() & self._lengths.keys():
                self.find(checks.check_lengths(split, np.concatenate(self._lengths[split])))
        shutil.rmtree(self._folder / "scratch", ignore_errors=True)
        documents = {DOCUMENTS: self._finish(DOCUMENTS)} if DOCUMENTS in self._lengths else {}
        splits = {split: self._labelled(split) for split in self._labels}
        said = {"baselines": self._baselines, "notes": self._notes, "differences": self._differences}
        return {"splits": splits, **documents, **said}

    def _label(self, split: str, rows: Sequence[np.ndarray] | np.ndarray, labels: Sequence[int] | np.ndarray) -> None:
        if self._compared:
            self._rows.setdefault(split, []).append(checks.hash_rows(rows))
        self._labels.setdefault(split, []).append(_integers(labels, f"{split}: labels"))

    def _append(self, name: str, sequences: Sequence[np.ndarray] | np.ndarray) -> None:
        if isinstance(sequences, np.ndarray):
            tokens = sequences.reshape(-1)
        else:
            filled = [sequence for sequence in sequences if len(sequence)]  # NumPy takes an empty one for floats
            tokens = np.concatenate(filled) if filled else np.empty(0, self.dtype)
        _check_integers(tokens, f"{name}: token ids")
        if tokens.dtype != np.uint8 or self.vocabulary_size < 256:
            low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
            if low < 0 or high >= self.vocabulary_size:
                limits = f"outside 0 to {self.vocabulary_size - 1}: see the task's vocabulary and its build"
                raise UsageError(f"{name}: token ids {low} to {high}, {limits}")
        with (self._folder / f"{name}.tokens.npy").open("ab") as file:
            if name not in self._lengths:
                self._lengths[name] = []
                _write_header(file, self.dtype, 0)
            file.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._lengths[name].append(np.array([len(sequence) for sequence in sequences], np.int64))

    def _labelled(self, split: str) -> dict[str, Any]:
        labels = np.concatenate(self._labels[split])
        _save(self._folder / f"{split}.labels.npy", labels)
        values, counts = np.unique(labels, return_counts=True)
        balance = {str(value): int(count) for value, count in zip(values, counts, strict=True)}
        if split in self._pairs:
            _save(self._folder / f"{split}.pairs.npy", np.concatenate(self._pairs[split]))
            return {"count": len(labels), "labels": balance}
        return {**self._finish(split), "labels": balance}

    def _finish(self, name: str) -> dict[str, Any]:
        lengths = np.concatenate(self._lengths[name])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        with (self._folder / f"{name}.tokens.npy").open("r+b") as file:
            _write_header(file, self.dtype, int(offsets[-1]))
        _save(self._folder / f"{name}.offsets.npy", offsets)
        return {
            "count": len(lengths),
            "tokens": int(offsets[-1]),
            "length": {
                "min": int(lengths.min(initial=offsets[-1])),
                "mean": round(float(offsets[-1]) / max(len(lengths), 1), 2),
                "max": int(lengths.max(initial=0)),
            },
        }


def _integers(values: Sequence[int] | np.ndarray, what: str) -> np.ndarray:
    """A copy as int64. UsageError if a value is no integer."""
    _check_integers(found := np.asarray(values), what)
    return found.astype(np.int64)


def _check_integers(values: np.ndarray, what: str) -> None:
    if values.size and values.dtype.kind not in "biu":
        raise UsageError(f"{what} are {values.dtype}, and must be integers: convert them in the task's build")


def _save(path: Path, array: np.ndarray) -> None:
    """As np.save, whose error on a full disk does not say that the disk is full."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    path.write_bytes(buffer.getbuffer())


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    """The .npy header of a vector. NumPy pads it to one size for every count, so that it can be rewritten."""
    shape = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, shape)
