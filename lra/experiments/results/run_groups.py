"""The runs that a command names: one directory, or that of all seeds of a setting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lra.errors import UsageError

_SEED = re.compile(r"(?P<setting>.*)-s(?P<seed>\d+)")


@dataclass(frozen=True)
class RunGroup:
    """Runs of one setting, by seed. `name` is their path without the seed."""

    name: str
    runs: tuple[Path, ...]


def find_group(place: str) -> RunGroup:
    """The run in a directory; or, where its path is given without `-s<seed>`, the runs of all its seeds.

    UsageError if there are none.
    """
    path = Path(place)
    if _is_run(path):
        return RunGroup(str(path.with_name(setting_of(path))), (path,))
    folder = path.parent
    runs = [each for each in folder.iterdir() if _is_run(each)] if folder.is_dir() else []
    seeds = sorted((seed_of(each), each) for each in runs if each.name != setting_of(each) == path.name)
    if not seeds:
        raise UsageError(
            f"{place} is no run: name its directory, or its directory without -s<seed> for the runs of all seeds"
        )
    return RunGroup(str(path), tuple(each for _, each in seeds))


def group_runs(places: Sequence[str]) -> list[RunGroup]:
    """The named runs by setting, each once."""
    found: dict[str, list[Path]] = {}
    for group in map(find_group, places):
        known = found.setdefault(group.name, [])
        known += [run for run in group.runs if run not in known]
    return [RunGroup(name, tuple(runs)) for name, runs in found.items()]


def setting_of(path: Path) -> str:
    """The name of a run's directory without its seed."""
    match = _SEED.fullmatch(path.name)
    return match["setting"] if match else path.name


def seed_of(path: Path) -> int:
    """The seed in the name of a run's directory; 0 if it has none."""
    match = _SEED.fullmatch(path.name)
    return int(match["seed"]) if match else 0


def short_names(groups: Sequence[RunGroup]) -> list[str]:
    """What tells settings apart: the parts of their task, attention, recipe and fields that not all of them have."""
    parts = [[*Path(group.name).parts[-3:-1], *re.split("[+,]", Path(group.name).name)] for group in groups]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    names = [" ".join(part for part in each if part not in shared) for each in parts]
    return [name or Path(group.name).name for name, group in zip(names, groups, strict=True)]


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.yaml", "result.json"))
