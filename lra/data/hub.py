"""Data sets of the Hugging Face Hub, or of a folder with the same layout.

A download stays in the Hub's own cache, where `hf download` puts it too. Its files are then read like a folder's.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lra.data import hub_errors
from lra.errors import UsageError, first_line, is_disk_full, system_error

if TYPE_CHECKING:
    import pyarrow.parquet as pq

CONFIG = "plain_text"  # of every data set read here
CARD = "README.md"
BATCH_ROWS = 1000  # rows
ABSENT_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.parquet", re.DOTALL)
Columns = dict[str, list[Any]]  # values by column


class UnusableSource(Exception):
    """Why a folder cannot be used as the data set."""


@dataclass(frozen=True)
class HubSplit:
    """One split as batches of rows. Its length is the number of rows."""

    count: int
    columns: set[str]
    batches: Callable[[list[str]], Iterator[Columns]]  # of these columns

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Columns]:
        return self.batches(sorted(self.columns))


def load_splits(
    source: str | Path, *, name: str, columns: tuple[str, ...], mend: str, note: Callable[[str], None]
) -> dict[str, HubSplit]:
    """The splits train and test. Each has rows, and all of these columns.

    Args:
        source: a Hub id, or a folder with its layout: README.md that names CONFIG, and parquet files.
        name: of the data set, for messages.
        mend: the command that ends every message.
        note: is told if the Hub cannot be reached and a cached copy is read instead.

    Raises:
        UsageError: if the data set cannot be had or is another one.
    """

    @contextmanager
    def refused() -> Iterator[None]:
        try:
            yield
        except UnusableSource as error:
            raise UsageError(f"cannot load {name} from {source} ({error}); name a copy: {mend}") from error

    path = os.path.expanduser(source)
    with refused():
        splits = _folder(Path(path)) if _is_folder(path) else _hub(path, note)
    for split in ("train", "test"):
        if split not in splits or not splits[split].count:
            raise UsageError(f"{source} has no rows in its split '{split}': {mend}")
        if missing := set(columns) - splits[split].columns:
            raise UsageError(f"{source} has no column '{min(missing)}' in its split '{split}': {mend}")

    def guarded(rows: HubSplit) -> HubSplit:
        def batches(columns: list[str]) -> Iterator[Columns]:
            with refused():
                yield from rows.batches(columns)

        return HubSplit(rows.count, set(columns), batches)

    return {split: guarded(splits[split]) for split in ("train", "test")}


def _is_folder(path: str) -> bool:
    """Whether `path` is a folder that exists, and not a name on the Hub."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            return True
        raise UnusableSource("it is a file; name the folder that holds it")
    except (FileNotFoundError, NotADirectoryError):
        try:
            validate_repo_id(path)
        except HFValidationError:
            raise UnusableSource("there is no such folder") from None
    return False


def _folder(folder: Path) -> dict[str, HubSplit]:
    """The splits that a folder's card names."""
    files = {}
    for split, patterns in _patterns(folder / CARD).items():
        found = {pattern: glob.glob(pattern, root_dir=folder, recursive=True) for pattern in patterns}
        if missing := [pattern for pattern in patterns if not found[pattern]]:
            raise UnusableSource(f"{folder} has no {missing[0]}")
        files[split] = [folder / name for name in sorted({name for names in found.values() for name in names})]
    return {split: _parquet(paths) for split, paths in files.items()}


def _patterns(card: Path) -> dict[str, list[str]]:
    """Names of files, with wildcards, by split."""
    from huggingface_hub import metadata_load

    try:
        metadata: Any = metadata_load(card)
        configs = {config["config_name"]: config for config in metadata["configs"]}
        parts = {part["split"]: part["path"] for part in configs[CONFIG]["data_files"]}
        return {split: [path] if isinstance(path, str) else [*map(str, path)] for split, path in parts.items()}
    except ABSENT_ERRORS as error:
        raise UnusableSource(f"there is no file {card}, which names the others ({error.strerror})") from None
    except Exception as error:  # of the operating system, YAML, or where something else is written than expected
        if system_error(error):
            raise
        raise UnusableSource(f"{card} does not name the files of {CONFIG}") from error


def _parquet(paths: Sequence[Path]) -> HubSplit:
    """The rows of parquet files, one file after another."""
    for path in paths:
        if (shard := _SHARD.fullmatch(path.name)) and int(shard[2]) != (
            count := sum(shard[1] == other[1] for each in paths if (other := _SHARD.fullmatch(each.name)))
        ):
            raise UnusableSource(f"{path.parent} has {count} of the {int(shard[2])} files {shard[1]}-*")
    tables = []
    for path in paths:
        with _opened(path) as table:
            tables.append((table.metadata.num_rows, set(table.schema_arrow.names)))

    def batches(columns: list[str]) -> Iterator[Columns]:
        for path in paths:
            with _opened(path) as table:
                for batch in table.iter_batches(BATCH_ROWS, columns=columns):
                    yield batch.to_pydict()

    return HubSplit(sum(count for count, _ in tables), set.intersection(*(columns for _, columns in tables)), batches)


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a parquet file. An error while it is read is either the system's, and passes, or the file's."""
    # here, as tasks name their data set before anything is read
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:  # by name, pyarrow takes some for addresses
            yield pq.ParquetFile(file)
    except MemoryError:
        raise
    except ABSENT_ERRORS as error:
        raise UnusableSource(f"{path} is not a file ({error.strerror})") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        if cause := system_error(error, path):
            raise cause from None
        raise UnusableSource(f"{path} is not a readable parquet file: {first_line(error)}") from error


def _hub(source: str, note: Callable[[str], None]) -> dict[str, HubSplit]:
    """The splits of a data set of the Hub: downloaded, or from a cached copy if the Hub cannot be reached."""
    failure = None
    if not offline_variable():
        try:
            folder = _download(source)
        except UnusableSource:
            raise
        except Exception as error:  # the Hub's client and the network raise what they like
            failure = error
        else:
            return _folder(folder)
    why = hub_errors.explain_failure(failure) if failure else f"{offline_variable()} is set"
    unusable = []
    for snapshot in _snapshots(source):
        try:
            splits = _folder(snapshot)
        except UnusableSource as error:
            unusable.append(str(error))
        else:
            note(f"{why}: the copy of revision {snapshot.name} in the Hub's cache was read")
            return splits
    with suppress(Exception):  # there is none
        splits = _arrow(source)
        note(f"{why}: the copy in the cache of `datasets` was read")
        return splits
    if is_disk_full(failure):
        there = f"no space left for the download in {_cache()}"
        raise UsageError(f"{there}: free some, or set HF_HOME to a folder of a larger disk") from None
    there = f"the copy in the Hub's cache is not whole: {unusable[0]}" if unusable else f"no copy is in {_cache()}"
    raise UnusableSource(f"{why}; {there}") from failure


def offline_variable() -> str:
    """The variable by which the user forbids the network; empty if none is set."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), "")


def _download(source: str) -> Path:
    """The folder of the newest revision, with all files that its card names."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    patience = huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT
    # Asked first: where the Hub does not answer, this says so at once, where a download is tried for half a minute
    siblings = huggingface_hub.HfApi().dataset_info(source, timeout=patience).siblings or ()
    names = [file.rfilename for file in siblings]
    if CARD not in names:
        raise UnusableSource(f"it has no {CARD}, which names the files")
    card = Path(huggingface_hub.hf_hub_download(source, CARD, repo_type="dataset"))
    for pattern in [pattern for patterns in _patterns(card).values() for pattern in patterns]:
        for name in fnmatch.filter(names, pattern):
            huggingface_hub.hf_hub_download(source, name, repo_type="dataset", revision=card.parent.name)
    return card.parent


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _snapshots(source: str) -> list[Path]:
    """Folders of revisions in the Hub's cache: that of `main` first, then the newest."""
    there = Path(_cache(), f"datasets--{source.replace('/', '--')}")
    main = ""
    with suppress(OSError, ValueError):
        main = (there / "refs/main").read_text().strip()
    found = [each for each in (there / "snapshots").glob("*") if each.is_dir()]
    return sorted(found, key=lambda each: (each.name == main, each.stat().st_mtime), reverse=True)


def _arrow(source: str) -> dict[str, HubSplit]:
    """The copy that `datasets` has cached in its own form."""
    import datasets
    import datasets.config

    before, told = datasets.config.HF_HUB_OFFLINE, datasets.logging.get_verbosity()
    datasets.config.HF_HUB_OFFLINE = True
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        loaded: Any = datasets.load_dataset(source, CONFIG)
    finally:
        datasets.config.HF_HUB_OFFLINE = before
        datasets.logging.set_verbosity(told)

    def batches(split: str, columns: list[str]) -> Iterator[Columns]:
        for batch in loaded[split].select_columns(columns).with_format("arrow").iter(BATCH_ROWS):
            yield batch.to_pydict()

    return {
        split: HubSplit(len(rows), set(rows.column_names), lambda columns, split=split: batches(split, columns))
        for split, rows in loaded.items()
    }
