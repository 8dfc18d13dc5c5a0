"""What a run of any task learns: its labels, or an objective in a file of its own.

An objective is a subclass of TaskModule that is put before the task's own module. `network` returns the model, `loss`
corrupts the input and returns the loss, and `forward` returns what is scored. Augmentation is put before all of them.
"""

from __future__ import annotations

from lra.config.schema import RunConfig
from lra.tasks.augmented import AugmentedTask
from lra.tasks.base import TaskModule
from lra.tasks.causal import CausalTask
from lra.tasks.denoised import DenoisedTask
from lra.tasks.masked import MaskedTask


def with_objective(task: type[TaskModule], run: RunConfig) -> type[TaskModule]:
    """Returns the module of a task that learns what the run says: by default its labels, with the task's own module."""
    learned = task
    if run.pretrain == "masked":
        learned = type(f"Masked{task.__name__}", (MaskedTask, task), {})
    elif run.pretrain == "causal":
        learned = type(f"Causal{task.__name__}", (CausalTask, task), {})
    elif run.denoise:
        learned = type(f"Denoised{task.__name__}", (DenoisedTask, task), {})
    if not run.augment.changes():
        return learned
    return type(f"Augmented{learned.__name__}", (AugmentedTask, learned), {})
