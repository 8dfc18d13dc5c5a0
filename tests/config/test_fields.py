"""Each field is described by its type and the comment beside it."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Literal

import pytest

from lra.config.fields import FieldDescription, describe_fields, format_value
from lra.config.override import convert_value
from lra.config.schema import RunConfig
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS


@dataclass(frozen=True)
class Base:
    block: str = "128"  # tokens, or "16x256"
    impl: Literal["auto", "triton", "gather"] = "auto"
    lengths: tuple[int, ...] = (
        1,  # of the short,
        2,  # and of the long one
    )  # fmt: skip


@dataclass(frozen=True)
class Heir(Base):
    block: str = "64"  # tokens alone
    rate: float | None = None  # type: ignore[assignment]
    # what has no room beside the field
    # stands above it
    causal: bool = False


@dataclass(frozen=True)
class Whole:
    part: Heir = field(default_factory=Heir)
    steps: int = 5  # of training


def test_fields_are_described_by_types_defaults_and_comments_of_the_class_and_its_bases():
    assert [*describe_fields(Whole(part=Heir(block="32")))] == [
        FieldDescription("part.block", "text", "64", "tokens alone"),
        FieldDescription("part.impl", "auto, triton or gather", "auto", ""),
        FieldDescription("part.lengths", "[integer,…]", "[1,2]", "of the short, and of the long one"),
        FieldDescription("part.rate", "a number or null", "null", ""),
        FieldDescription("part.causal", "true or false", "false", "what has no room beside the field stands above it"),
        FieldDescription("steps", "an integer", "5", "of training"),
    ]


def test_a_class_without_source_has_no_meanings():
    made = make_dataclass("Made", [("size", int, 3)])
    assert [*describe_fields(made())] == [FieldDescription("size", "an integer", "3", "")]


RUN = [each for each in describe_fields(RunConfig(task=None, attn=None)) if each.name not in ("task", "attn")]
COMPONENTS = [
    pytest.param([*describe_fields(registry.get(name).Config(), section)], id=name)
    for registry, section in ((TASKS, "task."), (ATTENTIONS, "attn."))
    for name, entry in registry.builtins().items()
    if not entry.missing
]


@pytest.mark.parametrize("fields", [pytest.param(RUN, id="run"), *COMPONENTS])
def test_every_field_has_a_meaning_of_one_line(fields):
    for each in fields:
        assert each.meaning and "\n" not in each.meaning and len(each.meaning) <= 110, each
        assert not each.meaning.endswith((".", ",")) and each.type != "Any", each


def test_a_closed_set_of_values_is_named():
    types = {each.name: each.type for each in RUN}
    assert types["model.pooling"] == "mean, max, cls or last" and types["model.axes"] == "1 or 2"
    assert types["head"] == "kept, fresh or null" and types["optim.clip"] == "a number or null"


@pytest.mark.parametrize(("value", "hint"), [
    (None, int | None), (True, bool), (False, bool), (0.1, float), (7, int), ("auto", str),
    ((0.9, 0.98), tuple[float, float]), (2, Literal[1, 2]),
])  # fmt: skip
def test_a_value_is_shown_as_it_may_be_typed(value, hint):
    assert convert_value(format_value(value), hint, "") == value
