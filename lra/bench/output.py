"""The file of a measurement.

Each setting has one JSON file, which is rewritten after every case, so that the same command goes on where it stopped.
A file of other options or of another environment is refused. A file is locked while a process measures for it:
processes share a folder if each measures settings of its own.
"""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lra import environment
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.training.run_directory import write_text as replace_file


def measured_run(run: RunConfig) -> dict[str, Any]:
    """The configuration of a measured run, as its file has it: of a folder with data it has the name alone."""
    saved = run.to_saved_dict()
    if "source" in saved["task"]:
        saved["task"]["source"] = environment.drop_folder(saved["task"]["source"])
    return saved


def write_measurement(path: Path, result: dict[str, Any]) -> None:
    """Writes JSON in one step, and makes the folder. UsageError if it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"out={path} can't be written ({error.strerror}): name another file") from None


@contextmanager
def lock_output(path: Path) -> Iterator[None]:
    """Holds the lock on a file that is measured for. Two processes would replace each other's records, and slow each
    other.

    UsageError if another process holds it, or if the file can't be written at the end.
    """
    environment.warn_unclean()
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        held = path.with_name(f".{path.name}.lock")
        lock = FileLock(held)
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"another process measures for {path}: wait for it") from None
    except OSError as error:
        raise UsageError(f"out={path} can't be written ({error.strerror or error}): name another file") from error
    try:
        yield
    finally:
        held.unlink(missing_ok=True)  # nobody waits for it
        lock.release()


@contextmanager
def open_output(out: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that writes a measurement to `out`, under `lock_output`. Without `out` it does nothing."""
    environment.warn_unclean()
    if out is None:
        yield lambda _: None
        return
    with lock_output(Path(out)):
        yield functools.partial(write_measurement, Path(out))
