"""What the operating system says, told from what a library says, and its mends."""

import errno
import os

import pytest

from lra.errors import failing, system_error


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


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "close other programs"),
        (errno.EIO, "run the same command again"),
        (errno.ESTALE, "run the same command again"),
        (errno.ENOMEM, "free memory"),
        (errno.ENOLCK, "another"),
    ],
)
def test_each_has_a_mend_in_one_line(number, mend):
    said = failing(OSError(number, os.strerror(number), "/a/file")) or ""
    assert said.startswith(f"/a/file can't be used ({os.strerror(number)}): ") and mend in said and "\n" not in said
    assert "can't be used" in str(failing(OSError(number, os.strerror(number))))


def test_memory_that_ran_out_is_told():
    assert "not enough memory (MemoryError)" in str(failing(MemoryError())) and failing(ValueError("x")) is None
