"""What weights were trained on, in their own run and in those before, and what must not be scored with them.

A task's examples come from a set that has a name here. Of a generated one, which is endless, train is the beginning, so
a number says which part was trained on. Of another one it is a text: `EVERYTHING` is all that the task calls train, and
`data_seed=0` is that without the part which this seed holds out for validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lra.config.override import parse_overrides
from lra.config.schema import LATER_FIELDS
from lra.errors import UsageError
from lra.tasks import TASKS, versioned

# fields that choose no other set: of a generator expression i of a seed is its i-th that fits the lengths, so with
# other lengths it is mostly the same one
SAME_SET = {
    *("source", "protocol", "tokens", "background", "difference", "version"),
    *("train", "val", "test", "fresh", "min_length", "max_length"),
}
EVERYTHING = "train"
UNSTATED = "unstated"  # in place of a set's name: the run from which an older lra began, and did not say more

Seen = dict[str, int | str]


def saved_task(saved: Mapping[str, Any]) -> Any:
    """The configuration of a task that a run saved."""
    config = TASKS.get(saved["name"]).Config
    saved = {name.removeprefix("task."): value for name, value in LATER_FIELDS.items()} | dict(saved)
    return config(**{field.name: saved[field.name] for field in fields(config) if field.name in saved})


def seen_before(identity: Mapping[str, Any]) -> Seen:
    """What the weights of a checkpoint were trained on before their own run."""
    config = identity["config"]
    if "seen" in identity:
        return _merged(*({_renamed(name): part} for name, part in dict(identity["seen"]).items()))
    return {UNSTATED: str(config["init"])} if config.get("init") else {}


def seen_by(identity: Mapping[str, Any]) -> Seen:
    """What the weights of a checkpoint were trained on, their own run included."""
    name, part = trained_on(saved_task(identity["config"]["task"]))
    return _merged(seen_before(identity), {name: part})


def trained_on(task: Any) -> tuple[str, int | str]:
    """The set from which a task's examples come, and which part of it is trained on."""
    drawn = all(hasattr(task, field) for field in ("train", "val", "data_seed"))  # not so with every task of others
    generated = drawn and getattr(task, "source", None) == "generate"
    if generated and (stream := getattr(task, "stream", None)):
        return stream, task.train
    held_out = getattr(task, "protocol", None) == "heldout"
    same = SAME_SET if generated else SAME_SET | {"data_seed"}
    of = [f"{field.name}={getattr(task, field.name)}" for field in fields(task) if field.name not in same]
    # else any copy has the same examples
    if not generated and hasattr(task, "source") and type(task)().source == "generate":
        of.insert(0, f"source={Path(task.source).name}")
    name = ", ".join([versioned(task), *of])
    return name, task.train if generated else f"data_seed={task.data_seed}" if held_out else EVERYTHING


def refuse_seen(task: Any, seen: Seen, path: str | Path, first: str) -> None:
    """UsageError if what is scored, `first` of all validation or test, is among what was trained on."""
    name, part = trained_on(task)
    there = seen.get(name)
    if isinstance(part, int) and isinstance(there, int):
        if task.train + (task.val if first == "test" else 0) < there:
            raise UsageError(
                f"{first} would be of the examples that {path} was trained on, as task.train={task.train} is not its "
                f"{there}: leave task.train as it was, or add task.data_seed={task.data_seed + 1}"
            )
    elif there not in (None, part) and part != EVERYTHING and first == "validation":
        field = "task.protocol=lra" if there == EVERYTHING else f"task.{there}"
        raise UsageError(f"validation would be of examples that {path} was trained on: give {field}, as it had")


def unknowns(task: Any, seen: Seen, path: str | Path) -> list[str]:
    """What cannot be told of whether the weights were trained on what is scored, one line each."""
    name, part = trained_on(task)
    notes = []
    if init := seen.get(UNSTATED):
        notes.append(f"{path} comes from {init} and does not say on what that was trained: perhaps on what is scored")
    for other in sorted(seen.keys() - {name, UNSTATED}):
        imported = isinstance(seen[other], str) or isinstance(part, str)  # streams are independent
        if imported and _kind(other) == _kind(name):
            notes.append(f"{path} was trained on {other}: whether that has examples of {name} is not known")
    return notes


def _merged(*parts: Seen) -> Seen:
    """All of them: of a stream the most, of another set everything where two parts differ."""
    found: Seen = {}
    for name, part in (item for each in parts for item in each.items()):
        there = found.get(name, part)
        if isinstance(there, int) and isinstance(part, int):
            found[name] = max(there, part)
        else:
            found[name] = part if there == part or name == UNSTATED else EVERYTHING
    return found


def _renamed(name: str) -> str:
    """The name of a generated set where an older lra wrote another: `listops, source=generate, data_seed=0`."""
    task, *of = name.split(", ")
    if "@" in task or not of:
        return name
    try:
        saved: dict[str, Any] = {override.field: override.text for override in parse_overrides(of)}
        if saved.get("data_seed", "").isdecimal():
            saved["data_seed"] = int(saved["data_seed"])
        return trained_on(saved_task(saved | {"name": task}))[0]
    except (UsageError, TypeError):  # of a task that is not here
        return name


def _kind(name: str) -> Any:
    """What tasks share whose examples are of one kind, by the name of a set; None of a task that is not here."""
    try:
        return TASKS.get(name.partition("@")[0]).Data
    except UsageError:
        return None
