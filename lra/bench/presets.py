"""Settings of the FlashAttention paper's tables of runtime and memory (arXiv 2205.14135, appendix E).

They need attentions at equal compression, and batches with a padding mask or of real lengths.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from lra.errors import UsageError
from lra.models.attention import ATTENTIONS

PASSES = ("forward", "backward", "both")
MOST_MASKED = 20  # tokens by which a sequence is shorter than N, at most
COMPRESSION, MOST_KEYS = 8, 256  # a query's keys: N / 8, or 256 if that is less

# Bytes of 128 reviews of IMDB's training split, cut at 4096: random.Random(0).sample of the 25,000 lengths in the order
# of the Hub's stanfordnlp/imdb, plain_text. All 25,000 have the mean 1298.6 and the mean square 2.50e6, the first 32
# here 1474.8 and 2.95e6.
IMDB_LENGTHS = (
    3225, 866, 829, 3371, 940, 831, 2928, 987, 932, 1479, 1338, 1113, 997, 3315, 1966, 362, 1478, 1203, 638, 1421,
    1100, 3016, 498, 2318, 1885, 1661, 2505, 337, 1053, 697, 1015, 891, 832, 1176, 1383, 1380, 1198, 2783, 349, 1567,
    1012, 1654, 1921, 401, 903, 2568, 1576, 679, 1835, 639, 1271, 874, 2833, 713, 1455, 806, 3205, 1321, 1823, 3644,
    966, 429, 755, 623, 1383, 604, 668, 1049, 2461, 3595, 590, 1057, 753, 950, 2051, 2137, 1273, 354, 614, 726, 828,
    1634, 1253, 1536, 2532, 626, 1203, 2607, 1037, 1235, 2896, 1754, 632, 1621, 1646, 1846, 681, 1995, 983, 682, 812,
    3124, 711, 1801, 1181, 1068, 293, 2720, 2018, 894, 1829, 1109, 396, 1348, 4096, 1331, 2612, 796, 665, 1031, 424,
    1123, 981, 873, 4096, 1031, 755, 981,
)  # fmt: skip


class Setting(NamedTuple):
    """A setting of appendix E.6."""

    dropout: float
    ragged: str  # of AttentionOptions
    tables: tuple[int, int, int]  # forward, backward and both


APPENDIX_E6 = {"lengths": tuple(2**i for i in range(7, 17)), "head_dims": (64,), "batch": 16, "heads": 8}
SETTINGS = {
    "dropout-mask": Setting(0.1, "mask", (9, 10, 11)),
    "mask": Setting(0.0, "mask", (12, 13, 14)),
    "dropout": Setting(0.1, "false", (15, 16, 17)),
    "plain": Setting(0.0, "false", (18, 19, 20)),
}
RUNTIME_TABLES = {
    str(number): APPENDIX_E6 | {"dropout": (setting.dropout,), "ragged": setting.ragged, "passes": (name,)}
    for setting in SETTINGS.values()
    for number, name in zip(setting.tables, PASSES, strict=True)
}
PAPER_TABLES: dict[str | None, dict[str, Any]] = {
    None: {},
    # as Table 7: batch 64, 16 heads, d = 64, dropout; but all lengths equal, without a padding mask
    "7": {"lengths": (128, 256, 512), "head_dims": (64,), "dropout": (0.1,), "batch": 64, "heads": 16},
    **RUNTIME_TABLES,
    "21": APPENDIX_E6 | {"dropout": (0.0,), "passes": ("forward", "both")},
}
COMPARED_TABLES = (*RUNTIME_TABLES, "21")  # the tables of all attentions, at equal compression


def with_budget(attention: str, n: int) -> str:
    """`name` as `name:field=value…`, with options whose cost is that of N / 8 keys, at most 256.

    A name that comes with fields keeps these. One that is not installed stays as it is: building it gives the error.
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


def masked_lengths(n: int, batch: int) -> tuple[int, ...]:
    """Lengths of sequences with a padding mask: up to 20 tokens less than N, the same in every call.

    They are at least 2, as one token has no gradients to check.
    """
    draw = random.Random(f"padding mask of {batch} x {n}")
    return tuple(max(2, n - draw.randint(0, MOST_MASKED)) for _ in range(batch))


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
