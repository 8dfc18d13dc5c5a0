"""One typed configuration from dataclass defaults, YAML and `field=value` arguments, in two phases.

Selectors (`task=`, `attn=`, `recipe=`) are read first and decide which dataclasses the tree is made of; only
then are fields merged, so that a typo is an error and `task=pathx` may stand beside `task.max_length=5`.
Precedence: dataclass default < task YAML < recipe < the recipe's section for the task < its section for the
attention and the task < command line.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lra.config.recipes import check_names, read_recipe, read_task, recipes
from lra.config.registry import Registry
from lra.errors import UsageError, brief

MOST_CHARACTERS = 200  # of a value that is no text: more are no number that anybody means
STARTED = "of what the recipe starts this run from, or changes for that: init=null leaves it out"


@dataclass(frozen=True)
class Composed:
    """A configuration and where each of its values came from."""

    config: Any  # a frozen instance of the schema
    origin: dict[str, str]  # dotted field -> layer that set it last
    overrides: tuple[str, ...]  # `field=value` of the command line, complete names, sorted
    start: tuple[str, ...] | None = None  # arguments of the run that this one starts from, if its recipe says so


def compose(
    schema: type,
    registries: Mapping[str, Registry],
    args: Sequence[str],
    locate: Callable[[tuple[str, ...]], str] | None = None,
    default: str | None = None,
) -> Composed:
    """Builds a `schema` (a dataclass with one field per registry and a field `recipe`) from arguments.

    Args:
        locate: the value of `init=` for the arguments of the run that a recipe starts this one from; without it
            recipes start nothing.
        default: the recipe where the arguments name none; without it the task's.

    Raises UsageError for an unknown selector, field or value, naming what was probably meant.
    """
    try:
        return _compose(schema, registries, args, locate, default)
    except UsageError as error:
        if locate is None or STARTED in str(error):
            raise
        _compose(schema, registries, args, None, default)  # which raises the same, if it is not of the start
        raise UsageError(f"{error} ({STARTED})") from None


def _compose(
    schema: type,
    registries: Mapping[str, Registry],
    args: Sequence[str],
    locate: Callable[[tuple[str, ...]], str] | None,
    default: str | None,
) -> Composed:
    selected, overrides = _split(args, (*registries, "recipe"))
    missing = [f"{name}=" for name in registries if name not in selected]
    if missing:
        first = next(name for name in registries if name not in selected)
        near = difflib.get_close_matches(first, [field for field, _ in overrides], n=1)
        raise UsageError(
            f"{' and '.join(missing)} missing{f', {near[0]}= is given' if near else ''}: "
            f"{first}= is one of {', '.join(registries[first].catalogue())}"
        )
    classes = {name: registry.get(selected[name]) for name, registry in registries.items()}
    task, attn = selected["task"], selected["attn"]

    task_yaml = read_task(task)
    recipe = selected.get("recipe") or default or task_yaml.get("recipe")
    if not recipe:
        raise UsageError(
            f"task '{task}' names no default recipe: give recipe={'|'.join(recipes())}, or write one into "
            f"configs/task/{task}.yaml, as recipe: <name>"
        )
    recipe_yaml, label = read_recipe(recipe), f"recipe/{recipe}.yaml"
    check_names(label, recipe_yaml, registries)
    tasks, attns = recipe_yaml.get("tasks") or {}, recipe_yaml.get("attns") or {}
    if task not in tasks:
        raise UsageError(
            f"recipe '{recipe}' has no section for task '{task}': it covers {', '.join(sorted(map(str, tasks)))}; "
            f"choose another, or add {task} to the tasks in {label}"
        )

    tree = _Tree(schema, {name: cls.Config for name, cls in classes.items()})
    own = attns.get(attn) or {}
    tree.merge(
        (f"task/{task}.yaml", task_yaml),
        (GIVEN if "recipe" in selected else "init" if default else f"task/{task}.yaml", {"recipe": recipe}),
        (label, recipe_yaml.get("defaults") or {}),
        (f"{label} {task}", tasks[task] or {}),
        *((f"{label} {attn}.{section}", own.get(section) or {}) for section in ("all", task)),
    )
    given = tree.override(overrides)
    start = None
    selected |= {"recipe": recipe}
    rules = _rules(label, recipe_yaml.get("start") or (), tree, selected)
    if rules and locate and tree.origin["init"] == DEFAULT:
        start = _start(rules[0], selected, given)
        own = {field: value for field, value in flatten(rules[0].get("with") or {}) if tree.origin.get(field) != GIVEN}
        with _in_chain(label, start):
            own |= {"init": locate(start)}
        tree.merge((f"{label} start", own))
    return Composed(tree.build(), tree.origin, given, start)


def restore(schema: type, registries: Mapping[str, Registry], saved: dict[str, Any], args: Sequence[str] = ()) -> Any:
    """The configuration that `to_dict` wrote, with `attn=` and `field=value` arguments on top.

    What an older one lacks has the value that the schema states as `later`, by its complete name.
    """
    selected, overrides = _split(args, (*registries, "recipe"))
    if "recipe" in selected:
        raise UsageError("recipe= chooses fields of a new run: the saved one has its own, give those to change")
    kept = dict(saved)
    for name in registries:
        before: str = saved[name]["name"]
        selected.setdefault(name, before)
        # another component's options would not fit the chosen one
        kept[name] = {k: v for k, v in saved[name].items() if k != "name"} if selected[name] == before else {}
    tree = _Tree(schema, {name: registry.get(selected[name]).Config for name, registry in registries.items()})
    later = {field: value for field, value in getattr(schema, "later", {}).items() if kept[field.partition(".")[0]]}
    tree.merge(("older configuration", {field: value for field, value in later.items() if field in tree.origin}))
    tree.merge(("saved configuration", kept))
    tree.override(overrides)
    return tree.build()


def to_dict(config: Any) -> dict[str, Any]:
    """A nested plain dict, safe for `torch.load(weights_only=True)`; registered configs keep their `name`."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            registered = getattr(type(value), "name", None)
            named = {"name": registered} if registered else {}
            return named | {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return plain(config)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping as `("a.b", value)`."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(old: Mapping[str, Any], new: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
    """Fields in which two plain configurations differ, as `field: old -> new`; of those `ignored` none."""
    a, b = dict(flatten(old)), dict(flatten(new))
    fields = sorted((a | b).keys() - set(ignored))
    return [f"{field}: {a.get(field)} -> {b.get(field)}" for field in fields if a.get(field) != b.get(field)]


DEFAULT, GIVEN = "default", "command line"
# fields of it that are a run's own: where it starts from is given other ones
MOST_STAGES = 30  # runs of which each starts from the next; recipes have up to four
# the arguments of the runs that start, one from the other, from what is composed
_chain: ContextVar[tuple[tuple[str, ...], ...]] = ContextVar("_chain", default=())
OWN = ("init", "head", "name", "resume", "positions.resize", "positions.scale")


def _rules(
    label: str, rules: Sequence[Mapping[str, Any]], tree: _Tree, selected: Mapping[str, str]
) -> list[Mapping[str, Any]]:
    """The rules whose `when` holds; UsageError if one for what is selected asks for a field that this has not."""
    holding = []
    for rule in rules:
        when = dict(flatten(rule["when"]))
        if any(when.pop(name, value) != value for name, value in selected.items()):
            continue
        if other := [field for field in when if field not in tree.origin]:
            here = " ".join(f"{name}={value}" for name, value in selected.items() if name != "recipe")
            raise UsageError(f"{label}: a rule of start for {here}: {tree.unknown(other[0])}")
        if all(tree.values.get(field) == value for field, value in when.items()):
            holding.append(rule)
    return holding


def _start(rule: Mapping[str, Any], selected: Mapping[str, str], given: Sequence[str]) -> tuple[str, ...]:
    """Arguments of the run before this one: this one's, with the rule's `from` on top, of which `field=` drops one."""
    changed = {text.partition("=")[0]: text for text in rule["from"]}
    kept = {text.partition("=")[0]: text for text in given if text.partition("=")[0] not in OWN}
    if "attn" in changed:  # another attention has other options
        kept = {field: text for field, text in kept.items() if not field.startswith("attn.")}
    chosen = {name: f"{name}={value}" for name, value in selected.items()}
    return tuple(text for text in (chosen | kept | changed).values() if not text.endswith("="))


@contextmanager
def _in_chain(label: str, start: tuple[str, ...]) -> Iterator[None]:
    """While a run is composed that others start from; UsageError if its chain of them does not end."""
    after = _chain.get()
    if start in after or len(after) == MOST_STAGES:
        what = "starts from itself" if start in after else f"has more than {MOST_STAGES} runs after it"
        raise UsageError(
            f"{label}: by the rules of start, the run of {' '.join(start)} {what}: mend their when or from"
        )
    token = _chain.set((*after, start))
    try:
        yield
    finally:
        _chain.reset(token)


def _split(args: Sequence[str], selectors: Sequence[str]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    selected: dict[str, str] = {}
    overrides: dict[str, str] = {}
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"'{arg}' is not of the form field=value")
        seen = selected if key in selectors else overrides
        if key in seen:
            raise UsageError(f"{key}= is given twice")
        seen[key] = value
    return selected, list(overrides.items())


def _form(hint: Any) -> str:
    """How a field's value is written."""
    *most, last = _forms(hint)
    return f"{', '.join(most)} or {last}" if most else last


def _forms(hint: Any) -> list[str]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, list):
        return [f"[{','.join('|'.join(form.split()[-1] for form in _forms(part)) for part in parts)}]"]
    if origin is typing.Literal:
        return [str(value) for value in parts]
    if origin in (typing.Union, types.UnionType):
        return [form for part in parts for form in _forms(part)]
    named = {int: ["an integer"], float: ["a number"], bool: ["true", "false"], types.NoneType: ["null"]}
    return named.get(hint) or [getattr(hint, "__name__", str(hint))]


@functools.cache  # it would take two thirds of the time of composing
def _defaults(schema: type, *nodes: tuple[str, type]) -> tuple[Any, Any]:
    """A `schema` of defaults, with these dataclasses as nodes, and OmegaConf's form of it."""
    example = schema(**{name: node() for name, node in nodes})
    tree = OmegaConf.structured(example)
    for section in (tree, *filter(OmegaConf.is_dict, tree.values())):
        OmegaConf.set_readonly(section, False)  # frozen as the dataclasses are
    return example, tree


class _Tree:
    """The fields of a configuration under construction: names, values and where from. OmegaConf checks types."""

    def __init__(self, schema: type, nodes: dict[str, type]):
        self.example, self.defaults = _defaults(schema, *nodes.items())
        names = {f"{node}.name" for node in nodes}
        self.values = {field: value for field, value in flatten(to_dict(self.example)) if field not in names}
        self.origin = dict.fromkeys(self.values, DEFAULT)
        self.given: dict[str, str] = {}  # the command line's fields, as they were written

    def merge(self, *layers: tuple[str, Mapping[str, Any]]) -> None:
        """Sets the fields of layers, one layer after the other."""
        for label, values in layers:
            for field, value in flatten(values):
                if field not in self.origin:
                    raise UsageError(f"{label}: {self.unknown(field)}")
                parts = value if isinstance(value, list) else [value]
                if any("${" in str(part) or part == "???" for part in parts):  # to OmegaConf another field, and a gap
                    raise UsageError(f"{label}: {field}={brief(value)}: write the value itself")
                self.values[field], self.origin[field] = value, label

    def build(self) -> Any:
        """The configuration; UsageError for a value that is none of its field's."""
        tree = copy.deepcopy(self.defaults)
        for field, label in self.origin.items():
            if label == DEFAULT:
                continue
            try:
                OmegaConf.update(tree, field, self.values[field])
            except (OmegaConfBaseException, OverflowError):  # its messages are of its own types, and some are templates
                given = brief(self.given.get(field, self.values[field]))
                raise UsageError(f"{label}: {field}={given}: write {_form(self._hint(field))}") from None
        built = OmegaConf.to_object(tree)
        for field, value in self.values.items():
            if isinstance(value, int) and value >= 1 << 64:  # where nothing has a limit of its own
                raise UsageError(f"{self.origin[field]}: {field}={value} is too large: use at most {(1 << 63) - 1}")
        return built

    def override(self, overrides: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """Sets the command line's fields and returns them as `field=value` with complete names, sorted."""
        full: dict[str, str] = {}
        for short, text in overrides:
            field = self.resolve(short)
            if field in full:
                raise UsageError(f"{field}= is given twice")
            if field not in self.origin:
                raise UsageError(f"command line: {self.unknown(field)}")
            full[field] = self.given[field] = text
        self.merge((GIVEN, {field: self.parse(field, text) for field, text in full.items()}))
        return tuple(sorted(f"{field}={text}" for field, text in full.items()))

    def resolve(self, field: str) -> str:
        """The complete name of a field; a task's fields may be written without `task.`."""
        short = f"task.{field}"
        return short if field not in self.origin and short in self.origin else field

    def parse(self, field: str, text: str) -> Any:
        """The value of `field=text`: text stays text where the field is one (YAML would read `on` as true)."""
        hint = self._hint(field)
        if text == "???" or "${" in text:  # to OmegaConf a missing value, and another field's or a variable's
            raise UsageError(f"command line: {field}={text} can't be read as a value: write the value itself")
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        if text == "null" and type(None) in options:
            return None
        literals = [value for option in options for value in typing.get_args(option)]
        if str in options or any(isinstance(value, str) for value in literals):
            return text
        if len(text) > MOST_CHARACTERS or not text.isascii():
            raise UsageError(f"command line: {field}={brief(text)} can't be read as a value: write {_form(hint)}")
        if int in options and text.removeprefix("-").isdecimal():
            return int(text)  # YAML takes 010 for 8
        if ":" in text and {int, float} & {*options}:
            raise UsageError(f"command line: {field}={text} can't be read as a value: write one number")  # not 1:30
        if mark := next((mark for mark in "#!" if mark in text), None):  # YAML's comments and tags
            raise UsageError(f"command line: {field}={text} can't be read as a value: leave out what {mark} begins")
        try:
            value = typing.cast(Any, OmegaConf.create(f"value: {text}")).value
            if not any(map(OmegaConf.is_config, value if isinstance(value, ListConfig) else [value])):
                return value  # no field is nested
        except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, RecursionError):
            pass
        raise UsageError(f"command line: {field}={text} can't be read as a value: write {_form(hint)}")

    def _hint(self, field: str) -> Any:
        owner, hint = self.example, None
        for part in field.split("."):
            if not dataclasses.is_dataclass(owner) or part not in (f.name for f in dataclasses.fields(owner)):
                return None  # unknown: set() reports it
            hint = typing.get_type_hints(type(owner))[part]
            owner = getattr(owner, part)
        return hint

    def unknown(self, field: str) -> str:
        leaf = field.lower().rpartition(".")[2]
        same_leaf = [known for known in self.origin if known.rpartition(".")[2] == leaf]
        near = same_leaf or difflib.get_close_matches(field.lower(), self.origin, n=1, cutoff=0.6)
        return f"unknown field '{field}'" + (f": did you mean '{near[0]}'?" if near else ": lra config show lists all")
