"""Runs made by hand to be packed and merged."""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from lra.experiments.results import unpack
from lra.experiments.results.archive import pack_runs
from lra.training.curves import CURVE_COLUMNS
from lra.training.run_directory import CLAIM_FILE, FIRST_FAILURE_FILE, PREDICTIONS_FILE
from tests.experiments.results.test_ledger import cell, result

DONE, FAILED, GOING = (
    f"listops/{name}" for name in ("flash/xiong2021-s0", "flash/xiong2021-s1", "linear/xiong2021-s0")
)
CELLS = {DONE: cell("flash", 0), FAILED: cell("flash", 1), GOING: cell("linear", 0)}


def make(runs: Path, name: str, status: str | None = "finished", steps: int = 500, **changes: Any) -> Path:
    """A run's directory; `status` None: it has not ended."""
    folder, made = runs / name, result(CELLS[name], directory=f"checkpoints/runs/{name}", **changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(made["config"], sort_keys=False))
    (folder / "env.json").write_text(json.dumps(made["environment"]))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, CURVE_COLUMNS)
        writer.writeheader()
        writer.writerows({"step": step, "val/accuracy": 0.1} for step in range(250, steps + 1, 250))
        writer.writerow({"step": steps + 50, "train/loss": 1.0})
    (folder / "best.ckpt").write_bytes(f"best.ckpt {steps}".encode())
    identity = {"task": made["task"], "vocabulary": "any", "config": made["config"]}
    save_file({"steps": torch.tensor([steps])}, folder / "model.safetensors", {"lra": json.dumps(identity)})
    torch.save({"global_step": steps, "callbacks": {}}, folder / "last.ckpt")
    (folder / "tensorboard").mkdir(exist_ok=True)
    if status:
        (folder / "result.json").write_text(json.dumps(made | {"status": status}))
    return folder


def listed(folder: Path) -> dict[str, bytes]:
    """The files below a folder, but for claims, which say nothing of a run."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CLAIM_FILE]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def packed(runs: Path, *args: str) -> Path:
    out = runs.parent / f"{runs.name}.tar.xz"
    out.unlink(missing_ok=True)
    pack_runs([f"runs={runs}", f"out={out}", *args])
    return out


def names(file: Path) -> dict[str, set[str]]:
    """run -> its files in an archive."""
    found: dict[str, set[str]] = {}
    with tarfile.open(file) as tar:
        for member in tar:
            run, _, name = member.name.rpartition("/")
            found.setdefault(run, set()).add(name)
    return found


SMALL = set(unpack.SMALL_FILES) - {FIRST_FAILURE_FILE, PREDICTIONS_FILE}
