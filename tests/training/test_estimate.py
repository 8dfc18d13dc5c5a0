"""What a run is expected to take to its end."""

from __future__ import annotations

import pytest

from lra.training.estimate import Estimate
from lra.training.progress import format_speed


def made(example: float | None = 0.1) -> Estimate:
    estimate = Estimate(steps=1000, eval_every=100, validation=50, test=200)
    estimate.paces.append(0.5)
    estimate.example = example
    return estimate


@pytest.mark.parametrize(("step", "training", "scoring"), [(0, 500, 70), (50, 475, 70), (900, 50, 25), (1000, 0, 20)])
def test_validations_that_are_left_and_the_test_sets_are_in_it(step, training, scoring):
    assert made().left(step) == (training, pytest.approx(scoring))


def test_a_step_that_compiles_is_not_in_the_pace():
    estimate = made()
    estimate.paces += [30.0, 0.5]
    assert estimate.pace == 0.5


def test_nothing_is_told_before_scoring_is_known():
    assert not made(None).due(0.0, 100)
    assert made().due(0.0, 100)


def test_it_is_told_again_when_it_has_doubled():
    estimate = made()
    training, scoring = estimate.tell(0.0, 100)
    assert training + scoring == pytest.approx(515)
    assert not estimate.due(50.0, 200)
    estimate.paces.extend([1.2] * 5)
    assert estimate.due(50.0, 200)
    estimate.tell(50.0, 200)
    assert not estimate.due(60.0, 210)


@pytest.mark.parametrize(("speed", "text"), [(None, ""), (0.0, ""), (40.0, "40.0/s"), (0.08, "12.5 s each")])
def test_a_slow_bar_shows_seconds_of_a_step(speed, text):
    assert format_speed(speed) == text
