"""What libraries ask of a user: a name, a home and caches, also where a container's user has none."""

import getpass
import os
import pwd
import warnings
from pathlib import Path

import pytest

from lra import environment

NAMES = (
    "LOGNAME",
    "USER",
    "LNAME",
    "USERNAME",
    "HOME",
    "LRA_DATA",
    "XDG_CACHE_HOME",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
)


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """A user without a line in /etc/passwd, and none of the variables."""

    def unknown(_):
        raise KeyError("getpwuid(): uid not found")

    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"lra-{os.getuid()}"


def test_a_user_without_name_and_home(nobody):
    with pytest.warns(UserWarning, match=f"no home: data goes to {nobody}/.cache/lra; set HOME or LRA_DATA"):
        environment.ensure_user()
    assert getpass.getuser() == f"uid-{os.getuid()}" and Path.home() == nobody
    assert (
        environment.cache_root() == nobody / ".cache/lra" and environment.cache_folder("x") == nobody / ".cache/lra/x"
    )
    assert "TRITON_CACHE_DIR" not in os.environ


def test_what_is_set_stays(nobody, monkeypatch):
    given = {name: f"/given/{name}" for name in ("USER", "HOME", "TRITON_CACHE_DIR")}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(action="error"):
        environment.ensure_user()
    assert {name: os.environ.get(name) for name in NAMES} == dict.fromkeys(NAMES) | given


def test_no_word_of_a_home_where_the_data_has_its_place(nobody, monkeypatch):
    monkeypatch.setenv("LRA_DATA", "/given")
    with warnings.catch_warnings(action="error"):
        environment.ensure_user()
    assert Path.home() == nobody


def test_a_home_that_can_not_be_written_to(nobody, monkeypatch, tmp_path):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and Path(path) != tmp_path / "home")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    environment.ensure_user()
    assert os.environ["HOME"] == str(tmp_path / "home") and os.environ["TRITON_CACHE_DIR"] == str(nobody / "triton")
    assert environment.cache_root() == tmp_path / "home/.cache/lra"  # where an administrator may have put data
    assert environment.cache_folder("inductor") == nobody / "inductor"
