"""The data verbs: a task's store, without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.base import TaskData
from lra.training.fit import configure


def _data(args: Sequence[str]) -> TaskData:
    """The data module of `task=… [recipe=…] [task fields]`; fields of anything but the task are refused."""
    foreign = {field.name for field in dataclasses.fields(RunConfig)} - {"task", "recipe"}
    for arg in args:
        if arg.partition("=")[0].partition(".")[0] in foreign:
            raise UsageError(f"{arg} has no meaning for data: give task=, recipe= and fields of the task")
    run = configure([*args, "attn=standard"]).config
    return TASKS.get(run.task.name).Data(run)


def prepare(args: Sequence[str]) -> str:
    """Prepares the store; `force=true` among the arguments replaces an existing one."""
    force = [arg for arg in args if arg.startswith("force=")]
    if any(arg not in ("force=true", "force=false") for arg in force):
        raise UsageError(f"{force[0]}: force is true or false")
    data = _data([arg for arg in args if arg not in force])
    data.prepare_data(force="force=true" in force)
    return f"{data.config.name} is ready in {data.content().path}"


def verify(args: Sequence[str]) -> str:
    """Reads every byte; UsageError naming the first file that differs from the manifest."""
    store = _data(args).open()
    store.verify()
    return f"{store.path}: every file is as the manifest says"


def info(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What the manifest says, as rows of a table."""
    store = _data(args).open()
    yield "folder", store.path
    for key, value in store.manifest.items():
        if isinstance(value, dict):
            yield from ((f"{key} {name}", content) for name, content in value.items())
        else:
            yield key, value
