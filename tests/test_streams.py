"""What a command prints where its output is a pipe, closed, full or of another encoding."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lra import cli, streams
from lra.models.attention import ATTENTIONS
from tests.command_line import process

pytestmark = pytest.mark.usefixtures("here")


def test_a_pipe_cuts_nothing():
    done = process("ls", "attns")
    rows = {row[0]: row[-1] for row in done.rows}
    assert done.code == 0 and not done.err and max(map(len, rows.values())) > 80
    assert rows.keys() == ATTENTIONS.catalogue().keys()
    assert all(rows[name].endswith(entry.summary) for name, entry in ATTENTIONS.catalogue().items())


def test_what_an_output_can_not_encode_is_replaced(monkeypatch):
    there = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", there)
    with streams.guard_streams():
        print("1 … 2")
    assert there.buffer.getvalue() == b"1 ? 2\n"  # type: ignore[attr-defined]
    assert sys.stdout is there


def test_an_output_that_was_closed_shows_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with streams.guard_streams() as output:
        print("nothing")
    assert output.error is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("verb", "code"), [("ls", 2), ("fit", 0)])
def test_a_full_output_is_told_and_is_no_failure_of_a_run(monkeypatch, capsys, verb, code):
    def verbs(**_: Any) -> None:
        print("something")
        sys.stdout.flush()
        print("more")

    monkeypatch.setattr(cli, "app", verbs)
    monkeypatch.setattr(sys, "argv", ["lra", verb])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert (ended.value.code or 0) == code
    assert ("can't be written to (No space left on device)" in capsys.readouterr().err) == (code == 2)


def test_an_output_without_a_reader_ends_a_listing_quietly(monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(cli, "app", lambda **_: print("something"))
    monkeypatch.setattr(sys, "argv", ["lra", "ls"])
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == cli.BROKEN_PIPE and not capsys.readouterr().err
