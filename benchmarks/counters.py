"""What bounds the kernels of flash attention on a Hopper GPU, by NVIDIA Nsight Compute's counters.

    python benchmarks/counters.py [--out benchmarks/results/flash-profile.json]

A row for each kernel, head dimension and dropout, of 16 sequences of 4,096 rows and 8 heads in bf16: the share of time
in which units are busy, in percent, and for which reasons a warp waits, in cycles for each instruction that is issued.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lra import environment
from lra.bench.files import write
from lra.bench.io import no_counters, read_kernels, run_ncu
from lra.kernels import flash_attention

SIZE, LENGTH, HEADS = 16, 4096, 8
KERNELS = ("hopper_forward_kernel", "hopper_backward_kernel")
BUSY = {  # name here -> metric
    "issue slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "shared memory and L1": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "exponentials": "smsp__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "integers and conversions": "smsp__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fp32": "smsp__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
}
REASONS = (
    "barrier", "dispatch_stall", "gmma", "long_scoreboard", "math_pipe_throttle", "mio_throttle", "not_selected",
    "short_scoreboard", "wait",
)  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
OTHERS = {
    "milliseconds, at the profiler's clocks": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "warps per multiprocessor": "sm__warps_active.avg.per_cycle_active",
}


def launch(head_dim: int, dropout: float) -> None:
    """What is profiled: a forward and a backward pass."""
    shape = (SIZE, LENGTH, HEADS, head_dim)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, dropout=dropout, seed=torch.tensor(0, device="cuda"))
    torch.autograd.grad(out, leaves, do)
    torch.cuda.synchronize()


def profile(head_dim: int, dropout: float) -> list[dict[str, Any]]:
    metrics = [*BUSY.values(), *(STALL.format(reason) for reason in REASONS), *OTHERS.values()]
    program = [sys.executable, __file__, "--launch", str(head_dim), str(dropout)]
    done = run_ncu(metrics, ["-k", f"regex:{'|'.join(KERNELS)}"], program)
    kernels = read_kernels(done.stdout)
    if done.returncode or not kernels:
        raise SystemExit(f"counters: ncu failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [_row(name, counted, head_dim, dropout) for name, counted in kernels]


def _row(kernel: str, counted: dict[str, float], head_dim: int, dropout: float) -> dict[str, Any]:
    others = {name: counted[metric] for name, metric in OTHERS.items()}
    others["milliseconds, at the profiler's clocks"] /= 1e6
    return {
        "kernel": kernel, "d": head_dim, "dropout": dropout, **others,
        "busy_percent": {name: counted[metric] for name, metric in BUSY.items()},
        "waits": {reason: counted[STALL.format(reason)] for reason in REASONS},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/flash-profile.json"))
    parser.add_argument("--launch", nargs=2, metavar=("HEAD_DIM", "DROPOUT"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.launch:
        launch(int(given.launch[0]), float(given.launch[1]))
        return 0
    if missing := no_counters():
        print(f"counters: {missing}", file=sys.stderr)
        return 2
    rows = [row for d in (32, 64, 128) for dropout in (0.0, 0.1) for row in profile(d, dropout)]
    result = {"environment": environment.describe(), "rows": rows}
    write(given.out, result)
    for row in rows:
        busy = ", ".join(f"{name} {value:.0f}%" for name, value in row["busy_percent"].items())
        print(f"{row['kernel']} d={row['d']} dropout={row['dropout']}: {busy}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
