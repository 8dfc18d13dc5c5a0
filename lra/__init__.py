"""Long Range Arena: one Transformer, its attention swapped by name.

`lra.fit("task=listops", "attn=flash")` trains, `lra.load("checkpoints/runs/…")` loads a trained module,
`lra.kernels.flash_attention` is the attention itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lra.training.fit import configure, fit, load, test

__all__ = ["configure", "fit", "load", "test"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when asked for: `lra ls` needs none of it
        from lra import ranks

        ranks.check()
        from lra.training import fit

        return getattr(fit, name)
    raise AttributeError(f"module 'lra' has no attribute '{name}'")
