"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lra.config.schema import OptimConfig
from lra.training.schedule import learning_rate


def rates(schedule: Any, warmup: int, steps: int, lr: float = 1.0) -> list[float]:
    config = OptimConfig(lr=lr, schedule=schedule, warmup=warmup)
    return [learning_rate(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_rises_to_the_peak(schedule):
    assert rates(schedule, 4, 10)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_decay_ends_at_zero_with_the_last_update():
    linear, cosine = rates("linear", 2, 10), rates("cosine", 2, 10)
    assert linear[-1] == 0 and math.isclose(cosine[-1], 0, abs_tol=1e-12)
    assert math.isclose(linear[5], 0.5) and math.isclose(cosine[5], 0.5)
    assert math.isclose(linear[3], 0.75) and math.isclose(cosine[3], 0.5 + 0.5 * math.sqrt(0.5))
    assert rates("constant", 2, 10)[-1] == 1


def test_rsqrt_peaks_at_lr_over_the_root_of_the_warmup():
    values = rates("rsqrt", 100, 400, lr=0.05)
    assert math.isclose(max(values), 0.005) and values.index(max(values)) == 99
    assert math.isclose(values[24], 0.05 / 4 / 10), "a quarter of the warmup"
    assert math.isclose(values[0], 0.05 / 100 / 10) and math.isclose(values[399], 0.05 / 20)
    assert math.isclose(rates("rsqrt", 0, 4)[3], 0.5), "without a warmup"
