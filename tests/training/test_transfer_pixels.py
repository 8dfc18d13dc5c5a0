"""`init=` where pixels are numbers: the hidden channel and CLS come and go, and a table of ids does not fit."""

from __future__ import annotations

import pytest
import torch

import lra
from lra.errors import UsageError
from lra.training import checkpoints
from tests.training.test_transfer import TABLE, build, moved, refused, saved

__all__ = ["saved"]  # the fixture of these tests, too

NUMBERS = "model.pixels=numbers"
WEIGHT, BIAS, CLS = "encoder.embedding.weight", "encoder.embedding.bias", "encoder.embedding.cls"


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize(("before", "after"), [("mean", "mean"), ("mean", "cls"), ("cls", "mean"), ("cls", "cls")])
def test_fine_tuning_drops_the_hidden_channel(saved, before, after, positions):
    args = NUMBERS, f"model.positions={positions}", f"model.pooling={after}"
    path = saved("pathfinder", *args[:2], f"model.pooling={before}", "pretrain=masked")
    weights = checkpoints.read_checkpoint(path)[0]
    own = {key: value.clone() for key, value in build("pathfinder", *args).model.state_dict().items()}
    module, said = moved("pathfinder", path, *args)
    state = module.model.state_dict()
    one, other = before == "cls", after == "cls"
    assert said.fresh == ["head", *["CLS"] * (other > one)]
    assert said.left == ["decoder", *["CLS"] * (one > other), "hidden channel"]
    assert said.describe(path).endswith(f"left behind: {', '.join(said.left)}")

    assert weights[WEIGHT].shape == (32, 2) and torch.equal(state[WEIGHT], weights[WEIGHT][:, :1])
    assert torch.equal(state[BIAS], weights[BIAS])
    source = weights if one else own
    changed = {WEIGHT}
    assert (CLS in state) == other and (not other or torch.equal(state[CLS], source[CLS]))
    changed |= {CLS} if one != other else set()
    if positions == "learned":
        assert torch.equal(state[TABLE][other:], weights[TABLE][one:])
        assert torch.equal(state[TABLE][:other], source[TABLE][:other])
        changed |= {TABLE} if one != other else set()
    for key, value in state.items():
        if key not in changed:
            assert torch.equal(value, own[key] if key.startswith("head.") else weights[key])
    assert said.same == len({key for key in weights if not key.startswith("decoder.")} - changed)


@pytest.mark.parametrize("objective", ["pretrain=masked", "denoise=1"])
def test_a_pretraining_from_a_fine_tuned_run_has_a_fresh_channel(saved, objective):
    path = saved("image", NUMBERS, "model.pooling=cls")
    weights = checkpoints.read_checkpoint(path)[0]
    args = NUMBERS, "model.pooling=cls", objective, "pixel_loss=l1"
    module, said = moved("image", path, *args)
    state, own = module.model.state_dict(), build("image", *args).model.state_dict()
    assert said.fresh == ["decoder", "hidden channel"] and said.left == ["head"] * (objective == "pretrain=masked")
    assert torch.equal(state[WEIGHT], torch.cat((weights[WEIGHT], own[WEIGHT][:, 1:]), 1))
    assert torch.equal(state[CLS], weights[CLS])
    with pytest.raises(UsageError, match="has no decoder and hidden channel for this model"):
        lra.test(f"init={path}", "pretrain=masked")


def test_a_pretraining_goes_on_with_another_loss(saved):
    path = saved("pathfinder", NUMBERS, "pretrain=masked", "pixel_loss=l1")
    weights = checkpoints.read_checkpoint(path)[0]
    module, said = moved("path64", path, NUMBERS, "pretrain=masked", "pixel_loss=l1", "positions.resize=gridwise")
    assert not said.fresh and not said.left and torch.equal(module.model.state_dict()[WEIGHT], weights[WEIGHT])
    _, said = moved("pathfinder", path, NUMBERS, "pretrain=masked")
    assert said.fresh == ["decoder"] and not said.left


def test_ids_and_numbers_do_not_fit(saved):
    ids, numbers = saved("pathfinder", "pretrain=masked"), saved("pathfinder", NUMBERS)
    refused("does not fit this model: model.pixels ids here numbers; use", "pathfinder", ids, NUMBERS)
    refused("does not fit this model: model.pixels numbers here ids; use", "pathfinder", numbers)
    with pytest.raises(UsageError, match="model.pixels ids here numbers"):
        lra.test(f"init={ids}", NUMBERS)


def test_a_checkpoint_loads_as_it_was(saved):
    path = saved("image", NUMBERS, "pretrain=masked", "pixel_loss=l1")
    module = lra.load(path)
    assert (module.run.model.pixels, module.run.pixel_loss) == ("numbers", "l1")
    weights = checkpoints.read_checkpoint(path)[0]
    assert all(torch.equal(value, weights[key]) for key, value in module.model.state_dict().items())
