"""A folder for a command that is to fail, and a run to spoil."""

from __future__ import annotations

import pytest

from tests.command_line import RUN, lra


@pytest.fixture
def around(tmp_path, monkeypatch):
    """A folder around the one that a command runs in, with the data beside it."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "file").write_text("x")
    monkeypatch.chdir(here)
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder with a finished run and its data, not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LRA_DATA", str(folder / "data"))
        assert lra("fit", *RUN, "name=done").code == 0
    return folder
