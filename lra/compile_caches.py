"""What torch.compile and Triton compiled: the folder that keeps it, and archives that carry it to other machines.

The folder is named by what compiled code depends on, so code of several GPUs or versions may lie beside each other, as
in a home that the nodes of a cluster share. Both libraries find an entry by a hash of all that it was made from, which
has no path in it. But Triton's lists of a kernel's files (`__grp__*.json`) state whole paths, so merging rewrites them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lra import environment
from lra.caches import check_binary
from lra.config.options import parse_options
from lra.errors import UsageError
from lra.files import check_archive_name, is_plain_name, refuse_existing_archive, unpack_archive, write_archive
from lra.kernels.device import find_ptxas, format_version

FOLDER = "compiled"  # in lra's cache
VARIABLES = {"inductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}
LIST_PREFIX = "__grp__"  # of Triton's lists of a kernel's files
# locks and files that a process is still writing
PASSING_NAMES = re.compile(r"locks?|tmp\..*|.*\.(lock|tmp)")

_chosen: dict[str, str] = {}  # the variables that `use_compile_caches` has set, with their values


@dataclass(frozen=True)
class PackOptions:
    out: str = ""

    def __post_init__(self) -> None:
        check_archive_name(self.out, "lra caches pack")


def use_compile_caches(device: torch.device) -> None:
    """Lets torch.compile and Triton keep what they compile for a device in lra's cache. What the user has set stays.

    It runs before the first kernel is compiled: both libraries read the variables then. Processes that this one starts
    have them too.
    """
    folders = cache_folders(machine_key(device))
    for name, variable in VARIABLES.items():
        if _set_by_user(name) is None:
            os.environ[variable] = _chosen[variable] = str(folders[name])


def machine_key(device: torch.device) -> str:
    """Names all that compiled code depends on, as a folder: versions, platform and GPU."""
    libc = "".join(platform.libc_ver())
    facts = {
        "torch": torch.__version__, "triton": environment.package_versions()["triton"] or "none",
        "python": ".".join(platform.python_version_tuple()[:2]),
    }  # fmt: skip
    where = [f"{platform.system()}-{platform.machine()}-{libc}", "cpu"]
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts |= {
            "cuda": str(torch.version.cuda), "ptxas": format_version(find_ptxas((gpu.major, gpu.minor)).version),
        }  # fmt: skip
        where[1] = f"{gpu.name}-{gpu.major}.{gpu.minor}"
    parts = [*(f"{name}-{version}" for name, version in facts.items()), *where]
    return "_".join(re.sub(r"[^\w.+]+", "-", part) for part in parts)


def current_device() -> torch.device:
    """The GPU that is used without `trainer.devices`, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def cache_folders(key: str) -> dict[str, Path]:
    """The folders `inductor` and `triton` of a key, or those that the user has set."""
    return {
        name: Path(_set_by_user(name) or environment.cache_folder(f"{FOLDER}/{key}/{name}")).absolute()
        for name in VARIABLES
    }


def describe_caches(device: torch.device) -> Iterator[tuple[str, str]]:
    """Rows of (subject, state): the key of this machine, and each folder with its files."""
    key = machine_key(device)
    yield "compiled code", f"for {key}"
    for name, folder in cache_folders(key).items():
        sizes = [path.stat().st_size for path in _lasting_files(folder)]
        yield f"  {name}", f"{len(sizes):,} files, {sum(sizes) / 1e6:.1f} MB in {folder}"


def pack_caches(args: Sequence[str]) -> list[str]:
    """Writes an archive of what is compiled for this machine. Returns lines to print."""
    out = Path(parse_options(PackOptions, args).out)
    refuse_existing_archive(out)
    key = machine_key(current_device())
    folders = cache_folders(key)
    members, damaged = [], 0
    for name, folder in folders.items():
        for path in _lasting_files(folder):
            if _is_whole(path):
                members.append((f"{key}/{name}/{path.relative_to(folder).as_posix()}", path))
            else:
                damaged += 1
    if not members:
        where = " and ".join(map(str, folders.values()))
        raise UsageError(f"nothing is compiled for {key} in {where}: run lra fit or lra bench step on that GPU first")
    size = write_archive(out, members)
    left_out = [f"left out: {damaged:,} damaged files"] if damaged else []
    return [*left_out, f"for {key}", f"{len(members):,} files, {size}"]


def merge_caches(file: str | Path) -> list[str]:
    """Adds the files of an archive to the caches of its key. Returns lines to print.

    A whole file that is there stays, as its name says what is in it. One that is damaged gives way.

    Raises:
        UsageError: and changes nothing, if anything in the file is wrong.
    """
    file = Path(file)
    if not file.is_file():
        raise UsageError(f"{file} is not a file: name an archive of lra caches pack")
    with tempfile.TemporaryDirectory(prefix="lra-merge-", ignore_cleanup_errors=True) as staging:
        names = unpack_archive(file, Path(staging), "lra caches pack", ("a compile cache", "caches"), _most_bytes)
        if len(keys := {name.partition("/")[0] for name in names}) != 1:
            raise UsageError(f"{file} has code for {len(keys)} machines, not for one: get it again")
        [key] = keys
        added, size = _settle(Path(staging, key), cache_folders(key), file)
    lines = [f"for {key}", f"{added:,} files added, {size / 1e6:.1f} MB, {len(names) - added:,} were here"]
    if (here := machine_key(current_device())) != key:
        lines.append(f"this machine does not use them: it is {here}")
    return lines


def _settle(new: Path, folders: dict[str, Path], file: Path) -> tuple[int, int]:
    """Moves unpacked files to their places. Returns how many, and their bytes."""
    pairs = [
        (path, folder / path.relative_to(new / name))
        for name, folder in folders.items()
        for path in _lasting_files(new / name)
    ]
    for path, _ in pairs:
        if not _is_whole(path):
            raise UsageError(f"{file} has a damaged {path.relative_to(new)}: get it again")
    added = size = 0
    # a list comes after its files, as a process that finds it looks for them
    for path, target in sorted(pairs, key=lambda pair: _is_list(pair[0])):
        if _is_in_place(target):
            continue
        if _is_list(path):
            children = {name: str(target.parent / name) for name in _listed(path)}
            path.write_text(json.dumps({"child_paths": children}), encoding="utf-8")
        added, size = added + 1, size + path.stat().st_size
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f"tmp.{os.getpid()}.{target.name}")
        shutil.move(path, aside)  # maybe to another disk, where it appears by and by
        os.replace(aside, target)
    return added, size


def _is_list(path: Path) -> bool:
    """Whether a file is one of Triton's lists of a kernel's files."""
    return path.name.startswith(LIST_PREFIX)


def _listed(path: Path) -> dict[str, str]:
    """The paths in one of Triton's lists, by the names of the files. ValueError if it is damaged."""
    try:
        return dict(json.loads(path.read_bytes())["child_paths"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _is_whole(path: Path) -> bool:
    """Whether a file can be read, as far as that is cheap to tell. A list must have its files beside it."""
    try:
        if _is_list(path):
            children = [path.parent / name for name in _listed(path) if is_plain_name(name)]
            return len(children) == len(_listed(path)) and all(map(_is_whole, children))
        if path.suffix == ".cubin":
            check_binary(path)
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
        return path.stat().st_size > 0
    except (OSError, UsageError, ValueError, RecursionError):
        return False


def _is_in_place(target: Path) -> bool:
    """Whether a file is here and whole. A list must lead to files that are here."""
    return _is_whole(target) and (not _is_list(target) or all(map(os.path.exists, _listed(target).values())))


def _lasting_files(folder: Path) -> Iterator[Path]:
    """The files of a cache, in order, without locks, unfinished files and links."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and all(map(_lasts, path.relative_to(folder).parts)):
            yield path


def _most_bytes(parts: list[str]) -> int | None:
    """No limit of its own for a file `<key>/<cache>/…`; None for anything else."""
    return sys.maxsize if len(parts) > 2 and parts[1] in VARIABLES and all(map(_lasts, parts)) else None


def _lasts(part: str) -> bool:
    """Whether a part of a path belongs to a file that is whole."""
    return is_plain_name(part) and not PASSING_NAMES.fullmatch(part)


def _set_by_user(name: str) -> str | None:
    """The folder of a cache that the user has set; None if lra chooses it.

    PyTorch sets its variable to its default, in /tmp, when Dynamo is imported.
    """
    given = os.environ.get(VARIABLES[name])
    if given and given != _chosen.get(VARIABLES[name]) and not (name == "inductor" and _is_default(given)):
        return given
    home = os.environ.get("TRITON_HOME") if name == "triton" else None
    return str(Path(home, ".triton", "cache")) if home else None


def _is_default(folder: str) -> bool:
    """Whether a folder is the one that PyTorch takes by itself."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(folder) == os.path.abspath(default_cache_dir())
