"""Runs of mixers: their weights move to and from attentions, and what can't be captured says why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lra
from lra.errors import UsageError
from lra.models.attention.gla import GatedLinearAttention
from lra.training import checkpoints
from lra.training.assembly import build_modules
from lra.training.describe import describe_run
from lra.training.fit import configure
from lra.training.step import Step
from tests.training.conftest import arguments
from tests.training.test_transfer import moved, saved  # noqa: F401


def test_a_mixer_leaves_the_projections_of_the_block_behind_and_takes_the_rest(saved):  # noqa: F811
    projections = [f"blocks.*.{part}.{kind}" for part in ("out", "qkv") for kind in ("bias", "weight")]
    path = saved("pathfinder", "model.attn_dropout=0")
    module, said = moved("pathfinder", path, "attn=s4d", "model.attn_dropout=0", "model.positions=learned")
    assert said.left == projections and all(name.startswith("blocks.*.attention.") for name in said.fresh)
    there, here = checkpoints.read_checkpoint(path)[0], module.model.state_dict()
    assert all(torch.equal(here[key], there[key]) for key in here if ".attention." not in key)
    _, said = moved("pathfinder", saved("pathfinder", "attn=gla", "model.positions=learned"), "model.attn_dropout=0")
    assert said.fresh == projections and "blocks.*.attention.gate.weight" in said.left


def test_what_can_not_be_captured_says_why_before_it_trains(monkeypatch):
    run = configure(arguments("attn=gla", "model.attn_dropout=0")).config
    module = build_modules(run)[1]
    monkeypatch.setattr(GatedLinearAttention, "decides_on_host", "gates are sorted on the host")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), world_size=1)
    parts: Any = SimpleNamespace(module=module, step=module.step, trainer=trainer, attention="gla", engine="eager")
    assert "engine eager as gates are sorted on the host, a GPU" in describe_run(run, parts)
    with pytest.raises(UsageError, match="engine=captured, but gates are sorted on the host: use engine=auto"):
        Step(replace(run, engine="captured")).captures(module, torch.device("cuda"))


def test_what_first_weights_are_can_not_be_asked_of_trained_ones(small):
    found = small("attn=s4d", "model.attn_dropout=0", "trainer.steps=4", "attn.init=inv")["directory"]
    for option in ("attn.init=legs", "attn.frequency=2", "attn.dt_max=0.2"):
        with pytest.raises(UsageError, match=f"^{option}: nothing is drawn to score these weights, .*; leave it out$"):
            lra.test(f"init={found}", option)
