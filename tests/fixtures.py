"""Small data sets in the layouts of the real ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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
    (folder / "plain_text").mkdir(parents=True)
    (folder / "README.md").write_text(IMDB_CARD)
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
