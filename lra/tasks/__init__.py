"""The benchmark's tasks by name, one file each: its LightningModule and its data module."""

from dataclasses import dataclass
from typing import Any

from lra.config.registry import Registry


@dataclass(frozen=True)
class TaskFacts:
    """The facts a task registers with; `lra ls tasks` prints them."""

    version: int  # raised by any change of data or protocol; results carry it
    classes: int
    length: int  # longest sequence of the full-size task
    paper: str
    mask: float  # share of the tokens that self-pretraining hides (Amos et al. 2024, arXiv 2310.02980, appendix C)


TASKS = Registry("task", "lra.tasks", TaskFacts)


def versioned(task: Any) -> str:
    """`listops@1`: a task's module or its class and the version, as checkpoints, results and stores name it."""
    return f"{task.name}@{task.facts.version}"
