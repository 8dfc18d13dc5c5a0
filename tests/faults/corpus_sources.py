"""Data sets in the layouts of the real ones, each spoilt in one way, and words of the line that refuses it."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests import fixtures
from tests.faults.corpus import Spoil

PARQUET = "plain_text/train-00000-of-00001.parquet"
FILES = pa.struct({"bytes": pa.binary(), "path": pa.string()})
EMPTY = pa.array([], pa.int64())


class Source(NamedTuple):
    """A good data set, the command that prepares it, and what can be wrong with it."""

    make: Callable[[Path], Path]
    command: tuple[str, ...]
    cases: dict[str, tuple[Spoil, tuple[str, ...]]]


def _put(name: str, data: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(data)


def _cut(name: str, size: int) -> Spoil:
    return lambda folder: os.truncate(folder / name, size)


def _gone(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def _folder(name: str) -> Spoil:
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def _link(name: str) -> Spoil:
    return lambda folder: ((folder / name).unlink(), (folder / name).symlink_to("/etc/hosts"))


def _table(name: str = PARQUET, **columns: Any) -> Spoil:
    return lambda folder: pq.write_table(pa.table(columns), folder / name)


def _text(data: bytes) -> Spoil:
    """These bytes for a text, which its column says are UTF-8."""
    binary = pa.array([data, data], pa.binary())
    return _table(text=pa.Array.from_buffers(pa.string(), 2, binary.buffers()), label=[0, 1])


def _renamed(name: str, to: str) -> Spoil:
    return lambda folder: (folder / name).rename(folder / to)


def png(side: int, *, height: int | None = None, gray: bool = False, wide: bool = False) -> bytes:
    """A black PNG file, RGB or gray; `wide` ones are gray and of 16 bits."""
    shape = (height or side, side, *(() if gray or wide else (3,)))
    return fixtures.pngs([np.zeros(shape, np.uint16 if wide else np.uint8)])[0].as_py()["bytes"]


def bomb(width: int, height: int) -> bytes:
    """A PNG file of some hundred bytes that states this many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


PIXEL_BOMBS = {
    "a PNG of 100 million pixels": bomb(10_000, 10_000),  # Pillow only warns
    "a PNG of 3,600 million pixels": bomb(60_000, 60_000),
    "a PNG of all pixels": bomb((1 << 31) - 1, (1 << 31) - 1),
    "a PNG of no pixels": bomb(0, 0),
}

_IMDB = ("cannot load IMDB", "a local mirror")
_TEXT, _SENTIMENT = ("text that is not a string", "'train'"), ("label other than 0 and 1", "'train'")
TEXT: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "no text": (_table(label=[0, 1]), ("no column 'text'", "'train'", "a local mirror")),
    "no label": (_table(text=["a"]), ("no column 'label'", "'train'", "a local mirror")),
    "null for a text": (_table(text=["a", None], label=[0, 1]), _TEXT),
    "bytes for texts": (_table(text=[b"\xff", b"b"], label=[0, 1]), _TEXT),
    "numbers for texts": (_table(text=[1, 2], label=[0, 1]), _TEXT),
    "lists for texts": (_table(text=[["a"], ["b"]], label=[0, 1]), _TEXT),
    "null for a label": (_table(text=["a", "b"], label=[0, None]), _SENTIMENT),
    "words for labels": (_table(text=["a", "b"], label=["0", "1"]), _SENTIMENT),
    "label 2": (_table(text=["a", "b"], label=[0, 2]), _SENTIMENT),
    "label -1, of IMDB's unlabelled": (_table(text=["a", "b"], label=[0, -1]), _SENTIMENT),
    "half a label": (_table(text=["a", "b"], label=[0.5, 1.0]), _SENTIMENT),
    "label NaN": (_table(text=["a", "b"], label=[float("nan"), 1.0]), _SENTIMENT),
    "no rows": (_table(text=pa.array([], pa.string()), label=EMPTY), ("no rows", "'train'", "a local mirror")),
    "no rows to test": (
        _table("plain_text/test-00000-of-00001.parquet", text=pa.array([], pa.string()), label=EMPTY),
        ("no rows", "'test'", "a local mirror"),
    ),
    "cut": (_cut(PARQUET, 200), _IMDB),
    "empty": (_cut(PARQUET, 0), _IMDB),
    "a web page": (_put(PARQUET, b"<html>404</html>" * 99), _IMDB),
    "gone": (_gone(PARQUET), _IMDB),
    "a folder": (_folder(PARQUET), _IMDB),
    "lists for labels": (_table(text=["a", "b"], label=[[0], [1]]), _SENTIMENT),
    "no UTF-8": (_text(b"\xff\xfe"), (*_IMDB, PARQUET, "can't decode")),
    "one of two files": (_renamed(PARQUET, PARQUET.replace("1.parquet", "2.parquet")), (*_IMDB, "1 of the 2 files")),
    "no card": (_gone("README.md"), _IMDB),
    "a folder for the card": (_folder("README.md"), (*_IMDB, "README.md")),
    "a broken card": (_put("README.md", b"---\n\t- [\n---\n"), _IMDB),
}  # fmt: skip


def _picture(data: bytes | None, label: int | None = 0) -> Spoil:
    files = pa.array([{"bytes": png(32), "path": None}, {"bytes": data, "path": None}], FILES)
    return _table(img=files, label=[0, label])


_CIFAR10 = ("cannot load CIFAR-10", "a local mirror")
_IMAGE, _CLASS = ("without a 32x32 RGB image", "'train'"), ("without a label 0 to 9", "'train'")
IMAGE: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "no images": (_table(label=[0, 1]), ("no column 'img'", "'train'")),
    "no labels": (_table(img=fixtures.pngs([np.zeros((32, 32, 3), np.uint8)])), ("no column 'label'", "'train'")),
    "null for an image": (_table(img=pa.array([None], FILES), label=[0]), _IMAGE),
    "null for a file": (_picture(None), _IMAGE),
    "an empty file": (_picture(b""), _IMAGE),
    "no PNG": (_picture(b"GIF89a" + bytes(99)), _IMAGE),
    "half a PNG": (_picture(png(32)[:60]), _IMAGE),
    "31x31 pixels": (_picture(png(31)), _IMAGE),
    "gray": (_picture(png(32, gray=True)), _IMAGE),
    "a path on this machine": (
        _table(img=pa.array([{"bytes": None, "path": "/etc/hosts"}], FILES), label=[0]), _IMAGE
    ),
    "words for images": (_table(img=["a", "b"], label=[0, 1]), _IMAGE),
    "label 10": (_picture(png(32), 10), _CLASS),
    "label -1": (_picture(png(32), -1), _CLASS),
    "null for a label": (_picture(png(32), None), _CLASS),
    "words for labels": (_table(img=pa.array([{"bytes": png(32), "path": None}], FILES), label=["a"]), _CLASS),
    "no rows": (_table(img=pa.array([], FILES), label=EMPTY), ("no rows", "'train'")),
    "cut": (_cut(PARQUET, 300), _CIFAR10),
    **{name: (_picture(data), _IMAGE) for name, data in PIXEL_BOMBS.items()},
}  # fmt: skip


def _images(data: bytes) -> Spoil:
    return _put("imgs/0/sample_3.png", data)


def _line(text: str) -> Spoil:
    """As the third line of the metadata."""

    def spoil(folder: Path) -> None:
        lines = (folder / "metadata/0.npy").read_text().splitlines()
        lines[2] = text
        (folder / "metadata/0.npy").write_text("\n".join(lines) + "\n")

    return spoil


_THIRD, _PNG = "metadata/0.npy:3", ("sample_3.png", "not a readable PNG", "get it again")
PATHFINDER: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "an empty line": (_line(""), (_THIRD, "0 columns", "get the file again")),
    "few columns": (_line("imgs/0 sample_2.png 2 1"), (_THIRD, "4 columns", "get the file again")),
    "label 2": (_line("imgs/0 sample_2.png 2 2 1.0 6 2 2 0.5 1 1"), (_THIRD, "'2'", "not 0 or 1")),
    "label NaN": (_line("imgs/0 sample_2.png 2 nan 1.0 6 2 2 0.5 1 1"), (_THIRD, "'nan'", "not 0 or 1")),
    "another level": (_line("imgs/0 sample_2.png 2 1 1.0 14 4 2 0.5 1 1"), (_THIRD, "'14'", "the level asked for")),
    "no length": (_line("imgs/0 sample_2.png 2 1 1.0 x 4 2 0.5 1 1"), (_THIRD, "'x'", "the level asked for")),
    "not UTF-8": (lambda folder: (folder / "metadata/0.npy").write_bytes(b"\xff\xfe" * 9), ("0.npy:1", "columns")),
    "a real .npy": (lambda folder: np.save(folder / "metadata/0.npy", np.zeros(3)), ("0.npy:1", "get the file again")),
    "named twice": (_line("imgs/0 sample_1.png 1 1 1.0 6 2 2 0.5 1 1"), (_THIRD, "is named before")),
    "named and not there": (_line("imgs/0 sample_99.png 2 1 1.0 6 2 2 0.5 1 1"), (_THIRD, "is not there")),
    "outside": (_line("../../../etc hosts 2 1 1.0 6 2 2 0.5 1 1"), (_THIRD, "is not there", "get the folder again")),
    "metadata without a number": (
        lambda folder: (folder / "metadata/0.npy").rename(folder / "metadata/x.npy"), ("x.npy", "numbers as names")
    ),
    "no metadata": (
        lambda folder: [file.unlink() for file in (folder / "metadata").iterdir()], ("metadata/*.npy", "get it again")
    ),
    "too few lines": (
        lambda folder: [_put("metadata/0.npy", b"")(folder), _put("metadata/1.npy", b"")(folder)], ("too few to split",)
    ),
    "an image gone": (_gone("imgs/0/sample_3.png"), ("metadata/0.npy:4", "is not there")),
    "an image that is a link": (_link("imgs/0/sample_3.png"), ("sample_3.png", "link")),
    "an image that is a folder": (_folder("imgs/0/sample_3.png"), ("sample_3.png", "regular file")),
    "an empty image": (_images(b""), _PNG),
    "text for an image": (_images(b"<html>404</html>"), _PNG),
    "half an image": (_images(png(32, gray=True)[:45]), _PNG),
    "a larger image": (_images(png(64, gray=True)), ("sample_3.png", "64x64", "not 32x32 of 8 bits")),
    "a narrow image": (_images(png(16, height=32, gray=True)), ("sample_3.png", "16x32", "not 32x32 of 8 bits")),
    "an image of 16 bits": (_images(png(32, wide=True)), ("sample_3.png", "mode I;16", "not 32x32 of 8 bits")),
    "a GIF": (_images(b"GIF89a" + bytes(99)), _PNG),
    **{name: (_images(data), ("sample_3.png", "get it again")) for name, data in PIXEL_BOMBS.items()},
}  # fmt: skip

_TRAIN, _PAIRS = "new_aan_pairs.train.tsv", b"1.0\ta\tb\tone\tother\n"
AAN: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "empty": (_put(_TRAIN, b""), (_TRAIN, "no pairs", "get the file again")),
    "zeros": (_put(_TRAIN, bytes(500)), (f"{_TRAIN}:1", "1 columns", "get the file again")),
    "four columns": (_put(_TRAIN, _PAIRS + b"1.0\ta\tb\tone\n"), (f"{_TRAIN}:2", "4 columns instead of 5")),
    "a tab in a text": (_put(_TRAIN, b"1.0\ta\tb\to\tne\tother\n"), (f"{_TRAIN}:1", "6 columns instead of 5")),
    "an empty line": (_put(_TRAIN, _PAIRS + b"\n" + _PAIRS), (f"{_TRAIN}:2", "1 columns instead of 5")),
    "a header": (_put(_TRAIN, b"label\tid1\tid2\ttext1\ttext2\n"), (f"{_TRAIN}:1", "'label'", "not 0 or 1")),
    "label 2": (_put(_TRAIN, b"2.0\ta\tb\tone\tother\n"), (f"{_TRAIN}:1", "'2.0'", "not 0 or 1")),
    "label NaN": (_put(_TRAIN, b"nan\ta\tb\tone\tother\n"), (f"{_TRAIN}:1", "'nan'", "not 0 or 1")),
    "label not UTF-8": (_put(_TRAIN, b"\xff\ta\tb\tone\tother\n"), (f"{_TRAIN}:1", "not 0 or 1")),
    "label of a megabyte": (_put(_TRAIN, b"1" * 1_000_000 + b"\ta\tb\tone\tother\n"), (f"{_TRAIN}:1", "not 0 or 1")),
    "a label that a terminal would obey": (_put(_TRAIN, b"\x1b[2J\ta\tb\tone\tother\n"), (r"x1b[2J", "not 0 or 1")),
    "UTF-16": (_put(_TRAIN, "1.0\ta\tb\tone\tother\n".encode("utf-16")), (f"{_TRAIN}:1", "not 0 or 1")),
    "gone": (_gone("new_aan_pairs.eval.tsv"), ("new_aan_pairs.eval.tsv", "get it again")),
    "a folder": (_folder(_TRAIN), (_TRAIN, "regular file")),
    "a link": (_link(_TRAIN), (_TRAIN, "link")),
}

_PAIRS_TSV = "pairs_train.tsv"
SCISUMM: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "no header": (_put(_PAIRS_TSV, b"1\ta\tb\n"), (f"{_PAIRS_TSV}:1", "label, id1 and id2")),
    "no pairs": (_put(_PAIRS_TSV, b"label\tid1\tid2\n"), (_PAIRS_TSV, "no pairs")),
    "no such paper": (_put(_PAIRS_TSV, b"label\tid1\tid2\n1\ta\tz\n"), (f"{_PAIRS_TSV}:2", "'z'", "papers.parquet")),
    "an id not UTF-8": (_put(_PAIRS_TSV, b"label\tid1\tid2\n1\ta\t\xff\n"), (f"{_PAIRS_TSV}:2", "papers.parquet")),
    "two columns": (_put(_PAIRS_TSV, b"label\tid1\tid2\n1\ta\n"), (f"{_PAIRS_TSV}:2", "2 columns instead of 3")),
    "pairs gone": (_gone(_PAIRS_TSV), (_PAIRS_TSV, "name the folder")),
    "pairs a folder": (_folder(_PAIRS_TSV), (_PAIRS_TSV, "name the folder")),
    "papers gone": (_gone("papers.parquet"), ("papers.parquet", "dataset=lra")),
    "papers cut": (_cut("papers.parquet", 100), ("papers.parquet", "get the file again")),
    "papers empty": (_cut("papers.parquet", 0), ("papers.parquet", "get the file again")),
    "papers a folder": (_folder("papers.parquet"), ("papers.parquet", "Is a directory")),
    "no text": (_table("papers.parquet", id=["a", "b"]), ("papers.parquet", "'text'")),
    "no id": (_table("papers.parquet", text=["a", "b"]), ("papers.parquet", "'id'")),
    "null for a text": (_table("papers.parquet", id=["a", "b"], text=["x", None]), ("row 1", "not a string")),
    "numbers for ids": (_table("papers.parquet", id=[1, 2], text=["x", "y"]), ("row 0", "not a string")),
    "an id twice": (_table("papers.parquet", id=["a", "a"], text=["x", "y"]), ("row 1", "occurs twice")),
    "no papers": (_table("papers.parquet", id=EMPTY, text=EMPTY), (f"{_PAIRS_TSV}:2", "has no paper")),
}

_REVIEWS = {"text": ["a"] * 20, "label": [0, 1] * 10}
_CIFAR = {"img": fixtures.pngs([np.zeros((32, 32, 3), np.uint8)] * 20), "label": [*range(10)] * 2}
_PAPERS = {"a": "one", "b": "other"}
_EACH = {split: [(1, "a", "b"), (0, "b", "b")] for split in ("train", "val", "test")}
_BLACK = np.zeros((20, 32, 32), np.uint8)
SOURCES = {
    "text": Source(lambda f: fixtures.write_imdb(f, train=_REVIEWS, test=_REVIEWS), ("task=text",), TEXT),
    "image": Source(lambda f: fixtures.write_cifar10(f, train=_CIFAR, test=_CIFAR), ("task=image",), IMAGE),
    "pathfinder": Source(
        lambda f: fixtures.write_pathfinder(f, _BLACK, [0, 1] * 10, 6, each=10),
        ("task=pathfinder", "level=easy"), PATHFINDER,
    ),
    "retrieval": Source(lambda f: fixtures.write_aan_pairs(f, _PAPERS, **_EACH), ("task=retrieval",), AAN),
    "scisumm": Source(
        lambda f: fixtures.write_aan_papers(f, _PAPERS, **_EACH), ("task=retrieval", "dataset=scisumm"), SCISUMM
    ),
}  # fmt: skip
