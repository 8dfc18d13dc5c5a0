"""Disks that are full, limits, and folders that vanish while a run trains: real ones, in processes of their own."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = Path("checkpoints/runs/listops/flash/run-s0")
FIT = (
    "fit", "task=listops", "attn=flash", "recipe=demo", "trainer.steps=120", "trainer.eval_every=60",
    "trainer.log_every=1", "trainer.accelerator=cpu", "batch.size=4", "model.d_model=16", "model.d_ff=16",
    "model.layers=1", "task.train=100", "task.val=20", "task.test=20", "task.fresh=20", "task.max_length=32",
    "name=run",
)  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(here) -> Iterator[Path]:
    """A disk of 4 MB for the runs; only root may mount one."""
    disk = here / "checkpoints"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], capture_output=True, check=False
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def start(*more: str, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "lra", *FIT, *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                            preexec_fn=before)  # fmt: skip


def trained(process: subprocess.Popen[str], rows: int) -> None:
    """Waits until a run has logged so many rows, in training."""
    until = time.monotonic() + 100
    while not (RUN / "metrics.csv").exists() or (RUN / "metrics.csv").read_bytes().count(b"\n") < rows:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)


def ends(process: subprocess.Popen[str], *said: str) -> None:
    """A run ends soon, in one line, with exit code 2."""
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and error.count("\n") == 1 and error.startswith("lra: "), error
    assert all(each in error for each in said), error


def as_unbroken(more: tuple[str, ...] = ()) -> None:
    """The run goes on to the result of one that nothing stopped."""
    process = start("resume=auto", *more)
    assert process.communicate(timeout=100)[1] == "" and process.returncode == 0
    found = (RUN / "metrics.csv").read_bytes(), (RUN / "model.safetensors").read_bytes()
    shutil.rmtree(RUN)
    process = start(*more)
    assert process.communicate(timeout=100)[1] == "" and process.returncode == 0
    assert found == ((RUN / "metrics.csv").read_bytes(), (RUN / "model.safetensors").read_bytes())


@pytest.mark.parametrize("rows", [5, 70], ids=["before a checkpoint", "after one"])
def test_a_disk_that_others_fill(small_disk, rows):
    process, fill = start(), small_disk / "fill"
    trained(process, rows)
    with fill.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    ends(process, "No space left on device", "free some space")
    fill.unlink()
    as_unbroken()


def test_a_limit_on_the_size_of_files(here):
    limit = (60_000, 60_000)  # more than rows take, less than a checkpoint
    ends(start(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)), "best.ckpt", "ulimit -f")
    as_unbroken()


def test_a_folder_that_is_renamed(here):
    process = start()
    trained(process, 70)
    RUN.rename("elsewhere")
    ends(process, "No such file or directory", "put back")
    Path("elsewhere").rename(RUN)
    as_unbroken()


def test_a_folder_that_is_removed_while_two_devices_train(here):
    two = ("trainer.devices=2",)
    process = start(*two)
    trained(process, 70)
    shutil.rmtree(RUN)
    ends(process, "No such file or directory")
    as_unbroken(two)
