"""Small data sets in the layouts of the real ones."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from lra.data import listops

IMDB_CARD = """---
configs:
- config_name: plain_text
  data_files:
  - split: train
    path: plain_text/train-*
  - split: test
    path: plain_text/test-*
---
"""


def write_imdb(folder: Path, **splits: dict[str, Any]) -> Path:
    """A mirror of the Hub's stanfordnlp/imdb with these columns, `train={"text": [...], "label": [...]}`."""
    return _write_mirror(folder, IMDB_CARD, splits)


def _write_mirror(folder: Path, card: str, splits: Mapping[str, dict[str, Any]]) -> Path:
    (folder / "plain_text").mkdir(parents=True)
    (folder / "README.md").write_text(card)
    for split, columns in splits.items():
        pq.write_table(pa.table(columns), folder / "plain_text" / f"{split}-00000-of-00001.parquet")
    return folder


def write_listops(folder: Path, **splits: tuple[Iterable[np.ndarray], Iterable[int]]) -> Path:
    """LRA's files with these expressions, `train=(sequences, labels)`."""
    folder.mkdir(parents=True)
    for split, (sequences, labels) in splits.items():
        some = zip(sequences, labels, strict=True)
        rows = [f"{parenthesised(listops.decode(ids).split()[::-1])}\t{label}\r\n" for ids, label in some]
        (folder / f"basic_{split}.tsv").write_bytes("".join(["Source\tTarget\r\n", *rows]).encode())
    return folder


def parenthesised(tokens: list[str]) -> str:
    """LRA's left-branching binary form of the expression that ends a reversed list of tokens."""
    text = tokens.pop()
    if text.isdigit():
        return text
    while tokens[-1] != "]":
        text = f"( {text} {parenthesised(tokens)} )"
    return f"( {text} {tokens.pop()} )"


CIFAR10_CARD = f"""---
dataset_info:
  config_name: plain_text
  features:
  - name: img
    dtype: image
  - name: label
    dtype:
      class_label:
        names:
{"".join(f"          '{number}': class{number}{chr(10)}" for number in range(10))}\
configs:
- config_name: plain_text
  default: true
  data_files:
  - split: train
    path: plain_text/train-*
  - split: test
    path: plain_text/test-*
---
"""


def write_cifar10(folder: Path, **splits: dict[str, Any]) -> Path:
    """A mirror of the Hub's uoft-cs/cifar10 with these columns, `train={"img": pngs(...), "label": [...]}`."""
    return _write_mirror(folder, CIFAR10_CARD, splits)


def pngs(images: Iterable[np.ndarray]) -> pa.Array:
    """Images uint8 `[H, W, 3]` or `[H, W]` as the Hub's column of images holds them: files with no path."""
    files = []
    for pixels in images:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format="PNG")
        files.append({"bytes": file.getvalue(), "path": None})
    return pa.array(files, pa.struct({"bytes": pa.binary(), "path": pa.string()}))


def pack(folder: Path, archive: Path, inside: str | None = None, members: Iterable[str] = ("",)) -> Path:
    """A tar archive, compressed as its suffix says, of a folder or some of its members in this order.

    In it the folder has the name `inside`, by default its own.
    """
    compression = archive.suffix.removeprefix(".").replace("tar", "")
    with tarfile.open(archive, f"w:{compression}") as tar:  # type: ignore[call-overload]
        for member in members:
            tar.add(folder / member, Path(inside or folder.name, member))
    return archive


AanPair = tuple[int, str, str]  # label and two ids


def write_aan_pairs(folder: Path, texts: Mapping[str, str], **splits: list[AanPair]) -> Path:
    """LRA's files of pairs of papers, whose texts are these by id."""
    folder.mkdir(parents=True)
    for split, pairs in splits.items():
        lines = [f"{label:.1f}\t{one}\t{other}\t{texts[one]}\t{texts[other]}\n" for label, one, other in pairs]
        name = {"val": "eval"}.get(split, split)
        (folder / f"new_aan_pairs.{name}.tsv").write_bytes("".join(lines).encode())
    return folder


def write_aan_papers(folder: Path, texts: Mapping[str, str], **splits: list[AanPair]) -> Path:
    """The compact form of the same: each paper once, and pairs of ids."""
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"id": list(texts), "text": list(texts.values())}), folder / "papers.parquet")
    for split, pairs in splits.items():
        lines = [f"{label}\t{one}\t{other}\n" for label, one, other in pairs]
        (folder / f"pairs_{split}.tsv").write_text("".join(["label\tid1\tid2\n", *lines]))
    return folder


def write_pathfinder(
    folder: Path, images: np.ndarray, labels: Sequence[int], contour_length: int, *, each: int
) -> Path:
    """A folder of LRA's Pathfinder: images uint8 `[n, H, W]` and their metadata, `each` in one file of it."""
    for row, (image, label) in enumerate(zip(images, labels, strict=True)):
        number, index = divmod(row, each)
        path = folder / f"imgs/{number}/sample_{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
        (folder / "metadata").mkdir(exist_ok=True)
        with (folder / f"metadata/{number}.npy").open("a") as file:  # text, whatever its name says
            law = f"1.0 {contour_length} {contour_length // 3} 2 0.5 1 1"
            file.write(f"imgs/{number} sample_{index}.png {index} {label} {law}\n")
    return folder
