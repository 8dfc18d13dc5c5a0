"""Reads YAML files of tasks, recipes and tables, and refuses a file whose form or names are wrong.

They are files of `configs`. A recipe or table may also come from another installed package, by an entry point
`name = "module"` of the group `lra.recipes` or `lra.tables`: `<name>.yaml` lies beside the module. Or it is any file,
which is named by its path and goes by its stem.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lra import reading
from lra.config.model import ModelConfig
from lra.config.registry import Registry, describe_unknown, owning_package
from lra.config.sources import find_source, split_reference
from lra.errors import UsageError, shorten

CONFIGS_FOLDER = Path(__file__).parent.parent / "configs"
# for a mixer, which has no queries and keys to change, and sees the order of tokens by itself
WITHOUT_QUERIES = {"positions": "none"} | {
    name: getattr(ModelConfig, name) for name in ("axes", "rotary_base", "rotary_share", "rotary_bands", "qk_norm")
}
ENTRY_POINTS = {"recipe": "lra.recipes", "table": "lra.tables"}  # groups by the kind of file


def config_names(kind: str) -> list[str]:
    """Names of the YAML files of a kind (task, recipe or table), of lra and of installed packages."""
    return sorted({*_own_names(kind), *_installed_modules(kind)})


def is_config_path(name: str) -> bool:
    """Whether a recipe or a table is named by the path of its file."""
    return name.endswith((".yaml", ".yml"))


def config_stem(name: str) -> str:
    """The name by which runs know a recipe or table: of a path the file's name without its ending."""
    return Path(name).stem if is_config_path(name) else name


def config_label(kind: str, name: str) -> str:
    """What messages call the YAML file."""
    return name if is_config_path(name) else f"{kind}/{name}.yaml"


def config_file(kind: str, name: str) -> Path:
    """The YAML file of a name, or of a path. UsageError if there is none, or if two have the name."""
    if is_config_path(name):
        taken = (stem := config_stem(name)) in config_names(kind)
        if not (file := Path(name).expanduser()).is_file():
            known = f"name a YAML file, or one of {', '.join(config_names(kind))}"
            raise UsageError(f"{kind} '{name}' is not there: " + (f"did you mean '{stem}'?" if taken else known))
        if taken:
            raise UsageError(f"{kind} {name} goes by the name '{stem}', which another {kind} has: rename the file")
        return file
    modules, own = _installed_modules(kind).get(name, []), name in _own_names(kind)
    owners = ["lra"] * own + [owner for _, owner in modules]
    if not owners:
        raise UsageError(describe_unknown(kind, name, config_names(kind)))
    if len(owners) > 1:
        they = " and ".join(owners)
        raise UsageError(f"{kind} '{name}' needs a name of its own, as {they} have one: remove or rename one of them")
    if own:
        return CONFIGS_FOLDER / kind / f"{name}.yaml"
    (module, owner), *_ = modules
    if (source := find_source(module)) is None:
        raise UsageError(f"{kind} '{name}': the module {module} that {owner} names is not there")
    return source.parent / f"{name}.yaml"


def _own_names(kind: str) -> list[str]:
    return [file.stem for file in (CONFIGS_FOLDER / kind).glob("[!.]*.yaml")]


@functools.cache  # the installed packages are read once
def _installed_modules(kind: str) -> dict[str, list[tuple[str, str]]]:
    """By name the modules beside which files of other packages lie, each with its package."""
    found: dict[str, list[tuple[str, str]]] = {}
    for point in entry_points(group=ENTRY_POINTS[kind]) if kind in ENTRY_POINTS else ():
        found.setdefault(point.name, []).append((point.value, owning_package(point)))
    return found


def recipe_names() -> list[str]:
    return config_names("recipe")


def recipes_of(task: str) -> list[str]:
    """Names of the recipes that cover a task. One that can't be read covers none."""
    covering = []
    for name in recipe_names():
        with suppress(UsageError):
            if task in (read_recipe(name).get("tasks") or {}):
                covering.append(name)
    return covering


def read_task(name: str) -> dict[str, Any]:
    """Returns a task's YAML: its default `recipe` and values of fields. Empty for a task without a file."""
    return read_config_yaml("task", name) if name in config_names("task") else {}


def read_recipe(name: str) -> dict[str, Any]:
    """A recipe's YAML: `about`, `source`, `defaults`, `tasks`, `attns` and `start`."""
    recipe, label = read_config_yaml("recipe", name), config_label("recipe", name)
    extra = set(recipe) - {"about", "source", "defaults", "tasks", "attns", "start"}
    if extra:
        raise UsageError(f"{label}: unknown section {', '.join(sorted(map(str, extra)))}")
    for part, value, kind in _parts(recipe):
        if not isinstance(value, kind):
            form = {dict: "a mapping", list: "a list", str: "a text"}[kind]
            raise UsageError(f"{label}: {part} is {shorten(repr(value))}, and must be {form}")
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


def brought_sections(attention: Any, task: str) -> Iterator[Mapping[str, Any]]:
    """Yields the fields that an attention brings for recipes that say nothing of it: a class with `facts`."""
    if not getattr(attention.facts, "dropout", True):
        yield {"model": {"attn_dropout": 0.0}}
    if getattr(attention.facts, "mixes", False):
        yield {"model": WITHOUT_QUERIES}
    own = getattr(attention, "recipe_section", {})
    yield from (own.get(section) or {} for section in ("all", task))


def read_config_yaml(kind: str, name: str) -> dict[str, Any]:
    """Returns the content of the file of a name or path. Callers must not change it, as it is cached."""
    file, label = config_file(kind, name), config_label(kind, name)
    try:
        found = _loaded(file, file.stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{label} can't be read: {why}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{label} has no fields: it is a mapping of names to values")
    return typing.cast(dict[str, Any], found)


@functools.lru_cache(maxsize=64)
def _loaded(file: Path, changed: int) -> Any:
    return reading.read_yaml(file, by_hand=True)


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
        if fixed := [field for field in ("init", "recipe") if field in (rule.get("with") or ())]:
            raise UsageError(f"{label}: with of a rule of start: {fixed[0]} is what it starts from, leave it out")
        named.append(("key of a rule of start", rule, ("when", "from", "with")))
        chosen = [name for name in registries if name in rule["when"]]
        named += [(registries[name].kind, [rule["when"][name]], known[name]) for name in chosen]
    for kind, names, there in named:
        for name in map(str, names):  # YAML reads some as something else
            if name not in there and not split_reference(name)[0]:
                raise UsageError(f"{label}: {describe_unknown(kind, name, there)}")


def resolve_references(recipe: Mapping[str, Any], registries: Mapping[str, Registry]) -> dict[str, Any]:
    """Returns a recipe with `tasks`, `attns` and `start`, which names components where it refers to their files."""

    def named(kind: str, sections: Mapping[Any, Any] | None) -> dict[str, Any]:
        return {registries[kind].name_of(str(name)): section for name, section in (sections or {}).items()}

    def resolved(key: str, value: Any) -> Any:
        if key == "recipe":
            return config_stem(str(value))
        return registries[key].name_of(str(value)) if key in registries else value

    attns = {name: named("task", sections) for name, sections in named("attn", recipe.get("attns")).items()}
    rules = [
        rule | {"when": {key: resolved(key, value) for key, value in rule["when"].items()}}
        for rule in recipe.get("start") or ()
    ]
    return {**recipe, "tasks": named("task", recipe.get("tasks")), "attns": attns, "start": rules}
