"""What is read back: good files as they are, and a few words of what is wrong with every other one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lra.reading import read_csv, read_json, read_text, read_yaml

BOMB = b"a0: &a0 [x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9)
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "file"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 60 + b"]" * 60, "nested too deeply"),
        (b"9" * 5000, "a number of 5,000 digits"),
        (b'{"a": %s}' % (b"9" * 400), "a number of 400 digits"),
        (b"18446744073709551616", "a number of 20 digits"),
        (b"1e400", "1e400, which is not finite"),
        (b"[NaN]", "NaN, which is not finite"),
        (b"-Infinity", "-Infinity, which is not finite"),
        (b'{"a": 1, "a": 2}', "a key twice"),
        (b"\xff\xfe", "can't decode byte"),
        ("{}".encode("utf-16"), "can't decode byte"),
        (bytes(99), "Expecting value"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_json_that_is_refused(file, content, said):
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_json(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (BOMB, "aliases make more than"),
        (b"a: &a [*a]", "an alias within what it stands for"),
        (b"[" * 5000, "nested too deeply"),
        (b"[" * 60 + b"]" * 60, "nested too deeply"),
        (b"a: " + b"9" * 5000, "a number of 5,000 characters on line 1"),
        (b"b: 1\na: 0x" + b"f" * 5000, "a number of 5,002 characters on line 2"),
        (b"a: 1\nb:\n  c: 1\n  c: 2", "a key twice in the mapping on line 3"),
        (b"a: {", "on line 1"),
        (b"\ta: 1", "on line 1"),
        (b"? [1]\n: 2", "unhashable"),
        (b"a: !!python/object/apply:os.system [x]", "constructor for the tag"),
        (b"a: 1\n---\nb: 2", "another document"),
        (b"a: \x1b[2J", "special characters"),
        ("a: 1".encode("utf-16"), "can't decode byte"),
        (b"a: " + b"x" * 300_000, "more than 262,144 bytes"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_yaml_that_is_refused(file, content, said):
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_yaml(file, by_hand=True)


def test_yaml_of_a_program_has_no_alias(file):
    file.write_text("a: &a [1]\nb: *a")
    assert read_yaml(file, by_hand=True) == {"a": [1], "b": [1]}
    with pytest.raises(ValueError, match="it has an alias"):
        read_yaml(file)


def test_yaml_by_hand_is_read_as_people_mean_it(file):
    file.write_text(
        "\ufefflr: 1e-4\nsteps: 1e5\nday: 2026-01-02\nname: 1e4x\nbase: &base {a: 1}\nmore: {<<: *base, a: 2}"
    )
    known = {"lr": 1e-4, "steps": 1e5, "day": "2026-01-02", "name": "1e4x", "base": {"a": 1}, "more": {"a": 2}}
    assert read_yaml(file, by_hand=True) == known
    file.write_text("")
    assert read_yaml(file) is None


def test_only_regular_files_are_read(tmp_path, file):
    os.mkfifo(file)  # to open it would wait for a writer
    for path in (file, tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="not a regular file"):
            read_text(path, 10)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


def test_rows_are_whole(file):
    file.write_text("step,a\n1,2\n\n3\n4,")
    assert read_csv(file, "step") == [{"step": "1", "a": "2"}, {"step": "3"}]
    for content, said in (
        ("a\n1,2\n", "longer"),
        (f"a\n{'x' * 1_000_000}\n", "field larger than field limit"),
        ("b\n", "no column a"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=said):
            read_csv(file, "a")
