"""Where lra keeps its files, and the facts that a measurement states: versions, hardware, commit, command, date."""

from __future__ import annotations

import datetime
import functools
import getpass
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "lra", "torch", "triton", "pytorch-lightning", "torchmetrics", "omegaconf", "datasets", "numpy", "numba", "pillow",
    "pyarrow",
)  # fmt: skip
UNCLEAN_MARK = "†"  # after a figure that no clean commit made
UNCLEAN_NOTE = "made by changed code, or no commit is stated"
WARNED_VARIABLE = "LRA_WARNED_UNCLEAN"  # set once `warn_unclean` was called


def cache_root() -> Path:
    """The folder `lra` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "lra"


def cache_folder(name: str) -> Path:
    """A folder for compiled code. It is in the temporary folder if the user's cache can't be written to."""
    folder = cache_root() / name
    return folder if _writable(folder) else _temporary_root() / name


def ensure_user() -> None:
    """Gives libraries the name, the home and the cache of a user, where a container's user has none.

    It runs before PyTorch and Triton are imported. What the user has set stays as it is.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # which one depends on Python's version
        os.environ["USER"] = f"uid-{os.getuid()}"
    if "HOME" not in os.environ and not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = str(_temporary_root())
        if not os.environ.get("LRA_DATA"):
            warnings.warn(f"this user has no home: data goes to {cache_root()}; set HOME or LRA_DATA", stacklevel=2)
    if not _writable(Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")):
        os.environ.setdefault("TRITON_CACHE_DIR", str(_temporary_root() / "triton"))


def _temporary_root() -> Path:
    return Path(tempfile.gettempdir(), f"lra-{os.getuid()}")


def _writable(folder: Path) -> bool:
    """Whether a folder may be written to, or made if there is none."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.exists(each))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages on which a result depends; None for a missing one."""
    return {"python": platform.python_version(), **{name: _installed_version(name) for name in PACKAGES}}


@functools.cache
def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def current_commit() -> str | None:
    """The checkout's commit, with `+` if the code differs from it; None outside a checkout.

    It is looked up once in a process: later results come from the code that was there then.
    """
    return _checkout()[0]


@functools.cache
def _checkout() -> tuple[str | None, str]:
    """The commit as `current_commit` gives it, and why there is none.

    The reason is empty for an installed package, which has a version.
    """
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None, f"{root} has no .git" if (root / "pyproject.toml").exists() else ""
    try:
        sha = _git(root, "rev-parse", "--short=12", "HEAD")
        dirty = _git(root, "status", "--porcelain", "--", "lra", "benchmarks/*.py")
    except subprocess.CalledProcessError as error:
        return None, (error.stderr.strip().splitlines() or [f"git ended with {error.returncode}"])[0]
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"git can't be run ({type(error).__name__})"
    return sha + ("+" if dirty else ""), ""


def _git(root: Path, *args: str) -> str:
    """The output of git. It takes no lock, so it neither waits for another process nor writes."""
    line = ["git", "--no-optional-locks", *args]
    return subprocess.run(line, cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def is_clean_commit(stated: str | None) -> bool:
    """Whether all commits that a record states, separated by commas, are known and of unchanged trees."""
    return all(re.fullmatch("[0-9a-f]{7,40}", each) for each in (stated or "").split(", "))


def warn_unclean() -> None:
    """Warns on standard error that results will state no clean commit, and says how to mend that.

    It warns once in a process and all its children. It does not warn for an installed package, as results state its
    version.
    """
    if WARNED_VARIABLE in os.environ:
        return
    os.environ[WARNED_VARIABLE] = "true"
    found, why = _checkout()
    if found is None:
        said = why and f"{why}: results state no commit, and tables mark them; use a git clone to name the code"
    else:
        changed = f"the code differs from commit {found.rstrip('+')}: results state {found}, and tables mark them"
        said = "" if is_clean_commit(found) else f"{changed}; commit the changes first to name the code"
    if said and sys.stderr:
        with suppress(OSError):  # a full disk
            print(f"lra: {said}", file=sys.stderr)


def current_command() -> str:
    """The command line. Of absolute paths it has only the names, as their folders mean nothing elsewhere."""
    program = Path(sys.argv[0])
    root = Path(__file__).parent.parent
    place = program.resolve().relative_to(root) if program.resolve().is_relative_to(root) else program.name
    called = ["lra"] if program.name in ("lra", "__main__.py") else ["python", str(place)]
    return " ".join([*called, *(re.sub(r"(^|=)/\S*/", r"\1", argument) for argument in sys.argv[1:])])


def drop_folder(path: str) -> str:
    """Of an absolute path the name alone, as its folder means nothing elsewhere. Another text stays as it is."""
    return Path(path).name if Path(path).is_absolute() else path


def compute_processes(*fields: str) -> list[list[str]] | None:
    """These fields of each process on a GPU, as nvidia-smi shows them; None if it does not answer."""
    line = ["nvidia-smi", f"--query-compute-apps={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(line, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if found.returncode else [row.split(", ") for row in found.stdout.splitlines()]


def gpu_processes(uuid: str) -> int:
    """How many processes compute on a GPU; 0 if nvidia-smi does not say, as in a container."""
    return sum(uuid in owner for (owner,) in compute_processes("gpu_uuid") or ())


def describe() -> dict[str, Any]:
    """All that a committed result states about where it was measured."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": current_command(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "commit": current_commit(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": package_versions(),
    }
