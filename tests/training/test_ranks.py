"""A run of several processes, each with a share of the batch, and of several that share a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lra
from lra import environment
from tests.sampling import sampled
from tests.training.conftest import arguments
from tests.training.test_fit import interrupt_at

LAUNCHERS = [["-m", "lra"], ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "lra"]]


def alone() -> dict[str, str]:
    """The environment of processes that are one thread each."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(lra.__file__).parents[1])}


@pytest.mark.parametrize("launcher", sampled(LAUNCHERS))
def test_two_processes_share_a_batch(launcher, tmp_path, small, monkeypatch):
    """Under torchrun and under Lightning's own launcher, going on where one process was interrupted: the same sequences
    and dropout, so the same result.
    """
    shared = ("model.attn_dropout=0", "trainer.average=ema")  # SDPA draws dropout from PyTorch's generator
    one = small(*shared, "name=one")
    with monkeypatch.context() as patch:
        interrupt_at(7, patch)
        with pytest.raises(RuntimeError, match="power cut"):
            small(*shared, "name=two")
    devices = [] if "torch.distributed.run" in launcher else ["trainer.devices=2"]
    command = [sys.executable, *launcher, "fit", *arguments(*shared, "name=two", "resume=auto", *devices)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=alone())
    assert run.returncode == 0 and run.stdout.count("test accuracy") == 1, run.stdout + run.stderr[-2000:]
    two = json.loads((tmp_path / "checkpoints/runs/listops/flash/two-s0/result.json").read_text())
    assert two["world_size"] == 2 and two["resumed"]
    for split in ("test", "fresh"):
        assert two[split]["loss"] == pytest.approx(one[split]["loss"], rel=1e-4)


OBJECTIVES = [
    ("pretrain=masked", "mask=0.5", "mask_random=0.3", "mask_span=2", "mask_loss=all"), ("pretrain=causal",),
    ("denoise=1", "mask=0.5", "augment.operands=true", "model.layer_drop=0.3"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_devices_learn_what_one_learns(objective, tmp_path, small):
    """What is hidden, augmented and left out is of a sequence, not of a device."""
    shared = ("model.attn_dropout=0", *objective)
    one = small(*shared, "name=one")
    command = [sys.executable, "-m", "lra", "fit", *arguments(*shared, "name=two", "trainer.devices=2")]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=alone())
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    two = json.loads((tmp_path / "checkpoints/runs/listops/flash/two-s0/result.json").read_text())
    assert two["world_size"] == 2
    assert two["test"]["loss"] == pytest.approx(one["test"]["loss"], rel=1e-4)


# the first batch that rank 1 scores takes 20 seconds, of which a slow machine's steps take few
SLOW = """
import os, time
from lra.cli import main
from lra.tasks.base import TaskModule
genuine, waits = TaskModule.forward, [20.0] if os.environ.get("LOCAL_RANK") == "1" else []

def forward(self, batch):
    if waits and not self.training:
        time.sleep(waits.pop())
    return genuine(self, batch)

TaskModule.forward = forward
main()
"""


@pytest.mark.slow
def test_no_step_waits_for_a_rank_that_is_longer_at_scoring(tmp_path):
    """As one that compiles it is: what a step takes, and what a run will, would be said wrongly."""
    (tmp_path / "slow.py").write_text(SLOW)
    fields = arguments("name=two", "trainer.devices=2", "trainer.steps=40", "trainer.eval_every=40")
    line = [sys.executable, "slow.py", "fit", *fields]
    run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=alone())
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "checkpoints/runs/listops/flash/two-s0/result.json").read_text())
    assert result["train_seconds"] < 10 < result["validation_seconds"]  # half of the wait is clear of either


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=["lightning", "torchrun"])
def test_two_processes_share_a_test_set(launcher, tmp_path, finished):
    devices = [] if "torch.distributed.run" in launcher else ["trainer.devices=2"]
    command = [sys.executable, *launcher, "test", f"init={finished}", *devices]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=alone())
    assert run.returncode == 0 and run.stdout.count("test accuracy") == 1, run.stdout + run.stderr[-2000:]
    result = json.loads((finished / "result.json").read_text())
    assert f"test accuracy {100 * result['test']['accuracy']:.2f}%" in run.stdout


def test_processes_that_share_a_gpu_are_counted(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU-12-ab\necho GPU-34-cd\necho GPU-12-ab\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [environment.gpu_processes(uuid) for uuid in ("12-ab", "34-cd", "56-ef")] == [2, 1, 0]
    smi.unlink()
    assert environment.gpu_processes("12-ab") == 0
