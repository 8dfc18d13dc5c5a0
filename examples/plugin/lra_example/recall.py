"""A task with data of its own: associative recall.

A sequence has pairs of a key and a digit, and then asks for one of the keys. The class is the digit of that key.
Ba et al. 2016 (arXiv 1610.06258, section 4.1) trained fast weights on it, and Arora et al. 2023 (arXiv 2312.04927)
compare mixers by it.
"""

from dataclasses import dataclass

import numpy as np

from lra.config.checks import check_at_least, check_at_most
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule

KEYS, DIGITS = "abcdefgh", "0123456789"
PAIRS = [key + digit for key in KEYS for digit in DIGITS]


class RecallData(TaskData):
    """Sequences of `pairs` tokens such as `a7`, each with another key, and a last token such as `a?`."""

    vocabulary, generator = (*PAIRS, *(f"{key}?" for key in KEYS)), "recall 1"

    def params(self):
        c = self.config
        return {"pairs": c.pairs, "train": c.train, "val": c.val, "test": c.test}

    def build(self, writer):
        draw, pairs = np.random.default_rng(0), self.config.pairs
        for split, count in (("train", self.config.train), ("val", self.config.val), ("test", self.config.test)):
            keys = draw.permuted(np.tile(np.arange(len(KEYS)), (count, 1)), axis=1)[:, :pairs]
            digits = draw.integers(len(DIGITS), size=keys.shape)
            asked = np.arange(count), draw.integers(pairs, size=count)
            tokens = np.column_stack((len(DIGITS) * keys + digits, len(PAIRS) + keys[asked]))
            writer.add(split, tokens.astype(np.uint8), digits[asked])

    def depict(self, example):
        return " ".join(self.vocabulary[token] for token in example)


@TASKS.register(
    "recall", version=1, classes=10, length=9, mask=0.1, paper="Ba et al. 2016, arXiv 1610.06258, section 4.1"
)
class Recall(TaskModule):
    """Recall: which digit stood behind this key."""

    @dataclass(frozen=True)
    class Config:
        source: str = "generate"
        pairs: int = 6  # in a sequence, at most 8
        max_length: int = 9  # most tokens of a sequence
        train: int = 20000  # training examples
        val: int = 1000  # validation examples
        test: int = 1000  # test examples

        def __post_init__(self):
            check_at_least(1, "task", self, "pairs", "train", "val", "test")
            check_at_most(len(KEYS), "task", self, "pairs")

    Data = RecallData
