"""Long Range Arena: one Transformer, its attention swapped by name.

`lra.fit("task=listops", "attn=flash")` trains, `lra.load("checkpoints/runs/…")` loads a trained module,
`lra.kernels.flash_attention` is the attention itself.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lra import environment

if TYPE_CHECKING:
    from lra.training.evaluate import load, test
    from lra.training.fit import configure, fit

environment.ensure_user()
# On a CPU, threads of PyTorch spin while they wait for each other, which takes the cores from other work. With this,
# they sleep after 1,000 turns. libgomp reads the variable when it is loaded, so it is set before PyTorch is imported.
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "1000"

__all__ = ["configure", "fit", "load", "test"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported only when it is used: `lra ls` needs none of it
        from lra import ranks

        ranks.check_variables()
        return getattr(import_module(f"lra.training.{'evaluate' if name in ('load', 'test') else 'fit'}"), name)
    raise AttributeError(f"module 'lra' has no attribute '{name}'")
