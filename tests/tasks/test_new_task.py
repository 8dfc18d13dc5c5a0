"""A task that somebody begins to write: what it lacks is told by name, with the file to add it to."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from types import SimpleNamespace

import pytest

from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.tasks.data import REQUIRED_FIELDS, REQUIRED_PARTS
from lra.training.assembly import build_modules
from lra.training.fit import configure


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


@pytest.mark.parametrize(
    ("bases", "parts", "message"),
    [
        ((), {"Config": Config, "Data": TaskData}, "Mine is no task: subclass TaskModule of lra.tasks.base"),
        ((TaskModule,), {}, "Mine lacks what every task has: add Config and Data to the class"),
        ((TaskModule,), {"Config": Config}, "Mine lacks what every task has: add Data to the class"),
        ((TaskModule,), {"Config": object, "Data": TaskData}, "the Config of Mine is no dataclass: write @dataclass"),
    ],
)
def test_a_class_that_can_not_be_a_task_is_refused_by_its_line(bases, parts, message):
    register = TASKS.register("mine", version=1, classes=2, length=9, mask=0.1, paper="")
    with pytest.raises(UsageError, match=rf"test_new_task.py:\d+: {message}"):
        register(type("Mine", bases, parts))


def test_data_without_what_every_task_has_is_refused():
    class Begun(TaskData):
        generator = "mine 1"

    with pytest.raises(UsageError) as error:
        Begun(SimpleNamespace(task=Config()))  # type: ignore[arg-type]
    what = "add vocabulary and params and build to Begun in tests/tasks/test_new_task.py"
    assert str(error.value) == f"task 'mine' lacks what every task has: {what}"


@pytest.mark.parametrize("name", [*REQUIRED_PARTS, "max_length"])
def test_a_run_is_refused_before_its_model_is_made(monkeypatch, name):
    run = configure(["task=listops", "attn=flash", "recipe=demo"]).config
    if name == "max_length":
        lacking = make_dataclass("Lacking", [("source", str, "generate")], namespace={"name": "listops"}, frozen=True)
        run = replace(run, task=lacking())
    else:
        monkeypatch.delattr(TASKS.get("listops").Data, name)
    with pytest.raises(UsageError, match=f"task 'listops' lacks what every task has: add `?{name}"):
        build_modules(run)


def test_what_every_task_has_is_enough():
    class Whole(TaskData):
        vocabulary, generator = ("a", "b"), "mine 1"

        def params(self):
            return {}

        def build(self, writer):
            pass

    assert REQUIRED_FIELDS.keys() == {"source", "max_length"}
    data = Whole(SimpleNamespace(task=Config()))  # type: ignore[arg-type]
    assert data.source() == "generated"
