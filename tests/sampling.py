"""Which cases `make test` runs, and which only `make test-all`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def sampled(cases: Collection[Any], every: int = 3) -> list[Any]:
    """One in `every` cases, and the others for make test-all."""
    marks = [() if number % every == 0 else pytest.mark.slow for number, _ in enumerate(cases)]
    return [pytest.param(case, marks=mark, id=ascii(case)) for case, mark in zip(cases, marks, strict=True)]
