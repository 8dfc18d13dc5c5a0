"""Components found by name: files of a folder and other packages' entry points, listed without importing them."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from lra.errors import UsageError

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Entry:
    """What a source file declares about its component, read without importing it."""

    name: str
    module: str
    summary: str  # first line of the class's docstring
    facts: dict[str, Any]  # the keyword arguments of its register(...)
    requires: tuple[str, ...] = ()  # optional packages it imports when used
    lacks: str = ""  # what another package's declaration lacks; then nothing else here need be so

    @property
    def missing(self) -> tuple[str, ...]:
        """What its declaration lacks, or the requirements that nothing here meets, `a or b` of alternatives."""
        if self.lacks:
            return (self.lacks,)
        choices = (requirement.split("|") for requirement in self.requires)
        return tuple(" or ".join(names) for names in choices if not any(map(_present, names)))


class Registry:
    """Classes registered by name in the modules of one package, and in those that entry points name.

    A component is one file, or several alike share one: `@REGISTRY.register("name", fact=value, ...)` above a class
    with a nested dataclass `Config`. The facts are literals, so that `catalogue()` answers from the source alone; on
    import they become an instance of the registry's `facts` dataclass on the class. Another installed package adds a
    component by an entry point `name = "module"` of the group `entry_points`; its name must be nobody else's.
    """

    def __init__(self, kind: str, package: str, facts: type, entry_points: str | None = None):
        self.kind, self.package, self.facts, self.entry_points = kind, package, facts, entry_points
        self._classes: dict[str, Any] = {}

    def register(self, name: str, *, requires: tuple[str, ...] = (), **facts: Any) -> Callable[[C], C]:
        """Adds a class. `requires` names optional packages; `get` reads it from the source, before the import.

        A requirement may list alternatives, `"a|b|$FILE"`; `$FILE` is an environment variable that names a file.
        """

        def add(cls: C) -> C:
            if name in self._classes:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            cls.name, cls.facts = name, self.facts(**facts)  # type: ignore[attr-defined]
            if "Config" not in vars(cls):  # inherited: a name written there would be every heir's
                cls.Config = type("Config", (cls.Config,), {})  # type: ignore[attr-defined]
            cls.Config.name = name  # type: ignore[attr-defined]
            self._classes[name] = cls
            return cls

        return add

    def catalogue(self) -> dict[str, Entry]:
        """Every component by name, without importing any; what other packages declare badly `lacks` something."""
        entries = self.builtins()
        for name, points in self._entry_points.items():
            owners = ["lra"] * (name in entries) + [_owner(point) for point in points]
            entry = entries.get(name) or self._installed(points[0])
            if len(owners) > 1:
                entry = replace(entry, lacks=f"a name of its own, as {' and '.join(sorted(owners))} have a '{name}'")
            entries[name] = entry
        return dict(sorted(entries.items()))

    def builtins(self) -> dict[str, Entry]:
        """Every component of the registry's own package, by name, without importing any."""
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations, self.package
        files = (f for folder in spec.submodule_search_locations for f in sorted(Path(folder).glob("*.py")))
        entries = (entry for file in files for entry in _declared(file, f"{self.package}.{file.stem}"))
        return {entry.name: entry for entry in sorted(entries, key=lambda e: e.name)}

    def declared(self, entry: Entry) -> Any:
        """An entry's facts, with the defaults of those it leaves out: an instance of the registry's `facts`."""
        return self.facts(**entry.facts)

    def get(self, name: str) -> Any:
        """The class registered as `name`; UsageError, with a suggestion, if there is none or it can't be had."""
        if name not in self._classes or name in self._entry_points:
            catalogue = self.catalogue()
            entry = catalogue.get(name)
            if entry is None:
                raise UsageError(unknown(self.kind, name, catalogue))
            if entry.lacks:
                raise UsageError(f"{self.kind} '{name}' lacks {entry.lacks}: mend or uninstall that package")
            if entry.missing:
                packages = " ".join(requirement.split()[0] for requirement in entry.missing)
                raise UsageError(f"{self.kind} '{name}' needs {', '.join(entry.missing)}: pip install {packages}")
            importlib.import_module(entry.module)
        return self._classes[name]

    @cached_property  # the installed packages are read once
    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        """The entry points of the registry's group by name, which more than one package may have taken."""
        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self.entry_points) if self.entry_points else ():
            found.setdefault(point.name, []).append(point)
        return found

    def _installed(self, point: EntryPoint) -> Entry:
        """What the module that an entry point names declares under the entry point's name."""
        lacks = f"the module {point.value} that {_owner(point)} names"
        try:
            if file := _source(point.value):
                declared = {entry.name: entry for entry in _declared(file, point.value)}
                if entry := declared.get(point.name):
                    self.declared(entry)
                    return entry
                others = f", which registers {', '.join(sorted(declared))}" if declared else ""
                lacks = f"a class registered as '{point.name}' in {point.value} of {_owner(point)}{others}"
        except Exception as error:  # another's source: whatever is wrong with it, the rest is listed
            lacks = f"a declaration that can be read in {point.value} of {_owner(point)} ({error})"
        required = (field.name for field in fields(self.facts) if field.default is MISSING)
        return Entry(point.name, point.value, "", dict.fromkeys(required, ""), lacks=lacks)


def _declared(file: Path, module: str) -> Iterable[Entry]:
    """The components that a source file registers."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        summary = (ast.get_docstring(node) or "").split("\n")[0]
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "register":
                facts = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
                requires = facts.pop("requires", ())
                yield Entry(ast.literal_eval(call.args[0]), module, summary, facts, requires)


def _source(module: str) -> Path | None:
    """A module's file, found without importing its parents; None if there is none."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for name in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
    return Path(spec.origin) if spec is not None and spec.origin else None


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an unnamed package"


def _present(name: str) -> bool:
    return bool(os.environ.get(name[1:])) if name.startswith("$") else importlib.util.find_spec(name) is not None


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist: the nearest ones, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind} '{name}': " + (
        f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(sorted(known))}"
    )
