"""Components found by name: one file per component in a folder, listed without importing it."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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

    @property
    def missing(self) -> tuple[str, ...]:
        """The requirements that nothing here meets, `a or b` where there are alternatives."""
        choices = (requirement.split("|") for requirement in self.requires)
        return tuple(" or ".join(names) for names in choices if not any(map(_present, names)))


class Registry:
    """Classes registered by name in the modules of one package.

    A component is one file, or several alike share one: `@REGISTRY.register("name", fact=value, ...)` above a class
    with a nested dataclass `Config`. The facts are literals, so that `catalogue()` answers from the source alone; on
    import they become an instance of the registry's `facts` dataclass on the class.
    """

    def __init__(self, kind: str, package: str, facts: type):
        self.kind, self.package, self.facts = kind, package, facts
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
        """Every component of the package, by name, without importing any."""
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations, self.package
        files = (f for folder in spec.submodule_search_locations for f in sorted(Path(folder).glob("*.py")))
        entries = (entry for file in files for entry in self._declared(file))
        return {entry.name: entry for entry in sorted(entries, key=lambda e: e.name)}

    def declared(self, entry: Entry) -> Any:
        """An entry's facts, with the defaults of those it leaves out: an instance of the registry's `facts`."""
        return self.facts(**entry.facts)

    def get(self, name: str) -> Any:
        """The class registered as `name`; UsageError with a suggestion if there is none."""
        if name not in self._classes:
            entry = self.catalogue().get(name)
            if entry is None:
                raise UsageError(unknown(self.kind, name, self.catalogue()))
            if entry.missing:
                packages = " ".join(requirement.split()[0] for requirement in entry.missing)
                raise UsageError(f"{self.kind} '{name}' needs {', '.join(entry.missing)}: pip install {packages}")
            importlib.import_module(entry.module)
        return self._classes[name]

    def _declared(self, file: Path) -> Iterable[Entry]:
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            summary = (ast.get_docstring(node) or "").split("\n")[0]
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "register":
                    facts = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
                    requires = facts.pop("requires", ())
                    yield Entry(ast.literal_eval(call.args[0]), f"{self.package}.{file.stem}", summary, facts, requires)


def _present(name: str) -> bool:
    return bool(os.environ.get(name[1:])) if name.startswith("$") else importlib.util.find_spec(name) is not None


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist: the nearest ones, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind} '{name}': " + (
        f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(sorted(known))}"
    )
