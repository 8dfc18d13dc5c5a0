"""The benchmark's tasks by name, one file each: its LightningModule and its data module."""

from dataclasses import dataclass
from typing import Any

from lra.config.registry import Registry


@dataclass(frozen=True)
class TaskFacts:
    """The facts a task registers with; `lra ls tasks` prints them."""

    version: (
        int  # raised by any change of data or protocol; results carry it. A task may keep older ones: `task_version`
    )
    classes: int
    length: int  # longest sequence of the full-size task
    paper: str
    mask: float  # share of the tokens that self-pretraining hides (Amos et al. 2024, arXiv 2310.02980, appendix C)


TASKS = Registry("task", "lra.tasks", TaskFacts, "lra.tasks", bases=("TaskModule",), parts=("Config", "Data"))


def task_version(config: Any) -> int:
    """The version that a task's configuration is of: its own field `version`, where it has one, else the task's."""
    return getattr(config, "version", TASKS.get_declared(config.name).facts.version)


def is_published(config: Any) -> bool:
    """Whether a task's data is a published set: its field `source` only says where a copy lies."""
    return getattr(type(config), "source", "generate") != "generate"


def versioned_name(config: Any) -> str:
    """`listops@1`: the task of a configuration and its version, as checkpoints, results and stores name it."""
    return f"{config.name}@{task_version(config)}"
