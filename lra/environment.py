"""Where lra keeps its files, and what a measurement was made with: versions, hardware, commit, command, date."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "lra", "torch", "triton", "pytorch-lightning", "torchmetrics", "omegaconf", "datasets", "numpy", "numba", "pillow",
    "pyarrow",
)  # fmt: skip


def cache_root() -> Path:
    """`lra` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lra"


def versions() -> dict[str, str | None]:
    """Installed versions of the packages a result depends on; None where one is missing."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def commit() -> str | None:
    """The checkout's commit, with `+` if what computes differs from it; None outside a checkout."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        sha = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=root, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--", "lra", "benchmarks/*.py"],
            cwd=root, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return sha.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def commits(before: str | None) -> str | None:
    """Commits that are stated already, with commas between, and this checkout's; each once."""
    return ", ".join(dict.fromkeys(filter(None, [*(before or "").split(", "), commit()]))) or None


def command() -> str:
    """The command line, of absolute paths only the names: where they lie means nothing elsewhere."""
    program = Path(sys.argv[0])
    root = Path(__file__).parent.parent
    place = program.resolve().relative_to(root) if program.resolve().is_relative_to(root) else program.name
    called = ["lra"] if program.name in ("lra", "__main__.py") else ["python", str(place)]
    return " ".join([*called, *(re.sub(r"(^|=)/\S*/", r"\1", argument) for argument in sys.argv[1:])])


def compute_processes(*fields: str) -> list[list[str]] | None:
    """These fields of each process on a GPU, as nvidia-smi names and shows them; None where it does not answer."""
    line = ["nvidia-smi", f"--query-compute-apps={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(line, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if found.returncode else [row.split(", ") for row in found.stdout.splitlines()]


def gpu_processes(uuid: str) -> int:
    """How many processes compute on a GPU; 0 where nvidia-smi does not say, as in a container."""
    return sum(uuid in owner for (owner,) in compute_processes("gpu_uuid") or ())


def describe() -> dict[str, Any]:
    """Everything a committed result states about where it was measured."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "commit": commit(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
    }
