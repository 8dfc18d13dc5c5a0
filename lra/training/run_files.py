"""Reads the configuration, the environments and the result from a run's directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from lra import environment
from lra.errors import UsageError
from lra.reading import is_number, read_json, read_yaml

EndStatus = Literal["finished", "oom", "failed"]  # how a run ended, if nothing stopped it
END_STATUSES: tuple[EndStatus, ...] = get_args(EndStatus)
ProvenanceRecord = dict[str, Any]  # as `lra.training.provenance` writes it
LINKS_FILE = "loggers.json"
UNKNOWN_COMMIT = "unknown"  # in a record, in place of a commit
# numbers that a result may lack, as results of older versions do
OPTIONAL_NUMBERS = (
    "steps", "steps_per_second", "train_seconds", "wall_seconds", "session_seconds", "peak_gpu_bytes", "world_size",
    "runs_per_device",
)  # fmt: skip


def read_config(file: Path) -> dict[str, Any] | None:
    """Returns the content of a run's `config.yaml`; None if the file is missing, damaged or something else."""
    try:
        config = read_yaml(file)
    except (FileNotFoundError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def read_result(file: Path) -> dict[str, Any] | None:
    """Returns the content of a run's `result.json`; None if the file is missing or not whole."""
    try:
        return read_whole_result(file)
    except (FileNotFoundError, ValueError):
        return None


def read_whole_result(file: Path) -> dict[str, Any]:
    """Returns the content of a run's `result.json`. ValueError says why the file is not whole."""
    result = read_json(file)
    if not isinstance(result, dict):
        raise ValueError("it is no mapping")
    if lacks := missing_fields(result):
        raise ValueError(f"it lacks {lacks}")
    return result


def read_environments(file: Path) -> list[dict[str, Any]]:
    """Returns what `env.json` states of each session of a run, in order. UsageError if the file is damaged.

    `step` is the number of steps done when a session began. Files of an older lra have only the last session, without
    `step`.
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


def read_links(folder: Path) -> dict[str, dict[str, str]]:
    """Returns by service its name for a run, `id`, and where to look at it, `link`. Empty for a damaged file."""
    try:
        found = read_json(folder / LINKS_FILE)
    except (FileNotFoundError, ValueError):
        return {}
    whole = isinstance(found, dict) and all(
        isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("id", "link"))
        for each in found.values()
    )
    return found if whole else {}


def missing_fields(content: Mapping[str, Any]) -> str:
    """Names what a result lacks; empty if it is whole. Every reader of a result relies on this check."""
    config, environment, test = (as_mapping(content.get(name)) for name in ("config", "environment", "test"))
    there = {
        f"a status of {', '.join(END_STATUSES)}": content.get("status") in END_STATUSES,
        "a config with task and attn": all(
            isinstance(as_mapping(config.get(name)).get("name"), str) for name in ("task", "attn")
        ),
        "task": isinstance(content.get("task"), str),
        "environment.date": isinstance(environment.get("date"), str),
    }
    if content.get("status") == "finished":
        there["test with all scores"] = _scored(test)
        there["val.accuracy"] = "val" not in content or is_number(as_mapping(content["val"]).get("accuracy"))
        sets = {name: score for name, score in content.items() if name == "fresh" or "plus_minus" in as_mapping(score)}
        there |= {f"{name} with all scores": _scored(as_mapping(score)) for name, score in sets.items()}
    for name in OPTIONAL_NUMBERS:
        there[f"a number as {name}"] = content.get(name) is None or (is_number(content[name]) and content[name] >= 0)
    for name in ("engine", "directory"):
        there[f"a text as {name}"] = isinstance(content.get(name), str | None)
    for name in ("gpu", "commit"):
        there[f"a text as environment.{name}"] = isinstance(environment.get(name), str | None)
    there["a whole provenance"] = is_provenance(content.get("provenance"))
    return ", ".join(what for what, found in there.items() if not found)


def is_provenance(value: Any) -> bool:
    """Whether a value is a record of `lra.training.provenance`. None and an empty record are valid."""
    record = as_mapping(value)
    if not record:
        return value is None or value == {}
    before = record.get("ancestors")
    return isinstance(before, list) and all(
        isinstance(each, dict) and isinstance(each.get("run", ""), str)
        and all(isinstance(each.get(name), str | None) for name in ("began", "ended", "commit"))
        and isinstance(own := each.get("own_code", {}), dict) and all(isinstance(text, str) for text in own.values())
        for each in (record, *before)
    )  # fmt: skip


def has_clean_commits(result: Mapping[str, Any]) -> bool:
    """Whether the code that made a result, and the named runs before it, is known.

    The code is known if each stated commit is of an unchanged tree and none is missing.
    """
    record = as_mapping(result.get("provenance"))
    stated = [result["environment"].get("commit"), *(each.get("commit") for each in record.get("ancestors", ()))]
    return all(map(environment.is_clean_commit, [*stated, *([record.get("commit")] if record else [])]))


def stated_code(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the files and packages outside lra that a result and the runs before it state, with their digests."""
    record = as_mapping(result.get("provenance"))
    codes = (as_mapping(each.get("own_code")) for each in (*record.get("ancestors", ()), record))
    stated = ((name, digest) for own in codes for name, digests in own.items() for digest in digests.split(", "))
    return list(dict.fromkeys(stated))


def describe_ancestry(result: Mapping[str, Any]) -> str:
    """Describes the runs that led to a result, oldest first: directory, digest of the last weights and commit.

    The digest has 12 digits. The text is empty if the result does not state its runs.
    """
    record = as_mapping(result.get("provenance"))
    runs = [*record["ancestors"], record] if record.get("run") else []
    stated = (each | {name: each.get(name) or UNKNOWN_COMMIT for name in ("ended", "commit")} for each in runs)
    return " > ".join(f"{each.get('run')} {each['ended'][:12]} (commit {each['commit']})" for each in stated)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Returns a value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, dict) else {}


def _scored(test: Mapping[str, Any]) -> bool:
    """Whether a test set has an accuracy from 0 to 1, its bound, size and baselines."""
    baselines = as_mapping(test.get("baselines"))
    shares = [test.get("accuracy"), test.get("plus_minus"), *baselines.values()]
    size = test.get("n", 1)
    counted = isinstance(size, int) and is_number(size) and size >= 0
    return counted and "majority" in baselines and all(is_number(share) and 0 <= share <= 1 for share in shares)
