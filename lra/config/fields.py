"""What each field of a configuration may be, and what it means: its type and the comment beside it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lra.config.override import describe_type

TOOL_COMMENTS = ("fmt:", "type:", "noqa", "pyright:")


@dataclass(frozen=True)
class FieldDescription:
    """One field, in the words of the command line."""

    name: str  # complete, as in `model.d_model`
    type: str  # what may be written: `an integer or null`, `mean, max or cls`
    default: str
    meaning: str  # the field's comment; empty if it has none


def describe_fields(config: Any, section: str = "") -> Iterator[FieldDescription]:
    """The fields of a configuration and of the configurations within it, in their order.

    Args:
        config: an instance of a dataclass.
        section: the prefix of the names, with a dot at its end.
    """
    types, meanings = typing.get_type_hints(type(config)), read_meanings(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{section}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from describe_fields(value, f"{name}.")
        else:
            default = "required" if field.default is dataclasses.MISSING else format_value(field.default)
            yield FieldDescription(name, describe_type(types[field.name]), default, meanings.get(field.name, ""))


def format_value(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


@functools.cache
def read_meanings(config: type) -> dict[str, str]:
    """The comment of each field of a dataclass, its bases' included; a class without a source has none."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        if dataclasses.is_dataclass(cls) and inspect.get_annotations(cls):
            try:
                found |= _read_comments(textwrap.dedent(inspect.getsource(cls)))
            except (OSError, SyntaxError):
                continue
    return found


def _read_comments(source: str) -> dict[str, str]:
    """The comments beside each field that a class declares, or else those on the lines right above it."""
    beside: dict[int, str] = {}
    above: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        comment = token.string.lstrip("#: ")
        if token.type == tokenize.COMMENT and not comment.startswith(TOOL_COMMENTS):
            (beside if token.line[: token.start[1]].strip() else above)[token.start[0]] = comment
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = [beside[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in beside]
            if not lines:
                first = node.lineno
                while first - 1 in above:
                    first -= 1
                lines = [above[line] for line in range(first, node.lineno)]
            found[node.target.id] = " ".join(lines)
    return found
