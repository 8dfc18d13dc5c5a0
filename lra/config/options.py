"""A verb's own options from `field=value` arguments: a frozen dataclass, lists with commas."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from lra.config.registry import unknown
from lra.errors import UsageError, brief

Options = TypeVar("Options")
MOST_DIGITS = 40  # of a number


def parse(schema: type[Options], args: Sequence[str], label: str = "", **preset: Any) -> Options:
    """A `schema` of the arguments, then of `preset`, then of the defaults.

    Fields may be bool, int, float, str, Literal, `X | None` and `tuple[X, ...]`, in brackets or not. Raises
    UsageError, which starts with `label`, for what is unknown, given twice or no value of its field.
    """
    hints = typing.get_type_hints(schema)
    names = [field.name for field in dataclasses.fields(schema)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for arg in args:
        name, equals, text = arg.partition("=")
        if not (name and equals and text):
            raise UsageError(f"{label}'{arg}' is not of the form field=value")
        if name not in names:
            raise UsageError(
                label + (unknown("field", name, names) if names else f"unknown field '{name}': it has none")
            )
        if name in values:
            raise UsageError(f"{label}{name}= is given twice")
        values[name] = _convert(f"{label}{name}={text}", hints[name], text)
    return schema(**(preset | values))


def take(schema: type[Options], args: Sequence[str]) -> tuple[Options, list[str]]:
    """A `schema` of those arguments that are its fields, as `parse` has it, and the other arguments."""
    names = {field.name for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    own = [arg for arg in args if arg.partition("=")[0] in names]
    return parse(schema, own), [arg for arg in args if arg not in own]


def refuse_repeats(**lists: Sequence[Any] | None) -> None:
    """UsageError for a list, under the name of its field, that has something twice."""
    for name, given in lists.items():
        if given and len(set(given)) < len(given):
            raise UsageError(f"{name}={','.join(map(str, given))} names one twice")


def shown(options: Any) -> dict[str, Any]:
    """What a result states of them: not where it lies."""
    return {name: value for name, value in dataclasses.asdict(options).items() if name not in ("out", "plots")}


def _convert(given: str, hint: Any, text: str) -> Any:
    arguments = typing.get_args(hint)
    if hint in (int, float) and (len(text) > MOST_DIGITS or not text.isascii()):
        raise UsageError(f"{brief(given)}: write a number, in at most {MOST_DIGITS} of the digits 0 to 9")
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if text == "null":
            return None
        return _convert(given, next(option for option in arguments if option is not type(None)), text)
    if typing.get_origin(hint) is tuple:
        if text.startswith("[") and text.endswith("]"):  # as lra fit has lists
            text = text[1:-1]
        return tuple(_convert(given, arguments[0], part) for part in text.split(","))
    choices = arguments if typing.get_origin(hint) is typing.Literal else (True, False) if hint is bool else ()
    if choices:
        by_text = {str(choice).lower(): choice for choice in choices}
        if text not in by_text:
            raise UsageError(f"{given}: choose from {', '.join(by_text)}")
        return by_text[text]
    try:
        value = hint(text)
    except ValueError:
        raise UsageError(f"{given}: '{text}' is not of the type {hint.__name__}") from None
    if hint is float and not math.isfinite(value):
        raise UsageError(f"{given}: write a finite number")
    if hint is int and abs(value) >= 1 << 63:
        raise UsageError(f"{given} is too large: use at most {(1 << 63) - 1}")
    return value
