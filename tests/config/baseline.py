"""The runs whose every option is tried: their fields, what an option needs beside it, and values that do the same."""

from __future__ import annotations

from typing import Any

import torch

from lra.config.augment import LIMITS
from lra.config.recipes import recipe_names

RUN = (
    "task=listops", "attn=flash", "recipe=demo", "trainer.steps=4", "trainer.eval_every=2", "trainer.log_every=1",
    "trainer.accelerator=cpu", "batch.size=4", "batch.eval=4", "optim.warmup=1", "model.d_model=32", "model.d_ff=16",
    "model.layers=1", "model.dropout=0.1", "model.attn_dropout=0.1", "task.train=20", "task.val=6", "task.test=6",
    "task.fresh=2", "task.max_length=24",
)  # fmt: skip
# instead of ListOps: small images
IMAGES = (
    "task=pathfinder", "task.tokens=all", "task.train=20", "task.val=6", "task.test=6",
    "attn=linear", "model.attn_dropout=0", "model.d_model=8", "model.heads=1", "batch.size=2",
)  # fmt: skip
# a value of each field that tasks without images refuse
OF_IMAGES = {"model.axes": "2", "model.pixels": "numbers", "pixel_loss": "l1", "mask_patch": "2"}
# of the run: what a field needs beside it; {…} is a finished run
BESIDE = {
    "mask": ("pretrain=masked",),
    "mask_random": ("pretrain=masked", "mask=0.5"),
    "mask_span": ("pretrain=masked", "mask=0.5"),
    "mask_patch": ("pretrain=masked", "mask=0.5"),
    "mask_loss": ("pretrain=masked", "mask=0.5"),
    "pixel_loss": ("pretrain=masked", "mask=0.5", "model.pixels=numbers"),
    "head": ("init={learned}",),
    "positions.resize": ("init={learned}", "task.max_length=48"),
    "positions.scale": ("init={sinusoidal}", "model.positions=sinusoidal", "task.max_length=48"),
    "trainer.devices": ("batch.size=5",),  # 2 would be started
    "trainer.on_nan": ("optim.lr=1e30",),
    "trainer.average_decay": ("trainer.average=ema",),
    "trainer.average_share": ("trainer.average=tail",),
    "trainer.patience": ("optim.schedule=constant", "trainer.eval_every=1"),
    "model.rotary_base": ("model.positions=rotary",),
    "model.rotary_share": ("model.positions=rotary",),
    "model.rotary_bands": ("model.positions=rotary",),
    "optim.momentum": ("optim.name=sgd", "optim.betas=null"),
    "optim.decay": ("optim.weight_decay=0.1",),
    # a plateau: validations that are not better
    "optim.schedule": ("trainer.steps=12", "trainer.eval_every=1", "optim.lr=1e-9"),
    "optim.plateau_factor": ("optim.schedule=plateau", "trainer.steps=12", "trainer.eval_every=1", "optim.lr=1e-9"),
    "optim.plateau_patience": ("optim.schedule=plateau", "trainer.steps=12", "trainer.eval_every=1", "optim.lr=1e-9"),
    "optim.cooldown": ("optim.schedule=constant",),
    "optim.cooldown_to": ("optim.schedule=constant", "optim.cooldown=2"),
    "augment.flip": ("augment.shift=0.1",),  # so that only the numbers differ
    **{f"augment.{name}": ("augment.flip=both",) for name in LIMITS},
    "task.background": ("task.tokens=lit",),
}
UNTRIED = {"demo", "amos2024"}  # the baseline, and a recipe whose pretraining has steps of its own
VALUES = {"recipe": lambda: [sorted({*recipe_names()} - UNTRIED)], "init": lambda: [["{learned}"]]}
# values that do here what the baseline's does
SAME: dict[str, tuple[Any, ...]] = {
    "optim.eps": (None,),  # the default
    "optim.momentum": (None,),
    "engine": ("eager",),  # auto, where there is no GPU
    "trainer.accelerator": () if torch.cuda.is_available() else ("auto",),
    "head": ("kept",),  # null, as its shapes agree
    "draws": ("changed",),  # a permission: tests/training/test_draws.py
    "positions.scale": ("pixel",),  # null
}
# of attentions
OPTIONS: dict[str, Any] = {"block": "4", "random": 1, "globals": 1}  # instead of defaults;
LARGEST, LONGEST = 8, 40  # of a number, and of a sequence
OPTIONS_BESIDE = {"deterministic": {"impl": "triton", "block": "16", "window": 15, "stride": 16}}
OPTION_VALUES = {"block": [["8"]], "summary": [[8]], "inner": [["local window=8"]]}
OPTION_SAME = {"impl": ("sdpa", "gather", "torch", "fft")}  # auto, where there is no GPU
ON_GPU = {"mode"}  # of torch.compile
INTERPRETED = {"impl", "deterministic"}  # seconds: some values are Triton's kernels
# of tasks
DATA: dict[str, Any] = {"train": 6, "val": 6, "test": 6, "fresh": 6, "min_length": 8, "max_length": 24}
