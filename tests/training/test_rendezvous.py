"""Ranks that wait for others: they say for whom, hear the first signal, and see that one is gone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lra
from tests.training.conftest import arguments

# the fields of lra fit follow; END ends rank 1 as it begins
DRIVER = """
import os, signal, sys
if os.environ.get("END") and os.environ.get("LOCAL_RANK") == "1":
    os.kill(os.getpid(), signal.SIGKILL)
from lra.cli import main
from lra.training import rendezvous
rendezvous.PATIENCE_S = 0.5
main()
"""
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip


def started(folder: Path, *fields: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "driver.py").write_text(DRIVER)
    known = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(lra.__file__).parents[1])} | environment
    return subprocess.Popen(
        [sys.executable, "driver.py", "fit", *arguments(*fields)], cwd=folder, env=known, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_says_for_whom_and_ends_on_the_first_signal(tmp_path, number):
    with started(tmp_path, **TORCHRUN) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "waits" in line)
        assert line.startswith("rank 1 of 2, started by torchrun, waits for rank 0 at 127.0.0.1:1")
        process.send_signal(number)
        assert process.wait(60) == 128 + number


@pytest.mark.slow
def test_a_rank_that_is_gone_ends_the_wait_for_it(tmp_path):
    with started(tmp_path, "trainer.devices=2", END="yes") as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    assert "lra: rank 1 ended (signal 9) before the ranks met" in output and "Traceback" not in output
    assert not list(tmp_path.rglob("result.json"))
