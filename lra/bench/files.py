"""The file of a measurement."""

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
from lra.errors import UsageError
from lra.training.run_directory import write_text as replace_file


def write(path: Path, result: dict[str, Any]) -> None:
    """As JSON, replaced in one step; its folder is made. UsageError if it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"out={path} can't be written ({error.strerror}): name another file") from None


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """UsageError if another process measures for a file: each would replace the other's records, and slow it down.

    So it is if the file can't be written in the end.
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
def output(out: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What writes a measurement to its `out=`, `alone` on it; does nothing without one."""
    environment.warn_unclean()
    if out is None:
        yield lambda _: None
        return
    with alone(Path(out)):
        yield functools.partial(write, Path(out))
