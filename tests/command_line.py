"""Commands as a user gives them, and what they print."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from lra import cli, printing

ROOT = Path(__file__).parent.parent


DATA = ("task=listops", "recipe=demo", "task.train=50", "task.val=10", "task.test=10", "task.fresh=10")


SHORT = ("trainer.steps=4", "trainer.eval_every=2", "trainer.log_every=1", "trainer.accelerator=cpu", "batch.size=4")


RUN = (*DATA, *SHORT, "attn=flash")


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """The cells of the printed tables, headers left out."""
        lines = (line for line in self.out.splitlines() if line.startswith("│"))
        return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def lra(*arguments: str, width: int = 1000) -> Done:
    """`lra …` in this process, with a terminal of so many columns."""
    out, err = io.StringIO(), io.StringIO()
    printing.console.width = width
    with (
        mock.patch.object(sys, "argv", [str(Path(sys.executable).with_name("lra")), *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
        sys.exit(0)
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def process(*arguments: str, **changes: str) -> Done:
    """`python -m lra …` in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | changes
    command = [sys.executable, "-m", "lra", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    return Done(done.returncode, done.stdout, done.stderr)


def refused(done: Done, message: str = "") -> str:
    """The one line of a refusal."""
    assert done.code == 2, done
    assert done.err.startswith("lra: ") and done.err.count("\n") == 1 and done.err.endswith("\n"), done.err
    assert re.search(message, done.err), done.err
    return done.err
