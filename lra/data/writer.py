"""Writes the splits of a store under construction, in chunks, so that a store may exceed memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


class Writer:
    """Appends labelled sequences to the splits of a store. `lra.data.store.prepare` makes it and finishes it."""

    def __init__(self, folder: Path, vocabulary_size: int):
        if not 1 <= vocabulary_size <= 1 << 16:
            raise ValueError(f"a store holds 1 to 65536 different tokens, not {vocabulary_size}")
        self.vocabulary_size = vocabulary_size
        self.dtype = np.dtype("u1" if vocabulary_size <= 256 else "<u2")
        self._folder = folder
        self._lengths: dict[str, list[np.ndarray]] = {}
        self._labels: dict[str, list[np.ndarray]] = {}

    def add(self, split: str, sequences: Sequence[np.ndarray] | np.ndarray, labels: Sequence[int] | np.ndarray) -> None:
        """Append sequences to a split, which begins when it is first named.

        `sequences`: integer arrays `[length]`, or one array `[n, length]`. `labels`: integers `[n]`.
        """
        if len(sequences) != len(labels):
            raise ValueError(f"{split}: {len(sequences)} sequences with {len(labels)} labels")
        tokens = np.concatenate(sequences) if len(sequences) else np.empty(0, self.dtype)
        low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
        if low < 0 or high >= self.vocabulary_size:
            raise ValueError(f"{split}: token ids {low} to {high}, outside 0 to {self.vocabulary_size - 1}")
        path = self._folder / f"{split}.tokens.npy"
        with path.open("ab") as file:
            if split not in self._lengths:
                self._lengths[split], self._labels[split] = [], []
                _write_header(file, self.dtype, 0)
            file.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._lengths[split].append(np.array([len(sequence) for sequence in sequences], np.int64))
        self._labels[split].append(np.array(labels, np.int64))

    def scratch(self) -> Path:
        """A folder for the builder's temporary files; it goes when the store is finished or fails."""
        path = self._folder / "scratch"
        path.mkdir(exist_ok=True)
        return path

    def finish(self) -> dict[str, Any]:
        """Complete the files and return what the manifest says of each split."""
        shutil.rmtree(self._folder / "scratch", ignore_errors=True)
        return {split: self._finish(split) for split in self._lengths}

    def _finish(self, split: str) -> dict[str, Any]:
        lengths, labels = np.concatenate(self._lengths[split]), np.concatenate(self._labels[split])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        with (self._folder / f"{split}.tokens.npy").open("r+b") as file:
            _write_header(file, self.dtype, int(offsets[-1]))
        np.save(self._folder / f"{split}.offsets.npy", offsets)
        np.save(self._folder / f"{split}.labels.npy", labels)
        values, counts = np.unique(labels, return_counts=True)
        return {
            "count": len(labels),
            "tokens": int(offsets[-1]),
            "labels": {str(value): int(count) for value, count in zip(values, counts, strict=True)},
            "length": {
                "min": int(lengths.min(initial=offsets[-1])),
                "mean": round(float(offsets[-1]) / max(len(labels), 1), 2),
                "max": int(lengths.max(initial=0)),
            },
        }


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    """The .npy header of a vector. NumPy pads it so that it keeps its size whatever the count: it can be rewritten."""
    shape = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, shape)
