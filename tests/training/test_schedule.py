"""The learning rate of each step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lra.config.optim import OptimConfig
from lra.errors import UsageError
from lra.training.fit import configure
from lra.training.schedule import learning_rate
from tests.training.conftest import arguments
from tests.training.test_faults import same, state
from tests.training.test_fit import interrupt_at


def rates(schedule: Any, warmup: int, steps: int, lr: float = 1.0, **cooldown: Any) -> list[float]:
    config = OptimConfig(lr=lr, schedule=schedule, warmup=warmup, **cooldown)
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


def test_a_cooldown_falls_linearly_at_the_end_of_a_schedule_and_changes_nothing_before():
    assert rates("constant", 2, 8, cooldown=4) == pytest.approx([0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert rates("constant", 0, 4, cooldown=4, cooldown_to=0.2) == pytest.approx([0.8, 0.6, 0.4, 0.2])
    plain, cooled = rates("rsqrt", 4, 20), rates("rsqrt", 4, 20, cooldown=5, cooldown_to=0.1)
    assert cooled[:15] == plain[:15] and math.isclose(cooled[-1], 0.1 * plain[14])
    assert cooled[15:] == pytest.approx([plain[14] * (1 - 0.18 * number) for number in range(1, 6)])
    assert rates("rsqrt", 0, 3, cooldown=3) == pytest.approx([2 / 3, 1 / 3, 0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["optim.schedule=cosine"], "optim.schedule=cosine falls to 0 by itself; set optim.schedule=constant, or"),
        (["optim.warmup=10"], "optim.cooldown=5 and optim.warmup=10 are more than trainer.steps=12: set .*cooldown=2 "),
        (["optim.warmup=12"], "are more than trainer.steps=12: set a smaller optim.warmup"),
        (["optim.cooldown=-1"], "optim.cooldown=-1 must be at least 0"),
        (["optim.cooldown_to=1"], "optim.cooldown_to=1.0 must be at least 0 and below 1"),
        (["optim.cooldown=0", "optim.cooldown_to=0.1"], "but there is no cooldown: set optim.cooldown"),
    ],
)
def test_a_cooldown_that_can_not_be_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        configure(arguments("optim.schedule=constant", "optim.warmup=0", "optim.cooldown=5", *fields))


def test_a_run_in_its_cooldown_resumes_bitwise(small, monkeypatch):
    options = ("optim.schedule=constant", "optim.cooldown=8", "optim.cooldown_to=0.25", "optim.warmup=2")
    whole = small("name=whole", *options)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(7, patch)
        small("name=parts", *options)
    parts = small("name=parts", *options, "resume=auto")
    assert same(*(state(Path(each["directory"], "last.ckpt")) for each in (whole, parts)))
