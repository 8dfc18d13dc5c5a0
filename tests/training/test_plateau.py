"""What follows when validations bring no better score: the learning rate falls, or training ends."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lra
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.training.fit import configure
from lra.training.plateau import Plateau
from lra.training.schedule import learning_rate
from lra.training.step import Step
from tests.sampling import sampled
from tests.training.conftest import arguments
from tests.training.test_engine import without_graphs  # noqa: F401 - a fixture
from tests.training.test_faults import same, state
from tests.training.test_fit import interrupt_at
from tests.training.test_preemption import signalled
from tests.training.test_ranks import alone

PLATEAU = ("optim.schedule=plateau", "optim.plateau_factor=0.5", "optim.plateau_patience=1")
PATIENCE = ("optim.schedule=constant", "trainer.patience=3")
EACH = ("trainer.eval_every=1", "trainer.log_every=1", "optim.warmup=0")
FLAT = (*EACH, "optim.lr=1e-9")  # the first validation stays the best


def run_of(*args: str) -> RunConfig:
    return configure(arguments("optim.warmup=0", *args)).config


def counted(run: RunConfig, scores: list[float]) -> Plateau:
    """What is known after validations with these scores."""
    plateau = Plateau(run)
    for step, score in enumerate(scores, 1):
        plateau.count(score, step)
    return plateau


def rates(result: dict[str, Any]) -> list[float]:
    with Path(result["directory"], "metrics.csv").open(newline="") as file:
        return [float(row["lr"]) for row in csv.DictReader(file) if row["lr"]]


def last(result: dict[str, Any]) -> Path:
    return Path(result["directory"], "last.ckpt")


def check_equal(whole: dict[str, Any], parts: dict[str, Any]) -> None:
    """A resumed run ends bitwise as the unbroken one, in its counts, too."""
    a, b = (torch.load(last(each), weights_only=True) for each in (whole, parts))
    assert a["global_step"] == b["global_step"] and a["callbacks"]["Plateau"] == b["callbacks"]["Plateau"]
    assert same(state(last(whole)), state(last(parts))) and rates(whole) == rates(parts)
    assert all(whole[name] == parts[name] for name in ("val", "test", "fresh", "steps"))
    assert whole.get("stopped") == parts.get("stopped")


# the learning rate


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_the_rate_is_that_of_pytorch(patience):
    run = run_of("optim.schedule=plateau", "trainer.steps=200", f"optim.plateau_patience={patience}", "optim.lr=0.1")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max", factor=0.2, patience=patience, threshold=0, eps=0
    )
    plateau, found = Plateau(run), []
    for step, score in enumerate(np.random.default_rng(0).integers(0, 60, 60) / 60, 1):
        theirs.step(float(score))
        plateau.count(float(score), step)
        ours = learning_rate(run.optim, step, 200, plateau.factor)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"])
        found.append(ours)
    assert len(set(found)) > 10


def test_the_warmup_and_the_cooldown_do_not_count(small):
    options = (*FLAT, *PLATEAU, "optim.warmup=3", "optim.cooldown=3", "optim.cooldown_to=0.1")
    expected = [1 / 3, 2 / 3, 1, 1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4]  # counted after steps 4, 5; 6, 7; 8, 9
    expected += [1 / 8 * (1 - 0.9 * done / 3) for done in (1, 2, 3)]
    assert rates(small(*options)) == pytest.approx([1e-9 * share for share in expected])


def test_a_better_score_starts_the_count_anew_and_an_equal_one_does_not():
    run = run_of(*PLATEAU)
    assert counted(run, [0.5, 0.4, 0.6, 0.6]).factor == 1
    assert counted(run, [0.5, 0.4, 0.6, 0.6, 0.6]).factor == 0.5
    assert counted(run, [0.5, 0.4, 0.4, 0.4]).factor == 0.5, "the count starts anew"
    assert counted(run, [0.5, 0.4, 0.4, 0.4, 0.5]).factor == 0.25


def test_counts_go_on_from_every_validation():
    run = run_of(*PLATEAU, "trainer.steps=60", "trainer.patience=60")
    scores = [float(score) for score in np.random.default_rng(1).integers(1, 20, 60)]
    whole = counted(run, scores).state_dict()
    assert whole["factor"] < 0.1 and whole["waited"] > whole["flat"]
    for cut in range(60):
        resumed = Plateau(run)
        resumed.load_state_dict(counted(run, scores[:cut]).state_dict())
        for step, score in enumerate(scores[cut:], cut + 1):
            resumed.count(score, step)
        assert resumed.state_dict() == whole


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("step", sampled([3, 7, 9]))
def test_a_plateau_resumes_bitwise(small, monkeypatch, request, engine, step):
    """Also between validations, which are after each second step."""
    if engine == "static":
        request.getfixturevalue("without_graphs")
    options = (*EACH, *PLATEAU, "trainer.eval_every=2", "optim.plateau_patience=0", "optim.lr=1e-9")
    whole = small("name=whole", *options)
    assert len(set(rates(whole))) > 3
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(step, patch)
        small("name=parts", *options)
    check_equal(whole, small("name=parts", *options, "resume=auto"))


@pytest.mark.parametrize("average", ["ema", "tail"])
def test_a_plateau_goes_with_averages_cooldown_smoothing_and_epochs(small, monkeypatch, average):
    own = (f"trainer.average={average}", "optim.cooldown=3", "optim.label_smoothing=0.1")
    options = (*FLAT, *PLATEAU, *own)
    whole = small("name=whole", *options)
    before = [1, 1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 8, 1 / 8]
    falling = [1 / 16 * (1 - done / 3) for done in (1, 2, 3)]  # the last validation before lowers the rate, too
    assert rates(whole) == pytest.approx([1e-9 * share for share in (*before, *falling)])
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(10, patch)
        small("name=parts", *options)
    check_equal(whole, small("name=parts", *options, "resume=auto"))
    passes = [arg for arg in arguments(*options, "name=passes") if not arg.startswith("trainer.steps")]
    assert same(state(last(whole)), state(last(lra.fit(*passes, "trainer.epochs=0.96"))))  # 12 batches of 8 of 100


@pytest.mark.slow
def test_a_plateau_that_a_signal_ends_between_validations_resumes_bitwise(small):
    options = (*EACH, *PLATEAU, "trainer.eval_every=2", "optim.plateau_patience=0", "optim.lr=1e-9")
    whole = small("name=whole", *options)
    run = signalled("step", 7, signal.SIGTERM, "name=parts", *options)
    assert run.returncode == 128 + signal.SIGTERM and "SIGTERM after step 7" in run.stdout, run.stderr
    check_equal(whole, small("name=parts", *options, "resume=auto"))


def test_a_finished_plateau_goes_on(small):
    options = (*FLAT, *PLATEAU)
    first = small("name=first", *options, "trainer.steps=6")
    longer = small("name=longer", *options, f"resume={last(first)}")
    whole = small("name=whole", *options)
    assert same(state(last(whole)), state(last(longer)))
    assert rates(whole)[6:] == rates(longer) and len(set(rates(longer))) > 1


# the end of training


def test_training_ends_at_the_validation_that_was_one_too_many(small, capsys):
    result = small(*FLAT, *PATIENCE, "trainer.eval_every=2")
    why = "3 validations in a row brought no better one (trainer.patience=3)"
    assert result["stopped"] == {"step": 8, "reason": why} and result["steps"] == 8
    assert result["status"] == "finished" and result["test"]["n"] == 20
    assert len(rates(result)) == 8 and torch.load(last(result), weights_only=True)["global_step"] == 8
    assert f"step 8: training ends, as {why}" in capsys.readouterr().out
    assert json.loads(Path(result["directory"], "result.json").read_text())["stopped"] == result["stopped"]


def test_the_expected_time_is_a_limit(small, capsys):
    for fields, said in ((("trainer.patience=30",), "expect at most "), ((), "expect ")):
        small(*EACH, "optim.schedule=constant", "trainer.steps=30", "trainer.eval_every=10", *fields)
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("expect")]
        assert line.startswith(said) and ("at most" in line) == bool(fields)


def test_a_run_that_ends_as_planned_was_not_stopped(small):
    result = small(*EACH, "optim.schedule=constant", "trainer.patience=12")
    assert result["steps"] == 12 and "stopped" not in result


def test_a_run_that_has_stopped_is_not_trained_on(small, monkeypatch):
    options = (*FLAT, *PATIENCE)
    first = small("name=first", *options)
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("trained again"))
    assert small("name=first", *options, "resume=auto") == first == small("name=first", *options)
    with pytest.raises(UsageError, match="last.ckpt has 4 steps behind it: trainer.patience=3 has ended training"):
        small("name=longer", *options, "trainer.steps=20", f"resume={last(first)}")
    Path(first["directory"], "result.json").unlink()  # killed before it was scored
    again = small("name=first", *options, "resume=auto")
    assert all(again[name] == first[name] for name in ("stopped", "steps", "val", "test", "fresh"))


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("step", sampled([1, 5, 7]))
def test_patience_resumes_bitwise(small, monkeypatch, request, engine, step):
    if engine == "static":
        request.getfixturevalue("without_graphs")
    options = (*FLAT, *PATIENCE, "trainer.eval_every=2", "trainer.average=ema", "optim.label_smoothing=0.1")
    whole = small("name=whole", *options)
    assert whole["stopped"]["step"] == 8
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(step, patch)
        small("name=parts", *options)
    check_equal(whole, small("name=parts", *options, "resume=auto"))


def test_both_go_together(small):
    result = small(*FLAT, *PLATEAU, "trainer.patience=5")
    assert rates(result) == pytest.approx([1e-9] * 3 + [5e-10] * 2 + [2.5e-10])
    assert result["stopped"]["step"] == 6


@pytest.mark.slow
def test_two_processes_end_together(tmp_path, small):
    options = (*FLAT, *PLATEAU, "trainer.patience=5", "model.attn_dropout=0")
    one = small(*options, "name=one")
    command = [sys.executable, "-m", "lra", "fit", *arguments(*options, "name=two", "trainer.devices=2")]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=alone())
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    two = json.loads((tmp_path / "checkpoints/runs/listops/flash/two-s0/result.json").read_text())
    assert two["world_size"] == 2 and two["stopped"] == one["stopped"] and rates(two) == rates(one)


# what is refused, and what is said


def test_a_run_without_either_says_nothing_of_it(small):
    result = small()
    assert "stopped" not in result and "Plateau" not in torch.load(last(result), weights_only=True)["callbacks"]
    saved = configure(arguments()).config.to_saved_dict()
    assert "patience" not in saved["trainer"] and not [name for name in saved["optim"] if "plateau" in name]
    saved = configure(arguments(*PLATEAU, "trainer.patience=5")).config.to_saved_dict()
    assert saved["trainer"]["patience"] == 5 and saved["optim"]["plateau_factor"] == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["optim.plateau_factor=0.5"], "optim.plateau_factor=0.5 needs optim.schedule=plateau: set that, or leave"),
        (["optim.plateau_patience=5"], "optim.plateau_patience=5 needs optim.schedule=plateau: set that, or leave"),
        ([*PLATEAU, "optim.plateau_factor=1"], "optim.plateau_factor=1.0 must be above 0 and below 1"),
        ([*PLATEAU, "optim.plateau_patience=-1"], "optim.plateau_patience=-1 must be at least 0"),
        ([*PATIENCE, "trainer.patience=0"], "trainer.patience=0 must be at least 1"),
        ([*PATIENCE, "optim.schedule=linear"], "optim.schedule=linear falls until the last step"),
        ([*PATIENCE, "optim.schedule=cosine"], "optim.schedule=cosine falls until the last step"),
        ([*PATIENCE, "optim.cooldown=2"], "optim.cooldown=2 falls until the last step"),
        ([*PATIENCE, "trainer.average=tail"], "trainer.average=tail averages the last steps, and which .*not known"),
        ([*PLATEAU, "trainer.patience=2"], "ends training before optim.plateau_patience=1 .*set trainer.patience=3 or"),
    ],
)
def test_what_can_not_be_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        configure(arguments("optim.warmup=2", *fields))


def test_a_test_has_no_patience(finished):
    with pytest.raises(UsageError, match="trainer.patience=3: used only in training"):
        lra.test(f"init={finished}", "trainer.patience=3")


@pytest.mark.gpu
def test_a_captured_plateau_is_the_eager_one(small):
    shared = ("trainer.accelerator=gpu", "model.attn_dropout=0", *FLAT, *PLATEAU, "trainer.patience=5")
    eager, captured = (small(f"name={engine}", f"engine={engine}", *shared) for engine in ("eager", "captured"))
    assert rates(eager) == rates(captured) and eager["stopped"] == captured["stopped"]
