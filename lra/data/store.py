"""The prepared store: ragged token sequences with labels, built once, checksummed and memory-mapped.

A store is a folder named after its content, with three arrays per split and a manifest:

    listops@1-0a1b2c3d/
        train.tokens.npy    uint8 or uint16 [sum of lengths], sequences end to end
        train.offsets.npy   int64 [n + 1], sequence i is tokens[offsets[i] : offsets[i + 1]]
        train.labels.npy    int64 [n]
        manifest.json       what this is, where it came from, sizes and checksums; written last

Where an example is a pair, the sequences are `documents.*.npy`, without labels, and a split has train.pairs.npy, int64
[n, 2], instead of tokens and offsets.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import hashlib
import json
import math
import os
import shlex
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lra import environment, reading
from lra.data.manifest import faulty_fields
from lra.data.preparation import show_preparation
from lra.data.split import Pairs, Split
from lra.data.writer import DOCUMENTS, StoreWriter
from lra.errors import UsageError, is_disk_failure, is_disk_full, system_error

FORMAT = 2  # of the files and the manifest; readers refuse any other
PATIENCE_S = 30  # seconds to wait for another process before a warning says so
ABSENT_CODES = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
# error codes of a file system that can't map, lock or sync files
UNSUPPORTED_CODES = (errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
# fields of every manifest, beside its format and files
MANIFEST_FIELDS = (
    *("task", "version", "params", "source", "vocabulary", "generator", "seed", "vocabulary_hash"),
    *("splits", "baselines", "notes", "date", "versions"),
)


def data_root() -> Path:
    """The folder of all prepared stores: `$LRA_DATA`, which users may share, else in the user's cache."""
    chosen = os.environ.get("LRA_DATA")
    return Path(os.path.expanduser(chosen)).absolute() if chosen else environment.cache_root()


def store_folder(task: str, version: int, params: Mapping[str, Any]) -> Path:
    """The folder of the store of this task, version and parameters, whether or not it exists."""
    return data_root() / f"{task}@{version}-{_hash(params)[:8]}"


def vocabulary_hash(vocabulary: Sequence[str]) -> str:
    """Identity of a vocabulary, 64 hex digits. Weights that were trained with one must not meet another."""
    return _hash(list(vocabulary))


@dataclass(frozen=True)
class StoreContent:
    """What a store holds and where it comes from: the part of its manifest that is known before it is built."""

    task: str
    version: int
    params: Mapping[str, Any]  # JSON values; they name the folder
    source: str  # for people: a Hub id, a folder, or "generated"
    vocabulary: Sequence[str]  # token id -> surface form; at most 256 entries are stored as uint8, else uint16
    generator: str  # name@version of the code that wrote the tokens
    seed: int | None  # None where nothing is drawn

    @property
    def path(self) -> Path:
        return store_folder(self.task, self.version, self.params)


def prepare_store(
    content: StoreContent,
    build: Callable[[StoreWriter], None],
    *,
    force: bool = False,
    command: str = "",
    check: Callable[[Store], None] | None = None,
) -> Store:
    """The store of `content`. `build` makes it if it does not exist yet, or anew with `force`.

    The store appears at once and complete, or not at all. Of several processes one builds, and the others wait.

    Args:
        command: as in `Store.open`.
        check: is given the store that was built. If it raises an error there is no store.

    Raises:
        UsageError: if the disk is full or the folder cannot be written.
    """
    path = content.path
    if os.path.exists(path) and not force:
        return Store.open(path, command)
    try:
        with _locked(path):
            _clean_up(path)  # what a killed build left
            if force or not path.exists():
                _build(path, content, build, check)
    except UsageError:
        raise
    except Exception as error:
        if is_disk_full(error):
            raise UsageError(f"no space left in {path.parent}: free some, or set LRA_DATA to a larger disk") from error
        raise
    return Store.open(path, command)


@dataclass(frozen=True)
class Store:
    """A prepared store on disk, of one build. No array is read before a split is asked for.

    All files are mapped at once, so a store stays whole when another build replaces it.
    """

    path: Path
    manifest: Mapping[str, Any]
    command: str  # prepares it; empty if it is not known
    arrays: Mapping[str, np.ndarray]  # by file

    @classmethod
    def open(cls, path: Path, command: str = "") -> Store:
        """The store at `path`.

        Args:
            command: prepares this store, and messages name it; empty if it is not known.

        Raises:
            UsageError: if the store is not there, has another format, or lacks (part of) a file.
        """
        if _size(path) is None:
            mend = f"; run: {command}" if command else ""
            raise UsageError(f"{path.name.split('@')[0]} is not prepared: no {path}{mend}")
        try:
            text = reading.read_text(path / "manifest.json", reading.MOST_JSON)
            manifest = reading.parse_json(text)
            version, source = manifest["format"], Path(manifest.get("source", ""))
            files = {name: (file["bytes"], file["sha256"]) for name, file in manifest["files"].items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}/manifest.json is missing or unreadable; {_mend(path, command)}") from error
        if command and source.is_absolute() and "source=" not in command:
            command += " " + shlex.quote(f"task.source={source}")  # nothing else can give it again
        if version != FORMAT:
            raise UsageError(
                f"{path}/manifest.json has format {version}, this lra reads format {FORMAT}; {_mend(path, command)}"
            )
        if missing := [name for name in MANIFEST_FIELDS if name not in manifest]:
            raise UsageError(f"{path}/manifest.json lacks {', '.join(missing)}; {_mend(path, command)}")
        if wrong := ", ".join(faulty_fields(manifest)):
            raise UsageError(f"{path}/manifest.json has no {wrong}; {_mend(path, command)}")
        if path.name != store_folder(manifest["task"], manifest["version"], manifest["params"]).name:
            other = f"{manifest['task']}@{manifest['version']} with {manifest['params']}"
            raise UsageError(f"{path} holds another store, of {other}; {_mend(path, command)}")
        for name, (stated, _) in files.items():
            if (size := _size(path / name)) != stated:
                found = "no" if size is None else size
                raise UsageError(f"{path}/{name} has {found} bytes instead of {stated}; {_mend(path, command)}")
        with suppress(FileNotFoundError):
            arrays = {name: _map(path / name, command) for name in files}
            if reading.read_text(path / "manifest.json", reading.MOST_JSON) == text:
                return cls(path, manifest, command, arrays)
        return cls.open(path, command)  # replaced meanwhile: the arrays may be of either build

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest["splits"])

    @property
    def digest(self) -> str:
        """12 digits of what the files hold, wherever it came from: the SHA-256 of their checksums."""
        return _hash({name: file["sha256"] for name, file in self.manifest["files"].items()})[:12]

    def split(self, name: str) -> Split:
        """One split of sequences, memory-mapped."""
        return self._sequences(name, self._labels(name))

    def pairs(self, name: str) -> Pairs:
        """One split of pairs of documents, memory-mapped."""
        labels, documents = self._labels(name), self._sequences(DOCUMENTS)
        pairs = self._array(name, "pairs")
        if pairs.shape != (len(labels), 2) or not _within(pairs, len(documents)):
            raise self._damaged(name, "pairs")
        return Pairs(documents, pairs, labels)

    def _labels(self, name: str) -> np.ndarray:
        if name not in self.splits:
            raise UsageError(f"{self.path.name} has no split '{name}': choose from {', '.join(self.splits)}")
        labels = self._array(name, "labels")
        if {str(label) for label in np.unique(labels)} != self.manifest["splits"][name]["labels"].keys():
            raise self._damaged(name, "labels")
        return labels

    def _sequences(self, name: str, labels: np.ndarray | None = None) -> Split:
        tokens, offsets = self._array(name, "tokens"), self._array(name, "offsets")
        count = len(offsets) - 1 if labels is None else len(labels)
        if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 0).any():
            raise self._damaged(name, "offsets")
        if not _within(tokens, len(self.manifest["vocabulary"])):
            raise self._damaged(name, "tokens")
        return Split.from_offsets(tokens, offsets, labels)

    def _array(self, name: str, part: str) -> np.ndarray:
        if (file := f"{name}.{part}.npy") not in self.arrays:
            raise self._damaged(name, part)
        return self.arrays[file]

    def _damaged(self, name: str, part: str) -> UsageError:
        what = f"{self.path}/{name}.{part}.npy has what a store's {part} can't be: it is corrupt"
        return UsageError(f"{what}; {_mend(self.path, self.command)}")

    def verify(self) -> None:
        """Reads every byte again. UsageError names the first file that is not what was written."""
        Store.open(self.path, self.command)
        for name, file in self.manifest["files"].items():
            if _file_hash(self.path / name) != file["sha256"]:
                raise UsageError(f"{self.path}/{name} is corrupt (another checksum); {_mend(self.path, self.command)}")


def _size(path: Path) -> int | None:
    """Bytes of a file; None if there is none."""
    try:
        return path.stat().st_size
    except OSError as error:
        if error.errno not in ABSENT_CODES:
            raise
        return None


def _map(file: Path, command: str) -> np.ndarray:
    try:
        array = _load(file)
    except (OSError, ValueError, EOFError) as error:
        if system := system_error(error, file):  # nothing is damaged
            raise system from None
        raise UsageError(f"{file} is not an array: it is corrupt; {_mend(file.parent, command)}") from error
    array.flags.writeable = False
    return array


def _load(file: Path) -> np.ndarray:
    """An array that maps the file: shared, else private. It is read into memory where the file system can't map."""
    modes: tuple[Literal["r", "c"], ...] = ("r", "c")
    for mode in modes:
        try:
            # np.asarray: the same mapped memory, without the cost of np.memmap at every slice
            return np.asarray(np.load(file, mmap_mode=mode))
        except OSError as error:
            if error.errno not in UNSUPPORTED_CODES:
                raise
    warnings.warn(f"the file system of {file.parent} can't map files: they are read into memory", stacklevel=4)
    try:
        return np.load(file)
    except MemoryError as error:
        what = f"{file} is larger than the memory, and its file system can't map files"
        raise UsageError(f"{what}: set LRA_DATA to a folder of another one") from error


def _within(values: np.ndarray, count: int) -> bool:
    """Whether all values are from 0 to `count - 1`. Bytes are not read if every byte is valid."""
    if values.dtype == np.uint8 and count >= 256:
        return True
    return values.dtype.kind in "iu" and values.min(initial=0) >= 0 and values.max(initial=0) < count


def _mend(path: Path, command: str) -> str:
    """How to mend a damaged store that `command` prepares."""
    return (
        f"run: {command} force=true"
        if command
        else f"remove {path}, and the next command that needs it prepares it again"
    )


def _build(
    path: Path, content: StoreContent, build: Callable[[StoreWriter], None], check: Callable[[Store], None] | None
) -> None:
    """Builds beside `path`, then renames. Call it under the lock only."""
    partial = _beside(path, "partial")
    partial.mkdir()
    try:
        with show_preparation(content.task, content.source, content.params) as count:
            writer = StoreWriter(partial, len(content.vocabulary), count)
            build(writer)
        written = writer.finish()
        files = sorted(file for file in partial.iterdir() if not file.name.startswith("."))  # a file system's own
        manifest = {
            "format": FORMAT,
            **asdict(content),
            "vocabulary_hash": vocabulary_hash(content.vocabulary),
            **written,  # splits, documents, baselines, notes, differences
            "files": {file.name: {"bytes": file.stat().st_size, "sha256": _file_hash(file)} for file in files},
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "versions": environment.package_versions(),
        }
        if check is not None:
            check(Store(path, manifest, "", {file.name: _map(file, "") for file in files}))
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for file in [*files, partial / "manifest.json", partial]:
            _sync(file)
        if path.exists():
            path.rename(_beside(path, "old"))
        partial.rename(path)
        _sync(path.parent)
    finally:
        _clean_up(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process at a time prepare a store. The lock goes when its process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if is_disk_full(error) or is_disk_failure(error):
            raise
        raise UsageError(f"cannot write to {path.parent} ({error.strerror}): set LRA_DATA to another folder") from error
    try:
        _lock(file, path)
        yield
    finally:
        os.close(file)


def _lock(file: int, path: Path) -> None:
    """Waits for the lock on a store's preparation. UsageError if its file system has no locks."""
    told = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in UNSUPPORTED_CODES:
                where = f"the file system of {path.parent} has no locks ({error.strerror})"
                raise UsageError(f"{where}: set LRA_DATA to a folder of another one") from error
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() > told:
            told = math.inf
            warnings.warn(f"another process prepares {path}: this one waits for it", stacklevel=5)
        time.sleep(0.05)


def _clean_up(path: Path) -> None:
    """Removes what a build left beside `path`. A store that was moved aside goes back if there is no other."""
    shutil.rmtree(_beside(path, "partial"), ignore_errors=True)
    old = _beside(path, "old")
    if os.path.exists(old) and not os.path.exists(path):
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        error.filename = str(path)  # reading names none
        raise


def _sync(path: Path) -> None:
    """Puts a file or a folder's entries on the disk, so that a rename never outlives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED_CODES:  # some file systems know none of folders
            raise
    finally:
        os.close(descriptor)
