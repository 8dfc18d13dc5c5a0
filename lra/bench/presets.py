"""The settings of the FlashAttention paper's tables of runtime and memory (arXiv 2205.14135, appendix E), and what they
need: attentions at equal compression, and batches with a padding mask."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from lra.errors import UsageError
from lra.models.attention import ATTENTIONS

PASSES = ("forward", "backward", "both")
MASKED = 20  # tokens by which a sequence is shorter than N, at most
COMPRESSION, MOST_KEYS = 8, 256  # a query's keys: N / 8, or 256 if that is less


class Setting(NamedTuple):
    """Of appendix E.6."""

    dropout: float
    ragged: str  # of AttentionOptions
    tables: tuple[int, int, int]  # forward, backward and both


E6 = {"lengths": tuple(2**i for i in range(7, 17)), "head_dims": (64,), "batch": 16, "heads": 8}
SETTINGS = {
    "dropout-mask": Setting(0.1, "mask", (9, 10, 11)),
    "mask": Setting(0.0, "mask", (12, 13, 14)),
    "dropout": Setting(0.1, "false", (15, 16, 17)),
    "plain": Setting(0.0, "false", (18, 19, 20)),
}
RUNTIME = {
    str(number): E6 | {"dropout": (setting.dropout,), "ragged": setting.ragged, "passes": (name,)}
    for setting in SETTINGS.values()
    for number, name in zip(setting.tables, PASSES, strict=True)
}
TABLES: dict[str | None, dict[str, Any]] = {
    None: {},
    # as Table 7: batch 64, 16 heads, d = 64, dropout; but all lengths equal, without a padding mask
    "7": {"lengths": (128, 256, 512), "head_dims": (64,), "dropout": (0.1,), "batch": 64, "heads": 16},
    **RUNTIME,
    "21": E6 | {"dropout": (0.0,), "passes": ("forward", "both")},
}
COMPARED = (*RUNTIME, "21")  # the tables of all attentions, at equal compression


def sized(attention: str, n: int) -> str:
    """`name` as `name:field=value…` with the options whose cost is that of N / 8 keys, at most 256.

    A name that comes with fields keeps these. What is not installed stays as it is: building it says so.
    """
    name = attention.partition("@")[0]  # another library's kernels have the options of what they compute
    if ":" in name:
        return attention
    try:
        cls = ATTENTIONS.get(name)
    except UsageError:
        return attention
    fields = cls.budget(max(1, min(MOST_KEYS, n // COMPRESSION)))
    return ":".join([attention, *(f"{field}={_text(value)}" for field, value in fields.items())])


def masked(n: int, batch: int) -> tuple[int, ...]:
    """Lengths of sequences with a padding mask: up to 20 tokens less than N, the same in every call.

    At least 2, as one token has no gradients to check.
    """
    draw = random.Random(f"padding mask of {batch} x {n}")
    return tuple(max(2, n - draw.randint(0, MASKED)) for _ in range(batch))


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
