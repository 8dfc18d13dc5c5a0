"""Unpacks an archive of runs: only the files that `lra results pack` writes, and only so many bytes."""

from __future__ import annotations

import sys
from pathlib import Path

from lra.errors import UsageError
from lra.files import unpack_archive
from lra.training.run_directory import FIRST_FAILURE_FILE, PREDICTIONS_FILE

SMALL_FILES = ("config.yaml", "env.json", FIRST_FAILURE_FILE, "metrics.csv", PREDICTIONS_FILE, "result.json")
CHECKPOINT_FILES = {
    "none": (), "weights": ("model.safetensors",), "last": ("last.ckpt",), "best": ("best.ckpt",),
    "all": ("best.ckpt", "last.ckpt", "model.safetensors"),
}  # fmt: skip
MOST_SMALL = 64 << 20  # bytes of a small file


def unpack_runs(file: Path, folder: Path) -> None:
    """Unpacks an archive's files below `folder`. UsageError if it holds anything that `pack_runs` does not write."""
    seen = unpack_archive(file, folder, "lra results pack", ("a run", "runs"), _most_bytes)
    for run in sorted({name.rpartition("/")[0] for name in seen}):
        if f"{run}/config.yaml" not in seen:
            raise UsageError(f"{file} has no {run}/config.yaml: get it again")


def _most_bytes(parts: list[str]) -> int | None:
    """The largest size of a file `<task>/<attn>/<run>/<name>` of a run; None for anything else."""
    if len(parts) != 4:
        return None
    return MOST_SMALL if parts[3] in SMALL_FILES else sys.maxsize if parts[3] in CHECKPOINT_FILES["all"] else None
