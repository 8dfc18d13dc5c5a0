"""ACL Anthology Network: pairs of papers, each read byte by byte on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn

from lra.config.checks import check_at_least, check_at_most
from lra.data import aan
from lra.data.split import Examples
from lra.data.store import Store
from lra.data.writer import StoreWriter
from lra.errors import UsageError
from lra.models.heads import PairClassifier
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.tasks.options import MOST_TOKENS


class RetrievalData(TaskData):
    """Pairs of papers as UTF-8 bytes, each paper stored once and whole, and cut at `max_length` when read."""

    vocabulary, generator = aan.VOCABULARY, aan.GENERATOR
    label_names = ("unrelated", "one cites the other")

    def params(self) -> dict[str, Any]:
        return {"dataset": self.config.dataset}  # not the source: any copy of the data set holds the same pairs

    def build(self, writer: StoreWriter) -> None:
        c = self.config
        if c.source is None:
            what = {"lra": "LRA's release, a folder or archive", "scisumm": aan.COMPACT}[c.dataset]
            command = f"lra data prepare task=retrieval dataset={c.dataset} source=<path>"
            raise UsageError(f"these pairs are on no hub; get {what}, then: {command}")
        aan.build_aan(writer, c.source, c.dataset)

    def splits(self, store: Store) -> dict[str, Examples]:
        return {name: store.pairs(name) for name in store.splits}

    def depict(self, example: tuple[np.ndarray, np.ndarray]) -> str:
        return "\n\n".join(paper[: self.config.max_length].tobytes().decode(errors="replace") for paper in example)


@TASKS.register(
    "retrieval",
    version=1,
    classes=2,
    length=4000,
    mask=0.15,
    paper="Radev et al. 2013; Tay et al. 2020, arXiv 2011.04006",
)
class Retrieval(TaskModule):
    """Retrieval: does one of two papers cite the other, encoded apart, byte by byte."""

    @dataclass(frozen=True)
    class Config:
        source: str | None = None  # folder or archive of LRA's release, or folder of the compact set
        # lra: 147,086 pairs of LRA's release; scisumm: 20,458 pairs of CL-SciSumm's papers
        dataset: Literal["lra", "scisumm"] = "lra"
        max_length: int = 4000  # bytes of each paper; of a longer one the start is kept
        # difference of the two encodings that the classifier sees; LRA's is signed
        difference: Literal["signed", "absolute"] = "signed"

        def __post_init__(self) -> None:
            check_at_least(1, "task", self, "max_length")
            check_at_most(MOST_TOKENS, "task", self, "max_length")

        @property
        def protocol(self) -> str:
            return {"lra": "the pairs of LRA", "scisumm": "scisumm, not the pairs of LRA"}[self.dataset]

    Data = RetrievalData

    def head(self) -> nn.Module:
        model, absolute = self.run.model, self.run.task.difference == "absolute"
        return PairClassifier(model.d_model, model.d_hidden, self.facts.classes, absolute)
