"""The configuration of a component, made from its source: its `Config` and the imports that this needs run, no more.

A module of an attention or a task imports PyTorch, which takes seconds. Its fields, defaults and checks don't need it.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lra.errors import name_error

FORMS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: 'a text, as in "N"',
    tuple[int, ...]: "whole numbers in a tuple, as in (1, 64)",
    tuple[str, ...]: 'texts in a tuple, one with a comma behind it: ("…",)',
}  # how to write a fact, by its type
RESERVED = {"name", "imported_from"}  # set on a component's `Config`, so no options
DECLARED = {"Config", "recipe_section"}  # of a component's class: what configurations are made of


def declare_component(file: Path, module: str, class_name: str) -> Any | None:
    """Returns a class with a component's `Config`, and with its `recipe_section` if it has one.

    It has the name of the component's class and no base.

    Args:
        file, module: where the component is written.
        class_name: the name of its class.

    Returns:
        None if only an import finds the `Config`: the class inherits it, or it names what its module defines.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"), file.name)
    (component,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    declared = [node for node in component.body if _defined_names(node) & DECLARED]
    if not any("Config" in _defined_names(node) for node in declared):
        return None
    alone = copy.copy(component)
    alone.bases, alone.keywords, alone.decorator_list, alone.body = [], [], [], declared
    used, imports = _used_names(alone), []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if _defined_names(alias) & used]
            imports += [node] if node.names else []
        elif node is not component and _defined_names(node) & used:
            return None
    tree.body = [*imports, alone]
    made = ModuleType(f"{module}:{class_name}")
    made.__file__ = str(file)
    sys.modules[made.__name__] = made  # there dataclasses, typing and inspect look for it
    exec(compile(tree, str(file), "exec"), made.__dict__)  # annotations stay text, as in this file
    return made.__dict__[class_name]


def config_flaw(config: Any) -> str:
    """Says why a component's `Config` can't have its options, and how to mend it; empty if it can."""
    own = vars(config) if isinstance(config, type) and dataclasses.is_dataclass(config) else None
    # an heir of a dataclass that adds options is one only if it says so, too
    if own is None or ("__annotations__" in own and "__dataclass_fields__" not in own):
        return "is no dataclass: write @dataclass(frozen=True) above it"
    try:
        typing.get_type_hints(config)
    except Exception as error:  # whatever stands there is run
        return f"has a type that can't be read ({name_error(error)}): mend it, or import it above the class"
    for field in dataclasses.fields(config):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            return f"has a field without a default, {field.name}: give it one"
        if field.name in RESERVED:
            return f"has a field {field.name}, which lra sets itself: rename it"
    return ""


def read_registration(call: ast.Call) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """Returns the name, the required packages and the facts of a `register(...)`. ValueError if one can't be read."""
    facts = {k.arg: _literal(k.value) for k in call.keywords if k.arg}
    requires = facts.pop("requires", ())
    name = _literal(call.args[0]) if call.args else facts.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"register on line {call.lineno} is given no name")
    _check_form("requires", requires, tuple[str, ...])
    return name, requires, facts


def make_facts(form: type, given: Mapping[str, Any]) -> Any:
    """Returns the facts that a component registers, an instance of `form`. ValueError or TypeError if one is wrong."""
    for name, kind in _types(form).items():
        if name in given:
            _check_form(name, given[name], kind)
    return form(**given)


_types = functools.cache(typing.get_type_hints)  # each composition asks for those of all components


def _check_form(name: str, value: Any, kind: Any) -> None:
    """Raises a ValueError that says how to write a fact, if it is not of a kind of FORMS."""
    of, *_ = typing.get_args(kind) or (kind,)
    values = [value] if of is kind else value if isinstance(value, tuple) else [None]
    if not all(type(each) is of or (of is float and type(each) is int) for each in values):
        raise ValueError(f"{name}={value!r}: write {FORMS[kind]}")


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:  # its message is of nodes
        raise ValueError(f"{ast.unparse(node)} on line {node.lineno} is no literal") from None


def _defined_names(node: ast.AST) -> set[str]:
    """The names that a statement of a module or a class gives a meaning to."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    return {name for child in ast.iter_child_nodes(node) for name in _defined_names(child)}


def _used_names(node: ast.AST) -> set[str]:
    """The names that a statement looks up. The annotations of functions are never looked up."""
    if isinstance(node, ast.Name):
        return {node.id}
    unread = {id(getattr(node, "returns", None)), id(node.annotation) if isinstance(node, ast.arg) else 0}
    children = (child for child in ast.iter_child_nodes(node) if id(child) not in unread)
    return {name for child in children for name in _used_names(child)}
