"""Runs that start from others: scored right after a transfer, trained from there, and resumed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lra
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.base import TaskData
from lra.training import checkpoints
from tests.training.conftest import arguments
from tests.training.test_fit import interrupt_at
from tests.training.test_transfer import FEW, HOW, MODEL, STEPS


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The directories of finished tiny runs on Pathfinder-32, by their positions."""
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = ("task=pathfinder", "attn=flash", *MODEL, *FEW, *STEPS)
        return {
            positions: folder / lra.fit(*run, f"model.positions={positions}", f"name={positions}")["directory"]
            for positions in ("learned", "rotary")
        }


PATH64 = ("task=path64", "task.level=easy", "task.tokens=lit", *FEW[:3])


def test_from_one_resolution_to_the_next(small, tmp_path, monkeypatch, capsys):
    """Scored right after each way of resizing, then trained from there, then scored once more larger."""
    monkeypatch.chdir(tmp_path)
    scored = {how: lra.test(f"init={small['learned']}", *PATH64, f"positions.resize={how}") for how in HOW}
    losses = [result["test"]["loss"] for result in scored.values()]
    assert len(set(losses)) == 3 and all(0 < loss < 2 for loss in losses) and not list(tmp_path.iterdir())
    assert lra.test(f"init={small['learned']}", *PATH64)["test"] == scored["bilinear"]["test"]
    assert "positions resized, gridwise, 32x32 pixels to 64x64 pixels" in capsys.readouterr().out

    still = ("optim.lr=1e-12", "optim.weight_decay=0")
    model = (*MODEL, *FEW, *STEPS, "task=path64", "attn=butterfly", f"init={small['learned']}", "name=large")
    result = lra.fit(*model, *still, "positions.resize=gridwise")
    assert result["transfer"] == json.loads(Path(result["directory"], "result.json").read_text())["transfer"]
    assert result["transfer"]["resized"] == "gridwise, 32x32 pixels to 64x64 pixels"
    assert result["transfer"]["changed"] == {"attn": ["flash", "butterfly"]}
    # at no learning rate it stays where the transfer put it
    large = lra.test(f"init={result['directory']}", "attn=flash")["test"]["loss"]
    assert large == pytest.approx(scored["gridwise"]["test"]["loss"], abs=1e-5)
    larger = ("task=pathx", *PATH64[1:], "batch.eval=2", "positions.resize=gridwise")
    assert 0 < lra.test(f"init={result['directory']}", *larger)["test"]["loss"] < 2


def test_what_is_not_trained_is_not_scored(small):
    with pytest.raises(UsageError, match=r"has no blocks.*projections.0.* for this model, .*: train it with lra fit"):
        lra.test(f"init={small['learned']}", "attn=linformer")
    with pytest.raises(UsageError, match=r"has no head for this model"):
        lra.test(f"init={small['learned']}", "model.classifier=linear")
    with pytest.raises(UsageError, match=r"positions.resize=gridwise: nothing is resized, both have 32x32"):
        lra.test(f"init={small['learned']}", "positions.resize=gridwise")
    with pytest.raises(UsageError, match=r"vocabulary of pathfinder@2, not of text@1: choose a "):
        lra.test(f"init={small['learned']}", "task=text")


def interrupted(monkeypatch, *args: str) -> None:
    """A run that dies between two checkpoints."""
    with monkeypatch.context() as patch:
        interrupt_at(3, patch)
        with pytest.raises(RuntimeError, match="power cut"):
            lra.fit(*args)


@pytest.mark.parametrize(
    ("positions", "how"), [("learned", "positions.resize=bicubic"), ("rotary", "positions.scale=image")]
)
def test_resuming_after_a_transfer_changes_nothing(small, tmp_path, monkeypatch, positions, how):
    monkeypatch.chdir(tmp_path)
    args = (*MODEL, *FEW, *STEPS, "task=path64", "attn=flash", f"model.positions={positions}",
            f"init={small[positions]}", how, "model.dropout=0.1")  # fmt: skip
    unbroken = lra.fit(*args, "name=unbroken")
    interrupted(monkeypatch, *args, "name=broken")
    resumed = lra.fit(*args, "name=broken", "resume=auto")
    a, b = (checkpoints.read_checkpoint(Path(result["directory"], "last.ckpt"))[0] for result in (unbroken, resumed))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert resumed["resumed"] and unbroken["transfer"] == resumed["transfer"] is not None
    assert unbroken["test"] == resumed["test"]
    again = lra.test(f"init={resumed['directory']}")
    assert again["test"]["loss"] == pytest.approx(resumed["test"]["loss"], rel=1e-5)
    assert again["transfer"]["scale"] == resumed["transfer"]["scale"]


def test_an_older_run_is_resumed(tmp_path, monkeypatch):
    """Its last.ckpt has no factor and says nothing of a transfer."""
    monkeypatch.chdir(tmp_path)
    args = (*MODEL, *FEW, *STEPS, "task=pathfinder", "attn=flash", "model.positions=rotary", "name=old")
    interrupted(monkeypatch, *args)
    last = Path("checkpoints/runs/pathfinder/flash/old-s0/last.ckpt")
    checkpoint = torch.load(last, weights_only=True)
    del checkpoint["state_dict"]["model.encoder.positions.scale"], checkpoint["callbacks"]["Origin"]
    torch.save(checkpoint, last)
    result = lra.fit(*args, "resume=auto")
    assert result["steps"] == 4 and result["resumed"] and result["transfer"] is None


def test_a_run_of_another_version_of_the_task_is_not_gone_on_with(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("checkpoints", "runs", "listops", "flash", "done-s0")
    shutil.copytree(finished, run)
    cls = TASKS.get("listops")
    monkeypatch.setattr(cls, "facts", replace(cls.facts, version=2))
    with pytest.raises(UsageError, match=f"{run} holds a result of listops@1, and the task is now listops@2"):
        lra.fit(*arguments("name=done", "resume=auto"))
    (run / "result.json").unlink()
    with pytest.raises(UsageError, match="last.ckpt is of listops@1, and the task is now listops@2"):
        lra.fit(*arguments("name=done", "resume=auto"))


def test_a_seed_scores_what_is_drawn_for_another_attention_and_nothing_else(finished, monkeypatch):
    monkeypatch.chdir(finished.parents[4])
    scored = [lra.test(f"init={finished}", "attn=performer", f"seed={seed}")["test"]["loss"] for seed in (1, 1, 2)]
    assert scored[0] == scored[1] != scored[2]
    monkeypatch.setattr(TaskData, "prepare_data", lambda _: pytest.fail("prepared data before refusing"))
    for attention in ((), ("attn=standard",)):
        with pytest.raises(UsageError, match="^seed=1: nothing is drawn to score these weights, .*; leave it out$"):
            lra.test(f"init={finished}", *attention, "seed=1")
