"""`init=` between models that differ in how they rotate or in the norms of queries and keys."""

from __future__ import annotations

import pytest
import torch

import lra
from lra.errors import UsageError
from lra.training import checkpoints
from tests.training.test_transfer import build, moved, saved  # noqa: F401 - a fixture

ROTARY = ("model.positions=rotary",)
NORMS = ["blocks.*.k_norm.weight", "blocks.*.q_norm.weight"]


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("field", ["model.rotary_share=0.5", "model.rotary_bands=heads", "model.qk_norm=true"])
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
    assert not {"rotary_share", "rotary_bands", "qk_norm", "layer_drop"} & {
        *checkpoints.read_checkpoint(path)[1]["config"]["model"]
    }
    _, said = moved("pathfinder", path, *ROTARY, "model.rotary_share=0.5", "model.rotary_bands=heads")
    assert said.changed == {"model.rotary_share": [1.0, 0.5], "model.rotary_bands": ["all", "heads"]}
    assert "trained with model.rotary_share=1.0, here 0.5" in said.describe(path)
    assert not moved("pathfinder", path, *ROTARY, "model.layer_drop=0.2")[1].changed, "that is of training alone"
    path = saved("pathfinder", *ROTARY, "model.rotary_share=0.5")
    assert moved("pathfinder", path, *ROTARY)[1].changed == {"model.rotary_share": [0.5, 1.0]}


@pytest.mark.parametrize(("attn", "norms"), [("flash", NORMS), ("reformer", NORMS[1:])])
def test_norms_that_only_one_model_has_are_fresh_or_left_behind(saved, attn, norms):  # noqa: F811
    plain, normalised = (saved("pathfinder", f"attn={attn}", f"model.qk_norm={has}") for has in ("false", "true"))
    module, said = moved("pathfinder", plain, f"attn={attn}", "model.qk_norm=true")
    assert said.fresh == norms and not said.left and said.changed == {"model.qk_norm": [False, True]}
    state = module.model.state_dict()
    scales = [value for key, value in state.items() if key.endswith(("q_norm.weight", "k_norm.weight"))]
    assert len(scales) == 2 * len(norms) and all(torch.equal(scale, torch.ones(16)) for scale in scales)
    _, said = moved("pathfinder", normalised, f"attn={attn}")
    assert said.left == norms and not said.fresh and said.changed == {"model.qk_norm": [True, False]}
    _, said = moved("pathfinder", normalised, f"attn={attn}", "model.qk_norm=true")
    assert not said.changed and not said.fresh and not said.left


def test_untrained_norms_are_not_scored(saved):  # noqa: F811
    with pytest.raises(UsageError, match=r"has no blocks\.\*\.k_norm\.weight and .* for this model"):
        lra.test(f"init={saved('pathfinder')}", "model.qk_norm=true")
