"""Estimates the time to the end of a run from the time that its steps and its scoring took."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass


@dataclass
class Estimate:
    """Estimates the seconds of training and scoring that remain.

    Args:
        steps: number of steps of the whole run.
        eval_every: steps between validations.
        validation: number of examples of each validation.
        test: number of examples of all test sets.
    """

    steps: int
    eval_every: int
    validation: int
    test: int

    def __post_init__(self) -> None:
        self.paces: deque[float] = deque(maxlen=5)  # the last measurements, seconds a step
        self.example: float | None = None  # seconds to score one example
        self._told: tuple[float, float] | None = None  # when the user was told, and what remained then

    @property
    def pace(self) -> float:
        """Seconds a step, as a median: a step that compiles or waits for another program is an outlier."""
        return statistics.median(self.paces)

    def left(self, step: int) -> tuple[float, float]:
        """Seconds of training, and seconds of all validations and tests, after this step."""
        validations = self.steps // self.eval_every - step // self.eval_every
        examples = validations * self.validation + self.test
        return (self.steps - step) * self.pace, examples * (self.example or 0.0)

    def due(self, now: float, step: int) -> bool:
        """Whether to tell the user: for the first time, or because the run takes twice as long as was told."""
        if not self.paces or self.example is None:
            return False
        left = sum(self.left(step))
        if self._told is None:
            return True
        when, told = self._told
        return now - when + left >= 2 * max(told, 30.0)  # nobody waits for the end of shorter runs

    def tell(self, now: float, step: int) -> tuple[float, float]:
        """Returns what remains, and notes that the user was told."""
        self._told = now, sum(self.left(step))
        return self.left(step)
