"""IMDB reviews, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lra.config.checks import check_at_least, check_at_most
from lra.data import imdb
from lra.data.split import Examples
from lra.data.store import Store
from lra.data.writer import StoreWriter
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.tasks.options import MOST_TOKENS, check_data_seed


class TextData(TaskData):
    """IMDB's labelled reviews as UTF-8 bytes, stored whole and cut at `max_length` when read."""

    vocabulary, generator = imdb.VOCABULARY, imdb.GENERATOR
    label_names = ("negative", "positive")

    def params(self) -> dict[str, Any]:
        return {"dataset": imdb.HUB}  # not the source: any mirror of the data set holds the same reviews

    def build(self, writer: StoreWriter) -> None:
        imdb.build_imdb(writer, self.config.source)

    def splits(self, store: Store) -> dict[str, Examples]:
        train, test = store.split("train"), store.split("test")
        if self.config.protocol == "lra":
            return {"train": train, "val": test, "test": test}
        return {**self.hold_out(train), "test": test}

    def depict(self, example: np.ndarray) -> str:
        return example[: self.config.max_length].tobytes().decode(errors="replace")


@TASKS.register(
    "text", version=1, classes=2, length=4096, mask=0.15, paper="Maas et al. 2011; Tay et al. 2020, arXiv 2011.04006"
)
class Text(TaskModule):
    """Text: the sentiment of an IMDB review read byte by byte."""

    @dataclass(frozen=True)
    class Config:
        source: str = imdb.HUB  # Hub data set, or a folder with a mirror of it
        max_length: int = 4096  # bytes of a review; of a longer one the start is kept
        # validation on a seeded tenth of train or, as in LRA's code, on the test set
        protocol: Literal["heldout", "lra"] = "heldout"
        data_seed: int = 0  # chooses the tenth of train that is held out for validation

        def __post_init__(self) -> None:
            check_data_seed(self)
            if self.protocol == "lra" and self.data_seed:
                raise UsageError("task.data_seed: nothing is held out with task.protocol=lra; leave one of them out")
            check_at_least(1, "task", self, "max_length")
            check_at_most(MOST_TOKENS, "task", self, "max_length")

    Data = TextData
