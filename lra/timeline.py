"""Where the seconds of a process go, for `lra bench start`.

A phase lasts until the next one is marked. Phases inside it are named `outer: inner`, and their time is theirs alone.
So each moment belongs to one phase, and the seconds of all phases add up. Nothing is recorded unless FILE_VARIABLE
names the file that a process writes at its end.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FILE_VARIABLE = "LRA_TIMELINE"
FIRST_PHASE = "imports"


class Timeline:
    """Adds up the seconds of phases.

    Attributes:
        began: when the first phase began, in seconds of `time.monotonic`, which all processes share.
        seconds: of each phase, in the order in which they ended first.
        facts: returns more for the file, by key. It is asked at the end.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self.began = self._since = now()
        self.seconds: dict[str, float] = defaultdict(float)
        self.facts: dict[str, Callable[[], Any]] = {}
        self._phases = [FIRST_PHASE]  # outermost first
        self._counted: dict[str, tuple[Callable[[], float], float]] = {}  # by phase: a count, and when last asked

    def mark(self, name: str) -> None:
        """Ends the present phase and begins another one."""
        self._settle()
        self._phases[-1] = name

    def enter(self, name: str) -> None:
        """Begins a phase inside the present one."""
        self._settle()
        self._phases.append(name)

    def leave(self) -> None:
        """Ends the phase that was entered last."""
        self._settle()
        self._phases.pop()

    def count(self, name: str, seconds: Callable[[], float]) -> None:
        """Makes a phase of what something else measures.

        Args:
            name: of the phase, which lies inside those in which the seconds passed.
            seconds: returns all seconds so far. It counts them up when they have passed.
        """
        self._settle()
        self._counted[name] = seconds, seconds()

    def saved(self) -> dict[str, Any]:
        """The JSON object: when the first phase began and the last one ended, the seconds of each, and the facts."""
        self._settle()
        facts = {name: fact() for name, fact in self.facts.items()}
        return {"began": self.began, "ended": self._since, "last": self._path(), "phases": self.seconds} | facts

    def _settle(self) -> None:
        """Gives the time since the last call to the phases in which it passed."""
        now = self._now()
        left, self._since = now - self._since, now
        for name, (seconds, before) in self._counted.items():
            after = seconds()
            self._counted[name] = seconds, after
            if took := min(after - before, left):
                self.seconds[self._path(name)] += took
                left -= took
        self.seconds[self._path()] += left

    def _path(self, *inner: str) -> str:
        return ": ".join([*self._phases, *inner])


_recorded: Timeline | None = None  # of this process


def begin_timeline() -> None:
    """Begins to record this process if FILE_VARIABLE asks for it. The processes that it starts are not recorded."""
    global _recorded
    if file := os.environ.pop(FILE_VARIABLE, None):
        _recorded = Timeline()
        atexit.register(_write, file)


def recorded_timeline() -> Timeline | None:
    """The timeline of this process; None if it is not recorded."""
    return _recorded


def mark_phase(name: str) -> None:
    """From now on the time of this process belongs to this phase."""
    if _recorded is not None:
        _recorded.mark(name)


@contextmanager
def inner_phase(name: str) -> Iterator[None]:
    """The time inside belongs to this phase, which lies inside the present one."""
    if _recorded is None:
        yield
        return
    _recorded.enter(name)
    try:
        yield
    finally:
        _recorded.leave()


def _write(file: str) -> None:
    assert _recorded is not None
    with open(file, "w", encoding="utf-8") as out:
        json.dump(_recorded.saved(), out)
