"""What bounds our kernels on a Hopper GPU, by the counters of NVIDIA Nsight Compute.

    python -m benchmarks.studies.counters.study {flash,feed-forward} --out FILE

There is a row for each kernel, width and dropout, in bf16. It has the share of time in which units are busy, in
percent, and the reasons for which a warp waits, in cycles for each issued instruction. `flash` is attention of 16
sequences of 4,096 rows and 8 heads, and d is a head's dimension. `feed-forward` is what follows it in a block, with
262,144 rows, and d is the model's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.command import command
from lra import environment
from lra.bench.output import write_measurement
from lra.bench.traffic import read_kernels, run_ncu, why_no_counters
from lra.errors import UsageError
from lra.kernels import flash_attention
from lra.kernels.dropout import dropout_threshold
from lra.kernels.layers.fused_layers import feed_forward
from lra.models.dropout import keep_scale

SIZE, LENGTH, HEADS, ROWS = 16, 4096, 8, 262144
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


class Part(NamedTuple):
    kernels: tuple[str, ...]
    widths: tuple[int, ...]
    launch: Callable[[int, float], None]  # of a width and dropout, a forward and a backward pass: what is profiled


def launch_flash(head_dim: int, dropout: float) -> None:
    shape = (SIZE, LENGTH, HEADS, head_dim)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, dropout=dropout, seed=torch.tensor(0, device="cuda"))
    torch.autograd.grad(out, leaves, do)
    torch.cuda.synchronize()


def launch_feed_forward(d: int, dropout: float) -> None:
    out, up, down = (nn.Linear(*sizes).cuda() for sizes in ((d, d), (d, 2 * d), (2 * d, d)))
    x = torch.randn(ROWS, d, device="cuda", requires_grad=True)
    keys = torch.randint(2**31, (ROWS,), device="cuda").int() if dropout else None
    dropped = dropout_threshold(dropout)
    y = feed_forward(
        x.detach().bfloat16(), x, out, nn.LayerNorm(d).cuda(), up, down,
        scale=keep_scale(dropped), threshold=dropped, keys=keys,
    )  # fmt: skip
    torch.autograd.grad(y, x, torch.randn_like(y))
    torch.cuda.synchronize()


PARTS = {
    "flash": Part(
        ("hopper_forward_kernel", "hopper_shared_kernel", "hopper_backward_kernel", "hopper_specialized_kernel"),
        (32, 64, 128),
        launch_flash,
    ),
    "feed-forward": Part(("feed_forward_kernel", "feed_forward_backward_kernel"), (64, 128), launch_feed_forward),
}


def profile(part: str, width: int, dropout: float) -> list[dict[str, Any]]:
    metrics = [*BUSY.values(), *(STALL.format(reason) for reason in REASONS), *OTHERS.values()]
    program = [sys.executable, __file__, part, "--launch", str(width), str(dropout)]
    names = "|".join(PARTS[part].kernels)
    done = run_ncu(metrics, ["-k", f"regex:^({names})$"], program)
    kernels = read_kernels(done.stdout)
    if done.returncode or not kernels:
        raise SystemExit(f"counters: ncu failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [_row(name, counted, width, dropout) for name, counted in kernels]


def _row(kernel: str, counted: dict[str, float], width: int, dropout: float) -> dict[str, Any]:
    others = {name: counted[metric] for name, metric in OTHERS.items()}
    others["milliseconds, at the profiler's clocks"] /= 1e6
    return {
        "kernel": kernel, "d": width, "dropout": dropout, **others,
        "busy_percent": {name: counted[metric] for name, metric in BUSY.items()},
        "waits": {reason: counted[STALL.format(reason)] for reason in REASONS},
    }  # fmt: skip


@command
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--launch", nargs=2, metavar=("WIDTH", "DROPOUT"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    part = PARTS[given.part]
    if given.launch:
        return part.launch(int(given.launch[0]), float(given.launch[1]))
    if not given.out:
        parser.error("name a JSON file for the result with --out")
    if missing := why_no_counters():
        raise UsageError(missing)
    rows = [row for d in part.widths for dropout in (0.0, 0.1) for row in profile(given.part, d, dropout)]
    result = {"environment": environment.describe(), "rows": rows}
    write_measurement(given.out, result)
    for row in rows:
        busy = ", ".join(f"{name} {value:.0f}%" for name, value in row["busy_percent"].items())
        print(f"{row['kernel']} d={row['d']} dropout={row['dropout']}: {busy}")


if __name__ == "__main__":
    sys.exit(main())
