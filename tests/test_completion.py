"""What shells complete, as they ask for it."""

from __future__ import annotations

import pytest

from lra.tasks import TASKS
from tests.command_line import lra


@pytest.mark.parametrize(("words", "found"), [
    (("fit", "task", "=", "pa"), ["path256", "path64", "pathfinder", "pathx"]),
    (("fit", "attn", "=", "flash", "task", "="), [*TASKS.catalogue()]),
    (("fit", "recipe", "=", "de"), ["demo"]),
    (("fit", "ta"), [f"task={name}" for name in TASKS.catalogue()]),
    (("config", "show", "task", "=", "listops", "attn", "=", "fle"), ["flex"]),
    (("data", "prepare", "task", "=", "im"), ["image"]),
    (("fit", "seed", "=", "3"), []),
    (("rep",), ["reproduce", "report"]),
])  # fmt: skip
def test_bash_completes_names(words, found, monkeypatch):
    """Bash cuts words at each =."""
    monkeypatch.setenv("COMP_WORDS", " ".join(("lra", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    monkeypatch.setenv("_LRA_COMPLETE", "complete_bash")
    assert lra().out.split() == found


def test_other_shells_complete_whole_words(monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "lra fit attn=flash task=pathf")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_LRA_COMPLETE", "complete_fish")
    assert lra().out.split() == ["task=pathfinder"]
    monkeypatch.setenv("_LRA_COMPLETE", "complete_zsh")
    assert '"task=pathfinder"' in lra().out
