"""A verb's own options from `field=value` arguments: a frozen dataclass, lists with commas."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from lra.config.override import Override, convert, parse_overrides, refuse_large
from lra.config.registry import unknown
from lra.errors import UsageError, shorten

Options = TypeVar("Options")


def parse(schema: type[Options], args: Iterable[str | Override], label: str = "", **preset: Any) -> Options:
    """A `schema` of the arguments, then of `preset`, then of the defaults.

    Fields may be of the types that `convert` takes. Raises UsageError, which starts with `label`, for what is unknown,
    given twice or no value of its field.
    """
    hints = typing.get_type_hints(schema)
    names = _names(schema)
    values: dict[str, Any] = {}
    for override in parse_overrides(args, label):
        field, given = override.field, f"{label}{override.field}={shorten(override.text)}"
        if field not in names:
            raise UsageError(
                label + (unknown("field", field, names) if names else f"unknown field '{field}': it has none")
            )
        values[field] = convert(override.text, hints[field], given)
        refuse_large(given, values[field])
    return schema(**(preset | values))


def take(schema: type[Options], args: Iterable[str | Override]) -> tuple[Options, list[Override]]:
    """A `schema` of those arguments that are its fields, as `parse` has it, and the other arguments."""
    own, others, names = [], [], _names(schema)
    for override in parse_overrides(args):
        (own if override.field in names else others).append(override)
    return parse(schema, own), others


def refuse_repeats(**lists: Sequence[Any] | None) -> None:
    """UsageError for a list, under the name of its field, that has something twice."""
    for name, given in lists.items():
        if given and len(set(given)) < len(given):
            raise UsageError(f"{name}={','.join(map(str, given))} names one twice")


def shown(options: Any) -> dict[str, Any]:
    """What a result states of them: not where it lies."""
    return {name: value for name, value in dataclasses.asdict(options).items() if name not in ("out", "plots")}


def _names(schema: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(schema)]
