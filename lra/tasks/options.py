"""What options of several tasks share. It needs no PyTorch, so that fields are checked before that is imported."""

from __future__ import annotations

from typing import Any

from lra.errors import UsageError

MOST_EXAMPLES = 10**7  # in a generated split: a hundred times those of LRA
MOST_TOKENS = 1 << 20  # in a sequence: 16 times those of Path-256


def check_generated_only(config: Any, *fields: str) -> None:
    """Raises a UsageError if one of `fields`, which are of generated data, is set for imported data."""
    default = type(config)
    changed = [field for field in fields if getattr(config, field) != getattr(default, field)]
    if changed and config.source != "generate":
        names = ", ".join(f"task.{field}" for field in changed)
        mend = " ".join(f"task.{field}={getattr(default, field)}" for field in changed)
        raise UsageError(
            f"{names}: only for generated data; set the default, {mend}, or leave out task.source={config.source}"
        )


def check_data_seed(config: Any) -> None:
    """Raises a UsageError if `data_seed` can't be a seed of the generators."""
    if not 0 <= config.data_seed < 1 << 32:
        raise UsageError(f"task.data_seed={config.data_seed} is out of range: choose 0 to {(1 << 32) - 1}")
