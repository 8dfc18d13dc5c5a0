"""The data verbs: a task's store, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lra.data.store import Store
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.base import TaskData
from lra.training.fit import configure


def _data(args: Sequence[str]) -> TaskData:
    """The data module of `task=… [recipe=…] [task fields]`; fields of anything but the task are refused."""
    if any(arg.startswith("attn=") for arg in args):
        raise UsageError("attn= has no meaning for data: leave it out")
    composed = configure([*args, "attn=standard"])
    foreign = [text for text in composed.overrides if not text.startswith("task.")]
    if foreign:
        raise UsageError(f"{foreign[0]} has no meaning for data: give fields of the task only")
    return TASKS.get(composed.config.task.name).Data(composed.config)


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
    data = _data(args)
    path = data.content().path
    Store.open(path).verify()
    return f"{path}: every file is as the manifest says"


def info(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What the manifest says, as rows of a table."""
    data = _data(args)
    path = data.content().path
    manifest = Store.open(path).manifest
    yield "folder", path
    for key, value in manifest.items():
        if isinstance(value, dict):
            yield from ((f"{key} {name}", content) for name, content in value.items())
        else:
            yield key, value
