"""A verb's own options from `field=value` arguments: a frozen dataclass, lists with commas."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from lra.config.override import Override, convert_value, parse_overrides, refuse_large_integers
from lra.config.registry import describe_unknown
from lra.errors import UsageError, shorten

OptionsT = TypeVar("OptionsT")


def parse_options(schema: type[OptionsT], args: Iterable[str | Override], label: str = "", **preset: Any) -> OptionsT:
    """Returns a `schema` with the values of the arguments, else those of `preset`, else the defaults.

    Fields may be of the types that `convert_value` takes. Raises UsageError, which starts with `label`, for a field
    that is unknown or given twice, and for a value that its field can't have.
    """
    hints = typing.get_type_hints(schema)
    names = _names(schema)
    values: dict[str, Any] = {}
    for override in parse_overrides(args, label):
        field, given = override.field, f"{label}{override.field}={shorten(override.text)}"
        if field not in names:
            raise UsageError(
                label + (describe_unknown("field", field, names) if names else f"unknown field '{field}': it has none")
            )
        values[field] = convert_value(override.text, hints[field], given)
        refuse_large_integers(given, values[field])
    return schema(**(preset | values))


def split_options(schema: type[OptionsT], args: Iterable[str | Override]) -> tuple[OptionsT, list[Override]]:
    """Returns a `schema` of the arguments that are its fields, as `parse_options` does, and the other arguments."""
    own, others, names = [], [], _names(schema)
    for override in parse_overrides(args):
        (own if override.field in names else others).append(override)
    return parse_options(schema, own), others


def refuse_repeats(**lists: Sequence[Any] | None) -> None:
    """Raises a UsageError for a list that has an item twice. Each list is given under the name of its field."""
    for name, given in lists.items():
        if given and len(set(given)) < len(given):
            raise UsageError(f"{name}={','.join(map(str, given))} names one twice")


def recorded_options(options: Any) -> dict[str, Any]:
    """Returns what a result records of a verb's options: all but where it writes files."""
    return {name: value for name, value in dataclasses.asdict(options).items() if name not in ("out", "plots")}


def _names(schema: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(schema)]
