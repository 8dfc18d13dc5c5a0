"""Nested list operations: one token per digit, operator and closing bracket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lra.config.checks import check_at_least, check_at_most
from lra.data import listops
from lra.data.split import Split
from lra.data.writer import StoreWriter
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.tasks.options import MOST_EXAMPLES, MOST_TOKENS, check_data_seed, check_generated_only


class ListOpsData(TaskData):
    """Expressions generated as LRA generated them, or the official TSV files."""

    vocabulary, generator = listops.VOCABULARY, listops.GENERATOR
    test_sets = ("test", "fresh")

    def params(self) -> dict[str, Any]:
        c = self.config
        if c.source == "generate":
            return self._drawn() | {"train": c.train, "val": c.val, "test": c.test}
        return self._drawn() | {"folder": self.source()}

    def _drawn(self) -> dict[str, int]:
        """What the generator is given, for imported data, too: its `fresh` is drawn."""
        c = self.config
        return {"seed": c.data_seed, "fresh": c.fresh, "min_length": c.min_length, "max_length": c.max_length}

    def seed(self) -> int:
        return self.config.data_seed

    def stated_examples(self) -> int | None:
        return self.config.train if self.config.source == "generate" else None

    def build(self, writer: StoreWriter) -> None:
        c = self.config
        if c.source == "generate":
            listops.build_listops(writer, train=c.train, val=c.val, test=c.test, **self._drawn())
        else:
            listops.build_released_listops(writer, c.source, **self._drawn())

    def baselines(self, name: str) -> dict[str, float]:
        return super().baselines(name) | {"root operator": self.accuracy_of(root_operator, name)}

    def depict(self, example: np.ndarray) -> str:
        return listops.format_tree(example)


def root_operator(split: Split) -> np.ndarray:
    """Token id of every expression's first token: all that a model at 36.3% has learned to read."""
    return split.tokens[split.starts].astype(np.int64)


@TASKS.register(
    "listops",
    version=1,
    classes=10,
    length=1999,
    mask=0.1,
    paper="Nangia and Bowman 2018, arXiv 1804.06028; Tay et al. 2020, arXiv 2011.04006",
)
class ListOps(TaskModule):
    """ListOps: the value of a nested expression of MIN, MAX, MED and SM over digits."""

    @dataclass(frozen=True)
    class Config:
        source: str = "generate"  # generate, or LRA's release: its folder or its archive
        data_seed: int = 0  # of the generated data
        train: int = 96000  # training examples
        val: int = 2000  # validation examples
        test: int = 2000  # test examples
        fresh: int = 50000  # examples of a second test set, of another seed: 2,000 leave 1.1 points of sampling error
        min_length: int = 501  # fewest tokens of an expression
        max_length: int = 1999  # most tokens of an expression

        def __post_init__(self) -> None:
            check_at_least(1, "task", self, "train", "val", "test", "fresh")
            check_at_most(MOST_EXAMPLES, "task", self, "train", "val", "test", "fresh")
            check_at_most(MOST_TOKENS, "task", self, "max_length")
            check_generated_only(self, "train", "val", "test")
            check_data_seed(self)
            if not 1 <= self.min_length <= self.max_length:
                limits = f"at least 1 and at most task.max_length={self.max_length}"
                raise UsageError(f"task.min_length={self.min_length} must be {limits}")

    Data = ListOpsData
