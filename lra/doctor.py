"""What this machine has, for `lra doctor`: versions, GPUs, kernels that run, prepared data, disk."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lra import environment
from lra.errors import first_line
from lra.reading import read_json

if TYPE_CHECKING:
    import torch

DoctorRow = tuple[str, str]
FIELD_OF_PARAM = {"seed": "data_seed", "folder": "source"}  # parameters of a store with other names than their fields


def diagnose() -> Iterator[DoctorRow]:
    """Rows of (subject, state). Something missing or broken is a row that says so, never an exception."""
    sections = {
        "platform": _platform,
        "versions": _versions,
        "GPU": _gpus,
        "compiled code": _compiled,
        "kernels": _kernels,
        "flash-attn": _flash_attn,
        "data": _data,
        "disk": _disk,
    }
    for subject, section in sections.items():
        yield from _guarded(subject, section)


def _guarded(subject: str, section: Callable[[], Iterator[DoctorRow]]) -> Iterator[DoctorRow]:
    try:
        yield from section()
    except Exception as error:  # this command reports whatever a broken installation raises
        yield subject, f"fails: {first_line(error)}"


def _platform() -> Iterator[DoctorRow]:
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    yield "platform", platform.platform()
    yield "lra", f"{environment.package_versions()['lra'] or 'not installed, run'} from {Path(__file__).parent}"


def _versions() -> Iterator[DoctorRow]:
    for name, version in environment.package_versions().items():
        if name not in ("python", "lra"):
            yield name, version or "not installed"


def _gpus() -> Iterator[DoctorRow]:
    import torch

    yield "CUDA of PyTorch", torch.version.cuda or "none: this PyTorch is built for the CPU"
    if not torch.cuda.is_available():
        yield "GPU", f"none: {_why_no_gpu()}"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        yield f"GPU {index}", f"{gpu.name}, {capability}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"


def _why_no_gpu() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "PyTorch sees no device"


def _compiled() -> Iterator[DoctorRow]:
    from lra.compile_caches import current_device, describe_caches, use_compile_caches

    use_compile_caches(current_device())  # the kernels that run next are kept there
    yield from describe_caches(current_device())


def _kernels() -> Iterator[DoctorRow]:
    import torch

    if torch.cuda.is_available():
        yield from _guarded("flash", lambda: _flash("cuda", torch.bfloat16))
        yield from _guarded("ptxas", _ptxas)
        yield from _guarded("tiles", _tiles)
        yield from _guarded("choices", _choices)
    else:
        yield "flash", "SDPA on the CPU (Triton needs a GPU)"
        yield "layers", "PyTorch (the kernels need a GPU)"


def _flash(device: str, dtype: torch.dtype) -> Iterator[DoctorRow]:
    """Runs the Triton kernels once, forward and backward, and compares them with their reference."""
    from lra.kernels.testing import Case, check_case

    errors = check_case(Case(lengths=(100, 0, 37), head_dim=32, dtype=dtype, dropout=0.1), device, "triton")
    verdict = "Triton works" if all(error.ok for error in errors.values()) else "Triton is WRONG here"
    measured = ", ".join(f"{name} {e.error:.1g} (budget {e.budget:.1g})" for name, e in errors.items())
    yield "flash", f"{verdict}; largest error in {str(dtype).removeprefix('torch.')}: {measured}"


def _ptxas() -> Iterator[DoctorRow]:
    from lra.kernels import device

    used = device.find_ptxas(device.compute_capability())
    yield "ptxas", f"{device.format_version(used.version)}, {used.path}"


def _choices() -> Iterator[DoctorRow]:
    """The kernels for each kind of call, with the rows and columns of their tiles, and why they are chosen."""
    import torch

    from lra.kernels import device, kernel_choices

    gpu = device.describe_gpu(torch.device("cuda"))
    for call, *choices in kernel_choices.attention_choices(gpu):
        yield f"  {call}", "; ".join(f"{c.kernel} {c.tile.rows}x{c.tile.columns}: {c.reason}" for c in choices)
    for layers, state in kernel_choices.layer_choices(gpu):
        yield f"  {layers}", state


def _tiles() -> Iterator[DoctorRow]:
    """The tables of tiles, in the order in which they are searched."""
    from lra.kernels.flash import tuning

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        tables = tuning.load_tables()
    yield from (("tiles", str(note.message)) for note in notes)
    for table in tables:
        whose = "shipped" if table.path.is_relative_to(Path(__file__).parent) else "this machine's"
        m = table.measured
        made = f"measured on {m['gpu']} with Triton {m['versions']['triton']}, ptxas {m['ptxas']}, {m['date'][:10]}"
        yield "tiles", f"{whose}, {len(table.tiles)} rows in {table.path}, {made}"
    if not tables:
        yield "tiles", "defaults, right but not the fastest: lra tune measures this GPU, some minutes"


def _flash_attn() -> Iterator[DoctorRow]:
    if importlib.util.find_spec("flash_attn") is None:
        yield "flash-attn", "not installed (optional, for comparison)"
    else:
        yield "flash-attn", importlib.import_module("flash_attn").__version__


def _data() -> Iterator[DoctorRow]:
    from lra.data import store

    root = store.data_root()
    yield "data", f"{root}" + ("" if root.exists() else " (does not exist yet)")
    for path in sorted(root.glob("[!.]*@*")):
        yield from _guarded(f"  {path.name}", lambda path=path: _store(path))


def _store(path: Path) -> Iterator[DoctorRow]:
    from lra.data.store import Store

    manifest = Store.open(path, _command(path)).manifest
    size = sum(file["bytes"] for file in manifest["files"].values())
    splits = ", ".join(f"{name} {split['count']:,}" for name, split in manifest["splits"].items())
    yield f"  {path.name}", f"{size / 1e6:.1f} MB: {splits}"


def _command(path: Path) -> str:
    """The command that prepares the store at `path`, by its manifest; empty if the parameters are not those of its
    name.
    """
    from lra.config.schema import RunConfig
    from lra.tasks import TASKS

    params: dict[str, Any] = {}  # those of the default, where none can be read
    with suppress(OSError, ValueError, KeyError, TypeError):
        params = dict(read_json(path / "manifest.json")["params"])
    with suppress(Exception):  # a task that is no more, or what none of its fields can be
        task = TASKS.get(path.name.partition("@")[0])
        given = {FIELD_OF_PARAM.get(name, name): value for name, value in params.items()}
        fields = {field.name: given[field.name] for field in dataclasses.fields(task.Config) if field.name in given}
        data = task.Data(RunConfig(task=task.Config(**fields), attn=None))
        if data.content().path == path:
            return data.command()
    return ""


def _disk() -> Iterator[DoctorRow]:
    from lra.data import store

    for subject, folder in (("for data", store.data_root()), ("for runs", Path.cwd())):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        yield f"disk {subject}", f"{shutil.disk_usage(there).free / 1e9:.1f} GB free in {there}"
