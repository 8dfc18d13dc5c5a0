"""The settings of the study: fields of `lra fit`, most promising first.

A setting is a pretraining, or none, and what is trained from its weights. Everything that a setting does not say is in
`SHARED`. Rates are constant, so that the clock may end a run at any step.
"""

from __future__ import annotations

from typing import NamedTuple

DATA = ("task=pathfinder", "task.train=160000", "task.val=2000", "task.test=2000")
SHARED = (
    *DATA, "attn=flash", "recipe=curriculum", "optim.schedule=constant", "optim.warmup=500",
    "trainer.eval_every=250", "trainer.log_every=50",
)  # fmt: skip
PRETRAINING = (*SHARED, "pretrain=masked", "optim.lr=1e-3", "trainer.steps=4000")
TRAINING = (*SHARED, "optim.lr=5e-4", "trainer.steps=1000000")

PIXELS = ("model.pixels=numbers",)
STRICT = (*PIXELS, "model.axes=1", "model.heads=8")  # as Amos et al. 2024 have it
LINEAR = ("model.classifier=linear",)
MAX, CLS = ("model.pooling=max",), ("model.pooling=cls",)
LIT, EASY = ("task.tokens=lit",), ("task.level=easy",)

# name: fields of the pretraining, beside PRETRAINING
PRETRAININGS: dict[str, tuple[str, ...]] = {
    "ids": (),
    "numbers": PIXELS,
    "strict": STRICT,
    "squares": (*PIXELS, "mask_patch=4"),
    "most": (*PIXELS, "mask=0.85"),
    "lit": LIT,
    "short": (*PIXELS, "trainer.steps=1000"),
    "six layers": (*PIXELS, "model.layers=6"),
    "wide": (*PIXELS, "model.d_model=256", "model.heads=8", "model.d_ff=512"),
    "strict squares": (*STRICT, "mask_patch=4"),
}


class Setting(NamedTuple):
    """What is trained, beside TRAINING, from which pretraining; None: from nothing."""

    start: str | None
    fields: tuple[str, ...] = ()
    why: str = ""


SETTINGS: dict[str, Setting] = {
    "numbers, max": Setting("numbers", (*PIXELS, *MAX), "a marker's vector is not averaged with 1,000 others"),
    "squares, max": Setting("squares", (*PIXELS, *MAX), "whoever restores a square has to join the paths around it"),
    "lit": Setting("lit", LIT, "pretrained on lit pixels: 165 tokens, and none of them is background"),
    "lit, max": Setting("lit", (*LIT, *MAX), "the same with the maximum"),
    "easy": Setting("numbers", (*PIXELS, *EASY), "the easy level from the same weights"),
    "strict, max": Setting("strict", (*STRICT, *MAX), "one axis of positions, eight heads"),
    "numbers": Setting("numbers", PIXELS, "mean pooling, as Amos et al. 2024"),
    "ids": Setting("ids", (), "a vector for each grey level: what stayed on the plateau"),
    "ids, max": Setting("ids", MAX, "the same with the maximum"),
    "numbers, cls": Setting("numbers", (*PIXELS, *CLS), "a token of its own looks for the markers"),
    "most, max": Setting("most", (*PIXELS, *MAX), "with 85% hidden, neighbours tell less"),
    "strict": Setting("strict", (*STRICT, *LINEAR), "Amos et al. 2024 but for the batch"),
    "strict squares, max": Setting("strict squares", (*STRICT, *MAX), "squares on one axis"),
    "numbers, max, 1e-3, 256": Setting(
        "numbers", (*PIXELS, *MAX, "optim.lr=1e-3", "batch.size=256"), "a larger rate and batch"
    ),
    "numbers, max, 1e-4": Setting("numbers", (*PIXELS, *MAX, "optim.lr=1e-4"), "a smaller rate"),
    "numbers, max, 32": Setting("numbers", (*PIXELS, *MAX, "batch.size=32"), "the paper's batch"),
    "numbers, max, denoise": Setting("numbers", (*PIXELS, *MAX, "denoise=1", "mask=0.3"), "restoring beside the label"),
    "scratch, max": Setting(None, (*PIXELS, *MAX), "no pretraining"),
    "short, max": Setting("short", (*PIXELS, *MAX), "a quarter of the pretraining"),
    "six layers, max": Setting("six layers", (*PIXELS, *MAX, "model.layers=6"), "more steps along a path"),
    "wide, max": Setting(
        "wide", (*PIXELS, *MAX, "model.d_model=256", "model.heads=8", "model.d_ff=512"), "twice the width"
    ),
    "squares": Setting("squares", PIXELS, "squares, and mean pooling"),
    "squares, cls": Setting("squares", (*PIXELS, *CLS), "squares, and a token of its own"),
    "intermediate, max": Setting("numbers", (*PIXELS, *MAX, "task.level=intermediate"), "paths of 9 dashes"),
    "flips, max": Setting("numbers", (*PIXELS, *MAX, "augment.flip=both"), "four times the images"),
}
