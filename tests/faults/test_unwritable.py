"""Disks and folders that can not be written to, or read."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lra.training.step import Step
from tests.command_line import DATA, RUN, lra
from tests.faults.refusals import PLACE, check, refuses
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("around")


def test_the_data_folder_is_a_file(around, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(around / "here/file"))
    refuses(around, ("data", "prepare", *DATA), ("LRA_DATA",))


@pytest.mark.parametrize(
    "file",
    sampled(
        ["last.ckpt", "best.ckpt", "env.json", "config.yaml", "metrics.csv", "model.safetensors", "result.json"], 6
    ),
)
def test_a_disk_that_is_full_for_a_file_of_a_run(file, around, made, monkeypatch):
    shutil.copytree(made / "data", around / "data")
    with full_for(file, monkeypatch):
        done = lra("fit", *RUN, "name=full")
    run = Path(PLACE).with_name("full-s0")
    check(done, (f"{run / file} can't be used (No space left on device): free some space",))
    assert not [*run.glob(".*")]  # what is half written takes no room
    assert lra("fit", *RUN, "name=full", "resume=auto").code == 0
    assert (run / "metrics.csv").read_bytes() == (made / PLACE / "metrics.csv").read_bytes()


@pytest.mark.parametrize("file", ["train.tokens.npy", "manifest.json"])
def test_a_disk_that_is_full_for_a_file_of_data(file, around, monkeypatch):
    with full_for(file, monkeypatch):
        refuses(around, ("data", "prepare", *DATA), ("no space left", "LRA_DATA"))
    assert lra("data", "prepare", *DATA).code == 0


@contextmanager
def full_for(file: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk that is full whenever a file of such a name is to be put on it."""
    synced = os.fsync

    def sync(descriptor: int) -> None:
        if file in Path(f"/proc/self/fd/{descriptor}").readlink().name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        yield


UNDER = (  # commands that write below a regular file
    ("data", "show", *DATA, "out=file/x.png"),
    ("results", "pack", "out=file/x.tar.xz"),
    ("results", "merge", "packed.tar.xz", "runs=file/x"),
    ("fit", *RUN),
)


@pytest.mark.parametrize("command", UNDER, ids=lambda command: " ".join(command[:2]))
def test_a_folder_that_is_a_file(command, around, made, monkeypatch):
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("trained"))
    shutil.copytree(made / "data", around / "data")
    if command[0] == "fit":
        Path("checkpoints").write_text("x")
    else:
        shutil.copytree(made / PLACE, around / "here" / PLACE)
        assert lra("results", "pack", "out=packed.tar.xz").code == 0
    refuses(around, command, ("checkpoints/runs" if command[0] == "fit" else "file/x",))


DENIED = {  # what may not be opened -> a command that opens it
    "manifest.json": ("data", "info", *DATA),
    "train.tokens.npy": ("fit", *RUN, "name=other"),
    "result.json": ("fit", *RUN, "name=done"),
    "model.safetensors": ("test", f"init={PLACE}"),
    "best.ckpt": ("test", f"init={PLACE}/best.ckpt"),
}


@pytest.mark.parametrize("file", DENIED)
def test_a_file_that_may_not_be_read(file, around, made, monkeypatch):
    """Also by root, who may read all."""
    for part, there in (("data", around / "data"), (PLACE, around / "here" / PLACE)):
        shutil.copytree(made / part, there)
    genuine = io.open

    def opened(path: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(path, str | Path) and Path(path).name == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return genuine(path, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr("builtins.open", opened)
        done = lra(*DENIED[file])
    check(done, (f"{file} can't be used (Permission denied): change who may use it",))


def test_a_folder_that_has_the_name_of_a_file(around):
    Path("fig3/plain.json").mkdir(parents=True)
    check(
        lra("reproduce", "fig3"),
        ("fig3/plain.json is not a measurement of lra reproduce fig3: remove it, or choose another out=",),
    )


def test_a_run_that_may_not_write_any_more(around, made, monkeypatch):
    shutil.copytree(made / "data", around / "data")
    refusal = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "there/last.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr("lra.training.checkpoints.replace_file", mock.Mock(side_effect=refusal))
        done = lra("fit", *RUN, "name=denied")
    check(done, ("there/last.ckpt can't be used (Permission denied)", "resume=auto goes on"))
    assert lra("fit", *RUN, "name=denied", "resume=auto").code == 0
