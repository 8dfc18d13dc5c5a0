"""Text: IMDB reviews as UTF-8 bytes (LRA's byte-level sentiment task), from the Hub or a local mirror of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lra.data import checks, hub
from lra.data.writer import StoreWriter
from lra.errors import UsageError

HUB = "stanfordnlp/imdb"
VOCABULARY = tuple(f"{byte:02x}" for byte in range(256))  # a token is a byte, its id the byte's value
GENERATOR = "lra.data.text@1"
PUBLISHED = 25_000  # labelled reviews of each split
_MEND = f"lra data prepare task=text source=<folder of a local mirror of {HUB}>"


def build_imdb(writer: StoreWriter, source: str | Path) -> None:
    """Store the labelled splits train and test. Reviews are whole; `Split.collate` truncates them later.

    Args:
        source: a Hub id, or a folder with the same layout: README.md with the config "plain_text", and parquet files
            with the columns text and label (0 negative, 1 positive).

    Raises:
        UsageError: if the data set cannot be had or is another one.
    """
    writer.compare(source)
    splits = hub.load_splits(source, name="IMDB", columns=("text", "label"), mend=_MEND, note=writer.note)
    for split, rows in splits.items():
        writer.find(checks.check_row_count(split, len(rows), PUBLISHED))
        for batch in rows:
            if not all(isinstance(text, str) for text in batch["text"]):
                raise UsageError(f"{source} has a text that is not a string in its split '{split}': {_MEND}")
            if not all(label in (0, 1) for label in batch["label"]):
                raise UsageError(f"{source} has a label other than 0 and 1 in its split '{split}': {_MEND}")
            writer.add(split, [np.frombuffer(text.encode(), np.uint8) for text in batch["text"]], batch["label"])
