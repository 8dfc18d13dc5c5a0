"""Stores on disks that are full, fail, or lack what others have: maps, locks, folders that can be synced."""

import errno
import fcntl
import mmap
import os
import warnings
from pathlib import Path

import numpy as np
import pytest

from lra.data.store import Store, prepare_store
from lra.data.writer import _save
from lra.errors import UsageError, is_disk_failure, is_disk_full
from tests.data.toy import build, content


@pytest.mark.parametrize("wrapped", [False, True])
def test_full_disk(wrapped):
    def fills_up(writer):
        build(writer)
        (writer.scratch() / "file").write_text("x")
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            if wrapped:
                raise RuntimeError("a library's own error") from error
            raise

    with pytest.raises(UsageError, match="no space left.*LRA_DATA") as caught:
        prepare_store(content(), fills_up)
    assert "\n" not in str(caught.value)
    assert not [path for path in content().path.parent.iterdir() if path.suffix != ".lock"]
    prepare_store(content(), build).verify()


def test_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "file" / "below"))
    with pytest.raises(UsageError, match="cannot write to .*set LRA_DATA"):
        prepare_store(content(), build)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a disk that is always full")
def test_an_array_on_a_full_disk_says_so():
    with pytest.raises(OSError) as caught:
        _save(Path("/dev/full"), np.zeros(100_000))
    assert is_disk_full(caught.value)


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EINVAL])
@pytest.mark.parametrize("private", [True, False])
def test_a_file_system_that_can_not_map_files(monkeypatch, number, private):
    mapped = mmap.mmap

    def fails(*args, access, **options):
        if access == mmap.ACCESS_READ or not private:
            raise OSError(number, os.strerror(number))
        return mapped(*args, access=access, **options)

    monkeypatch.setattr(mmap, "mmap", fails)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        made = prepare_store(content(), build)
        made.verify()
    assert len(told) == (not private)
    assert all("can't map files: they are read into memory" in str(each.message) for each in told)
    train = made.split("train")
    assert train.labels.tolist() == [0, 1, 2, 1, 0, 7] and train[5].tolist() == [2, 2, 2, 2]
    assert not train.tokens.flags.writeable


TROUBLE = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EACCES]


@pytest.mark.parametrize("number", TROUBLE)
@pytest.mark.parametrize("what", ["mmap.mmap", "numpy.load", "pathlib.Path.open", "pathlib.Path.stat"])
def test_what_can_not_be_read_is_not_called_damaged(monkeypatch, number, what):
    path = prepare_store(content(), build).path

    def fails(*_, **__):
        raise OSError(number, os.strerror(number), *([str(path)] if "Path" in what else []))

    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(what, fails)
        Store.open(path, "lra data prepare task=toy")
    assert caught.value.errno == number and caught.value.filename
    assert number == errno.EACCES or is_disk_failure(caught.value)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(monkeypatch, number):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(UsageError, match=r"has no locks \(.*\): set LRA_DATA to a folder of another one"):
        prepare_store(content(), build)
    monkeypatch.undo()


def test_a_file_system_that_can_not_sync_folders_and_has_files_of_its_own(monkeypatch):
    def fails(_):
        raise OSError(errno.EINVAL, "Invalid argument")

    def visited(writer):
        build(writer)
        (writer._folder / "._train.tokens.npy").write_bytes(b"\0\5\x16\7")

    monkeypatch.setattr(os, "fsync", fails)
    made = prepare_store(content(), visited)
    assert not [name for name in made.manifest["files"] if name.startswith(".")]
    (made.path / "._train.tokens.npy").unlink()
    made.verify()


def test_a_store_larger_than_memory_where_files_can_not_be_mapped(monkeypatch):
    path = prepare_store(content(), build).path

    def fails(*_, mmap_mode=None):
        raise OSError(errno.ENODEV, "No such device") if mmap_mode else MemoryError

    monkeypatch.setattr(np, "load", fails)
    with (
        pytest.warns(UserWarning, match="can't map files"),
        pytest.raises(UsageError, match="larger than the memory.*set LRA_DATA"),
    ):
        Store.open(path)
