"""`init=` between models that differ in how they rotate."""

from __future__ import annotations

import pytest
import torch

from lra.training import checkpoints
from tests.training.test_transfer import build, moved, saved  # noqa: F401 - a fixture

ROTARY = ("model.positions=rotary",)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("field", ["model.rotary_share=0.5", "model.rotary_bands=heads"])
def test_they_move_to_another_resolution(saved, field, axes):  # noqa: F811
    model = (*ROTARY, f"model.axes={axes}", field)
    path = saved("pathfinder", *model)
    module, said = moved("path64", path, *model, "positions.scale=image")
    assert said.scale == ([1 / 4] if axes == 1 else [1 / 2] * 2) and not said.fresh and not said.left
    assert not said.changed
    small = build("pathfinder", *model).model.encoder.positions
    places = torch.stack((torch.arange(32), torch.arange(32).flip(0)), 1)[:, :axes]
    times = 4 if axes == 1 else 2
    for one, other in zip(module.model.encoder.positions(times * places), small(places), strict=True):
        assert torch.equal(one, other)
    weights = checkpoints.read_checkpoint(path)[0]
    same = (key for key in weights if key != "encoder.positions.scale")
    assert all(torch.equal(module.model.state_dict()[key], weights[key]) for key in same)


def test_other_rotations_are_said(saved):  # noqa: F811
    path = saved("pathfinder", *ROTARY)
    assert not {"rotary_share", "rotary_bands"} & {*checkpoints.read_checkpoint(path)[1]["config"]["model"]}
    _, said = moved("pathfinder", path, *ROTARY, "model.rotary_share=0.5", "model.rotary_bands=heads")
    assert said.changed == {"model.rotary_share": [1.0, 0.5], "model.rotary_bands": ["all", "heads"]}
    assert "trained with model.rotary_share=1.0, here 0.5" in said.describe(path)
    path = saved("pathfinder", *ROTARY, "model.rotary_share=0.5")
    assert moved("pathfinder", path, *ROTARY)[1].changed == {"model.rotary_share": [0.5, 1.0]}
