"""The program that ncu watches.

`python -m lra.bench.ncu_target N D heads batch dtype rows` runs the plain Triton forward kernel once. It has its usual
tile, but for the number of query rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from lra.bench.cases import TORCH_DTYPES
from lra.compile_caches import use_compile_caches
from lra.kernels import flash_attention
from lra.kernels.flash.tuning import block_dim, default_tile, force_tile


def main(arguments: Sequence[str]) -> None:
    use_compile_caches(torch.device("cuda"))
    n, d, heads, batch = map(int, arguments[:4])
    dtype, rows = TORCH_DTYPES[arguments[4]], int(arguments[5])
    q, k, v = (torch.randn(batch, n, heads, d, device="cuda", dtype=dtype) for _ in range(3))
    tile = default_tile("forward", dtype, block_dim(d), dropout=False)
    # a warp group for each 64 rows, as fewer would not have the registers
    with force_tile("forward", tile._replace(rows=rows, warps=max(4, min(8, rows // 16)))):
        flash_attention(q, k, v)  # compiles
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        flash_attention(q, k, v)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
