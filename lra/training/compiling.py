"""Compiles functions of a batch."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from lra import environment
from lra.batch import Batch


def compile_batched(function: Callable[[Batch], Tensor], deterministic: bool) -> Callable[[Batch], Tensor]:
    """Compiles a function. Its kernels are kept in lra's cache, because PyTorch's default, /tmp, is emptied.

    A function of packed batches is compiled once for all numbers of rows. Its kernels then depend on the first batch
    and on which of several is fastest.

    Args:
        deterministic: compile for each shape instead, so that kernels depend on nothing else.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(environment.cache_folder("inductor")))
    if deterministic:
        torch._dynamo.config.recompile_limit = 64  # so many shapes; further ones would not be compiled
        return torch.compile(function, dynamic=False, options={"deterministic": True})
    compiled = torch.compile(function)

    def run(batch: Batch) -> Tensor:
        for rows in () if batch.padded else (batch.tokens, batch.positions):
            if rows is not None:
                torch._dynamo.maybe_mark_dynamic(rows, 0)
        return compiled(batch)

    return run
