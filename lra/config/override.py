"""Splits `field=value` arguments once, and makes their texts values of the fields' types."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import BooleanNode, FloatNode, IntegerNode, StringNode, ValueNode

from lra.errors import UsageError

LARGEST_INTEGER = (1 << 63) - 1  # of an integer, unless its field says so itself


@dataclass(frozen=True)
class Override:
    """One argument `field=text`."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}={self.text}"


def parse_overrides(
    args: Iterable[str | Override], label: str = "", may_be_empty: bool = False
) -> tuple[Override, ...]:
    """Returns the arguments as overrides. An argument that is an override already stays as it is.

    Raises UsageError, whose text starts with `label`, for an argument of another form, and for a field that is given
    twice. `field=` without a text is of another form unless texts `may_be_empty`.
    """
    found: dict[str, Override] = {}
    for arg in args:
        field, equals, text = str(arg).partition("=")
        if not (field and equals and (text or may_be_empty)):
            raise UsageError(f"{label}'{arg}' is not of the form field=value")
        if field in found:
            raise UsageError(f"{label}{field}= is given twice")
        found[field] = Override(field, text)
    return tuple(found.values())


def convert_value(value: Any, hint: Any, given: str) -> Any:
    """Returns the value of a field, made from a text or from a value of YAML.

    Args:
        hint: the field's type: bool, int, float, str, Literal, `X | None`, or a tuple of these, whose text has commas
            and may have brackets.
        given: the field and the value, as the message of the UsageError names them if the value does not fit.
    """
    try:
        return _convert(value, hint)
    except OverflowError:
        raise UsageError(f"{given}: write a finite number") from None
    except (ValueError, TypeError):
        raise UsageError(f"{given}: write {describe_type(hint)}") from None


def refuse_large_integers(given: str, value: Any, most: int = LARGEST_INTEGER) -> None:
    """Raises a UsageError if a value, or an item of a tuple, is an integer further from 0 than `most`."""
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, int) and abs(part) > most:
            raise UsageError(f"{given} is too large: use at most {LARGEST_INTEGER}")


# OmegaConf knows how a text says a number or a truth, and that True is no number
_SCALARS: Mapping[type, ValueNode] = {bool: BooleanNode(), int: IntegerNode(), float: FloatNode(), str: StringNode()}


def _convert(value: Any, hint: Any) -> Any:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value in (None, "null"):
            return None
        return _convert(value, next(part for part in parts if part is not types.NoneType))
    if value is None:
        raise ValueError
    if origin is tuple:
        if isinstance(value, str):
            bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
            value = [part.strip() for part in bare.split(",")]
        hints = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_convert(part, each) for part, each in zip(value, hints, strict=True))
    if origin is typing.Literal:
        return parts[[str(choice) for choice in parts].index(str(value))]
    if isinstance(value, str) and hint is not str and not value.isascii():  # Python reads every script's digits
        raise ValueError
    converted = _SCALARS[hint].validate_and_convert(value)
    if hint is float and not math.isfinite(converted):
        raise OverflowError
    return converted


def describe_type(hint: Any) -> str:
    """What may be written as the value of a field of this type: `an integer or null`, `mean, max or cls`."""
    *most, last = _alternatives(hint)
    return f"{', '.join(most)} or {last}" if most else last


def _alternatives(hint: Any) -> list[str]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        items = (
            "…" if part is Ellipsis else "|".join(each.split()[-1] for each in _alternatives(part)) for part in parts
        )
        return [f"[{','.join(items)}]"]
    if origin is typing.Literal:
        return [str(value) for value in parts]
    if origin in (typing.Union, types.UnionType):
        return [each for part in parts for each in _alternatives(part)]
    named = {int: ["an integer"], float: ["a number"], bool: ["true", "false"], str: ["text"], types.NoneType: ["null"]}
    return named.get(hint) or [getattr(hint, "__name__", str(hint))]
