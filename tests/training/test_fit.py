"""A run from beginning to end: what it leaves, what it refuses, and that resuming changes nothing."""

import csv
import json
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint

import lra
from lra.errors import UsageError
from lra.training import checkpoints, curves
from lra.training.clock import Clock
from lra.training.run_directory import claim_directory, is_claimed, locked_shared
from lra.training.step import Step
from tests.training.conftest import arguments

FILES = {"config.yaml", "env.json", "metrics.csv", "best.ckpt", "last.ckpt", "model.safetensors", "result.json"}


def test_a_run_leaves_its_files_and_a_whole_result(finished):
    assert {path.name for path in finished.iterdir()} >= FILES
    result = json.loads((finished / "result.json").read_text())
    assert result["status"] == "finished" and result["task"] == "listops@1" and result["steps"] == 12
    for split in ("test", "fresh"):
        assert 0 <= result[split]["accuracy"] <= 1 and result[split]["n"] == 20
        assert {"majority", "root operator"} == set(result[split]["baselines"])
    assert yaml.safe_load((finished / "config.yaml").read_text()) == result["config"]


def test_curves_have_one_row_per_logged_step(finished):
    with (finished / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["train/loss"]] == [2, 4, 6, 8, 10, 12]
    assert [int(row["step"]) for row in rows if row["val/accuracy"]] == [4, 8, 12]


def test_checkpoints_are_plain_and_hold_their_identity(finished):
    for name in ("best.ckpt", "last.ckpt"):
        identity = torch.load(finished / name, weights_only=True)["lra"]
        assert identity["task"] == "listops@1" and identity["config"]["model"]["d_model"] == 32
    weights, identity = checkpoints.read_checkpoint(finished)
    best, _ = checkpoints.read_checkpoint(finished / "best.ckpt")
    assert weights.keys() == best.keys() and all(torch.equal(weights[key], best[key]) for key in best)


def test_only_weights_go_back_to_the_best_step(small, monkeypatch):
    """What is said of a run is of all its steps, also where nothing is left of it but scoring."""
    with monkeypatch.context() as patch:
        patch.setattr(ModelCheckpoint, "check_monitor_top_k", lambda self, trainer, _: trainer.global_step == 4)
        patch.setattr(Clock, "load_state_dict", lambda *_: pytest.fail("the clock was set back"))
        result = small()
    path = Path(result["directory"])
    (path / "result.json").unlink()
    again = small("resume=auto", "batch.micro=4")  # nothing is computed by it any more
    best, last = (torch.load(path / name, weights_only=True) for name in ("best.ckpt", "last.ckpt"))
    assert (best["global_step"], last["global_step"]) == (4, 12)
    scored, _ = checkpoints.read_checkpoint(path)
    assert all(torch.equal(value, best["state_dict"][f"model.{name}"]) for name, value in scored.items())
    assert not all(torch.equal(value, last["state_dict"][f"model.{name}"]) for name, value in scored.items())
    clock = last["callbacks"]["Clock"]
    assert clock["steps"] == 10, "all but those of the first stride"
    for each in (result, again):
        assert each["steps"] == 12 and each["steps_per_second"] == round(10 / clock["seconds"], 2)
    assert all(again[split] == result[split] for split in ("val", "test", "fresh"))


def test_a_finished_run_returns_its_result_at_once(finished, monkeypatch):
    monkeypatch.chdir(finished.parents[4])
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("trained again"))
    assert lra.fit(*arguments("name=done")) == json.loads((finished / "result.json").read_text())
    monkeypatch.setattr("lra.ranks.detect_launch", lambda *_: SimpleNamespace(rank=1))
    assert lra.fit(*arguments("name=done")) == {}, "only the first rank has a result to print"


def test_test_scores_a_checkpoint_as_fit_did(finished):
    result = json.loads((finished / "result.json").read_text())
    again = lra.test(f"init={finished}", "batch.eval=7")
    assert again["test"]["accuracy"] == pytest.approx(result["test"]["accuracy"])
    assert again["fresh"]["loss"] == pytest.approx(result["fresh"]["loss"], rel=1e-5)


def test_a_checkpoint_is_scored_whatever_it_was_trained_on_and_for(finished, monkeypatch):
    read = checkpoints.read_checkpoint

    def trained_otherwise(path):
        weights, identity = read(path)
        identity["config"]["trainer"] |= {"steps": 10, "eval_every": 4, "devices": 2}
        identity["config"]["optim"] |= {"cooldown": 40000, "warmup": 2000, "schedule": "constant"}
        return weights, identity

    monkeypatch.setattr(checkpoints, "read_checkpoint", trained_otherwise)
    assert lra.test(f"init={finished}")["test"]["n"] == 20


def test_load_gives_a_module_that_predicts(finished):
    from lra.data import listops
    from lra.data.split import Split

    module = lra.load(finished)
    tokens = listops.tokenize("[MAX 2 9 [MIN 4 7 ] 0 ]")
    split = Split.from_offsets(tokens, torch.tensor([0, len(tokens)]).numpy(), torch.tensor([9]).numpy())
    assert module(split.collate([0], max_length=32).to("cpu")).shape == (1, 10)


def interrupt_at(step: int, monkeypatch) -> None:
    """The run dies in the middle of an epoch, between two checkpoints."""
    original = Step.__call__

    def call(self, module, batches):
        if module.trainer.global_step == step:
            raise RuntimeError("power cut")
        original(self, module, batches)

    monkeypatch.setattr(Step, "__call__", call)


GPU = ("trainer.accelerator=gpu", "attn.deterministic=true")


@pytest.mark.parametrize(
    ("attn", "options"),
    [
        ("flash", ()),
        ("standard", ()),
        ("s4d", ("model.attn_dropout=0",)),
        ("gla", ("model.attn_dropout=0",)),
        pytest.param("flash", (*GPU, "engine=eager"), marks=pytest.mark.gpu),
        pytest.param("flash", (*GPU, "engine=captured"), marks=pytest.mark.gpu),
    ],
)
def test_resuming_in_mid_epoch_changes_nothing(small, monkeypatch, attn, options):
    fields = (f"attn={attn}", *options)
    unbroken = small("name=unbroken", *fields)
    with monkeypatch.context() as patch:
        interrupt_at(7, patch)
        with pytest.raises(RuntimeError, match="power cut"):
            small("name=broken", *fields)
    resumed = small("name=broken", *fields, "resume=auto")
    for name in ("best.ckpt", "last.ckpt"):
        a, b = (torch.load(f"{result['directory']}/{name}", weights_only=True) for result in (unbroken, resumed))
        different = [key for key in a["state_dict"] if not torch.equal(a["state_dict"][key], b["state_dict"][key])]
        assert not different, name
        moments = [list(c["optimizer_states"][0]["state"].values()) for c in (a, b)]
        assert all(torch.equal(x[key], y[key]) for x, y in zip(*moments, strict=True) for key in x)
    texts = [Path(result["directory"], "metrics.csv").read_text() for result in (unbroken, resumed)]
    assert texts[0] == texts[1]
    assert all(unbroken[split] == resumed[split] for split in ("val", "test", "fresh"))


def test_one_process_works_on_a_run(small):
    path = Path("checkpoints/runs/listops/flash/mine-s0")
    held = claim_directory(path)
    assert held is not None
    with pytest.raises(UsageError, match=r"another process works in \S*mine-s0: wait for it, or choose another name="):
        small("name=mine")
    assert [file.name for file in path.iterdir()] == ["claim"]
    os.close(held)
    assert small("name=mine")["status"] == "finished"


def test_who_looks_whether_a_run_is_worked_on_keeps_nobody_from_it(tmp_path):
    with ExitStack() as looking:
        assert looking.enter_context(locked_shared(tmp_path))
        threading.Timer(0.1, looking.close).start()
        held = claim_directory(tmp_path)
    assert held is not None and is_claimed(tmp_path)
    os.close(held)


def test_a_finished_run_goes_on_with_more_steps(small):
    first = small()["directory"]
    longer = small("trainer.steps=20", f"resume={first}/last.ckpt")
    rows = curves.read_curves(Path(longer["directory"], "metrics.csv"))
    assert longer["steps"] == 20 and [int(row["step"]) for row in rows if row["val/accuracy"]] == [16, 20]


def test_what_goes_on_elsewhere_keeps_the_best_so_far(small):
    first = Path(small()["directory"])
    checkpoint = torch.load(first / "last.ckpt", weights_only=True)
    (scored,) = (state for state in checkpoint["callbacks"].values() if state.get("best_model_score") is not None)
    scored["best_model_score"] = torch.tensor(0.875)  # no later validation of 20 examples reaches it
    scored["best_k_models"] = {scored["best_model_path"]: scored["best_model_score"]}
    torch.save(checkpoint, first / "last.ckpt")
    fields = ("name=longer", "trainer.steps=20", f"resume={first}/last.ckpt")
    best = first / "best.ckpt"
    kept = best.rename("kept.ckpt")
    with pytest.raises(UsageError, match="best.ckpt is missing or damaged, .*: put it back; or begin another run"):
        small(*fields)
    kept.rename(best)
    longer = small(*fields)
    assert longer["val"]["accuracy"] == 0.875
    assert Path(longer["directory"], "best.ckpt").read_bytes() == best.read_bytes()
    weights, scored_weights = (checkpoints.read_checkpoint(folder)[0] for folder in (first, longer["directory"]))
    assert all(torch.equal(value, weights[key]) for key, value in scored_weights.items())


def test_an_unfinished_run_says_how_to_go_on(small, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(7, patch)
        with pytest.raises(RuntimeError):
            small()
    with pytest.raises(UsageError, match="resume=auto"):
        small()
    (best,) = Path("checkpoints/runs").rglob("best.ckpt")
    kept = best.rename("kept.ckpt")
    with pytest.raises(
        UsageError, match=r"best.ckpt is missing or damaged, .*: put it back; or remove last.ckpt, and "
    ):
        small("resume=true")
    kept.rename(best)
    with (best.parent / "metrics.csv").open("a") as file:
        file.write("\0\0\n")  # as a power cut may leave it
    assert small("resume=true")["steps"] == 12


def test_what_computes_is_no_other_configuration(small):
    """The directory is the same, and a finished run is the result of all of them."""
    here = small("trainer.accelerator=cpu")
    again = small("trainer.accelerator=cpu", "batch.micro=4", "batch.eval=3", "engine=eager", "trainer.devices=2")
    assert again == here and "micro" not in again["directory"]


def test_another_configuration_in_a_directory_is_refused(small):
    small("name=mine")
    with pytest.raises(UsageError, match=r"another configuration \(model.d_ff: 128 -> 64\)"):
        small("name=mine", "model.d_ff=64")


def test_a_checkpoint_of_another_configuration_is_not_gone_on_from(small, finished, tmp_path):
    last = f"resume={finished}/last.ckpt"
    for field, differs in (
        ("seed=3", "seed: 0 -> 3"),
        ("trainer.log_every=4", "trainer.log_every: 2 -> 4"),  # Lightning counts strides
        ("task.train=50", "task.train: 100 -> 50"),
    ):
        with pytest.raises(UsageError, match=rf"another configuration \({differs}\).* init="):
            small("trainer.steps=24", last, field)
    assert not (tmp_path / "checkpoints").exists()


def test_a_finished_checkpoint_of_another_directory_is_no_beginning(small, finished, tmp_path):
    """Also where a best.ckpt is there already."""
    own = Path(small("name=own")["directory"])
    (own / "result.json").unlink()
    with pytest.raises(UsageError, match="own-s0 holds an unfinished run: resume=auto goes on with it, name= starts"):
        small("name=own", f"resume={finished}/last.ckpt")
    (own / "last.ckpt").unlink()
    with pytest.raises(UsageError, match="has 12 steps behind it: raise trainer.steps"):
        small("name=own", f"resume={finished}/last.ckpt")


def test_fewer_examples_than_devices_are_refused(small, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [__file__])  # a worker of xdist is no file
    with pytest.raises(UsageError, match="val has 1 examples for 2 devices: set trainer.devices=1 or less"):
        small("task.val=1", "trainer.devices=2")
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_with_dropout_is_scored_with_an_attention_that_has_none(finished, monkeypatch):
    monkeypatch.chdir(finished.parents[4])
    assert 0 <= lra.test(f"init={finished}", "attn=linear")["test"]["accuracy"] <= 1


def test_nothing_to_resume_is_an_error_for_true_and_none_for_auto(small, tmp_path):
    with pytest.raises(UsageError, match="resume=true, but"):
        small("resume=true")
    with pytest.raises(UsageError, match="no such checkpoint"):
        small("resume=no/such.ckpt")
    assert not (tmp_path / "checkpoints").exists()
    assert small("resume=auto")["status"] == "finished"


def test_init_starts_from_another_run(small, finished):
    weights, _ = checkpoints.read_checkpoint(finished)
    started = small(f"init={finished}", "optim.lr=1e-12", "optim.weight_decay=0")
    after, _ = checkpoints.read_checkpoint(started["directory"])
    assert all(torch.allclose(weights[key], after[key], atol=1e-6) for key in weights)


def test_every_tensor_that_does_not_fit_is_named(finished):
    weights, identity = checkpoints.read_checkpoint(finished)
    bias, scale = weights.pop("head.2.bias"), weights["encoder.norm.weight"]
    weights |= {"tail.bias": bias, "encoder.norm.weight": scale[1:]}
    there, here = len(scale) - 1, len(scale)
    message = (
        rf"w does not fit this model: head.2.bias missing, norm.weight \[{there}\] here \[{here}\], tail.bias unknown"
    )
    with pytest.raises(UsageError, match=message):
        checkpoints.load_into(lra.load(finished), weights, identity, "w")


def test_init_that_does_not_fit_is_refused_by_name(small, finished, tmp_path):
    with pytest.raises(UsageError, match=r"does not fit this model: model.d_ff 128 here 64; use the model fields"):
        small(f"init={finished}", "model.d_ff=64")
    with pytest.raises(UsageError, match="no checkpoint at"):
        small("init=nowhere")
    (merged := tmp_path / "merged").mkdir()
    (merged / "result.json").write_text("{}")
    with pytest.raises(UsageError, match="merged has a result and no weights: .* checkpoints=weights, or remove"):
        small(f"init={merged}")
    for name in ("last.ckpt", "best.ckpt"):  # the better one is named
        (merged / name).touch()
        with pytest.raises(UsageError, match=f"merged has no model.safetensors, .*: give {merged}/{name}"):
            small(f"init={merged}")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((finished / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UsageError, match="can't be read as a checkpoint"):
        small(f"init={broken}")
    pickled = tmp_path / "pickled.ckpt"
    torch.save({"state_dict": {}, "lra": print}, pickled)
    with pytest.raises(UsageError, match="was not loaded"):
        small(f"init={pickled}")
    assert not (tmp_path / "checkpoints").exists()


def test_a_checkpoint_of_another_vocabulary_is_refused(small, finished, tmp_path):
    checkpoint = torch.load(finished / "best.ckpt", weights_only=True)
    checkpoint["lra"] |= {"vocabulary": "0" * 64, "task": "text@1"}
    torch.save(checkpoint, tmp_path / "text.ckpt")
    for use in ("init", "resume"):
        with pytest.raises(UsageError, match="vocabulary of text@1, not of listops@1"):
            small(f"{use}={tmp_path / 'text.ckpt'}")


def test_the_run_does_not_depend_on_the_layout(small):
    shared = "model.attn_dropout=0"  # which SDPA draws from PyTorch's generator
    packed, padded = small(shared, "name=packed"), small(shared, "batch.layout=padded", "name=padded")
    assert packed["test"]["loss"] == pytest.approx(padded["test"]["loss"], rel=1e-4)
