"""What is said of files that the system can't read or write."""

from __future__ import annotations

import errno
import os
import socket
import sys

import pytest

from lra import cli
from lra.errors import UsageError, explain_system_error, is_disk_failure, name_file, system_error

MENDS = {
    "ENOSPC": "free some space", "EDQUOT": "free some space", "EFBIG": "ulimit -f", "EMFILE": "ulimit -n",
    "ENFILE": "ulimit -n", "ENOENT": "put back", "EROFS": "another folder", "EACCES": "another folder",
    "EPERM": "another folder", "EIO": "disk or network mount", "ESTALE": "disk or network mount",
    "ENOTCONN": "disk or network mount", "EUCLEAN": "another folder", "ENAMETOOLONG": "name another",
}  # fmt: skip


def system(name: str, *file: str) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number), *file)


@pytest.mark.parametrize("name", MENDS)
def test_each_number_has_one_line_that_names_the_file_and_the_mend(name):
    said = explain_system_error(system(name, "run/last.ckpt"))
    assert said and said.startswith(f"run/last.ckpt can't be used ({os.strerror(getattr(errno, name))}): ")
    assert MENDS[name] in said and "\n" not in said


def test_an_error_that_a_library_has_wrapped_is_found_and_named():
    with pytest.raises(OSError, match="No space left") as caught, name_file("run/best.ckpt"):
        try:
            raise system("ENOSPC")
        except OSError:
            raise RuntimeError("file write failed") from None
    assert caught.value.filename == "run/best.ckpt"
    assert "run/best.ckpt can't be used" in (explain_system_error(caught.value) or "")


def test_what_is_no_word_on_a_file_stays_a_bug():
    others = [
        ValueError("x"), OSError("of a library"), ConnectionResetError(errno.ECONNRESET, "reset"),
        socket.gaierror(-2, "x"), ChildProcessError(errno.ECHILD, "none"), system("EINVAL"),
    ]  # fmt: skip
    assert not any(explain_system_error(error) for error in others)
    with pytest.raises(UsageError, match="mine"), name_file("file"):
        raise UsageError("mine")
    with pytest.raises(ValueError, match="mine"), name_file("file"):
        raise ValueError("mine")


@pytest.mark.parametrize("error", [system("EIO", "a/file"), system("ESTALE", "a/file")])
def test_the_command_line_says_it_in_one_line_also_where_nothing_can_be_said(error, monkeypatch, capsys):
    def app(**_):
        raise error

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["lra", "ls"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("lra: a/file can't be used")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what it holds back is written when it is closed


def test_the_word_of_the_operating_system_is_found_behind_others():
    try:
        try:
            raise OSError(errno.EIO, "Input/output error")
        except OSError as error:
            raise RuntimeError("a library's own") from error
    except RuntimeError as error:
        found = system_error(error, "a file")
    assert found and found.errno == errno.EIO and found.filename == "a file"
    named = OSError(errno.EIO, "Input/output error", "another")
    assert system_error(named, "a file") is named and named.filename == "another"


@pytest.mark.parametrize("error", [None, OSError("not a parquet file"), OSError(errno.EINVAL, "x"), ValueError("x")])
def test_what_a_library_makes_of_a_file_is_no_such_word(error):
    assert system_error(error) is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ENOLCK, errno.ENODEV])
def test_a_machine_that_fails_damages_nothing(number):
    assert is_disk_failure(OSError(number, os.strerror(number), "/a/file"))


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "x"), OSError(errno.ENOSPC, "x"), OSError("x"), ValueError()])
def test_what_users_did_is_no_failure_of_the_machine(error):
    assert not is_disk_failure(error)


def test_memory_that_ran_out_is_told():
    assert "not enough memory (MemoryError)" in str(explain_system_error(MemoryError())) and is_disk_failure(
        MemoryError()
    )
