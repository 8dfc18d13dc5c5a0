"""An attention of another installed package: listed, trained and measured like those of lra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lra.models.attention import ATTENTIONS
from tests.command_line import lra as command
from tests.command_line import refused

ROOT = Path(__file__).parent.parent.parent
MODULE = '''
from dataclasses import dataclass

from torch.nn import functional as F

from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention


@ATTENTIONS.register("mine", exact=False, dropout=False, ragged=False, paper="None yet")
class Mine(Attention):
    """The mean of the values, times a factor."""

    @dataclass(frozen=True)
    class Config:
        factor: float = 1.0

    def forward(self, q, k, v, batch):
        real = batch.mask()[:, :, None, None]
        mean = batch.pad(v).masked_fill(~real, 0).sum(1, keepdim=True) / batch.length.clamp(min=1)[:, None, None, None]
        return (self.config.factor * (mean + 0 * batch.pad(q + k))).masked_fill(~real, 0).flatten(0, 1)
'''
POINTS = "[lra.attentions]\nmine = my_attention\ntheirs = no_such_module\n"
RUN = (
    "task=listops", "attn=mine", "attn.factor=0.5", "recipe=demo", "batch.size=4",
    "trainer.steps=2", "trainer.eval_every=2", "trainer.log_every=1", "trainer.accelerator=cpu",
    "task.train=50", "task.val=10", "task.test=10", "task.fresh=10", "task.max_length=32",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where commands run; in it `site`, with the installed package `mine`."""
    folder = tmp_path_factory.mktemp("mine")
    info = folder / "site" / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (folder / "site" / "my_attention.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def lra(folder):
    """Runs `python -m lra …` where the package is installed; returns the finished process."""
    changes = {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}", "LRA_DATA": str(folder / "data")}
    environment = os.environ | changes | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "lra", *arguments)
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_it_is_listed(lra):
    done = lra("ls", "attns")
    assert done.returncode == 0 and not done.stderr
    lines = [line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    rows = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in lines}
    assert rows["mine"] == ["no", "no", "no", "no", "1-1024", "The mean of the values, times a factor."]
    assert rows["theirs"][5] == "Needs the module no_such_module that mine names."
    assert rows["flash"][5].startswith("FlashAttention")


def test_it_is_trained(lra, folder):
    done = lra("fit", *RUN)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("checkpoints/runs/listops/mine/*/result.json")
    result = json.loads(file.read_text())
    assert result["status"] == "finished" and result["config"]["attn"] == {"name": "mine", "factor": 0.5}


@pytest.mark.slow
def test_it_is_measured(lra):
    done = lra("bench", "attention", "attns=mine:factor=2", "lengths=64", "head_dims=16", "tokens=128", "heads=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine:factor=2" in done.stdout and "unsupported" not in done.stdout


@pytest.fixture
def installed(folder, monkeypatch):
    """The package is installed for this process, too."""
    ATTENTIONS.catalogue()
    monkeypatch.delitem(vars(ATTENTIONS), "_entry_points")  # which it keeps, to be put back
    monkeypatch.syspath_prepend(folder / "site")


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ("theirs", "lra: attention 'theirs' lacks the module no_such_module that mine names: rename, mend or remove"),
        ("min", "lra: unknown attention 'min': did you mean 'mine'?"),
    ],
)
def test_what_cannot_be_had_is_one_line(installed, attn, message):
    assert refused(command("config", "show", "task=listops", f"attn={attn}")).startswith(message)


@pytest.mark.slow
def test_what_declares_badly_is_no_alternative(lra):
    done = lra("fit", *RUN, "model.attn_dropout=0.1")
    assert "set model.attn_dropout=0, or use attn=" in done.stderr and "theirs" not in done.stderr
