"""Text: IMDB reviews as UTF-8 bytes (LRA's byte-level sentiment task), from the Hub or a local mirror of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lra.data.writer import Writer
from lra.errors import UsageError

HUB = "stanfordnlp/imdb"
VOCABULARY = tuple(f"{byte:02x}" for byte in range(256))  # a token is a byte, its id the byte's value
GENERATOR = "lra.data.text@1"


def build(writer: Writer, source: str | Path = HUB) -> None:
    """Store the labelled splits train and test whole: label 0 negative, 1 positive, truncation is for `gather`.

    `source` is a Hub id or a folder with the same layout (README.md with the config "plain_text", parquet files with
    the columns text and label). UsageError if it cannot be had or is something else.
    """
    dataset = _load(str(Path(source).expanduser()), writer.scratch())
    for split in ("train", "test"):
        if split not in dataset or not len(dataset[split]):
            raise UsageError(f"{source} has no rows in its split '{split}': {_MEND}")
        if missing := {"text", "label"} - set(dataset[split].column_names):
            raise UsageError(f"{source} has no column '{min(missing)}' in its split '{split}': {_MEND}")
        for batch in dataset[split].iter(1000):
            if not all(isinstance(text, str) for text in batch["text"]):
                raise UsageError(f"{source} has a text that is no string in its split '{split}': {_MEND}")
            if not set(batch["label"]) <= {0, 1}:
                raise UsageError(f"{source} has a label other than 0 and 1 in its split '{split}': {_MEND}")
            writer.add(split, [np.frombuffer(text.encode(), np.uint8) for text in batch["text"]], batch["label"])


_MEND = "lra data prepare task=text source=<folder of a local mirror of stanfordnlp/imdb>"


def _load(source: str, scratch: Path) -> Any:
    """The dataset dictionary, by split."""
    import datasets
    import datasets.config

    local = Path(source).is_dir()
    reachable = local or _hub_answers()
    # Without a network the Hub's client retries for 24 seconds. Offline mode still finds what it has cached.
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or not reachable
    try:
        # A mirror needs no copy in the user's cache; a download belongs there
        return datasets.load_dataset(source, "plain_text", cache_dir=str(scratch) if local else None)
    except Exception as error:  # datasets, its readers and the network raise what they like
        reason = _reason(error) if reachable else "the Hub does not answer and no copy is cached"
        raise UsageError(f"cannot load IMDB from {source} ({reason}); name a copy: {_MEND}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _reason(error: BaseException) -> str:
    """First line of the error at the bottom: those above it only say that there was one."""
    while error.__cause__:
        error = error.__cause__
    return next(iter(str(error).splitlines()), type(error).__name__)


def _hub_answers() -> bool:
    import huggingface_hub

    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=3)
    except Exception:  # of whichever HTTP library this version uses
        return False
    return True
