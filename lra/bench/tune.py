"""`lra tune`: measures candidate tiles on this GPU and keeps the fastest correct one for each kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lra import environment
from lra.bench.records import session_of
from lra.compile_caches import use_compile_caches
from lra.config.options import parse_options, refuse_repeats
from lra.errors import UsageError, name_error
from lra.kernels import device
from lra.kernels.flash import flash_attention, tuning
from lra.kernels.flash.tuning import KERNELS, TABLE_DTYPES, Tile, TileKey, TileTable, block_dim
from lra.kernels.kernel_choices import list_kernels
from lra.kernels.testing import Case, check_case

# Queries, keys, warps, stages. `tuning.default_tile` is tried too, and first.
NARROW_FORWARD = ((128, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2))
WIDE_FORWARD = ((128, 64, 8, 3), (128, 32, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2))
NARROW_BACKWARD = ((64, 128, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 3), (32, 128, 4, 2), (32, 64, 4, 3))
WIDE_BACKWARD = ((64, 64, 8, 2), (64, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (32, 128, 8, 2), (32, 64, 4, 2))
HOPPER_FORWARD = ((64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 2))
HOPPER_SHARED = (
    *((192, 128, 12, stages) for stages in (2, 3, 4)),
    *((256, 64, 16, stages) for stages in (4, 5, 6)),
    (128, 128, 8, 3),
)
WIDE_HOPPER_SHARED = ((128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2))
HOPPER_BACKWARD = ((64, 64, 4, 2), (64, 64, 4, 3))
WIDE_HOPPER_BACKWARD = (*HOPPER_BACKWARD, (64, 128, 8, 2), (64, 128, 8, 3))
HOPPER_SPECIALIZED = ((64, 128, 4, 3), (64, 128, 4, 2))
FLOAT32 = ((64, 64, 8, 2), (64, 32, 4, 2), (32, 64, 8, 2), (32, 32, 4, 2), (32, 16, 4, 2), (16, 32, 4, 2))

SPILLING_TILES = {  # tiles a little faster on the GPU, for which one of the supported assemblers lacks registers
    TileKey("dkdv", "bfloat16", 64, True): Tile(32, 128, 4, 2),
    TileKey("dkdv", "float32", 32, True): Tile(64, 32, 4, 2),
    TileKey("dkdv", "float32", 64, True): Tile(32, 32, 4, 2),
}

TIMED_HEADS, TIMED_LENGTHS, TIMED_SHORT_LENGTHS = 8, (4096,) * 8, (tuning.SHORT_LENGTH,) * 64  # what is timed


@dataclass(frozen=True)
class TuneOptions:
    """What `lra tune` measures: the fields of its command line."""

    kernels: tuple[str, ...] = ()  # none named: all that run on this GPU
    dtypes: tuple[str, ...] = TABLE_DTYPES
    head_dims: tuple[int, ...] = (32, 64, 128)
    dropout: tuple[bool, ...] = (False, True)
    out: str | None = None  # the user's table of this GPU

    def __post_init__(self) -> None:
        for field, known in (("kernels", KERNELS), ("dtypes", TABLE_DTYPES)):
            if others := set(getattr(self, field)) - set(known):
                raise UsageError(f"{field}={min(others)}: choose from {', '.join(known)}")
        for head_dim in self.head_dims:
            if not 1 <= head_dim <= 128:
                raise UsageError(f"head_dims={head_dim}: the kernels take 1 to 128")
        refuse_repeats(kernels=self.kernels, dtypes=self.dtypes, head_dims=self.head_dims, dropout=self.dropout)
        seen: dict[int, int] = {}
        for head_dim in self.head_dims:
            block_d = block_dim(head_dim)
            if (other := seen.setdefault(block_d, head_dim)) != head_dim:
                raise UsageError(f"head_dims={other},{head_dim} have one row in the table, of {block_d}: name one")


@dataclass(frozen=True)
class Trial:
    """One candidate: the time of its pass, or why it is ruled out."""

    key: TileKey
    tile: Tile
    microseconds: float | None = None
    fault: str = ""

    def __str__(self) -> str:
        what = f"{self.key.kernel:18} {self.key.dtype:8} d={self.key.block_d:<3} dropout={self.key.dropout!s:5}"
        return f"{what} {'x'.join(map(str, self.tile)):13} {self.fault or f'{self.microseconds:,.0f} us'}"


def tune_tiles(args: Sequence[str], progress: Callable[[Trial], None] = lambda trial: None) -> Path:
    """Measures the tiles, and returns the path of the table. The table is rewritten whenever one of its rows is
    known.

    Rows that are not measured stay, if they are of the same GPU, Triton and kernels. Most of the time goes into
    compiling.

    Args:
        progress: is called with every trial.

    Raises:
        UsageError: for bad arguments, without a GPU, and if no tile is correct.
    """
    options = parse_options(TuneOptions, args)
    if not torch.cuda.is_available():
        raise UsageError("lra tune measures on a GPU, and PyTorch sees none here: lra doctor says why")
    torch.cuda.init()
    use_compile_caches(torch.device("cuda"))
    gpu = device.describe_gpu(torch.device("cuda"))
    if gpu.refusal and any(kernel.startswith("hopper_") for kernel in options.kernels):
        raise UsageError(f"Hopper's kernels can't be measured: {gpu.refusal}")
    table, later = _begin(Path(options.out) if options.out else tuning.user_table_path(torch.cuda.get_device_name()))
    for dtype, head_dim, kernel, dropout in itertools.product(
        options.dtypes, options.head_dims, options.kernels or KERNELS, options.dropout
    ):
        if kernel not in list_kernels(getattr(torch, dtype), block_dim(head_dim), dropout, gpu):
            continue
        key = TileKey(kernel, dtype, block_dim(head_dim), dropout)
        trials = []
        for candidate in candidate_tiles(key):
            trials.append(try_tile(key, head_dim, candidate))
            progress(trials[-1])
        if best := _fastest(key, head_dim, trials, progress):
            table.tiles[key], table.microseconds[key] = best
            table.made[key] = later
            tuning.write_table(table)
    tuning.forget_tables()
    if not table.tiles:
        raise UsageError("no tile was right, so no table is written: the reasons are listed above")
    return table.path


def _begin(path: Path) -> tuple[TileTable, dict[str, Any]]:
    """The table in `path` with the rows that it may keep, and the facts that new rows state."""
    environment.warn_unclean()
    new = environment.describe() | {
        "ptxas": device.format_version(device.find_ptxas(device.compute_capability()).version)
    }
    try:
        old = tuning.read_table(path)
    except UsageError:  # there is none, or nothing worth keeping
        if path.exists() and path != tuning.user_table_path(new["gpu"]):
            raise  # whatever it is, it is not lra's to replace
        old = None
    if old is None or old.measured["gpu"] != new["gpu"] or tuning.outdated_reason(old):
        return TileTable(path, new, tuning.hash_kernels(), {}, {}, {}), {}
    return old, {"made": session_of(new)}


def _fastest(
    key: TileKey, head_dim: int, trials: Sequence[Trial], progress: Callable[[Trial], None]
) -> tuple[Tile, float] | None:
    """The fastest trial that is also correct with the causal mask."""
    timed = [(trial.microseconds, trial.tile) for trial in trials if trial.microseconds is not None]
    for microseconds, candidate in sorted(timed):
        fault = find_fault(key, head_dim, candidate, causal=True)
        if not fault:
            return candidate, microseconds
        progress(Trial(key, candidate, fault=f"causal: {fault}"))
    return None


def candidate_tiles(key: TileKey) -> list[Tile]:
    """A short list without repetitions. The default comes first."""
    if key.dtype == "float32":
        tiles = FLOAT32
    elif key.kernel.startswith("hopper_"):
        shared = HOPPER_SHARED if key.block_d <= 64 else WIDE_HOPPER_SHARED
        tiles = {
            "hopper_forward": HOPPER_FORWARD,
            "hopper_shared": shared,
            "hopper_shared_short": shared,
            "hopper_backward": HOPPER_BACKWARD if key.block_d < 64 else WIDE_HOPPER_BACKWARD,
            "hopper_specialized": HOPPER_SPECIALIZED,
        }[key.kernel]
    elif key.kernel == "forward":
        tiles = NARROW_FORWARD if key.block_d <= 64 else WIDE_FORWARD
    else:
        tiles = NARROW_BACKWARD if key.block_d <= 64 else WIDE_BACKWARD
    first = tuning.default_tile(key.kernel, getattr(torch, key.dtype), key.block_d, key.dropout)
    return [
        tile for tile in dict.fromkeys([first, *(Tile(*tile) for tile in tiles)]) if tile != SPILLING_TILES.get(key)
    ]


def try_tile(key: TileKey, head_dim: int, tile: Tile) -> Trial:
    """Checks one candidate, then times it."""
    fault = find_fault(key, head_dim, tile, causal=False)
    return Trial(key, tile, fault=fault) if fault else Trial(key, tile, time_tile(key, head_dim, tile))


def find_fault(key: TileKey, head_dim: int, tile: Tile, causal: bool) -> str:
    """What is wrong with the results of this tile, or why there are none; empty if they are correct."""
    case = Case(
        (300, 0, 1, 127), heads=2, head_dim=head_dim, dtype=getattr(torch, key.dtype), strides="fused", causal=causal,
        dropout=0.1 * key.dropout, deterministic=_deterministic(key),
    )  # fmt: skip
    try:
        with tuning.force_tile(key.kernel, tile) as launched:
            errors = check_case(case, "cuda", "triton")
            if not launched and not causal:
                return "another kernel takes this case"
    except Exception as error:  # a tile that does not compile or fit raises what it likes
        torch.cuda.synchronize()  # raises too if the GPU can't go on
        return name_error(error)
    return ", ".join(f"{name} is wrong by {e.error:.1g} > {e.budget:.1g}" for name, e in errors.items() if not e.ok)


def time_tile(key: TileKey, head_dim: int, tile: Tile) -> float:
    """Median microseconds, by CUDA events, of the pass to which the kernel belongs."""
    from triton.testing import do_bench

    lengths = TIMED_SHORT_LENGTHS if key.kernel.endswith("short") else TIMED_LENGTHS
    rows = sum(lengths)
    make = lambda: torch.randn(rows, TIMED_HEADS, head_dim, device="cuda").to(getattr(torch, key.dtype))  # noqa: E731
    qkv, do = [make().requires_grad_() for _ in range(3)], make()
    length = torch.tensor(lengths, dtype=torch.int32, device="cuda")

    def forward() -> torch.Tensor:
        return flash_attention(
            *qkv, start=length.cumsum(0, dtype=torch.int32) - length, length=length, max_length=max(lengths),
            dropout=0.1 * key.dropout, seed=torch.zeros((), dtype=torch.int64, device="cuda"), impl="triton",
            deterministic=_deterministic(key),
        )  # fmt: skip

    with tuning.force_tile(key.kernel, tile):
        if key.kernel.endswith("forward") or key.kernel.startswith("hopper_shared"):
            with torch.no_grad():
                milliseconds: Any = do_bench(forward, warmup=10, rep=50, return_mode="median")
        else:
            out = forward()
            backward = lambda: torch.autograd.grad(out, qkv, do, retain_graph=True)  # noqa: E731
            milliseconds = do_bench(backward, warmup=10, rep=50, return_mode="median")
    return round(1000 * milliseconds, 1)


def _deterministic(key: TileKey) -> bool:
    """Whether the kernel belongs to the backward pass without atomics."""
    return key.kernel in ("dkdv", "dq")
