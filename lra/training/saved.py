"""What a run's directory says of the run: its configuration, and its result, which is whole or none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from lra import environment
from lra.errors import UsageError
from lra.reading import is_number, read_json, read_yaml

End = Literal["finished", "oom", "failed"]  # how a run ended by itself
ENDS: tuple[End, ...] = get_args(End)
Record = dict[str, Any]  # where a run's weights come from, as `lra.training.provenance` states it
UNKNOWN = "unknown"  # there, in place of a commit
# numbers of a result that may be lacking, as in results of older versions
NUMBERS = (
    "steps", "steps_per_second", "train_seconds", "wall_seconds", "session_seconds", "peak_gpu_bytes", "world_size",
    "runs_per_device",
)  # fmt: skip


def read_config(file: Path) -> dict[str, Any] | None:
    """A run's configuration as `config.yaml` has it; None if there is none, or it is damaged or something else."""
    try:
        config = read_yaml(file)
    except (FileNotFoundError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def read_result(file: Path) -> dict[str, Any] | None:
    """The content of a run's `result.json`; None if there is none, or it is not whole."""
    try:
        return whole_result(file)
    except (FileNotFoundError, ValueError):
        return None


def whole_result(file: Path) -> dict[str, Any]:
    """The content of a run's `result.json`; ValueError that says why it is not whole."""
    result = read_json(file)
    if not isinstance(result, dict):
        raise ValueError("it is no mapping")
    if lacks := lacking(result):
        raise ValueError(f"it lacks {lacks}")
    return result


def read_environments(file: Path) -> list[dict[str, Any]]:
    """What `env.json` states of each session of a run, in their order; UsageError if that is damaged.

    `step` is how many steps a session found done. Files of an older lra have the last session alone, without it.
    """
    try:
        stated = read_json(file)
    except FileNotFoundError:
        return []
    except ValueError:
        stated = None
    sessions = [stated] if isinstance(stated, dict) else stated
    if not isinstance(sessions, list) or not all(isinstance(session, dict) for session in sessions):
        raise UsageError(f"{file} is damaged: remove it, what it stated of earlier sessions is lost")
    return sessions


def lacking(content: Mapping[str, Any]) -> str:
    """What a run's result lacks of what every one has; empty if nothing. Whoever reads a result relies on this."""
    config, environment, test = (mapping(content.get(name)) for name in ("config", "environment", "test"))
    there = {
        f"a status of {', '.join(ENDS)}": content.get("status") in ENDS,
        "a config with task and attn": all(
            isinstance(mapping(config.get(name)).get("name"), str) for name in ("task", "attn")
        ),
        "task": isinstance(content.get("task"), str),
        "environment.date": isinstance(environment.get("date"), str),
    }
    if content.get("status") == "finished":
        there["test with all scores"] = _scored(test)
        there["val.accuracy"] = "val" not in content or is_number(mapping(content["val"]).get("accuracy"))
        sets = {name: score for name, score in content.items() if name == "fresh" or "plus_minus" in mapping(score)}
        there |= {f"{name} with all scores": _scored(mapping(score)) for name, score in sets.items()}
    for name in NUMBERS:
        there[f"a number as {name}"] = content.get(name) is None or (is_number(content[name]) and content[name] >= 0)
    for name in ("engine", "directory"):
        there[f"a text as {name}"] = isinstance(content.get(name), str | None)
    for name in ("gpu", "commit"):
        there[f"a text as environment.{name}"] = isinstance(environment.get(name), str | None)
    there["a whole provenance"] = whole_record(content.get("provenance"))
    return ", ".join(what for what, found in there.items() if not found)


def whole_record(value: Any) -> bool:
    """Whether a value is what `lra.training.provenance` writes of a run; None and an empty one state nothing."""
    record = mapping(value)
    if not record:
        return value is None or value == {}
    before = record.get("ancestors")
    return isinstance(before, list) and all(
        isinstance(each, dict) and isinstance(each.get("run", ""), str)
        and all(isinstance(each.get(name), str | None) for name in ("began", "ended", "commit"))
        for each in (record, *before)
    )  # fmt: skip


def clean(result: Mapping[str, Any]) -> bool:
    """Whether the code is known that made a result and, as far as they are named, the runs before it.

    So it is if each commit that is stated is one of an unchanged tree, and none is lacking.
    """
    record = mapping(result.get("provenance"))
    stated = [result["environment"].get("commit"), *(each.get("commit") for each in record.get("ancestors", ()))]
    return all(map(environment.is_clean_commit, [*stated, *([record.get("commit")] if record else [])]))


def chain(result: Mapping[str, Any]) -> str:
    """The runs that led to a result, the first one first: each by its directory, its last weights and its commit.

    Weights are named by the first 12 digits of their digest. Empty if the result does not state them.
    """
    record = mapping(result.get("provenance"))
    runs = [*record["ancestors"], record] if record.get("run") else []
    return " > ".join(
        f"{each.get('run')} {(each.get('ended') or UNKNOWN)[:12]} (commit {each.get('commit') or UNKNOWN})"
        for each in runs
    )


def mapping(value: Any) -> Mapping[str, Any]:
    """A value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def _scored(test: Mapping[str, Any]) -> bool:
    """Whether a test set has its accuracy as a share, its bound, size and baselines."""
    baselines = mapping(test.get("baselines"))
    shares = [test.get("accuracy"), test.get("plus_minus"), *baselines.values()]
    size = test.get("n", 1)
    counted = isinstance(size, int) and is_number(size) and size >= 0
    return counted and "majority" in baselines and all(is_number(share) and 0 <= share <= 1 for share in shares)
