"""Times one tree's attention for study.py. It imports only the kernels of the project.

For each line of JSON `[case, seconds]` on stdin it prints milliseconds of forward and backward.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from lra.kernels import block_sparse_attention, flash_attention
from lra.kernels.block_sparse.layouts import butterfly

CASES: dict[str, dict[str, Any]] = {
    f"d={d} p={p} N={n}": dict(head_dim=d, heads=h, dropout=p, length=n, batch=b)
    for d, h in ((32, 8), (64, 4), (128, 4))
    for p in (0.0, 0.1)
    for n, b in ((1024, 64), (4096, 8), (16384, 2))
}
CASES |= {
    "d=32 p=0.1 N=128": dict(head_dim=32, dropout=0.1, length=128, batch=128),
    "d=32 p=0 N=512": dict(head_dim=32, length=512, batch=32),
    "ragged d=32 p=0.1": dict(head_dim=32, dropout=0.1, length=2048, batch=32, ragged=True),
    "ragged d=64 p=0": dict(head_dim=64, length=2048, batch=32, ragged=True),
    "butterfly d=64 p=0 N=16384": dict(head_dim=64, length=16384, batch=2, block=128),
    "butterfly d=32 p=0.1 N=4096": dict(head_dim=32, dropout=0.1, length=4096, batch=8, block=64),
    "causal d=64 p=0 N=2048": dict(head_dim=64, length=2048, batch=16, causal=True),
    "causal d=32 p=0.1 N=1024": dict(head_dim=32, dropout=0.1, length=1024, batch=32, causal=True),
    "d=16 p=0 N=1024": dict(head_dim=16, length=1024, batch=32),
    "deterministic d=32 p=0 N=1024": dict(head_dim=32, length=1024, batch=32, deterministic=True),
    "fp32 d=32 p=0 N=1024": dict(head_dim=32, length=1024, batch=16, dtype=torch.float32),
    "fp32 d=64 p=0.1 N=1024": dict(head_dim=64, dropout=0.1, length=1024, batch=16, dtype=torch.float32),
}


class Graphs:
    """Forward alone, and forward with backward, as CUDA graphs, so that no time of the host is measured."""

    def __init__(
        self, head_dim: int, length: int, batch: int, heads: int = 4, dropout: float = 0.0, ragged: bool = False,
        block: int = 0, dtype: torch.dtype = torch.bfloat16, **options: bool,
    ):  # fmt: skip
        torch.manual_seed(0)
        lengths = torch.full((batch,), length, dtype=torch.int32)
        if ragged:
            lengths[1:] = torch.randint(length // 8, length + 1, (batch - 1,), dtype=torch.int32)
        starts = (lengths.cumsum(0) - lengths).int()
        tokens = int(lengths.sum())
        self.qkv = torch.randn(tokens, 3, heads, head_dim, device="cuda").to(dtype).requires_grad_()
        self.out_gradient = torch.randn(tokens, heads, head_dim, device="cuda").to(dtype)
        self.options: dict[str, Any] = dict(
            start=starts.cuda(), length=lengths.cuda(), max_length=length, dropout=dropout, impl="triton",
            seed=torch.tensor(3, device="cuda"), **options,
        )  # fmt: skip
        if block:
            self.options["layout"] = butterfly(length, (block, block))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.backward()
        torch.cuda.current_stream().wait_stream(stream)
        self.graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graphs[0]):
            self.forward()
        with torch.cuda.graph(self.graphs[1]):
            self.kept = self.backward()

    def forward(self) -> torch.Tensor:
        q, k, v = self.qkv.unbind(1)
        attention = block_sparse_attention if "layout" in self.options else flash_attention
        return attention(q, k, v, **self.options)

    def backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.qkv, self.out_gradient)

    def milliseconds(self, seconds: float) -> tuple[float, float]:
        forward, both = (replayed(graph, seconds) for graph in self.graphs)
        return forward, both - forward


def replayed(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Milliseconds of a replay: the mean of as many as take about that long."""
    times, each = 1, 0.0
    for _ in range(3):  # warm up, guess, measure
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        each = begin.elapsed_time(end) / times
        times = max(3, int(1000 * seconds / max(each, 1e-3)))
    return each


def main() -> None:
    names = json.loads(sys.stdin.readline()) or list(CASES)
    graphs = {name: Graphs(**CASES[name]) for name in names}
    print(json.dumps(names), flush=True)
    for line in sys.stdin:
        name, seconds = json.loads(line)
        print(json.dumps(graphs[name].milliseconds(seconds)), flush=True)


if __name__ == "__main__":
    main()
