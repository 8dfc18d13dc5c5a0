"""What a result says of its scores."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lra import environment
from lra.data.store import Store, data_root
from lra.kernels import operators
from lra.training import assembly, fit
from lra.training.clock import Clock
from lra.training.result import result_costs, result_facts, sampling_bound


@pytest.mark.parametrize(
    ("accuracy", "n", "bound"), [(0.5, 2000, 0.0219), (0.376, 50_000, 0.0042), (0.0, 10, 0.2775), (1.0, 2000, 0.0019)]
)
def test_sampling_bound(accuracy, n, bound):
    """Also of a test set that a run has all right, or all wrong."""
    assert sampling_bound(accuracy, n) == bound


def test_a_result_has_the_commit_that_made_it(small, monkeypatch):
    monkeypatch.setattr(environment, "current_commit", lambda: "0123456789ab+")
    path = Path(small("trainer.steps=2", "trainer.eval_every=2")["directory"])
    for file in ("result.json", "env.json"):
        said = json.loads((path / file).read_text())
        made_with = said[-1] if isinstance(said, list) else said["environment"]
        assert made_with["commit"] == "0123456789ab+"


def test_a_result_states_what_ran_and_how_long():
    composed = fit.configure(["task=listops", "attn=standard", "recipe=demo", "seed=4", "optim.lr=1e-3", "resume=auto"])
    _, module = assembly.build_modules(composed.config)
    trainer: Any = SimpleNamespace(global_step=70, world_size=2)
    clock = Clock()
    clock.sharing = 3
    operators.clear_kernels_run()
    for name in ("hopper_shared", "hopper_forward", "hopper_shared"):
        operators.record_kernel("forward", name)
    clock.elsewhere, clock.seconds, clock.steps, clock.first, clock.validation = 100.0, 20.0, 50, 2.26, 3.34
    said = result_facts(composed, module, trainer, clock)
    assert (said["task"], said["attn"], said["recipe"], said["seed"]) == ("listops@1", "standard", "demo", 4)
    assert "optim.lr=1e-3" in said["overrides"] and "resume=auto" not in said["overrides"]
    assert said["parameters"] == sum(weight.numel() for weight in module.model.parameters())
    assert (said["steps"], said["world_size"], said["runs_per_device"]) == (70, 2, 3)
    assert said["train_seconds"] == 120.0, "of all devices"
    assert said["steps_per_second"] == 2.5, "of the last device alone"
    assert (said["first_step_seconds"], said["validation_seconds"]) == (2.3, 3.3)
    assert said["config"] == composed.config.to_saved_dict()
    assert said["kernels"] == {"forward": ["hopper_forward", "hopper_shared"], "backward": [], "layers": []}
    unused = result_facts(composed, module, trainer, Clock())
    assert unused["steps_per_second"] is None and unused["first_step_seconds"] is None


def test_a_result_names_the_kernels_that_ran(small):
    """Of its own run alone, in a process that has had others."""
    operators.record_kernel("layers", "of another run")
    tiny = ("trainer.steps=2", "trainer.eval_every=2", "task.test=4", "task.fresh=4", "task.val=4", "batch.size=2")
    result = small("attn.impl=triton", "trainer.precision=fp32", *tiny)
    assert result["kernels"] == {"forward": ["forward"], "backward": ["dkdv"], "layers": []}
    assert result["attention"] == "flash by triton"


def test_what_a_run_took_is_of_all_its_sessions():
    before, after = Clock(), Clock()
    before._wall, before._peak = 100.0, 7
    after.load_state_dict(before.state_dict())
    took = result_costs(after)
    assert 100 <= took["wall_seconds"] < 110 and took["peak_gpu_bytes"] == 7
    after._wall = None
    assert result_costs(after)["wall_seconds"] is None and result_costs(Clock())["peak_gpu_bytes"] is None


def test_scores_are_beside_the_baselines_and_the_data_that_they_are_of(finished):
    result = json.loads((finished / "result.json").read_text())
    for split in ("test", "fresh"):
        scored = result[split]
        assert scored["plus_minus"] == sampling_bound(scored["accuracy"], scored["n"]) and scored["n"] == 20
        assert scored["accuracy"] * 20 == pytest.approx(round(scored["accuracy"] * 20)) and scored["loss"] > 0
    assert result["test"]["loss"] != result["fresh"]["loss"]
    assert result["data"]["source"] == "generated" and result["data"]["store"].startswith("listops@1-")
    assert result["data"]["digest"] == Store.open(data_root() / result["data"]["store"]).digest
    assert result["protocol"] is None and "pretrain" not in result


@pytest.mark.parametrize(
    ("source", "kept"),
    [("/here/lra_release.gz", "lra_release.gz"), ("generated", "generated"), ("stanfordnlp/imdb", "stanfordnlp/imdb")],
)
def test_where_data_lay_on_this_machine_is_not_said(source, kept):
    assert environment.drop_folder(source) == kept
