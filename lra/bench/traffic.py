"""`lra bench io`: bytes between HBM and the chip, by formula and, where ncu can count them, measured.

Theorem 2 of FlashAttention (arXiv 2205.14135): standard attention moves Θ(N d + N²) elements, and FlashAttention
Θ(N² d² / M) with on-chip memory for M elements. The counts here are exact for the algorithms as written.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from lra import environment
from lra.bench.output import write_measurement
from lra.config.options import parse, refuse_repeats, shown
from lra.errors import UsageError

BYTES_OF_DTYPE = {"bf16": 2, "fp16": 2, "fp32": 4}
STATISTIC_BYTES = 4  # bytes of a row's maximum or sum, fp32 whatever the inputs are
STANDARD_ALGORITHM, ALGORITHM_1, KERNEL_ORDER = "standard", "flash (Algorithm 1)", "flash (our order)"
DRAM_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


class Traffic(NamedTuple):
    """Bytes that one head of one sequence moves."""

    read: int
    write: int


def standard_traffic(n: int, d: int, size: int) -> Traffic:
    """Algorithm 0. S = QK^T is written, and read for P = softmax(S), which is written, and read for O = PV."""
    rows, scores = n * d * size, n * n * size
    return Traffic(read=2 * rows + scores + scores + rows, write=scores + scores + rows)


def flash_traffic(n: int, d: int, size: int, columns: int) -> Traffic:
    """Algorithm 1. For each block of `columns` keys and values it moves every block of queries, results and
    statistics.

    The result and its two statistics per row are initialised in HBM, then read and written once per block of keys. The
    size of a block of queries does not matter.
    """
    passes = -(-n // columns)
    matrix, statistics = n * d * size, 2 * n * STATISTIC_BYTES
    return Traffic(read=2 * matrix + passes * (2 * matrix + statistics), write=(1 + passes) * (matrix + statistics))


def kernel_traffic(n: int, d: int, size: int, rows: int) -> Traffic:
    """The order of lra's kernels. For each block of `rows` queries they read every key and value, and write the
    result once.

    The log-sum-exp is two fp32 numbers per row. Blocks of queries that run at the same time find keys and values in the
    L2 cache, so HBM sees less than this.
    """
    matrix = n * d * size
    return Traffic(read=matrix + -(-n // rows) * 2 * matrix, write=matrix + 2 * n * STATISTIC_BYTES)


def on_chip_elements(columns: int, d: int) -> int:
    """Elements M of on-chip memory for which Algorithm 1 has blocks of `columns` keys: B_c = M / 4d."""
    return 4 * d * columns


@dataclass(frozen=True)
class IoOptions:
    """What `lra bench io` counts: by default the shape of the paper's Figure 2."""

    length: int = 1024
    head_dim: int = 64
    heads: int = 16
    batch: int = 64
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    blocks: tuple[int, ...] = (16, 32, 64, 128, 256, 512)  # B_c; B_r = min(B_c, d) in Algorithm 1
    counters: Literal["auto", "true", "false"] = "auto"  # hardware counters: auto where there are a GPU and ncu
    out: str | None = None  # JSON file

    def __post_init__(self) -> None:
        if min(self.length, self.head_dim, self.heads, self.batch, *self.blocks) < 1:
            raise UsageError("length=, head_dim=, heads=, batch= and blocks= must be at least 1")
        refuse_repeats(blocks=self.blocks)


@dataclass(frozen=True)
class TrafficRow:
    """Bytes that the whole batch moves in one algorithm, and the sizes of its blocks."""

    algorithm: str
    block_columns: int | None = None
    block_rows: int | None = None
    on_chip_elements: int | None = None
    theorem: int | None = None  # bytes of Theorem 2
    measured_read: int | None = None
    measured_write: int | None = None
    read: int = 0
    write: int = 0


@dataclass(frozen=True)
class IoResult:
    """What `lra bench io` counted."""

    environment: dict[str, Any]
    options: dict[str, Any]
    rows: list[TrafficRow]
    notes: list[str]


def measure_traffic(args: Sequence[str]) -> IoResult:
    """Counts the bytes of the whole batch. `args`: `field=value` of IoOptions."""
    options = parse(IoOptions, args)
    missing = "counters=false" if options.counters == "false" else why_no_counters()
    if options.counters == "true" and missing:
        raise UsageError(f"counters=true: {missing}")
    environment.warn_unclean()
    n, d, size, heads = options.length, options.head_dim, BYTES_OF_DTYPE[options.dtype], options.heads * options.batch
    theorem, notes = heads * size * (n * d + n * n), []
    rows = [_row(STANDARD_ALGORITHM, standard_traffic(n, d, size), heads, theorem=theorem)]
    for columns in options.blocks:
        m = on_chip_elements(columns, d)
        places = {"block_columns": columns, "block_rows": min(columns, d), "on_chip_elements": m}
        theorem = round(heads * size * n * n * d * d / m)
        rows.append(_row(ALGORITHM_1, flash_traffic(n, d, size, columns), heads, **places, theorem=theorem))
    for block in options.blocks:
        row = _row(KERNEL_ORDER, kernel_traffic(n, d, size, block), heads, block_rows=block)
        rows.append(row if missing else _count_with_ncu(row, block, options, notes))
    if missing:
        notes.append(f"not measured: {missing}")
    result = IoResult(environment.describe(), shown(options), rows, notes)
    if options.out:
        write_measurement(Path(options.out), asdict(result))
    return result


def _row(algorithm: str, traffic: Traffic, heads: int, **places: int) -> TrafficRow:
    return TrafficRow(algorithm, **places, read=heads * traffic.read, write=heads * traffic.write)


def traffic_table(result: IoResult) -> tuple[str, list[str], list[list[str]]]:
    """(title, header, rows), in 10^9 bytes."""
    header = ["algorithm", "B_c", "B_r", "M", "Theorem 2", "read", "write", "both", "measured read", "measured write"]
    rows = []
    for row in result.rows:
        places = (row.block_columns, row.block_rows, row.on_chip_elements)
        moved = (row.theorem, row.read, row.write, row.read + row.write, row.measured_read, row.measured_write)
        cells = ["" if v is None else str(v) for v in places] + ["" if v is None else f"{v / 1e9:.3f}" for v in moved]
        rows.append([row.algorithm, *cells])
    return "HBM traffic of the forward pass, GB", header, rows


def why_no_counters() -> str | None:
    """Why hardware counters can't be read here; None where they can be tried."""
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    return None if shutil.which("ncu") else "ncu (NVIDIA Nsight Compute) is not on PATH"


def _count_with_ncu(row: TrafficRow, block_rows: int, options: IoOptions, notes: list[str]) -> TrafficRow:
    """The row with the bytes that ncu counts for our kernel with this block of queries. A note says if it counts
    none.
    """
    values = (options.length, options.head_dim, options.heads, options.batch, options.dtype, block_rows)
    program = [sys.executable, "-m", "lra.bench.ncu_target", *map(str, values)]
    done = run_ncu(DRAM_METRICS, ["--clock-control", "none", "--profile-from-start", "off"], program)
    counted = read_traffic(done.stdout)
    if done.returncode or len(counted) < len(DRAM_METRICS):
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()] or [
            "no counter values"
        ]
        notes.append(f"B_r={block_rows} not measured: {lines[-1].strip()}")
        return row
    read, written = (counted[metric] for metric in DRAM_METRICS)
    return replace(row, measured_read=read, measured_write=written)


def run_ncu(metrics: Sequence[str], options: Sequence[str], program: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Counts the metrics while the program runs. `read_kernels` reads what it prints."""
    counting = ["ncu", *options, "--csv", "--print-units", "base", "--metrics", ",".join(metrics)]
    return subprocess.run([*counting, *program], capture_output=True, text=True)


def read_kernels(output: str) -> list[tuple[str, dict[str, float]]]:
    """Name and metrics of each kernel in the output of `run_ncu`."""
    lines = output.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[header:]))):
        if row.get("Metric Value"):  # else a line of the program
            _, counted = kernels.setdefault(row["ID"], (row["Kernel Name"], {}))
            counted[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return list(kernels.values())


def read_traffic(output: str) -> dict[str, int]:
    """Bytes of each of DRAM_METRICS, summed over the kernels."""
    counted: dict[str, int] = {}
    for _, metrics in read_kernels(output):
        for metric in metrics.keys() & set(DRAM_METRICS):
            counted[metric] = counted.get(metric, 0) + round(metrics[metric])
    return counted
