"""Data sets of the Hugging Face Hub, or of a folder with the same layout."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from lra.errors import UsageError, disk_full, first_line

CONFIG = "plain_text"  # of every data set read here


def load(source: str | Path, *, name: str, columns: tuple[str, ...], scratch: Path, mend: str) -> dict[str, Any]:
    """The splits train and test, each a `datasets.Dataset` that has rows and these columns.

    `source` is a Hub id or a folder with its layout: README.md that names CONFIG, and parquet files. What a folder
    holds is read through files in `scratch`; a download stays in the user's cache. UsageError, ending in the command
    `mend`, if the data set called `name` cannot be had or is something else.
    """
    dataset = _load(str(Path(source).expanduser()), name, scratch, mend)
    for split in ("train", "test"):
        if split not in dataset or not len(dataset[split]):
            raise UsageError(f"{source} has no rows in its split '{split}': {mend}")
        if missing := set(columns) - set(dataset[split].column_names):
            raise UsageError(f"{source} has no column '{min(missing)}' in its split '{split}': {mend}")
    return {split: dataset[split] for split in ("train", "test")}


def _load(source: str, name: str, scratch: Path, mend: str) -> Any:
    """The dataset dictionary, by split."""
    import datasets
    import datasets.config

    local = os.path.isdir(source)
    if not local and (source.startswith((".", "/", "~")) or source.count("/") > 1):  # no name on the Hub
        raise UsageError(f"cannot load {name} from {source} (there is no such folder); name a copy: {mend}")
    reachable = local or _hub_answers()
    # Without a network the Hub's client retries for 24 seconds. Offline mode still finds what it has cached.
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or not reachable
    told = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it tells of errors and raises them, too
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        # A mirror needs no copy in the user's cache; a download belongs there
        return datasets.load_dataset(source, CONFIG, cache_dir=str(scratch) if local else None)
    except Exception as error:  # datasets, its readers and the network raise what they like
        if disk_full(error) and local:
            raise  # the store's own disk
        if disk_full(error):
            there = f"no space left for the download in {datasets.config.HF_CACHE_HOME}"
            raise UsageError(f"{there}: free some, or set HF_HOME to a folder of a larger disk") from None
        reason = _reason(error) if reachable else "the Hub does not answer and no copy is cached"
        raise UsageError(f"cannot load {name} from {source} ({reason}); name a copy: {mend}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
        datasets.logging.set_verbosity(told)


def _reason(error: BaseException) -> str:
    """First line of the error at the bottom: those above it only say that there was one."""
    while error.__cause__:
        error = error.__cause__
    return first_line(error)


def _hub_answers() -> bool:
    import huggingface_hub

    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=3)
    except Exception:  # of whichever HTTP library this version uses
        return False
    return True
