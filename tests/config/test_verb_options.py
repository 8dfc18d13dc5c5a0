"""Options of verbs: each is read by the code of its verb, and refuses what is no value of it. None is listed here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import typing
from pathlib import Path
from typing import Any

import pytest

import lra
from lra.config.options import parse_options
from lra.errors import UsageError
from lra.experiments import accuracy

PACKAGE = Path(lra.__file__).parent
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")}


def schemas() -> list[type]:
    """Every dataclass that a module of lra hands to `parse_options` or `split_options` by its name."""
    found: dict[str, type] = {}
    for file, tree in TREES.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            reads = isinstance(call.func, ast.Name) and call.func.id in ("parse_options", "split_options")
            if reads and isinstance(call.args[0], ast.Name):
                name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
                cls = getattr(importlib.import_module(name), call.args[0].id, None)
                if inspect.isclass(cls):
                    found[f"{cls.__module__}.{cls.__name__}"] = cls
    return list(found.values())


SCHEMAS = schemas()
FIELDS = [(cls, field) for cls in SCHEMAS for field in dataclasses.fields(cls)]


def named(value: Any) -> str:
    return value.name if isinstance(value, dataclasses.Field) else f"{value.__module__.rpartition('.')[2]}"


def users(cls: type) -> list[ast.Module]:
    """The modules of the class and of its bases, and those that import from these or import these."""
    found = []
    for name in {each.__module__ for each in cls.__mro__}:
        package, _, module = name.rpartition(".")
        for file, tree in TREES.items():
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            own = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) == name
            if own or any(
                node.module == name or (node.module == package and module in [each.name for each in node.names])
                for node in imports
            ):
                found.append(tree)
    return found


@functools.cache
def read_outside(cls: type) -> set[str]:
    """Each `name` that code reads as `<something>.<name>` elsewhere than in the checks of the class."""
    found = set()
    for tree in users(cls):
        checks = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"]
        checked = {id(inner) for node in checks for inner in ast.walk(node)}
        found |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in checked
        }
    return found


def test_verbs_have_options():
    assert len(SCHEMAS) >= 9 and len(FIELDS) > 40


@pytest.mark.parametrize(("cls", "field"), FIELDS, ids=named)
def test_an_option_is_read(cls, field):
    assert field.name in read_outside(cls)


@pytest.mark.parametrize(("cls", "field"), FIELDS, ids=named)
def test_what_is_no_value_is_refused(cls, field):
    hint = typing.get_type_hints(cls)[field.name]
    plain = {str, str | None, tuple[str, ...], tuple[str, ...] | None}
    if hint in plain:  # any text may be one, unless it is to be a name: then at once, or by the verb
        try:
            assert getattr(parse_options(cls, [f"{field.name}=§.tar.xz"], **needed(cls, field)), field.name)
        except UsageError as error:
            assert str(error).startswith(field.name)
        return
    with pytest.raises(UsageError, match=rf"^{field.name}=§: "):
        parse_options(cls, [f"{field.name}=§"], **needed(cls, field))


def needed(cls: type, field: dataclasses.Field[Any]) -> dict[str, Any]:
    """What another field must be, where its default is refused."""
    try:
        cls()
    except UsageError as error:
        name = next(each.name for each in dataclasses.fields(cls) if f"{each.name}=" in str(error))
        return {} if name == field.name else {name: "a.tar.xz"}
    return {}


def test_a_list_has_commas_and_may_have_brackets():
    bare = parse_options(accuracy.GridOptions, ["tasks=listops,text"])
    assert parse_options(accuracy.GridOptions, ["tasks=[listops,text]"]) == bare
    assert parse_options(accuracy.GridOptions, ["attns=[flash]"]).attns == ("flash",)
