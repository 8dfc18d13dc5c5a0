"""Components by name, listed without importing them: files of a folder, other packages' entry points, a user's file."""

from __future__ import annotations

import ast
import copyreg
import difflib
import functools
import importlib.util
import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from lra.config.declaration import config_flaw, declare_component, make_facts, read_registration
from lra.config.sources import (
    SCRIPT,
    Source,
    explain_syntax,
    find_file_or_module,
    find_source,
    import_component,
    name_line,
    split_reference,
)
from lra.errors import UsageError

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class CatalogueEntry:
    """What a source file declares about its component, read without importing it."""

    name: str
    module: str
    summary: str  # first line of the class's docstring
    facts: dict[str, Any]  # the keyword arguments of its register(...)
    requires: tuple[str, ...] = ()  # optional packages it imports when used
    lacks: str = ""  # what its declaration lacks; the other facts may then be wrong
    source: str = ""  # the module or file that a user named; empty for what is found by its name alone
    class_name: str = ""  # as its source has it

    @property
    def reference(self) -> str:
        """The text that finds it in any process: `name`, or `source:name`."""
        return f"{self.source}:{self.name}" if self.source else self.name

    @property
    def missing(self) -> tuple[str, ...]:
        """What the declaration lacks, or else the requirements that this machine does not meet."""
        if self.lacks:
            return (self.lacks,)
        choices = (requirement.split("|") for requirement in self.requires)
        return tuple(" or ".join(names) for names in choices if not any(map(_is_installed, names)))


class Registry:
    """Classes registered by name in the modules of one package, in those that entry points name, and in a user's own.

    A component is one file, or several alike share one: `@REGISTRY.register("name", fact=value, ...)` above a class
    with a nested dataclass `Config`. The facts are literals, so that `catalogue()` answers from the source alone; on
    import they become an instance of the registry's `facts` dataclass on the class. Another installed package adds a
    component by an entry point `name = "module"` of the group `entry_points`. A user names the module or the file, as
    in `module:Class`, `file.py` or `file.py:name`, or registers the class before. No other component may have its name.

    A component subclasses one of `bases`, classes of the package's module `base`, and has all of `parts`. If it
    has `method_flaw(facts)`, that says what is wrong with its methods.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        facts: type,
        entry_points: str | None = None,
        bases: Sequence[str] = (),
        parts: Sequence[str] = ("Config",),
    ):
        self.kind, self.package, self.facts, self.entry_points = kind, package, facts, entry_points
        self.bases, self.parts = bases, parts
        self._classes: dict[str, Any] = {}
        self._declared: dict[str, Any] = {}  # of classes that were not imported when their configuration was asked for

    def register(self, name: str, *, requires: tuple[str, ...] = (), **facts: Any) -> Callable[[_Class], _Class]:
        """Adds a class.

        Args:
            requires: optional packages, which `get` reads from the source before the import. A requirement may list
                alternatives, `"a|b|$FILE"`; `$FILE` is an environment variable that names a file.
            facts: literals, the fields of the registry's `facts`.
        """

        def add(cls: _Class) -> _Class:
            given = make_facts(self.facts, facts)
            if flaw := self._flaw(cls, given):
                caller = traceback.extract_stack(limit=2)[0]
                raise UsageError(f"{name_line(Path(caller.filename), caller.lineno)}: {flaw}")
            before = self._classes.get(name)
            if before is not None and _place(before) != _place(cls):  # a cell that runs again replaces its own
                raise UsageError(
                    f"{self.kind} '{name}' is registered twice, by {_place(before)} and {_place(cls)}: rename one"
                )
            listed = self._is_listed(name, cls.__module__)
            if not listed:
                self._check_name(name, cls.__module__)
            cls.name, cls.facts = name, given  # type: ignore[attr-defined]
            if name in self._declared and listed:  # one component has one Config
                cls.Config = self._declared[name].Config  # type: ignore[attr-defined]
            if "Config" not in vars(cls):  # inherited: a name written there would be every heir's
                place = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}  # pickle reads it
                cls.Config = type("Config", (cls.Config,), place)  # type: ignore[attr-defined]
            cls.Config.name, cls.Config.imported_from = name, "" if listed else cls.__module__  # type: ignore[attr-defined]
            self._classes[name] = cls
            return cls

        return add

    def _flaw(self, cls: Any, facts: Any) -> str:
        """Says why a class can't be a component, and how to mend it; empty if it can."""
        names = [base.__name__ for base in cls.__mro__ if base.__module__ == f"{self.package}.base"]
        if self.bases and not {*names} & {*self.bases}:
            return f"{cls.__name__} is no {self.kind}: subclass {' or '.join(self.bases)} of {self.package}.base"
        if missing := [part for part in self.parts if not hasattr(cls, part)]:
            return f"{cls.__name__} lacks what every {self.kind} has: add {' and '.join(missing)} to the class"
        if flaw := config_flaw(cls.Config):
            return f"the Config of {cls.__name__} {flaw}"
        flaw = cls.method_flaw(facts) if hasattr(cls, "method_flaw") else ""
        return flaw and f"{cls.__name__} {flaw}"

    def catalogue(self) -> dict[str, CatalogueEntry]:
        """Returns every component by name and imports none. A component that is declared badly `lacks` something."""
        entries = self.builtins()
        for name, points in self._entry_points.items():
            owners = [owning_package(point) for point in points]
            if name in entries:
                owners.append("lra")
            entry = entries.get(name) or self._installed_entry(points[0])
            entries[name] = _clashing_entry(entry, owners) if len(owners) > 1 else entry
        for name, cls in self._classes.items():
            if name not in entries and (source := cls.Config.imported_from):
                summary = (cls.__doc__ or "").split("\n")[0]
                entries[name] = CatalogueEntry(name, cls.__module__, summary, vars(cls.facts), source=source)
        return dict(sorted(entries.items()))

    def builtins(self) -> dict[str, CatalogueEntry]:
        """Returns every component of the registry's own package by name, and imports none."""
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations, self.package
        found: dict[str, list[CatalogueEntry]] = {}
        for folder in spec.submodule_search_locations:
            for file in sorted(Path(folder).glob("*.py")):
                for entry in self._entries_of(file):
                    found.setdefault(entry.name, []).append(entry)
        return {
            name: _clashing_entry(same[0], [_source_path(entry.module) for entry in same]) if len(same) > 1 else same[0]
            for name, same in sorted(found.items())
        }

    def facts_of(self, entry: CatalogueEntry) -> Any:
        """Returns an entry's facts as an instance of the registry's `facts`, which has the defaults."""
        return self.facts(**entry.facts)

    def find(self, text: str) -> CatalogueEntry:
        """Returns the component of a name or a reference, and imports nothing. UsageError if there is none."""
        source, name = split_reference(text)
        if source and source != SCRIPT:
            return self._referred_entry(find_file_or_module(source), name)
        catalogue = self.catalogue()
        if name in catalogue:
            return catalogue[name]
        if source:
            raise UsageError(
                f"{self.kind} '{name}' was registered in a script or notebook: register it before, or save its class "
                f"as a file and name that: <file>.py:{name}"
            )
        raise UsageError(describe_unknown(self.kind, name, catalogue))

    def name_of(self, text: str) -> str:
        """Returns the name of the component that a reference finds, and a name as it is, known or not."""
        return self.find(text).name if split_reference(text)[0] else text

    def get(self, text: str) -> Any:
        """Returns the class of a name or a reference, to use it. UsageError as in `find_usable`."""
        return self._import(self.find_usable(text))

    def find_usable(self, text: str) -> CatalogueEntry:
        """Returns the component of a name or a reference, and imports nothing.

        Raises a UsageError that says what to do if it can't be used, also if a package that it needs is not installed.
        """
        entry = self.find(text)
        if not entry.lacks and entry.missing:  # even if it is imported: what can be used does not depend on that
            packages = " ".join(requirement.split()[0] for requirement in entry.missing)
            raise UsageError(f"{self.kind} '{entry.name}' needs {', '.join(entry.missing)}: pip install {packages}")
        return self._whole(entry)

    def get_declared(self, text: str) -> Any:
        """Returns a class with the `Config`, the `facts` and the `recipe_section` of a name or a reference.

        A component of the registry's own package is not imported for that. Packages that it needs may be missing here:
        results of other machines are read with it. Raises a UsageError if its declaration is wrong.
        """
        entry = self._whole(self.find(text))
        name = entry.name
        if name in self._classes or not self._is_own(entry.module):
            return self._import(entry)
        if name not in self._declared:
            file = find_source(entry.module)
            assert file is not None, entry.module
            declared = declare_component(file, entry.module, entry.class_name)
            if declared is None or config_flaw(declared.Config):  # the import says what is wrong, and where
                return self._import(entry)
            declared.facts = self.facts_of(entry)
            declared.Config.name, declared.Config.imported_from = name, ""
            copyreg.pickle(declared.Config, self._pickled)
            self._declared[name] = declared
        return self._declared[name]

    def _whole(self, entry: CatalogueEntry) -> CatalogueEntry:
        """Returns the entry. UsageError if its declaration is wrong."""
        if entry.lacks:  # even if it is imported: another one may have taken its name
            raise UsageError(f"{self.kind} '{entry.name}' lacks {entry.lacks}: rename, mend or remove what declares it")
        return entry

    def _import(self, entry: CatalogueEntry) -> Any:
        """Returns the class of an entry whose declaration is whole."""
        name = entry.name
        if name not in self._classes or self._classes[name].__module__ != entry.module:
            import_component(entry.module)
        if entry.source:
            self._classes[name].Config.imported_from = entry.source
        if entry.source.endswith(".py"):
            copyreg.pickle(self._classes[name].Config, self._pickled)
        return self._classes[name]

    def _pickled(self, config: Any) -> tuple[Any, ...]:
        """Names the component of a configuration to pickle, as another process can't import the `Config` by itself."""
        origin = (self.package, f"{self.kind.upper()}S", config.name, config.imported_from)
        return _empty_config, origin, config.__getstate__()

    def get_saved(self, saved: Mapping[str, Any], field: str) -> Any:
        """Returns the class of a saved configuration. The UsageError says which `field` may name its source anew."""
        if not (source := saved.get("from")):
            return self.get_declared(saved["name"])
        try:
            return self.get_declared(f"{source}:{saved['name']}")
        except UsageError as error:
            raise UsageError(f"{error} ({field}= says where it is now)") from None

    @cached_property  # the installed packages are read once
    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        """The entry points of the registry's group by name. Several packages may have taken the same name."""
        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self.entry_points) if self.entry_points else ():
            found.setdefault(point.name, []).append(point)
        return found

    def _entries_of(self, file: Path) -> Sequence[CatalogueEntry]:
        """Returns the components that a file of the registry's package declares, or one that says what is wrong."""
        module = f"{self.package}.{file.stem}"
        try:
            entries = _read_entries(file, module, file.stat().st_mtime_ns)
            for entry in entries:
                make_facts(self.facts, entry.facts)
        except Exception as error:  # one is being written, perhaps: the rest is listed
            return [
                self._broken_entry(
                    file.stem, module, f"a declaration that can be read in {_source_path(module)} ({error})"
                )
            ]
        return entries

    def _installed_entry(self, point: EntryPoint) -> CatalogueEntry:
        """What the module that an entry point names declares under the entry point's name."""
        lacks = f"the module {point.value} that {owning_package(point)} names"
        try:
            if file := find_source(point.value):
                declared = {entry.name: entry for entry in _read_entries(file, point.value, file.stat().st_mtime_ns)}
                if entry := declared.get(point.name):
                    make_facts(self.facts, entry.facts)
                    return entry
                others = f", which registers {', '.join(sorted(declared))}" if declared else ""
                lacks = f"a class registered as '{point.name}' in {point.value} of {owning_package(point)}{others}"
        except Exception as error:  # another's source: whatever is wrong with it, the rest is listed
            lacks = f"a declaration that can be read in {point.value} of {owning_package(point)} ({error})"
        return self._broken_entry(point.name, point.value, lacks)

    def _referred_entry(self, source: Source, name: str) -> CatalogueEntry:
        """What a user's module or file declares by a name, or alone. UsageError if there is no such component.

        The name is the registered one, or that of the class.
        """
        text, file = source.text, source.file
        try:
            entries = _read_entries(file, source.module, file.stat().st_mtime_ns)
            declared = {entry.name: entry for entry in entries}
            entry = next((each for each in entries if name in ("", each.name, each.class_name)), None)
            if entry is not None:
                make_facts(self.facts, entry.facts)
        except SyntaxError as error:
            raise UsageError(explain_syntax(file, error)) from None
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(f"{text} has no declaration that can be read ({error}): mend it") from None
        if entry is None or not (name or len(declared) == 1):
            others = " or ".join(f"{text}:{each}" for each in declared)
            form = f'write @{self.kind.upper()}S.register("{name or "name"}", …) above its class'
            mend = f"give {others}" if others else form
            raise UsageError(f"{text} registers {', '.join(declared) or 'nothing'}: {mend}")
        if self._is_listed(entry.name, source.module):
            return entry
        self._check_name(entry.name, text)
        return replace(entry, source=text)

    def _is_listed(self, name: str, module: str) -> bool:
        """Whether a module's component is found by its name alone."""
        return self._is_own(module) or any(point.value == module for point in self._entry_points.get(name, ()))

    def _is_own(self, module: str) -> bool:
        return module.startswith(f"{self.package}.")

    def _check_name(self, name: str, source: str) -> None:
        """Raises a UsageError if a user's component has a name that is not its own, or that no folder can have."""
        if not re.fullmatch(r"\w[\w.+-]*", name) or name.endswith(".py"):
            raise UsageError(f"{self.kind} '{name}' of {source}: a name has letters, digits and _ alone, rename it")
        if name in self._entry_points or name in self.builtins():
            raise UsageError(f"{self.kind} '{name}' of {source} has the name of another {self.kind}: rename it")

    def _broken_entry(self, name: str, module: str, lacks: str) -> CatalogueEntry:
        required = (field.name for field in fields(self.facts) if field.default is MISSING)
        return CatalogueEntry(name, module, "", dict.fromkeys(required, ""), lacks=lacks)


@functools.cache  # each composition asks for all
def _read_entries(file: Path, module: str, changed: int) -> Sequence[CatalogueEntry]:
    """The components that a source file registers."""
    entries: list[CatalogueEntry] = []
    for node in ast.parse(file.read_text(encoding="utf-8"), file.name).body:
        if not isinstance(node, ast.ClassDef):
            continue
        summary = (ast.get_docstring(node) or "").split("\n")[0]
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "register":
                name, requires, facts = read_registration(call)
                entries.append(CatalogueEntry(name, module, summary, facts, requires, class_name=node.name))
    return entries


def _empty_config(package: str, registry: str, name: str, source: str) -> Any:
    """A configuration of a component without values, which pickle or copy then sets."""
    components = getattr(importlib.import_module(package), registry)
    known = components._classes.get(name) or components._declared.get(name)  # a copy needs no file
    if known is None or known.Config.imported_from != source:
        known = components.get_declared(f"{source}:{name}" if source else name)
    return object.__new__(known.Config)


def _clashing_entry(entry: CatalogueEntry, owners: Iterable[str]) -> CatalogueEntry:
    """Returns an entry for a name that several components have."""
    return replace(entry, lacks=f"a name of its own, as {' and '.join(sorted(owners))} have a '{entry.name}'")


def _source_path(module: str) -> str:
    """Returns the file of a module in the registry's own package."""
    return f"{module.replace('.', '/')}.py"


def _place(cls: type) -> str:
    """Where a class is written."""
    return f"{cls.__module__}.{cls.__qualname__}"


def owning_package(point: EntryPoint) -> str:
    """Returns the name of the package that has an entry point, for messages."""
    return point.dist.name if point.dist else "an unnamed package"


def _is_installed(name: str) -> bool:
    return bool(os.environ.get(name[1:])) if name.startswith("$") else importlib.util.find_spec(name) is not None


def describe_unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns the message for an unknown name. It suggests the nearest name, or else lists all."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind} '{name}': " + (
        f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(sorted(known))}"
    )
