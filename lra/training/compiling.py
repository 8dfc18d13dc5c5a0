"""Compiled functions of a batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lra import environment
from lra.batch import Batch

# a hash of dropout is computed in the kernel that asks for it, never written
INDUCTOR: dict[str, Any] = {"realize_opcount_threshold": 100}


def compile_batched(function: Callable[[Batch], Tensor], deterministic: bool) -> Callable[[Batch], Tensor]:
    """A compiled function, whose kernels later processes find; /tmp, where PyTorch keeps them, is emptied.

    What is compiled for a packed batch is compiled once, for all numbers of rows. Then kernels depend on the batch
    that came first, and on what is the fastest of several: not so where attention has to be `deterministic`.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(environment.cache_folder("inductor")))
    if deterministic:
        torch._dynamo.config.recompile_limit = 64  # shapes; what comes after them would not be compiled
        return torch.compile(function, dynamic=False, options=INDUCTOR | {"deterministic": True})
    compiled = torch.compile(function, options=INDUCTOR)

    def run(batch: Batch) -> Tensor:
        for rows in () if batch.padded else (batch.tokens, batch.positions):
            if rows is not None:
                torch._dynamo.maybe_mark_dynamic(rows, 0)
        return compiled(batch)

    return run
