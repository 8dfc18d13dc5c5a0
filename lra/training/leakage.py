"""Records on which examples weights were trained, in all runs, and refuses to score them on the same examples.

The examples of a task come from a named set. A generated set is endless and training uses its beginning, so the part
that was trained on is a number of examples. For any other set the part is a text. `ALL_OF_TRAIN` is the whole train
split. `data_seed=0` is train without the examples that this seed holds out for validation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lra.config.override import parse_overrides
from lra.config.schema import LATER_FIELDS
from lra.errors import UsageError
from lra.tasks import TASKS, is_published, versioned_name

# fields that choose no other set. Expression i of a seed is the i-th that fits the lengths, so other lengths give
# mostly the same expressions; `shifted_split` says what that leaves open
SAME_SET_FIELDS = {
    *("source", "protocol", "tokens", "background", "difference", "version"),
    *("train", "val", "test", "fresh", "min_length", "max_length"),
}
ALL_OF_TRAIN = "train"
UNSTATED_SET = "unstated"  # in place of a set: an older lra named only the run from which it started

TrainedSets = dict[str, int | str]


def restore_task(saved: Mapping[str, Any]) -> Any:
    """Returns the task configuration that a run saved."""
    config = TASKS.get_saved(saved, "task").Config
    saved = {name.removeprefix("task."): value for name, value in LATER_FIELDS.items()} | dict(saved)
    return config(**{field.name: saved[field.name] for field in fields(config) if field.name in saved})


def sets_before_run(identity: Mapping[str, Any]) -> TrainedSets:
    """Returns the sets on which the weights of a checkpoint were trained before their own run."""
    config = identity["config"]
    if "seen" in identity:
        return _merged(*({_renamed(name): part} for name, part in dict(identity["seen"]).items()))
    return {UNSTATED_SET: str(config["init"])} if config.get("init") else {}


def sets_of_checkpoint(identity: Mapping[str, Any]) -> TrainedSets:
    """Returns the sets on which the weights of a checkpoint were trained, including their own run."""
    return _merged(sets_before_run(identity), sets_of_tasks([restore_task(identity["config"]["task"])]))


def sets_of_tasks(tasks: Iterable[Any]) -> TrainedSets:
    """Returns the sets on which a chain of runs trains that have these tasks."""
    return _merged(*({name: part} for name, part in map(training_set, tasks)))


def training_set(task: Any) -> tuple[str, int | str]:
    """Returns the set from which a task's examples come, and the part of it that is trained on."""
    drawn = all(hasattr(task, field) for field in ("train", "val", "data_seed"))  # a user's task may lack them
    generated = drawn and getattr(task, "source", None) == "generate"
    if generated and (stream := getattr(task, "stream", None)):
        return stream, task.train
    held_out = getattr(task, "protocol", None) == "heldout"
    same = SAME_SET_FIELDS if generated else SAME_SET_FIELDS | {"data_seed"}
    of = [f"{field.name}={getattr(task, field.name)}" for field in fields(task) if field.name not in same]
    if not generated and hasattr(task, "source") and not is_published(task):  # any copy has the same examples
        of.insert(0, f"source={Path(task.source).name}")
    name = ", ".join([versioned_name(task), *of])
    return name, task.train if generated else f"data_seed={task.data_seed}" if held_out else ALL_OF_TRAIN


def refuse_leakage(task: Any, seen: TrainedSets, path: str | Path, first: str) -> None:
    """Raises a UsageError if the examples to score (`first`: validation or test) were trained on."""
    name, part = training_set(task)
    there = seen.get(name)
    if isinstance(part, int) and isinstance(there, int):
        if task.train + (task.val if first == "test" else 0) < there:
            raise UsageError(
                f"{first} would be of the examples that {path} was trained on, as task.train={task.train} is not its "
                f"{there}: leave task.train as it was, or add task.data_seed={task.data_seed + 1}"
            )
    elif there not in (None, part) and part != ALL_OF_TRAIN and first == "validation":
        field = "task.protocol=lra" if there == ALL_OF_TRAIN else f"task.{there}"
        raise UsageError(f"validation would be of examples that {path} was trained on: give {field}, as it had")


def shifted_split(before: Any, task: Any, path: str | Path) -> list[str]:
    """Returns a line if validation and test may begin elsewhere in the stream of expressions than `before` had them.

    A stream is cut after so many expressions of the asked lengths, without repeats. Short ones repeat often.
    """
    if training_set(before)[0] != training_set(task)[0] or not hasattr(task, "min_length"):
        return []
    lengths = [(each.min_length, each.max_length) for each in (before, task)]
    if lengths[0] == lengths[1] or max(lengths)[0] >= min(most for _, most in lengths):
        return []
    had = f"{path} was trained on expressions of {before.min_length} to {before.max_length} tokens"
    mend = f"task.data_seed={task.data_seed + 1} has others"
    return [f"{had}: with other lengths some of them may be among those that are scored; {mend}"]


def unknown_overlaps(task: Any, seen: TrainedSets, path: str | Path) -> list[str]:
    """Returns a line for each case in which it is unknown whether the scored examples were trained on."""
    name, part = training_set(task)
    notes = []
    if init := seen.get(UNSTATED_SET):
        notes.append(f"{path} comes from {init} and does not say on what that was trained: perhaps on what is scored")
    for other in sorted(seen.keys() - {name, UNSTATED_SET}):
        imported = isinstance(seen[other], str) or isinstance(part, str)  # streams are independent
        if imported and _kind(other) == _kind(name):
            notes.append(f"{path} was trained on {other}: whether that has examples of {name} is not known")
    return notes


def _merged(*parts: TrainedSets) -> TrainedSets:
    """Merges sets. A stream keeps the larger number; another set becomes `ALL_OF_TRAIN` if its parts differ."""
    found: TrainedSets = {}
    for name, part in (item for each in parts for item in each.items()):
        there = found.get(name, part)
        if isinstance(there, int) and isinstance(part, int):
            found[name] = max(there, part)
        else:
            found[name] = part if there == part or name == UNSTATED_SET else ALL_OF_TRAIN
    return found


def _renamed(name: str) -> str:
    """Translates the name of a generated set from an older lra: `listops, source=generate, data_seed=0`."""
    task, *of = name.split(", ")
    if "@" in task or not of:
        return name
    try:
        saved: dict[str, Any] = {override.field: override.text for override in parse_overrides(of)}
        if saved.get("data_seed", "").isdecimal():
            saved["data_seed"] = int(saved["data_seed"])
        return training_set(restore_task(saved | {"name": task}))[0]
    except (UsageError, TypeError):  # the task is not installed here
        return name


def _kind(name: str) -> Any:
    """Returns the data class of a set's task, which tasks of one kind share; None if the task is not installed."""
    try:
        return TASKS.get(name.partition("@")[0]).Data
    except UsageError:
        return None
