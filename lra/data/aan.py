"""Retrieval: pairs of papers of the ACL Anthology Network as UTF-8 bytes. The label is 1 if one cites the other.

`lra` is LRA's own files. `scisumm` is a smaller set that holds each paper once. In both, a document is identified by
its text, not by its id: equal texts are stored once, and an id that stands for two texts keeps both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np

from lra.data import checks, lra_release
from lra.data.imdb import VOCABULARY as VOCABULARY
from lra.data.writer import StoreWriter
from lra.errors import UsageError, first_line, system_error

GENERATOR = "lra.data.aan@1"
COMPACT = "a folder of papers.parquet and pairs_{train,val,test}.tsv"  # the source of `scisumm`
CHUNK = 1 << 24  # bytes of documents per write
_RELEASED = {"train": "new_aan_pairs.train.tsv", "val": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
_PUBLISHED = {"train": 147_086, "val": 18_090, "test": 17_437}  # pairs in each file
_COMPACT = {"train": "pairs_train.tsv", "val": "pairs_val.tsv", "test": "pairs_test.tsv"}
_HEADER = b"label\tid1\tid2"
_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}


def build_aan(writer: StoreWriter, source: str | Path, dataset: Literal["lra", "scisumm"]) -> None:
    """Store the splits train, val and test as pairs of whole documents. `Split.collate` truncates them later.

    Args:
        source: of `lra` the folder of `new_aan_pairs.{train,eval,test}.tsv`, or LRA's release around it, unpacked or
            not (`lra_release.release_files`). The columns are label, two ids and two texts, without a header. Of
            `scisumm` a folder of `papers.parquet` (id, text) and `pairs_{train,val,test}.tsv` with the header label,
            id1, id2. All files are tab-separated, and a quote is an ordinary character.

    Raises:
        UsageError: names the file and the line that does not have this form.
    """
    writer.compare(source)
    source, documents = Path(os.path.expanduser(source)), _Documents(writer)
    read = {"lra": _read_released, "scisumm": _read_compact}[dataset]
    splits = read(source, documents)
    documents.write()
    for split in ("train", "val", "test"):
        writer.add_pairs(split, splits[split][:, 1:], splits[split][:, 0])
        if dataset == "lra":
            writer.find(checks.check_row_count(_RELEASED[split], len(splits[split]), _PUBLISHED[split]))


class _Documents:
    """Hands every different text to the writer once. Of a text that is written it keeps a fingerprint of 16 bytes."""

    def __init__(self, writer: StoreWriter):
        self._writer = writer
        self._rows: dict[bytes, int] = {}  # by fingerprint
        self._waiting: list[np.ndarray] = []
        self._size = 0  # bytes that wait to be written

    def row(self, text: bytes) -> int:
        """The place of a text among the documents."""
        fingerprint = blake2b(text, digest_size=16).digest()
        if fingerprint not in self._rows:
            self._rows[fingerprint] = len(self._rows)
            self._waiting.append(np.frombuffer(text, np.uint8))
            self._size += len(text)
            if self._size > CHUNK:
                self.write()
        return self._rows[fingerprint]

    def write(self) -> None:
        self._writer.add_documents(self._waiting)
        self._waiting, self._size = [], 0


def _read_released(source: Path, documents: _Documents) -> dict[str, np.ndarray]:
    """The pairs of each split, as `_pairs` returns them."""
    if os.path.exists(source / "papers.parquet") and not os.path.exists(source / _RELEASED["train"]):
        raise UsageError(f"{source} holds papers.parquet, which is no part of LRA's release: choose dataset=scisumm")
    splits = {name: split for split, name in _RELEASED.items()}

    def rows(_id1: bytes, _id2: bytes, one: bytes, other: bytes) -> tuple[int, int]:
        return documents.row(one), documents.row(other)

    return {
        splits[file.name]: _pairs(file.stream, file.path, rows, columns=5)
        for file in lra_release.release_files(source, "tsv_data", *splits)
    }


def _read_compact(source: Path, documents: _Documents) -> dict[str, np.ndarray]:
    """The pairs of each split, as `_pairs` returns them."""
    papers = {name: documents.row(text.encode()) for name, text in _papers(source).items()}

    def rows(*names: bytes) -> tuple[int, int]:
        one, other = (papers[name.decode(errors="replace")] for name in names)
        return one, other

    splits = {}
    for split, name in _COMPACT.items():
        path = source / name
        try:
            file = path.open("rb")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise UsageError(f"{path}: {error.strerror}; name the folder of papers.parquet and {name}") from error
        with file:
            if file.readline().rstrip(b"\r\n") != _HEADER:
                raise UsageError(f"{path}:1: the first line must name the tab-separated columns label, id1 and id2")
            splits[split] = _pairs(file, str(path), rows, columns=3, first=2)
    return splits


def _papers(source: Path) -> dict[str, str]:
    """The texts by id."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = source / "papers.parquet"
    if not os.path.exists(path):
        raise UsageError(f"{source} has no papers.parquet: name its folder, or choose dataset=lra for LRA's own files")
    try:
        with path.open("rb") as file:  # by name, pyarrow takes some for addresses, and folders for tables
            table = pq.read_table(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, MemoryError) or system_error(error, path):
            raise
        raise UsageError(f"{path} is not a readable parquet file ({first_line(error)}); get the file again") from error
    if missing := {"id", "text"} - set(table.column_names):
        raise UsageError(f"{path} has no column '{min(missing)}'; get the file again")
    papers: dict[str, str] = {}
    for number, (name, text) in enumerate(zip(*(table[column].to_pylist() for column in ("id", "text")), strict=True)):
        if not isinstance(name, str) or not isinstance(text, str):
            raise UsageError(f"{path}: the id or text of row {number} is not a string; get the file again")
        if name in papers:
            raise UsageError(f"{path}: the id of row {number}, {name!r}, occurs twice; get the file again")
        papers[name] = text
    return papers


def _pairs(
    lines: Iterable[bytes], path: str, rows: Callable[..., tuple[int, int]], *, columns: int, first: int = 1
) -> np.ndarray:
    """Label and two documents of every line, int64 `[n, 3]`.

    Args:
        rows: finds the documents from the columns after the label.
        first: number of the first line.
    """
    pairs = []
    for number, line in enumerate(lines, first):
        fields = line.removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
        if len(fields) != columns:
            raise UsageError(f"{path}:{number}: {len(fields)} columns instead of {columns}; get the file again")
        if fields[0] not in _LABELS:
            label = fields[0][:20].decode(errors="replace")
            raise UsageError(f"{path}:{number}: the label is {label!r}, not 0 or 1; get the file again")
        try:
            pairs.append((_LABELS[fields[0]], *rows(*fields[1:])))
        except KeyError as error:
            raise UsageError(f"{path}:{number}: papers.parquet has no paper {error}; get the files again") from None
    if not pairs:
        raise UsageError(f"{path}: no pairs; get the file again")
    return np.array(pairs, np.int64)
