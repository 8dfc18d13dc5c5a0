"""A task that somebody begins to write: what it lacks is told by name, with the file to add it to."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from lra.errors import UsageError
from lra.tasks.base import REQUIRED_FIELDS, TaskData


@dataclass(frozen=True)
class Config:
    source: str = "generate"
    max_length: int = 9
    name = "mine"


@dataclass(frozen=True)
class Bare:
    name = "mine"


def test_a_configuration_without_what_every_task_has_is_refused():
    with pytest.raises(UsageError) as error:
        TaskData(SimpleNamespace(task=Bare()))  # type: ignore[arg-type]
    text = str(error.value)
    assert text.startswith(
        "task 'mine' lacks what every task has: add `source: str = \"generate\"` and `max_length: int"
    )
    assert text.endswith(f"to its Config in {__name__.replace('.', '/')}.py")


def test_a_configuration_with_it_is_enough():
    assert REQUIRED_FIELDS.keys() == {"source", "max_length"}
    data = TaskData(SimpleNamespace(task=Config()))  # type: ignore[arg-type]
    assert data.source() == "generated"
