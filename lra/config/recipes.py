"""The YAML files of `configs`: read, and refused where form or names are wrong."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lra.config.registry import Registry, unknown
from lra.errors import UsageError, first_line

CONFIGS = Path(__file__).parent.parent / "configs"


def recipes() -> list[str]:
    return sorted(file.stem for file in (CONFIGS / "recipe").glob("*.yaml"))


def read_recipe(name: str) -> dict[str, Any]:
    """A recipe's YAML: `about`, `source`, `defaults`, `tasks`, `attns` and `start`."""
    if name not in recipes():
        raise UsageError(unknown("recipe", name, recipes()))
    recipe = read_yaml("recipe", name)
    extra = set(recipe) - {"about", "source", "defaults", "tasks", "attns", "start"}
    if extra:
        raise UsageError(f"recipe/{name}.yaml: unknown section {', '.join(sorted(extra))}")
    for part, value, kind in _parts(recipe):
        if not isinstance(value, kind):
            form = "a mapping" if kind is dict else "a list"
            raise UsageError(f"recipe/{name}.yaml: {part} is {value!r}, and must be {form}")
    return recipe


def _parts(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any, type]]:
    """Each part of a recipe and what it must be; those within it when that has been found so."""
    for section, kind in (("defaults", dict), ("tasks", dict), ("attns", dict), ("start", list)):
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


def read_yaml(folder: str, name: str) -> dict[str, Any]:
    """`configs/<folder>/<name>.yaml`; not to be written to, as it is kept."""
    file = CONFIGS / folder / f"{name}.yaml"
    return _loaded(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _loaded(file: Path, changed: int) -> dict[str, Any]:
    # OmegaConf's loader reads 1e-4 as a number, PyYAML's does not
    try:
        found = OmegaConf.to_container(OmegaConf.load(file))
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise UsageError(f"{file.parent.name}/{file.name} can't be read: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{file.parent.name}/{file.name} has no fields: it is a mapping of names to values")
    return typing.cast(dict[str, Any], found)


def check_names(label: str, recipe: Mapping[str, Any], registries: Mapping[str, Registry]) -> None:
    """UsageError for a name in a recipe that nothing has: what is said of it would never count."""
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
                raise UsageError(f"{label}: {unknown(kind, name, there)}")
