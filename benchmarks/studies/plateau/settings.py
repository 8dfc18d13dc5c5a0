"""The settings of the study: what each changes of `BASE`, the easy level as recipe `paths` trains it."""

from __future__ import annotations

from typing import NamedTuple

SHARED = ("task=pathfinder", "attn=flash", "recipe=paths", "trainer.steps=8000", "trainer.eval_every=500")
BASE = (*SHARED, "task.level=easy", "task.tokens=lit")
PRETRAINING = (
    *SHARED, "pretrain=masked", "augment.levels=0", "augment.flip=none", "optim.lr=1e-3", "trainer.steps=4000"
)  # fmt: skip

MEAN, CLS = "model.pooling=mean", "model.pooling=cls"
IDS, EXACT = "model.pixels=ids", "augment.levels=0"
HARD, ALL = "task.level=hard", "task.tokens=all"
ONE_AXIS = ("model.axes=1", "model.heads=8")  # as Amos et al. 2024 have it

# name: fields of a masked pretraining on hard images, beside PRETRAINING
PRETRAININGS: dict[str, tuple[str, ...]] = {"pixels": (), "lit": ("task.tokens=lit",), "one axis": ONE_AXIS}


def file_name(name: str) -> str:
    """What a run of this setting, and the file of its result, are called."""
    return name.replace(", ", "+").replace(" ", "-")


class Setting(NamedTuple):
    """What is trained, beside BASE, and from which pretraining; None: from nothing."""

    fields: tuple[str, ...]
    why: str
    start: str | None = None


SETTINGS: dict[str, Setting] = {
    "as it is": Setting((), "maximum, grey levels as numbers and moved by one"),
    "mean": Setting((MEAN,), "the label is in the vectors of two markers, about 20 of 120 lit pixels"),
    "cls": Setting((CLS,), "a token of its own looks for the markers"),
    "ids": Setting((IDS,), "a vector for each grey level"),
    "ids, mean": Setting((IDS, MEAN), "both"),
    "exact": Setting((EXACT,), "grey levels as they are: the exact one tells which dash a pixel is of"),
    "exact, mean": Setting((EXACT, MEAN), "the same with a mean"),
    "exact, ids": Setting((EXACT, IDS), "the same with a vector for each"),
    "exact, ids, mean": Setting((EXACT, IDS, MEAN), "the first stage of recipe curriculum"),
    "one axis": Setting(ONE_AXIS, "positions in the order of the sequence"),
    "all pixels": Setting((ALL,), "1,024 tokens with the background"),
    "intermediate": Setting(("task.level=intermediate",), "paths of 9 dashes instead of 6"),
    "hard": Setting((HARD,), "paths of 14 dashes"),
    "small rate": Setting(("optim.lr=1e-4",), "a fifth of the rate"),
    "small batch": Setting(("batch.size=32",), "a quarter of the images"),
    "hard, pretrained on lit": Setting((HARD,), "lit pixels, after restoring hidden ones", "lit"),
    "hard, all pixels, pretrained": Setting((HARD, ALL), "what Amos et al. 2024 do, with the maximum", "pixels"),
    "hard, all pixels, mean, pretrained": Setting((HARD, ALL, MEAN), "the same with a mean", "pixels"),
    "hard, all pixels, one axis, pretrained": Setting((HARD, ALL, *ONE_AXIS), "the strict league", "one axis"),
}
