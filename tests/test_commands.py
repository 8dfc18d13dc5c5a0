"""A command is parsed as it would be, and not run."""

import pytest

from lra.cli import app
from lra.commands import parse_command
from lra.errors import UsageError

RUN = ("task=listops", "attn=flash", "trainer.steps=4", "trainer.eval_every=4", "trainer.log_every=4")


@pytest.mark.parametrize(
    "command",
    [
        ("fit", *RUN),
        ("config", "show", *RUN),
        ("test", "init=nowhere"),
        ("data", "prepare", "task=listops", "force=true"),
        ("data", "show", "task=listops", "count=1"),
        ("bench", "attention", "attn=flash", "lengths=16"),
        ("bench", "io", "length=64"),
        ("bench", "step", "task=listops", "attn=flash", "steps=1"),
        ("bench", "start", "task=listops", "attn=flash", "cold=true"),
        ("tune", "kernels=forward"),
        ("reproduce", "table3", "tasks=listops", "attns=flash", "--dry-run"),
        ("reproduce", "table3", "tasks=listops", "attns=flash", "speed=true", "steps=5"),
        ("reproduce", "fig3", "batch=2"),
        ("sweep", "task=listops", "attn=flash,standard", "optim.lr=1e-4,3e-4", "seed=0,1", "--dry-run"),
        ("report", "table3", "tasks=listops"),
        ("results", "pack", "out=runs.tar.xz"),
        ("results", "merge", "runs.tar.xz", "runs=there"),
        ("results", "push", "run", "repo=owner/name", "private=true"),
        ("caches", "pack", "out=caches.tar.xz"),
        ("ls", "runs", "task=listops", "runs=there"),
    ],
    ids=" ".join,
)
def test_a_command_is_parsed_and_not_run(command, here):
    assert parse_command(app, command) is not None
    with pytest.raises(UsageError):
        parse_command(app, (*command, "steps"))
    assert not list(here.iterdir())


@pytest.mark.parametrize("command", ["doctor", "ls attns", "reproduce", "report"])
def test_a_verb_without_fields_has_nothing_to_parse(command):
    assert parse_command(app, command.split()) is None


def test_an_unknown_verb_is_refused():
    with pytest.raises(UsageError, match="unknown command 'atention': did you mean 'attention'"):
        parse_command(app, ["bench", "atention"])
