"""The help of `lra fit` names what exists, and its example is a command."""

from __future__ import annotations

from lra.cli import app
from lra.commands import parse_command
from lra.config.recipes import recipe_names
from lra.help import COMMON_FIELDS, FIT_EXAMPLE
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from tests.command_line import lra


def test_help_of_fit_shows_an_example_and_what_can_be_named():
    done = lra("fit", "--help")
    words = done.out.replace(",", " ").split()
    assert done.code == 0 and FIT_EXAMPLE in done.out
    assert {*TASKS.catalogue(), *ATTENTIONS.catalogue(), *recipe_names()} <= set(words)
    assert {f"{field}=" for field in COMMON_FIELDS} <= set(words) and len(COMMON_FIELDS) == 10
    assert max(map(len, done.out.splitlines())) <= 80


def test_the_example_in_the_help_is_a_command_and_its_fields_exist():
    composed = parse_command(app, FIT_EXAMPLE.split()[1:])
    assert set(COMMON_FIELDS) <= composed.origin.keys()
