"""Reads the YAML files of `configs`, and refuses a file whose form or names are wrong."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lra import reading
from lra.config.registry import Registry, describe_unknown
from lra.errors import UsageError, shorten

CONFIGS_FOLDER = Path(__file__).parent.parent / "configs"


def config_names(folder: str) -> list[str]:
    """The YAML files of `configs/<folder>`."""
    return sorted(file.stem for file in (CONFIGS_FOLDER / folder).glob("[!.]*.yaml"))


def recipe_names() -> list[str]:
    return config_names("recipe")


def read_task(name: str) -> dict[str, Any]:
    """Returns a task's YAML: its default `recipe` and values of fields. Empty for a task without a file."""
    return read_package_yaml("task", name) if name in config_names("task") else {}


def read_recipe(name: str) -> dict[str, Any]:
    """A recipe's YAML: `about`, `source`, `defaults`, `tasks`, `attns` and `start`."""
    if name not in recipe_names():
        raise UsageError(describe_unknown("recipe", name, recipe_names()))
    recipe = read_package_yaml("recipe", name)
    extra = set(recipe) - {"about", "source", "defaults", "tasks", "attns", "start"}
    if extra:
        raise UsageError(f"recipe/{name}.yaml: unknown section {', '.join(sorted(map(str, extra)))}")
    for part, value, kind in _parts(recipe):
        if not isinstance(value, kind):
            form = {dict: "a mapping", list: "a list", str: "a text"}[kind]
            raise UsageError(f"recipe/{name}.yaml: {part} is {shorten(repr(value))}, and must be {form}")
    return recipe


def _parts(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any, type]]:
    """Yields each part of a recipe with the type it must have. The parts within a part follow once that is checked."""
    for section, kind in (
        ("about", str), ("source", str), ("defaults", dict), ("tasks", dict), ("attns", dict), ("start", list)
    ):  # fmt: skip
        yield section, recipe.get(section) or kind(), kind
    for task, fields in (recipe.get("tasks") or {}).items():
        yield f"tasks.{task}", fields or {}, dict
    for attn, sections in (recipe.get("attns") or {}).items():
        yield f"attns.{attn}", sections or {}, dict
        for task, fields in (sections or {}).items():
            yield f"attns.{attn}.{task}", fields or {}, dict
    for rule in recipe.get("start") or ():
        yield "a rule of start", rule, dict
        for key, kind in (("when", dict), ("from", list), ("with", dict)):
            yield f"{key} of a rule of start", rule.get(key) or kind(), kind
        yield from (("what a rule of start has in from", text, str) for text in rule.get("from") or ())


def read_package_yaml(folder: str, name: str) -> dict[str, Any]:
    """Returns `configs/<folder>/<name>.yaml`. Callers must not change it, as it is cached."""
    file = CONFIGS_FOLDER / folder / f"{name}.yaml"
    try:
        return _loaded(file, file.stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{folder}/{name}.yaml can't be read: {why}") from None


@functools.lru_cache(maxsize=64)
def _loaded(file: Path, changed: int) -> dict[str, Any]:
    found = reading.read_yaml(file, by_hand=True)
    if not isinstance(found, dict):
        raise UsageError(f"{file.parent.name}/{file.name} has no fields: it is a mapping of names to values")
    return typing.cast(dict[str, Any], found)


def check_recipe_names(label: str, recipe: Mapping[str, Any], registries: Mapping[str, Registry]) -> None:
    """Raises a UsageError for an unknown name in a recipe, as what stands below it would never apply."""
    tasks, attns, rules = recipe.get("tasks") or {}, recipe.get("attns") or {}, recipe.get("start") or ()
    known = {name: registry.catalogue() for name, registry in registries.items()}
    named: list[tuple[str, Iterable[str], Iterable[str]]] = [
        (registries["task"].kind, tasks, known["task"]),
        (registries["attn"].kind, attns, known["attn"]),
        *((f"section of {attn}", sections or (), (*known["task"], "all")) for attn, sections in attns.items()),
    ]
    for rule in rules:
        if lacking := [key for key in ("when", "from") if key not in rule]:
            raise UsageError(f"{label}: a rule of start has no {lacking[0]}: add it")
        named.append(("key of a rule of start", rule, ("when", "from", "with")))
        chosen = [name for name in registries if name in rule["when"]]
        named += [(registries[name].kind, [rule["when"][name]], known[name]) for name in chosen]
    for kind, names, there in named:
        for name in map(str, names):  # YAML reads some as something else
            if name not in there:
                raise UsageError(f"{label}: {describe_unknown(kind, name, there)}")
