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
import math
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lra.config import recipes
from lra.config.override import Override, convert_value, parse_overrides, refuse_large_integers
from lra.config.registry import Registry
from lra.config.start_rules import EPOCHS, LENGTH_FIELDS, STEPS, guard_chain, split_start_fields, starting_arguments
from lra.errors import UsageError, shorten

ExampleCounter = Callable[[Any], int]  # the number of training examples of a task's configuration
START_MEND = "of what the recipe starts this run from, or changes for that: init=null leaves it out"


@dataclass(frozen=True)
class ComposedConfig:
    """A configuration and where each of its values came from."""

    config: Any  # a frozen instance of the schema
    origin: dict[str, str]  # dotted field -> layer that set it last
    overrides: tuple[Override, ...]  # of the command line, with complete names, sorted
    start: tuple[Override, ...] | None = None  # arguments of the run that this one starts from, if its recipe says so


def compose(
    schema: type,
    registries: Mapping[str, Registry],
    args: Iterable[str | Override],
    locate: Callable[[tuple[Override, ...]], str] | None = None,
    default: str | None = None,
    count: ExampleCounter | None = None,
) -> ComposedConfig:
    """Builds a `schema` (a dataclass with one field per registry and a field `recipe`) from arguments.

    Args:
        locate: returns the value of `init=` for the arguments of the run that a recipe starts this one from. Without
            it recipes start nothing.
        default: the recipe if the arguments name none. Without it the task's own recipe.
        count: returns the number of training examples of a task's configuration. Without it `trainer.steps` don't
            follow from `trainer.epochs`.

    Raises UsageError for an unknown selector, field or value, naming what was probably meant.
    """
    selected, overrides = _split_selectors(args, (*registries, "recipe"))
    missing = [name for name in registries if name not in selected]
    if missing:
        first = missing[0]
        near = difflib.get_close_matches(first, [override.field for override in overrides], n=1)
        raise UsageError(
            f"{' and '.join(f'{name}=' for name in missing)} missing{f', {near[0]}= is given' if near else ''}: "
            f"{first}= is one of {', '.join(registries[first].catalogue())}"
        )
    classes = {name: registry.get_declared(selected[name]) for name, registry in registries.items()}
    names = selected | {name: cls.Config.name for name, cls in classes.items()}
    task, attn = names["task"], names["attn"]

    task_yaml = recipes.read_task(task)
    recipe = selected.get("recipe") or default or task_yaml.get("recipe")
    if not recipe:
        covering = "|".join(recipes.recipes_of(task)) or f"<file>.yaml, which has {task} among its tasks"
        raise UsageError(f"task '{task}' names no default recipe: give recipe={covering}")
    recipe_yaml, label = recipes.read_recipe(recipe), recipes.config_label("recipe", recipe)
    recipes.check_recipe_names(label, recipe_yaml, registries)
    recipe_yaml = recipes.resolve_references(recipe_yaml, registries)
    tasks, attns = recipe_yaml["tasks"], recipe_yaml["attns"]
    if task not in tasks:
        raise UsageError(
            f"recipe '{recipe}' has no section for task '{task}': it covers {', '.join(sorted(map(str, tasks)))}; "
            f"choose another, or add {task} to the tasks in {label}"
        )

    tree = _Tree(schema, {name: cls.Config for name, cls in classes.items()})
    own = attns.get(attn) or {}
    named_by = FROM_COMMAND_LINE if "recipe" in selected else "init" if default else f"task/{task}.yaml"
    tree.merge(
        (f"task/{task}.yaml", task_yaml),
        (named_by, {"recipe": recipes.config_stem(recipe)}),
        (label, recipe_yaml.get("defaults") or {}),
        (f"{label} {task}", tasks[task] or {}),
        *((f"attn={attn}", section) for section in recipes.brought_sections(classes["attn"], task)),
        *((f"{label} {attn}.{section}", own.get(section) or {}) for section in ("all", task)),
    )
    before, asked = split_start_fields(overrides)
    given = tree.override(asked)
    selected |= {"recipe": recipe}
    rules = _matching_rules(label, recipe_yaml["start"], tree, names | {"recipe": recipes.config_stem(recipe)})
    if not (rules and locate and tree.origin["init"] == FROM_DEFAULT):
        if before:
            raise UsageError(f"{before[0]} is of a run before this one, and {label} starts this one from none")
        return ComposedConfig(tree.finish(count), tree.origin, given)
    start = starting_arguments(label, rules[0], selected, given, before, tree.resolve, tree.origin)
    given = tuple(sorted((*given, *before), key=str))
    started = tree.copy()
    try:
        changes = dict(flatten(rules[0].get("with") or {}))
        with guard_chain(label, start):
            changes["init"] = locate(start)
        asked = {field: value for field, value in changes.items() if tree.origin.get(field) != FROM_COMMAND_LINE}
        started.merge((f"{label} start", asked))
        return ComposedConfig(started.finish(count), started.origin, given, start)
    except UsageError as error:
        if error.of_earlier_run:
            raise
        tree.finish(count)  # what is wrong without the start, too, is said of what was given
        raise UsageError(f"{error} ({START_MEND})", of_earlier_run=True) from None


def restore(
    schema: type, registries: Mapping[str, Registry], saved: dict[str, Any], args: Iterable[str | Override] = ()
) -> Any:
    """The configuration that `to_dict` wrote, with `attn=` and `field=value` arguments on top.

    A field that an older configuration lacks gets the value that the schema states for it in `later_fields`.
    """
    selected, overrides = _split_selectors(args, (*registries, "recipe"))
    if "recipe" in selected:
        raise UsageError("recipe= chooses fields of a new run: the saved one has its own, give those to change")
    kept, nodes = dict(saved), {}
    for name, registry in registries.items():
        chosen = registry.get_declared(selected[name]) if name in selected else registry.get_saved(saved[name], name)
        nodes[name] = chosen.Config
        # another component's options would not fit the chosen one
        options = saved[name].items() if nodes[name].name == saved[name]["name"] else ()
        kept[name] = {key: value for key, value in options if key not in ("name", "from")}
    tree = _Tree(schema, nodes)
    later = {
        field: value for field, value in getattr(schema, "later_fields", {}).items() if kept[field.partition(".")[0]]
    }
    tree.merge(("older configuration", {field: value for field, value in later.items() if field in tree.origin}))
    tree.merge(("saved configuration", kept))
    tree.override(overrides)
    return tree.build()


def to_dict(config: Any) -> dict[str, Any]:
    """A nested plain dict, safe for `torch.load(weights_only=True)`. Registered configs keep `name`, and `from`."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            known = {key: getattr(type(value), name, "") for key, name in (("name", "name"), ("from", "imported_from"))}
            named = {key: text for key, text in known.items() if text}  # no option is called `from`, a word of Python
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


def list_differences(old: Mapping[str, Any], new: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
    """The fields in which two plain configurations differ, as `field: old -> new`, without those `ignored`."""
    a, b = dict(flatten(old)), dict(flatten(new))
    fields = sorted((a | b).keys() - set(ignored))
    return [f"{field}: {a.get(field)} -> {b.get(field)}" for field in fields if a.get(field) != b.get(field)]


FROM_DEFAULT, FROM_COMMAND_LINE, FROM_EPOCHS = "default", "command line", "trainer.epochs"


def _matching_rules(
    label: str, rules: Sequence[Mapping[str, Any]], tree: _Tree, selected: Mapping[str, str]
) -> list[Mapping[str, Any]]:
    """The rules whose `when` holds. Raises a UsageError if a rule for what is selected names an unknown field."""
    holding = []
    for rule in rules:
        when = dict(flatten(rule["when"]))
        if any(when.pop(name, value) != value for name, value in selected.items()):
            continue
        if other := [field for field in when if field not in tree.origin]:
            here = " ".join(f"{name}={value}" for name, value in selected.items() if name != "recipe")
            raise UsageError(f"{label}: a rule of start for {here}: {tree.unknown(other[0])}")
        given = {field: f"{label}: when of a rule of start: {field}={shorten(value)}" for field, value in when.items()}
        wanted = {field: convert_value(value, tree.hints[field], given[field]) for field, value in when.items()}
        if all(tree.typed(field) == value for field, value in wanted.items()):
            holding.append(rule)
    return holding


def _split_selectors(
    args: Iterable[str | Override], selectors: Collection[str]
) -> tuple[dict[str, str], list[Override]]:
    """Returns the text of each selector that is given, and the other arguments."""
    overrides = parse_overrides(args)
    selected = {override.field: override.text for override in overrides if override.field in selectors}
    return selected, [override for override in overrides if override.field not in selectors]


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


class _Tree:
    """The fields of a configuration under construction: names, types, values and their origins."""

    def __init__(self, schema: type, nodes: Mapping[str, type]):
        self.example = schema(**{name: node() for name, node in nodes.items()})
        self.hints: dict[str, Any] = {}  # dotted field -> type
        self.values: dict[str, Any] = {}
        self._add(self.example)
        self.origin = dict.fromkeys(self.values, FROM_DEFAULT)
        self.layers = [FROM_DEFAULT]  # in the order in which they were merged
        self.given: dict[str, str] = {}  # the command line's fields, as they were written

    def _add(self, node: Any, section: str = "") -> None:
        for name, hint in _field_types(type(node)).items():
            value, field = getattr(node, name), f"{section}{name}"
            if dataclasses.is_dataclass(value):
                self._add(value, f"{field}.")
            else:
                self.values[field], self.hints[field] = value, hint

    def copy(self) -> _Tree:
        """A copy whose fields may be set apart from these."""
        other = copy.copy(self)
        other.values, other.origin, other.layers = dict(self.values), dict(self.origin), [*self.layers]
        return other

    def merge(self, *layers: tuple[str, Mapping[str, Any]]) -> None:
        """Sets the fields of layers, one layer after the other."""
        for label, values in layers:
            self.layers.append(label)
            for field, value in flatten(values):
                if field not in self.origin:
                    raise UsageError(f"{label}: {self.unknown(field)}")
                parts = value if isinstance(value, list | tuple) else [value]
                if any("${" in str(part) or part == "???" for part in parts):  # OmegaConf's words for what is elsewhere
                    raise UsageError(f"{label}: {field}={shorten(value)}: write the value itself")
                self.values[field], self.origin[field] = value, label

    def finish(self, count: ExampleCounter | None) -> Any:
        """The configuration of a new run, with fields of `multiples` made smaller until they divide what was given.

        With `trainer.epochs` the steps are the fewest that do so many passes over the training set and that the others
        can divide: where they can't, as with a prime number, a few more, at most 5%.
        """
        least = self._steps_of_epochs(count)
        if least is None:
            self._divide()
            return self.build()
        more = min(least // 20, self.typed("trainer.eval_every"))  # the next multiple of it can be divided
        tree = self
        for steps in (*range(least, least + more + 1), least):
            tree = self.copy()
            tree.values[STEPS], tree.origin[STEPS] = steps, FROM_EPOCHS
            if tree._divide():
                break
        self.values, self.origin = tree.values, tree.origin
        return self.build()

    def _steps_of_epochs(self, count: ExampleCounter | None) -> int | None:
        """The steps of `trainer.epochs`. None if it is not given, or a later layer says `trainer.steps`.

        Raises:
            UsageError: one layer gives both, or the data must be prepared before they can be counted.
        """
        epochs = self.typed(EPOCHS) if EPOCHS in self.values else None
        if count is None or epochs is None or epochs <= 0:  # which the configuration refuses
            return None
        places = {label: place for place, label in enumerate([*self.layers, FROM_COMMAND_LINE])}
        by_steps, by_epochs = (places[self.origin[field]] for field in LENGTH_FIELDS)
        if by_steps == by_epochs:
            raise UsageError(f"{self.origin[EPOCHS]}: {STEPS}= and {EPOCHS}= both say how long: leave one of them out")
        if by_steps > by_epochs:
            self.values[EPOCHS], self.origin[EPOCHS] = None, self.origin[STEPS]
            return None
        fields = {field: self.typed(field) for field in self.values if field.startswith("task.")}
        examples = count(self._built(self.example.task, fields, "task."))
        if "train_share" in self.values:
            examples *= Fraction(str(self.typed("train_share")))
        exact = Fraction(str(epochs)) * examples / max(self.typed("batch.size"), 1)
        return max(math.ceil(exact), 1)

    def _divide(self) -> bool:
        """Makes fields of `multiples` smaller until they divide what was given. Returns whether all do.

        A field that was given stays as it is. So does a field whose nearest divisor is less than a tenth of it, as the
        run would validate or log far too often; the configuration then refuses it.
        """
        changed, divided = {FROM_COMMAND_LINE, FROM_EPOCHS}, True
        for whole, part in getattr(self.example, "multiples", ()):
            multiple, value = self.typed(whole), self.typed(part)
            if self.origin[whole] in changed and self.origin[part] != FROM_COMMAND_LINE:
                largest = min(multiple, value)
                smaller = range(largest, max(largest // 10, 1) - 1, -1)
                divisor = next((each for each in smaller if multiple % each == 0), value)
                if divisor != value:
                    self.values[part] = value = divisor
                    self.origin[part] += f", made to divide {whole}"
                    changed.add(self.origin[part])
            divided = divided and value > 0 and multiple % value == 0
        return divided

    def build(self) -> Any:
        """Returns the configuration. Raises a UsageError for a value that its field can't have."""
        values = {field: self.typed(field) for field in self.values}
        built = self._built(self.example, values)
        for field, value in values.items():
            refuse_large_integers(f"{self.origin[field]}: {field}={value}", value, (1 << 64) - 1)  # as a seed
        return built

    def _built(self, node: Any, values: Mapping[str, Any], section: str = "") -> Any:
        """A dataclass like `node` with these values."""
        return type(node)(**{
            name: values[f"{section}{name}"]
            if f"{section}{name}" in values
            else self._built(getattr(node, name), values, f"{section}{name}.")
            for name in _field_types(type(node))
        })  # fmt: skip

    def typed(self, field: str) -> Any:
        """Returns a field's value in the field's type. Raises a UsageError if the value does not fit."""
        value = self.values[field]
        if self.origin[field] == FROM_DEFAULT:
            return value
        given = f"{self.origin[field]}: {field}={shorten(self.given.get(field, value))}"
        return convert_value(value, self.hints[field], given)

    def override(self, overrides: Iterable[Override]) -> tuple[Override, ...]:
        """Sets the command line's fields and returns them with complete names, sorted."""
        for override in overrides:
            field = self.resolve(override.field)
            if field in self.given:
                raise UsageError(f"{field}= is given twice")
            self.merge((FROM_COMMAND_LINE, {field: override.text}))
            self.given[field] = override.text
            self.values[field] = self.typed(field)
        return tuple(sorted((Override(*item) for item in self.given.items()), key=str))

    def resolve(self, field: str) -> str:
        """Returns the complete name of a field. Fields of a task may be written without `task.`."""
        short = f"task.{field}"
        return short if field not in self.origin and short in self.origin else field

    def unknown(self, field: str) -> str:
        leaf = field.lower().rpartition(".")[2]
        same_leaf = [known for known in self.origin if known.rpartition(".")[2] == leaf]
        near = same_leaf or difflib.get_close_matches(field.lower(), self.origin, n=1, cutoff=0.6)
        return f"unknown field '{field}'" + (f": did you mean '{near[0]}'?" if near else ": lra config show lists all")
