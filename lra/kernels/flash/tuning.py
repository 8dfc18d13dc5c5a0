"""The tile of scores that a kernel works on. dispatch.py decides which kernel runs.

`find_tile` looks into the table that `lra tune` measured on this machine, then into the table that is shipped for the
GPU. Without a row there, it takes `default_tile`, which works everywhere but is not the fastest. No call measures.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lra import environment
from lra.errors import UsageError
from lra.kernels import device
from lra.kernels.flash.layout import Layout
from lra.kernels.plans import forget_plans
from lra.reading import is_number, read_json

KERNELS = (
    "forward", "dkdv", "dq", "dkdv_dq",
    "hopper_forward", "hopper_shared", "hopper_shared_short", "hopper_backward", "hopper_specialized",
)  # fmt: skip
SHORT_LENGTH = 1024  # rows; `hopper_shared_short` is for sequences up to this length
TABLE_DTYPES = ("bfloat16", "float32")  # float16 has bfloat16's size and speed, and uses its tiles
FLASH_FOLDER = Path(__file__).parent


class Tile(NamedTuple):
    """The tile of scores that a program works on at a time, and its warps and stages.

    All numbers are powers of two, except the stages, and the rows and warps of `hopper_shared`: 64 and 4 for each
    group.
    """

    rows: int  # queries
    columns: int  # keys, a multiple of 16
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """Its arguments for a launch. Not every version of Triton fuses a * b + c by default."""
        return dict(
            BLOCK_M=self.rows, BLOCK_N=self.columns, num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=True
        )


class TileKey(NamedTuple):
    """The case that a tile is measured for."""

    kernel: str  # one of KERNELS
    dtype: str  # one of DTYPES
    block_d: int  # the head dimension inside the kernel, a power of two
    dropout: bool


class TileTable(NamedTuple):
    """The measured tiles of one file."""

    path: Path
    measured: dict[str, Any]  # environment.describe() of the measurement, and its ptxas
    sources: str  # `sources()` of the kernels that were measured
    tiles: dict[TileKey, Tile]
    microseconds: dict[TileKey, float]  # the time of the pass with that tile
    # what a row states if another session measured it: `lra.bench.records.session_of`
    made: dict[TileKey, dict[str, Any]]


def find_tile(kernel: str, dtype: torch.dtype, block_d: int, dropout: bool, layout: Layout | None = None) -> Tile:
    """The tile of `kernel`, one of KERNELS, on the current device, which must be the device of q.

    With a layout the tile is cut so that it lies within a block, and so that registers have room for the rules.
    """
    if kernel in forced_tiles:
        _asked.add(kernel)
        found = forced_tiles[kernel]
    else:
        found = _tile(_current_device(), kernel, dtype, block_d, dropout)
    if layout is None:
        return found
    rows, columns = layout.block
    if layout.ruled:
        narrow = dtype != torch.float32 and block_d * (1 + dropout) <= 64
        most = 32 if dtype == torch.float32 or device.compute_capability()[0] in (8, 12) else 64
        rows, columns, found = math.gcd(rows, most), math.gcd(columns, most), found._replace(warps=4 if narrow else 8)
    return found._replace(rows=math.gcd(found.rows, rows), columns=math.gcd(found.columns, columns))


@contextmanager
def force_tile(kernel: str, tile: Tile) -> Iterator[set[str]]:
    """Inside, `kernel` has this tile, and passes run on its family of kernels, Hopper's or the plain ones.

    The set contains the kernel after its launch.
    """
    forced_tiles[kernel] = tile
    _asked.clear()
    forget_plans()
    try:
        yield _asked
    finally:
        del forced_tiles[kernel]
        forget_plans()


forced_tiles: dict[str, Tile] = {}  # no context variable, because autograd calls the backward in another thread
_asked: set[str] = set()


def block_dim(head_dim: int) -> int:
    """The head dimension inside the kernels: a power of two, and at least the 16 that tl.dot needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def default_tile(kernel: str, dtype: torch.dtype, block_d: int, dropout: bool) -> Tile:
    """A tile for the current device without a table. It fits, but is not the fastest."""
    narrow, generation = block_d <= 64, device.compute_capability()[0]
    if dtype == torch.float32:  # exact products run on the ordinary units and read registers
        if kernel != "forward" or generation == 10:  # with 64 rows Triton 3.6 takes the tensor cores there, in TF32
            return Tile(32, 32, 8, 2)
        return Tile(64, 32, 8, 2) if narrow else Tile(32, 16, 8, 2)
    if generation in (8, 12):  # mma.sync: operands and sums all lie in registers
        if kernel == "forward":
            return Tile(128, 32, 8, 2) if narrow else Tile(64, 64, 8, 2)
        return Tile(64, 32, 4, 2) if narrow else Tile(32, 64, 8, 2)
    shared = Tile(128, 64, 8, 4) if not narrow else Tile(192, 128, 12, 3) if dropout else Tile(256, 64, 16, 5)
    return {
        "forward": Tile(128, 64, 8, 3 if narrow else 2),
        "dkdv": Tile(64, 64, 4, 2) if narrow else Tile(32, 64, 8, 2),
        "dq": Tile(64, 64, 4 if narrow else 8, 2),
        "dkdv_dq": Tile(64, 64, 4, 2) if narrow else Tile(32, 64, 8, 2),
        "hopper_forward": Tile(64, 128, 4, 2) if narrow else Tile(64, 64, 4, 2),
        "hopper_shared": shared,
        "hopper_shared_short": Tile(256, 64, 16, 5) if narrow else shared,
        "hopper_backward": Tile(64, 64, 4, 3) if narrow else Tile(64, 128, 8, 2),
        "hopper_specialized": Tile(64, 128, 4, 3),
    }[kernel]


def load_tables() -> list[TileTable]:
    """The tables for the current device, in the order in which `find_tile` looks into them."""
    found = []
    if torch.cuda.is_initialized():
        path = user_table_path(torch.cuda.get_device_name())
        if path.exists():
            table = read_table(path)
            if reason := outdated_reason(table):
                warnings.warn(f"{path} is not used: {reason}; lra tune measures anew", stacklevel=2)
            else:
                found.append(table)
    major, minor = device.compute_capability()
    path = FLASH_FOLDER / "tuned" / f"sm_{major}{minor}.json"
    return [*found, read_table(path)] if path.exists() else found


def user_table_path(gpu: str) -> Path:
    """The file for the measurements of `lra tune` on this model of GPU, in the user's cache folder."""
    return environment.cache_root() / "tiles" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', gpu)}.json"


def outdated_reason(table: TileTable) -> str | None:
    """Why a user's table does not describe the present kernels; None where it does."""
    import triton

    before = table.measured["versions"]["triton"]
    if before != triton.__version__:
        return f"it was measured with Triton {before}, and this is {triton.__version__}"
    return None if table.sources == hash_kernels() else "the kernels have changed since it was measured"


def hash_kernels() -> str:
    """A hash of the files that hold kernels."""
    files = [
        file.read_bytes() for file in sorted([*FLASH_FOLDER.rglob("*.py"), *FLASH_FOLDER.parent.glob("hopper.py")])
    ]
    kernels = [text for text in files if re.search(rb"^@(triton|gluon)\.jit", text, re.MULTILINE)]
    return hashlib.sha256(b"".join(kernels)).hexdigest()[:16]


def read_table(path: Path) -> TileTable:
    """Read a table. A file that `write_table` did not write raises a UsageError."""
    try:
        content = read_json(path)
        table = TileTable(path, content["measured"], content["sources"], {}, {}, {})
        for row in content["tiles"]:
            key = TileKey(*(row[name] for name in TileKey._fields))
            chosen = Tile(*(row[name] for name in Tile._fields))
            sizes = (key.block_d, *chosen, row["microseconds"])
            if (
                key.kernel not in KERNELS
                or key.dtype not in TABLE_DTYPES
                or not all(n > 0 and is_number(n) for n in sizes)
            ):
                raise ValueError(f"no kernel has the row {row}")
            table.tiles[key], table.microseconds[key] = chosen, row["microseconds"]
            table.made[key] = {"made": row["made"]} if "made" in row else {}
        if not (table.measured["versions"]["triton"] and table.measured["gpu"] and table.measured["date"]):
            raise ValueError("it does not say what it was measured with")
        return table
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is broken ({error}): delete it, or measure anew with lra tune") from error


def write_table(table: TileTable) -> None:
    """Replace the table's file in one step. It has a line for each row."""
    head = json.dumps({"measured": table.measured, "sources": table.sources}, indent=2).removesuffix("\n}")
    rows = (
        {**key._asdict(), **table.tiles[key]._asdict(), "microseconds": table.microseconds[key]} | table.made[key]
        for key in sorted(table.tiles)
    )
    body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    aside = table.path.with_name(f".{table.path.name}.{os.getpid()}")
    try:
        table.path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(f'{head},\n  "tiles": [\n{body}\n  ]\n}}\n')
        os.replace(aside, table.path)
    except OSError as error:
        raise UsageError(f"cannot write {table.path} ({error.strerror}): name another file with out=") from error


def forget_tables() -> None:
    """Forget cached tables, facts of the GPU, and what was planned by them. Call it after a table was written."""
    forget_plans()
    for cached in (_tile, _tables, device.describe_gpu):
        cached.cache_clear()


def _current_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


@functools.cache
def _tile(device: int | None, kernel: str, dtype: torch.dtype, block_d: int, dropout: bool) -> Tile:
    """The tile for the current device. `device` is only a key of the cache."""
    key = TileKey(kernel, "float32" if dtype == torch.float32 else "bfloat16", block_d, dropout)
    known = (table.tiles[key] for table in _tables(device) if key in table.tiles)
    return next(known, default_tile(kernel, dtype, block_d, dropout))


@functools.cache
def _tables(device: int | None) -> list[TileTable]:
    return load_tables()
