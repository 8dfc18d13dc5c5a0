"""Steps that are not finite: nothing of them reaches the weights, and what is left says which and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lra
from lra.errors import UsageError
from lra.tasks.base import TaskModule
from lra.training import curves
from lra.training.clock import Clock
from lra.training.faults import find_culprit
from lra.training.fit import configure
from lra.training.optim import AdamW
from lra.training.step import Step
from lra.training.tally import PendingCounts, StepCounts, Tally
from tests.training.conftest import arguments
from tests.training.test_engine import without_graphs  # noqa: F401 - a fixture
from tests.training.test_fit import interrupt_at

RUN = Path("checkpoints/runs/listops/flash")
CPU = torch.device("cpu")


class Broken(torch.autograd.Function):
    """The identity, whose gradient is infinite where `bad` is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (bad,) = ctx.saved_tensors
        return grad + torch.where(bad, torch.inf, 0.0), None


def inject(monkeypatch: pytest.MonkeyPatch, what: str, *steps: int) -> None:
    """Makes the loss NaN, or one gradient infinite, of the steps with these numbers, from 1, whoever does them."""
    seeds = [Step(configure(arguments()).config).seeds(s - 1, 0)[1] for s in steps]
    original = TaskModule.loss

    def loss(self: TaskModule, batch: Any) -> torch.Tensor:
        bad = torch.stack([batch.seed == seed for seed in seeds]).any()  # no copy to a GPU, which can't be captured
        if what == "loss":
            return original(self, batch) + torch.where(bad, torch.nan, 0.0)
        weight = next(self.model.encoder.parameters())
        return original(self, batch) + 0 * Broken.apply(weight.flatten()[0], bad)

    monkeypatch.setattr(TaskModule, "loss", loss)


def state(path: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint."""
    checkpoint = torch.load(path, weights_only=True)
    moments = checkpoint["optimizer_states"][0]["state"]
    weights = {f"weight {name}": value for name, value in checkpoint["state_dict"].items()}
    return weights | {f"{i} {name}": value for i, each in moments.items() for name, value in each.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kept_before(step: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Is filled with weights, as they are before the step with this number, from 1."""
    kept: dict[str, torch.Tensor] = {}
    original = Step.__call__

    def call(self: Step, module: TaskModule, batches: Any) -> None:
        if module.trainer.global_step == step - 1:
            kept.update({name: value.clone() for name, value in module.state_dict().items()})
        original(self, module, batches)

    monkeypatch.setattr(Step, "__call__", call)
    return kept


def kept_at_the_end(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Is filled with the weights of a run that ends with an error."""
    kept: dict[str, torch.Tensor] = {}

    def ending(self: TaskModule, *_: Any) -> None:
        kept.update({name: value.clone() for name, value in self.state_dict().items()})

    monkeypatch.setattr(Clock, "on_exception", lambda self, trainer, module, error: ending(module), raising=False)
    return kept


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize(("what", "step"), [("loss", 1), ("gradient", 7), ("loss", 12)])
def test_the_run_stops_with_the_weights_before_the_fault(small, monkeypatch, request, engine, what, step):
    if engine == "static":
        request.getfixturevalue("without_graphs")
    before, ended = kept_before(step, monkeypatch), kept_at_the_end(monkeypatch)
    inject(monkeypatch, what, step)
    said = {"loss": "the training loss is nan", "gradient": "the gradient of encoder.* is not finite"}[what]
    with pytest.raises(UsageError, match=rf"{said} at step {step}: lower optim.lr; .*bad-s0/fault.pt has") as error:
        small("name=bad", "trainer.log_every=4")
    result = json.loads((RUN / "bad-s0/result.json").read_text())
    assert result["status"] == "failed" and str(error.value) in result["error"]
    fault = torch.load(RUN / "bad-s0/fault.pt", weights_only=True)
    assert fault["step"] == step and same(fault["state_dict"], before) and same(ended, before)
    assert not list((RUN / "bad-s0").glob(".fault*"))


@pytest.mark.parametrize(
    ("clip", "mend"),
    [("null", "lower optim.lr, or set optim.clip=1"), ("5", "lower optim.lr, or set optim.clip=1"),
     ("1", "lower optim.lr"), ("0.5", "lower optim.lr")],
)  # fmt: skip
def test_the_mend_is_nothing_that_is_set_already(small, monkeypatch, clip, mend):
    inject(monkeypatch, "loss", 1)
    with pytest.raises(UsageError, match=f"is nan at step 1: {mend}; "):
        small("name=bad", f"optim.clip={clip}")


def test_a_fault_is_reproduced_by_its_weights_and_batch_alone(small, monkeypatch):
    original = Step.__call__

    def call(self: Step, module: TaskModule, batches: Any) -> None:
        if module.trainer.global_step == 6:
            with torch.no_grad():
                list(module.model.parameters())[-1][3] = torch.inf
        original(self, module, batches)

    with monkeypatch.context() as patch, pytest.raises(UsageError) as error:
        patch.setattr(Step, "__call__", call)
        small("name=bad", "batch.micro=3")
    torch.manual_seed(1)  # as in another process
    path = RUN / "bad-s0/fault.pt"
    found = find_culprit(lra.load(path), torch.load(path, weights_only=True))
    assert found and str(error.value).startswith(f"{found} at step 7")


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize(("what", "steps"), [("loss", (1, 6)), ("gradient", (5, 12))])
def test_a_skipped_update_is_as_one_left_out(small, monkeypatch, request, capsys, engine, what, steps):
    if engine == "static":
        request.getfixturevalue("without_graphs")
    genuine, done = AdamW.update, [0]

    def update(self: AdamW, left_out: torch.Tensor | None = None) -> None:
        done[0] += 1
        if done[0] not in steps:
            genuine(self, left_out)

    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "update", update)
        wanted = small("name=wanted")
    assert wanted["skipped_updates"] == 0
    inject(monkeypatch, what, *steps)
    result = small("name=skipping", "trainer.on_nan=skip")
    assert same(*(state(Path(each["directory"], "last.ckpt")) for each in (wanted, result)))
    assert result["skipped_updates"] == 2 and result["status"] == "finished"
    said = capsys.readouterr().out
    assert (
        f"1 update skipped, as the loss or a gradient was not finite; 2 of this run, the first at step {steps[0]}"
        in said
    )


def test_skipped_updates_after_the_best_checkpoint_count_if_scoring_fails(small, monkeypatch):
    inject(monkeypatch, "loss", 11)
    monkeypatch.setattr(TaskModule, "on_test_epoch_end", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small("name=bad", "trainer.on_nan=skip", "optim.lr=1e-30")  # so that the first validation's is the best
    assert json.loads((RUN / "bad-s0" / "result.json").read_text())["skipped_updates"] == 1


def test_nothing_but_faults_ends_a_run_that_skips(small, monkeypatch):
    inject(monkeypatch, "loss", *range(5, 9))
    with pytest.raises(UsageError, match="the training loss is nan at step 5"):
        small("name=bad", "trainer.on_nan=skip", "trainer.log_every=4")


def test_a_run_that_skips_ends_with_the_weights_before_the_faults(small, monkeypatch):
    """Later steps would change them."""
    before = kept_before(5, monkeypatch)
    inject(monkeypatch, "loss", 5, 6)
    with pytest.raises(UsageError, match="the training loss is nan at step 5"):
        small("name=bad", "trainer.on_nan=skip", "trainer.log_every=2", "trainer.eval_every=12")
    assert same(torch.load(RUN / "bad-s0/fault.pt", weights_only=True)["state_dict"], before)


@pytest.mark.parametrize("step", [4, 5])
def test_a_run_that_dies_has_logged_what_was_counted(small, monkeypatch, step):
    monkeypatch.setattr(PendingCounts, "arrived", lambda self: False)  # as on a GPU that has more to do
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(step, patch)
        small("name=bad", "trainer.log_every=3", "trainer.eval_every=12")
    assert [row["step"] for row in curves.read_curves(RUN / "bad-s0/metrics.csv")] == ["3"]


def test_a_tally_counts_on_from_where_it_was():
    bad, good = torch.tensor([1.0, torch.inf, 2.0]), torch.tensor([1.0, 1.0, 2.0])
    for skip, counts in ((False, StepCounts(2.0, 1, 1, 2)), (True, StepCounts(4.0, 2, 1, 1))):
        tally = Tally(CPU, 0, skip)
        for flat in (good, bad):
            tally.judge(flat)
        again = Tally(CPU, 2, skip, tally.read())
        again.judge(good)
        assert again.read() == counts


# the loss of the step with the seed FAULTY is NaN where sequence 6 is: that is rank 1's
SECOND = """
import os, sys, torch
from lra.cli import main
from lra.tasks.base import TaskModule
genuine, seed = TaskModule.loss, int(os.environ["FAULTY"])

def loss(self, batch):
    bad = (batch.index == 6).any() & (batch.seed == seed)
    return genuine(self, batch) + torch.where(bad, torch.nan, 0.0)

TaskModule.loss = loss
main()
"""


@pytest.mark.slow  # two processes that import PyTorch
@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_ranks_agree_on_a_fault_of_one(tmp_path, monkeypatch, on_nan):
    monkeypatch.chdir(tmp_path)
    seed = Step(configure(arguments()).config).seeds(6, 0)[1]
    Path("second.py").write_text(SECOND)
    environment = os.environ | {"PYTHONPATH": str(Path(lra.__file__).parents[1]), "FAULTY": str(seed)}
    line = [sys.executable, "second.py", "fit", *arguments("name=two", "trainer.devices=2", f"trainer.on_nan={on_nan}")]
    run = subprocess.run(line, capture_output=True, text=True, timeout=240, env=environment)
    result = json.loads((RUN / "two-s0/result.json").read_text())
    if on_nan == "skip":
        assert run.returncode == 0 and result["skipped_updates"] == 1, run.stderr
        return
    assert run.returncode == 2 and run.stderr.count("the training loss is nan at step 7") == 1, run.stderr
    fault = torch.load(RUN / "two-s0/fault.pt", weights_only=True)
    assert [[sorted(batch["index"].tolist()) for batch in rank] for rank in fault["batches"]] == [
        [[0, 1, 2, 3]],
        [[4, 5, 6, 7]],
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["captured", "eager"])
def test_a_gpu_stops_and_skips_alike(small, monkeypatch, engine):
    gpu = ("trainer.accelerator=gpu", f"engine={engine}", "trainer.steps=40", "trainer.eval_every=20")
    inject(monkeypatch, "loss", 33)
    with pytest.raises(UsageError, match="the training loss is nan at step 33"):
        small("name=bad", *gpu)
    fault = torch.load(RUN / "bad-s0/fault.pt", weights_only=True)
    assert all(value.isfinite().all() for value in fault["state_dict"].values())
    result = small("name=skipping", "trainer.on_nan=skip", *gpu)
    assert result["skipped_updates"] == 1 and result["engine"] == engine
    moments = state(Path(result["directory"], "last.ckpt"))
    assert all(value.isfinite().all() for value in moments.values())
    assert {float(value) for name, value in moments.items() if name.endswith(" step")} == {39.0}
