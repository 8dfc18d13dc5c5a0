"""Standard output and standard error that never end a command: if closed, full, without a reader, or with few
characters.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class GuardedStream:
    """A standard stream. If text can't be written it is lost, `error` says why, and the program continues."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _lose(self, error: OSError) -> None:
        """Sends what is still buffered, and all that follows, to the null device."""
        self.error = self.error or error
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


@contextmanager
def guard_streams() -> Iterator[GuardedStream]:
    """Guards the standard streams of a command, and yields standard output.

    A character that a stream can't encode is replaced. A closed stream accepts everything and shows nothing.
    """
    _reopen()
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.stdout, sys.stderr = output, _ = GuardedStream(before[0]), GuardedStream(before[1])
    try:
        yield output
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _reopen() -> None:
    """Opens the null device in place of closed streams. Otherwise the next file would get their number, and our
    output.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            if stream.fileno() == number:
                os.set_inheritable(number, True)  # by child processes, as the others are
            setattr(sys, name, stream)
