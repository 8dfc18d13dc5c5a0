"""A checkpoint that a machine can't read is not called damaged, and one of weights needs no file system that maps."""

import errno
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from lra.training import checkpoints

TROUBLE = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.EACCES)


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(save({"a": torch.arange(3.0)}, metadata={"lra": json.dumps({"task": "toy@1"})}))
    return path


def test_weights_are_read_and_not_mapped(weights):
    read, identity = checkpoints._weights_file(weights)
    assert read["a"].tolist() == [0, 1, 2] and identity == {"task": "toy@1"}
    assert str(weights) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("number", TROUBLE)
@pytest.mark.parametrize("name", ["model.safetensors", "best.ckpt"])
def test_what_the_machine_says_is_told(weights, monkeypatch, number, name):
    path = weights.with_name(name)
    path.touch()

    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_bytes", fails)
    monkeypatch.setattr(zipfile, "ZipFile", fails)
    for reader in (checkpoints.verify_checkpoint, checkpoints.read_checkpoint):
        with pytest.raises(OSError) as caught:
            reader(path)
        assert caught.value.errno == number and caught.value.filename == str(path)


def test_a_short_file_is_damaged(tmp_path):
    """Looking for its end is a call that is not valid, which says nothing of the machine."""
    (tmp_path / "best.ckpt").write_bytes(b"PK")
    assert checkpoints.find_damage(tmp_path / "best.ckpt") == "BadZipFile"
