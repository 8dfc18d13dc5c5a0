"""Image: CIFAR-10 in gray levels, pixel after pixel (LRA, 1,024 tokens), from the Hub or a local mirror of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lra.data import checks, hub, picture
from lra.data.writer import StoreWriter
from lra.errors import UsageError, system_error

HUB = "uoft-cs/cifar10"
PIXELS = tuple(str(level) for level in range(256))  # vocabulary of 8-bit pixels: a token's id is its gray level
GENERATOR = "lra.data.image@1"
PUBLISHED = {"train": 50_000, "test": 10_000}  # images
SIDE = 32
_MEND = f"lra data prepare task=image source=<folder of a local mirror of {HUB}>"


def build_cifar10(writer: StoreWriter, source: str | Path) -> None:
    """Store the splits train and test: rows of 32 pixels from the top, labels 0 to 9 (airplane to truck).

    A gray level is the luma of ITU-R BT.601, 0.299 R + 0.587 G + 0.114 B as Pillow rounds it.

    Args:
        source: a Hub id, or a folder with the same layout: README.md with the config "plain_text", and parquet files
            with the columns img and label.

    Raises:
        UsageError: if the data set cannot be had or is another one.
    """
    writer.compare(source)
    splits = hub.load_splits(source, name="CIFAR-10", columns=("img", "label"), mend=_MEND, note=writer.note)
    for split, rows in splits.items():
        writer.find(checks.check_row_count(split, len(rows), PUBLISHED[split]))
        for batch in rows:
            labels = batch["label"]
            if not all(label in range(10) for label in labels):
                raise UsageError(f"{source} has rows without a label 0 to 9 in its split '{split}': {_MEND}")
            try:
                tokens = np.stack([_gray(image) for image in batch["img"]])
            except Exception as error:  # Pillow raises what it likes for a broken file
                if system_error(error) or isinstance(error, MemoryError):
                    raise
                what = f"rows without a {SIDE}x{SIDE} RGB image"
                raise UsageError(f"{source} has {what} in its split '{split}': {_MEND}") from error
            writer.add(split, tokens, labels)


def _gray(image: Any) -> np.ndarray:
    """Tokens uint8 `[1024]` of an image as the Hub stores it: a dictionary with the bytes of a file."""
    with picture.open_image(image["bytes"]) as read:
        if read.mode != "RGB" or read.size != (SIDE, SIDE):
            raise ValueError(f"{read.mode} {read.size}")
        return np.asarray(read.convert("L")).reshape(-1)
