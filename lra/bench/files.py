"""The file of a measurement, and when, by which command and of which commit each of its records was made."""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lra import environment
from lra.errors import UsageError
from lra.training.run import write as replace_file

PART = ("date", "command", "commit")  # of the environment: what differs between sessions that measure for one file


def part(session: Mapping[str, Any]) -> dict[str, Any]:
    """What a record states that is added to a file which another session began.

    Args:
        session: `environment.describe()` of the session that measured the record.
    """
    return {"made": {name: session[name] for name in PART}}


def made(result: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Date, command and commit of a record: its own, or those of the file if it states none."""
    stated = record.get("made", result["environment"])
    return {name: stated.get(name) for name in PART}


def joined(results: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records of several files, for one file that has the first one's environment."""
    first = {name: results[0]["environment"].get(name) for name in PART}
    for result in results:
        for record in result["cells"]:
            stated = made(result, record)
            yield record if stated == first else record | {"made": stated}


def sessions(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Date, command and commit of each session that measured for a file, by date; of an empty file, its own."""
    stated = [made(result, record) for record in result["cells"] or [{}]]
    return sorted((dict(each) for each in {tuple(each.items()) for each in stated}), key=lambda each: each["date"])


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
