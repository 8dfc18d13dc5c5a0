"""`lra ls runs`: every run below a folder, in whatever state it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

from lra.config.options import parse_options
from lra.config.registry import describe_unknown
from lra.errors import UsageError, first_line
from lra.reading import read_csv
from lra.training.run_directory import CURVES_FILE, RUNS_FOLDER, UNNAMED_FIELDS, is_claimed
from lra.training.run_files import as_mapping, read_config, read_environments, read_whole_result

HEADER = ("run", "task", "attn", "changes", "state", "val", "test", "date")


@dataclass(frozen=True)
class ListOptions:
    runs: str = str(RUNS_FOLDER)  # the folder that is searched
    task: str | None = None  # the only task that is listed
    attn: str | None = None  # the only attention that is listed
    # best accuracies, or newest runs, first; path: in the order of their paths
    sort: Literal["path", "val", "test", "date"] = "path"


@dataclass(frozen=True)
class RunSummary:
    """A row of the list; what is not known is empty."""

    name: str  # of its folder, without the fields that `changes` has
    task: str = ""
    attn: str = ""
    changes: str = ""  # fields that were given beside the recipe
    state: str = ""
    validation: str = ""
    test: str = ""
    date: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        return astuple(self)


def list_runs(args: Iterable[str]) -> list[RunSummary]:
    """The runs below a folder, in the order that is asked for; UsageError if there are none that are asked for."""
    options = parse_options(ListOptions, args)
    root = Path(options.runs)
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder with runs: lra fit makes one here, or name another one by runs=")
    found = [_summarize(path) for path in _find_directories(root)]
    if not found:
        raise UsageError(f"{root} has no runs: lra fit makes one, or name another folder by runs=")
    for field, asked in (("task", options.task), ("attn", options.attn)):
        if asked is not None:
            known = {getattr(run, field) for run in found} - {""}
            found = [run for run in found if getattr(run, field) == asked]
            if not found:
                raise UsageError(f"{root} has no such runs: {describe_unknown(field, asked, known)}")
    if options.sort == "date":
        found.sort(key=lambda run: run.date, reverse=True)
    elif options.sort != "path":
        name = {"val": "validation", "test": "test"}[options.sort]
        found.sort(key=lambda run: float(getattr(run, name).rstrip("%") or -1), reverse=True)  # unknown ones last
    return found


def _find_directories(root: Path) -> Iterator[Path]:
    """The folders with a configuration or a result of a run."""
    files = (file for name in ("config.yaml", "result.json") for file in root.rglob(name))
    yield from sorted({file.parent for file in files if not any(map(_hidden, file.relative_to(root).parts))})


def _hidden(name: str) -> bool:
    return name.startswith(".")


def _summarize(path: Path) -> RunSummary:
    """What a run's files say. A run that can't be read has the reason in place of its state."""
    task, attn = path.parts[-3:-1] if len(path.parts) > 2 else ("", "")
    try:
        return _read_result(path) or _read_unfinished(path)
    except (UsageError, ValueError, OSError) as error:
        return RunSummary(path.name, task, attn, state=f"can't be read: {first_line(error)}")


def _read_result(path: Path) -> RunSummary | None:
    """The row of a run that ended by itself; ValueError if its result is not whole, None if there is none."""
    try:
        result = read_whole_result(path / "result.json")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"result.json is not whole: {error}") from None
    error = str(result.get("error") or "").partition("\n")[0]
    state = {"finished": "finished", "oom": "out of memory", "failed": f"failed: {error}"}[result["status"]]
    finished = result["status"] == "finished"
    validation, test = (
        f"{100 * result[name]['accuracy']:.1f}%" if finished and name in result else "" for name in ("val", "test")
    )
    changes = _list_changes(result)
    return RunSummary(
        _shorten(path.name, result["config"], changes),
        result["task"].partition("@")[0],
        result["config"]["attn"]["name"],
        changes,
        state,
        validation,
        test,
        result["environment"]["date"][:10],
    )


def _read_unfinished(path: Path) -> RunSummary:
    """The row of a run without a result; ValueError or UsageError for files that are damaged."""
    if (config := read_config(path / "config.yaml")) is None:
        raise ValueError("config.yaml is damaged")
    task, attn = (as_mapping(config.get(field)).get("name") for field in ("task", "attn"))
    if not isinstance(task, str) or not isinstance(attn, str):
        raise ValueError("config.yaml names no task or attention")
    try:
        rows = read_csv(path / CURVES_FILE, "step")
    except FileNotFoundError:
        rows = []
    except ValueError as error:
        raise ValueError(f"{CURVES_FILE} is damaged: {error}") from None
    *_, session = [{}, *read_environments(path / "env.json")]
    state = f"{'running' if is_claimed(path) else 'unfinished'} at step {rows[-1].get('step') if rows else 0}"
    date, changes = session.get("date"), _list_changes(session)
    when = date[:10] if isinstance(date, str) else ""
    return RunSummary(_shorten(path.name, config, changes), task, attn, changes, state, date=when)


def _shorten(name: str, config: Mapping[str, Any], changes: str) -> str:
    """`demo+…-s0` of `demo+batch.size=8-s0`, and `demo+…~1f2e3d4c-s0` where a digest replaces the end of the fields.

    A name stays whole if it was given, or if its fields are shown nowhere else.
    """
    return name if config.get("name") or not changes else re.sub(r"\+[^~]*(~\w{8})?(-s\d+)$", r"+…\1\2", name)


def _list_changes(stated: Mapping[str, Any]) -> str:
    """The fields that were given beside the recipe, as they may be typed again.

    Left out are the seed and the name, how the run was called, and on what it computes.
    """
    overrides = stated.get("overrides")
    given = map(str, overrides) if isinstance(overrides, list) else ()
    return " ".join(each.removeprefix("task.") for each in given if each.partition("=")[0] not in UNNAMED_FIELDS)
