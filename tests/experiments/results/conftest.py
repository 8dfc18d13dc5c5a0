"""Folders of runs for the tests of archives."""

from __future__ import annotations

import pytest

from tests.experiments.results.archives import DONE, FAILED, GOING, make


@pytest.fixture
def runs(tmp_path):
    runs = tmp_path / "there"
    make(runs, DONE)
    make(runs, FAILED, "oom")
    make(runs, GOING, None)
    return runs


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"
