"""The grid of a table of accuracies: attentions by columns by seeds. Each cell is one run of `lra fit`.

Its run directory (`RunDirectory`) is a cell's only state. So a grid may be stopped at any time, continued on another
machine, or filled by hand with `lra fit`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from lra.config.compose import ComposedConfig, list_differences, to_dict
from lra.config.override import Override, parse_overrides
from lra.config.recipes import config_file, config_label, config_stem, read_config_yaml, read_recipe
from lra.config.registry import Registry, describe_unknown
from lra.errors import UsageError, shorten
from lra.models.attention import ATTENTIONS
from lra.reading import is_number
from lra.tasks import TASKS
from lra.training.fit import configure
from lra.training.run_directory import RunDirectory

# Fields of a task that do not change what its scores mean: where its data lies, which part is held out, from which
# stream it is drawn, how much there is, and how its classifier compares two texts.
EQUIVALENT_TASK_FIELDS = tuple(
    f"task.{name}" for name in ("source", "data_seed", "version", "train", "val", "test", "fresh", "difference")
)
# fields of `lra fit` that the grid or the command sets
FIELDS_OF_GRID = {"task": "tasks=", "attn": "attns=", "seed": "seeds=", "resume": "nothing, every run is resumed"}
League = Literal["strict", "open"]  # lra.experiments.grid.league says what they are
OWN_FIGURES = ("average", "speedup")  # of all columns: a paper may state them beside those of each
MOST_SEEDS = 1000  # nobody trains more: a number with too many digits would never end


@dataclass(frozen=True)
class Column:
    """A task under a protocol."""

    fields: tuple[Override, ...]  # arguments of `lra fit` that choose it, under their complete names
    apart: bool = False  # enters no average, and runs only if it is asked for

    @property
    def task(self) -> str:
        return TASKS.name_of(next(override.text for override in self.fields if override.field == "task"))

    @property
    def recipe(self) -> str | None:
        """Its recipe, if that is another than the table's."""
        return next((override.text for override in self.fields if override.field == "recipe"), None)


@functools.cache
def compose_once(args: tuple[Override, ...]) -> ComposedConfig:
    """A composed configuration. It is cached, as cells share stages; a command that makes cells clears the cache."""
    return configure(args, lambda start: str(RunDirectory(compose_once(start)).path))


@dataclass(frozen=True)
class Cell:
    """One attention, column and seed."""

    column: str
    attn: str
    seed: int
    args: tuple[Override, ...]  # of `lra fit`

    @property
    def composed(self) -> ComposedConfig:
        return compose_once(self.args)

    @functools.cached_property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.composed)

    @functools.cached_property
    def stages(self) -> tuple[Cell, ...]:
        """The runs that the recipe puts before this one, the first of all first."""
        if self.composed.start is None:
            return ()
        attn = compose_once(self.composed.start).config.attn.name
        before = Cell(self.column, attn, self.seed, self.composed.start)
        chain = (*before.stages, before)
        return tuple(replace(cell, column=f"{self.column} stage {i}") for i, cell in enumerate(chain, 1))

    def __str__(self) -> str:
        return f"{self.column} {self.attn} seed {self.seed}"


@dataclass(frozen=True)
class PublishedModel:
    """A model of another paper, which a table shows below its attentions. Figures are accuracies in %, by column."""

    league: str
    source: str
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Grid:
    """A table of a paper, as its YAML states it."""

    name: str
    about: str
    source: str
    recipe: str  # if the command line names none
    seeds: int  # likewise; how many there are, from 0
    attns: tuple[str, ...]  # names and references, as `attn=` takes them
    columns: Mapping[str, Column]
    paper: Mapping[str, Mapping[str, float]]  # attention -> column, `average` or `speedup` -> the paper's figure
    published: Mapping[str, PublishedModel] = field(default_factory=dict)
    means: Mapping[str, Sequence[str]] = field(default_factory=dict)  # further averages: the columns of each
    others: Mapping[str, str] = field(
        default_factory=dict
    )  # columns with another task than the paper's, and the difference
    argument: str = ""  # what commands take for it: its name or its file

    def under(self, cells: Iterable[Cell]) -> Grid:
        """This grid for the given cells, as their recipe and the user's fields make it.

        Where these make a column another task than the paper's, the title says so, and the paper's figures are left
        out.
        """
        found: dict[str, dict[str, None]] = {}
        for cell in cells:
            if cell.seed > 0:
                continue  # its task is that of seed 0, and composing takes long
            task, made = cell.composed.config.task, self.columns[cell.column].fields
            paper, here = ({"task": to_dict(config)} for config in (type(task)(), task))
            changed = list_differences(paper, here, (*EQUIVALENT_TASK_FIELDS, *(override.field for override in made)))
            found.setdefault(cell.column, {}).update(dict.fromkeys(changed))
        others = {column: "; ".join(changed) for column, changed in found.items() if changed}
        changed = replace(self, others=others)
        return replace(changed, about=changed.titled(self.about))

    def titled(self, title: str) -> str:
        """The title of a table, with the columns whose task is another than the paper's."""
        return f"{title}; of other tasks: {', '.join(self.others)}" if self.others else title

    @property
    def cited(self) -> str:
        """The source of the figures, and where they are left out."""
        out = ", ".join(f"{column} ({changed})" for column, changed in self.others.items())
        out = f"; its figures, averages too, are left out where the task is another: {out}" if out else ""
        return f"paper: {self.source}{out}"

    def figure(self, attn: str, name: str) -> float | None:
        """The paper's figure in a column, or its `average` or `speedup` over all columns that are not apart.

        None if the paper has none, or if one of these columns has another task here.
        """
        of = [name] if name in self.columns else self.together()
        return None if self.others.keys() & of else self.paper.get(attn, {}).get(name)

    def together(self, columns: Iterable[str] | None = None) -> list[str]:
        """The columns, of these or of all, that are not apart: those that averages are of."""
        return [name for name in (self.columns if columns is None else columns) if not self.columns[name].apart]

    def averaged(self, columns: Sequence[str]) -> list[str]:
        """The columns of these that an average is of: at least two, and none if the paper has no average."""
        has = any("average" in row for row in self.paper.values())
        names = [name for name in self.together() if has and name in columns]
        return names if len(names) > 1 else []

    def averages(self, columns: Sequence[str]) -> dict[str, list[str]]:
        """The averages over these columns by name: `average`, if the paper has one, and the table's own `means`."""
        averaged = self.averaged(columns)
        own = {name: list(names) for name, names in self.means.items() if {*names} <= {*columns}}
        return ({"average": averaged} if averaged else {}) | own

    def average(self, attn: str, columns: Sequence[str]) -> float | None:
        """The paper's average over these columns: its own for all columns, else the mean; None if it lacks one."""
        if [*columns] == self.averaged(list(self.columns)):
            return self.figure(attn, "average")
        known = [figure for name in columns if (figure := self.figure(attn, name)) is not None]
        return statistics.fmean(known) if known and len(known) == len(columns) else None

    def covered(self, columns: Iterable[str], recipe: str | None = None) -> list[str]:
        """The columns of these whose recipe has their task. Another `recipe` is none of a column with its own."""
        found = []
        for name in columns:
            own = self.columns[name]
            tasks = read_recipe(recipe or own.recipe or self.recipe)["tasks"]
            if own.task in map(TASKS.name_of, map(str, tasks)) and own.recipe in (None, recipe or own.recipe):
                found.append(name)
        return found

    def rows(self, attns: Sequence[str] | None = None) -> list[str]:
        """The names of these attentions, or of the table's."""
        return [ATTENTIONS.find(attn).name for attn in attns or self.attns]

    def cells(
        self,
        columns: Sequence[str] | None = None,
        attns: Sequence[str] | None = None,
        seeds: int | None = None,
        recipe: str | None = None,
        fields: Iterable[str | Override] = (),
    ) -> list[Cell]:
        """All cells of these columns and attentions, seed by seed, so that one seed's table is complete first.

        Args:
            columns: by default those that are not apart and that the recipe covers.
            recipe: instead of the table's. A column with a recipe of its own has no other.
            attns: by default the table's. Any other has no figure of the paper's.
            fields: further arguments of `lra fit` for every cell. They replace what a column sets, beside its task and
                the task's fields.

        Raises:
            UsageError: for an unknown name, a field that the grid sets or that makes a column, and too many seeds.
        """
        given = {override.field: override for override in parse_overrides(fields)}
        for override in given.values():
            if mend := FIELDS_OF_GRID.get(override.field):
                raise UsageError(f"{override} can't be one for every cell: give {mend}")
        if seeds is not None and seeds > MOST_SEEDS:
            raise UsageError(f"seeds={seeds}: it is how many there are, at most {MOST_SEEDS}")
        compose_once.cache_clear()  # recipes may have changed since the last grid
        rows = [ATTENTIONS.find(attn) for attn in attns or self.attns]
        # with a recipe that covers none, the first cell says so
        columns = columns or self.covered(self.together(), recipe) or self.together()
        for name in columns:
            if name not in self.columns:
                raise UsageError(describe_unknown("task", name, self.columns))
            if recipe and (other := self.columns[name].recipe) not in (None, recipe):
                raise UsageError(f"recipe={recipe}: column {name} is made by recipe={other}, leave it out")
            for made in self.columns[name].fields:
                override = given.get(made.field) or given.get(made.field.removeprefix("task."))
                if override and made.field.startswith("task"):
                    raise UsageError(
                        f"{override}: column {name} is made by {made}: leave it out, or name another in tasks="
                    )
        own = {
            name: [made for made in self.columns[name].fields if made.field not in {"recipe", *given}]
            for name in columns
        }
        recipes = {name: recipe or self.columns[name].recipe or self.recipe for name in columns}
        return [
            Cell(column, row.name, seed, parse_overrides((
                *own[column], f"attn={row.reference}", f"recipe={recipes[column]}", f"seed={seed}", *given.values(),
            )))
            for seed in range(self.seeds if seeds is None else seeds)
            for column in columns
            for row in rows
        ]  # fmt: skip


def read_grid(name: str) -> Grid:
    """The grid of a table's YAML, by name or path. UsageError if it does not exist or is no table."""
    tree, label = read_config_yaml("table", name), config_label("table", name)
    if wrong := next(_faults(tree), None):
        raise UsageError(f"{label}: {wrong}")
    columns = {
        key: Column(parse_overrides(value["fields"], f"{label}: column {key}: "), value.get("apart", False))
        for key, value in tree["columns"].items()
    }
    default = {"about": f"accuracy on {', '.join(columns)}", "source": "no paper", "seeds": 1, "paper": {}}
    published = {
        model: PublishedModel(**{key: row[key] for key in ("league", "source")}, figures=_figures(row))
        for model, row in tree.get("published", {}).items()
    }
    made = {"attns": tuple(tree["attns"]), "columns": columns, "published": published}
    return Grid(name=config_stem(name), argument=name, **(default | tree | made))


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a published model."""
    return {key: value for key, value in row.items() if key not in ("league", "source")}


def _faults(tree: Mapping[str, Any]) -> Iterator[str]:
    """Why a YAML tree is no table, the first reason first."""
    required, optional = ("recipe", "attns", "columns"), ("about", "source", "seeds", "paper", "published", "means")
    for key in tree:
        if key not in (*required, *optional):
            yield describe_unknown("field", str(key), (*required, *optional))
    if lacking := [key for key in required if not tree.get(key)]:
        yield f"it lacks {', '.join(lacking)}"
    for key, kind, form in (
        ("about", str, "a text"), ("source", str, "a text"), ("recipe", str, "a recipe's name"),
        ("seeds", int, "how many there are"), ("attns", list, "a list of attentions"),
        ("columns", dict, "a mapping of columns"), ("paper", dict, "a mapping of attentions"),
        ("published", dict, "a mapping of models"), ("means", dict, "a mapping of names to lists of columns"),
    ):  # fmt: skip
        if key in tree and (not isinstance(tree[key], kind) or isinstance(tree[key], bool)):
            yield f"{key} is {shorten(repr(tree[key]))}, and must be {form}"
    if not 1 <= tree.get("seeds", 1) <= MOST_SEEDS:
        yield f"seeds is {tree['seeds']}, and must be 1 to {MOST_SEEDS}"
    try:
        config_file("recipe", tree["recipe"])
    except UsageError as error:
        yield str(error)
    for attn in tree["attns"]:
        yield from _unknown(ATTENTIONS, str(attn))
    for name, column in tree["columns"].items():
        made = column.get("fields") if isinstance(column, dict) else None
        if not isinstance(name, str):
            yield f"the name of column {name} is not a text: write it in quotes"
        elif name in OWN_FIGURES:
            yield f"column {name} has the name of a figure of all columns: choose another"
        elif not isinstance(made, list) or not all(isinstance(text, str) and "=" in text for text in made):
            yield f"column {name} needs fields, a list of arguments of lra fit: {name}: {{fields: [task={name}]}}"
        elif column.keys() - {"fields", "apart"} or not isinstance(column.get("apart", False), bool):
            yield f"column {name} has more than fields and apart, which is true or false"
        elif len(task := [text.removeprefix("task=") for text in made if text.startswith("task=")]) != 1:
            yield f"column {name} needs one task= among its fields"
        else:
            yield from (f"column {name}: {why}" for why in _unknown(TASKS, task[0]))
    for attn, figures in tree.get("paper", {}).items():
        if not isinstance(figures, dict) or not all(is_number(figure) for figure in figures.values()):
            yield f"paper's {attn} is {shorten(repr(figures))}, and must be a mapping of columns to numbers"

    for model, row in tree.get("published", {}).items():
        stated = isinstance(row, dict) and isinstance(row.get("source"), str) and row.get("league") in get_args(League)
        if not stated or not all(map(is_number, _figures(row).values())):
            yield f"published {model} needs a source, a league, which is strict or open, and numbers for columns"
        else:
            unknown = (name for name in _figures(row) if name not in tree["columns"])
            yield from (f"published {model}: {describe_unknown('column', name, tree['columns'])}" for name in unknown)
    for mean, names in tree.get("means", {}).items():
        if not isinstance(names, list) or {*map(str, names)} - tree["columns"].keys():
            yield f"mean {mean} is {shorten(repr(names))}, and must be a list of columns of this table"
        elif mean in (*OWN_FIGURES, *tree["columns"]):
            yield f"mean {mean} has the name of a column or a figure of all columns: choose another"


def _unknown(registry: Registry, text: str) -> Iterator[str]:
    """Why a name or reference finds nothing."""
    try:
        registry.find(text)
    except UsageError as error:
        yield str(error)
