"""What a run of any task learns: its labels, or an objective in a file of its own.

An objective is a subclass of TaskModule that is put before the task's own module. `network` returns the model, `loss`
corrupts the input and returns the loss, and `forward` returns what is scored.
"""

from __future__ import annotations

from lra.config.schema import RunConfig
from lra.tasks.base import TaskModule
from lra.tasks.causal import CausalTask
from lra.tasks.denoised import DenoisedTask
from lra.tasks.masked import MaskedTask


def with_objective(task: type[TaskModule], run: RunConfig) -> type[TaskModule]:
    """Returns the module of a task that learns what the run says: by default its labels, with the task's own module."""
    if run.pretrain == "masked":
        return type(f"Masked{task.__name__}", (MaskedTask, task), {})
    if run.pretrain == "causal":
        return type(f"Causal{task.__name__}", (CausalTask, task), {})
    if run.denoise:
        return type(f"Denoised{task.__name__}", (DenoisedTask, task), {})
    return task
