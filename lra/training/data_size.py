"""Counts the training examples of a task before a run is configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lra.config.schema import RunConfig
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS

if TYPE_CHECKING:
    from lra.tasks.base import TaskData


def count_examples(task: Any, prepare: bool = False) -> int:
    """Returns the number of training examples of a task's configuration.

    Args:
        prepare: whether to prepare the data first if they are needed.

    Raises:
        UsageError: the data are needed and not prepared, or can't be.
    """
    attention = ATTENTIONS.get_declared("standard")  # data have none, but a configuration has
    data: TaskData = TASKS.get(task.name).Data(RunConfig(task, attention.Config()))
    if (stated := data.stated_examples()) is not None:
        return stated
    if prepare:
        data.prepare_data()
    return len(data.splits(data.open())["train"])
