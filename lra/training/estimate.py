"""How long a run takes to its end, by what its steps and its scoring have taken."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass


@dataclass
class Estimate:
    """Seconds of training and of scoring that are left.

    Args:
        steps: of the whole run.
        eval_every: steps between validations.
        validation: examples of each validation.
        test: examples of all test sets.
    """

    steps: int
    eval_every: int
    validation: int
    test: int

    def __post_init__(self) -> None:
        self.paces: deque[float] = deque(maxlen=5)  # seconds of a step, as they were measured last
        self.example: float | None = None  # seconds that scoring one takes
        self._told: tuple[float, float] | None = None  # when, and how much was left then

    @property
    def pace(self) -> float:
        """Seconds of a step. A median, as a step that compiles or waits for another program is not the others' like."""
        return statistics.median(self.paces)

    def left(self, step: int) -> tuple[float, float]:
        """Seconds of training, and of all validations and tests, after this step."""
        validations = self.steps // self.eval_every - step // self.eval_every
        examples = validations * self.validation + self.test
        return (self.steps - step) * self.pace, examples * (self.example or 0.0)

    def due(self, now: float, step: int) -> bool:
        """Whether it has to be told: for the first time, or since the run takes twice as long as was told."""
        if not self.paces or self.example is None:
            return False
        left = sum(self.left(step))
        if self._told is None:
            return True
        when, told = self._told
        return now - when + left >= 2 * max(told, 30.0)  # of shorter ones nobody waits for the end

    def tell(self, now: float, step: int) -> tuple[float, float]:
        """What is left, which counts as told."""
        self._told = now, sum(self.left(step))
        return self.left(step)
