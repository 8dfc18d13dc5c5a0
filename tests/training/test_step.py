"""Schedules, seeds, and the step's arithmetic."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lra
from lra.config.optim import OptimConfig
from lra.data.split import Split
from lra.errors import UsageError
from lra.models.transformer import Encoder
from lra.tasks.base import TaskModule
from lra.training import curves
from lra.training import step as step_module
from lra.training.assembly import build_modules
from lra.training.checkpoints import read_checkpoint
from lra.training.fit import configure
from lra.training.schedule import learning_rate
from lra.training.seeding import derive_seed
from lra.training.step import Step
from tests.training.conftest import arguments
from tests.training.test_fit import interrupt_at

ONE = ("trainer.steps=1", "trainer.eval_every=1", "trainer.log_every=1")


def test_seeds_differ_by_purpose_and_step_and_stay_put():
    seeds = {derive_seed(0, p, s) for p in ("dropout", "attention") for s in range(100)} | {
        derive_seed(1, "dropout", 0)
    }
    assert len(seeds) == 201 and all(0 <= seed < 1 << 62 for seed in seeds)
    assert derive_seed(0, "dropout", 7) == 1856790709148308229


def test_every_step_draws_dropout_of_its_own_and_a_resumed_run_the_same(small, monkeypatch):
    """The seed that batches carry, from which attention and the layers draw."""
    seeds: list[int] = []
    original = TaskModule.loss

    def loss(self, batch):
        seeds.append(int(batch.seed))
        return original(self, batch)

    monkeypatch.setattr(TaskModule, "loss", loss)
    small("name=unbroken", "batch.micro=4")
    unbroken = seeds.copy()
    assert unbroken[::2] == unbroken[1::2] == [derive_seed(0, "attention", step) for step in range(12)]
    assert len({*unbroken}) == 12, "one for both micro-batches of a step"
    seeds.clear()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(7, patch)
        small("name=broken", "batch.micro=4")
    seeds.clear()
    small("name=broken", "batch.micro=4", "resume=auto")
    assert seeds == unbroken[8:], "from the checkpoint of step 4"


def test_ranks_share_the_seed_of_batches_and_have_generators_of_their_own():
    step = Step(configure(arguments("seed=5")).config)
    seeds = [step.seeds(number, rank) for number in (3, 4) for rank in (0, 1)]
    assert len({generator for generator, _ in seeds}) == 4
    assert [of_batches for _, of_batches in seeds] == [derive_seed(5, "attention", number) for number in (3, 3, 4, 4)]


def test_accumulation_does_not_change_the_run(small):
    # SDPA draws dropout from PyTorch's generator. A key's bias has no gradient but what rounding leaves, of which AdamW
    # would make steps without a larger eps
    shared = ("model.attn_dropout=0", "optim.eps=1e-5")
    whole, parts = small(*shared, "name=whole", "trainer.log_every=1"), small(*shared, "batch.micro=3", "name=parts")
    a, b = (read_checkpoint(result["directory"])[0] for result in (whole, parts))
    assert all(torch.allclose(a[key], b[key], atol=1e-6) for key in a)
    each, pairs = (losses(result) for result in (whole, parts))
    assert pairs == pytest.approx([(one + two) / 2 for one, two in zip(each[::2], each[1::2], strict=True)], rel=1e-4)


def losses(result: dict[str, Any]) -> list[float]:
    """As a run has logged them."""
    rows = curves.read_curves(Path(result["directory"], "metrics.csv"))
    return [float(row["train/loss"]) for row in rows if row["train/loss"]]


def test_steps_are_those_of_plain_adamw(one_thread):
    """Seeds, micro-batches, the mean of the loss, clipping, rates and the optimiser's fields are as asked for."""
    fields = ("attn=standard", "batch.size=6", "optim.betas=[0.7,0.8]", "optim.eps=1e-4", "optim.clip=0.5",
              "optim.weight_decay=0.2", "optim.lr=0.01", "optim.warmup=2", "seed=7")  # fmt: skip
    run = configure(arguments(*fields)).config
    ours, theirs = (build_modules(run)[1].train() for _ in range(2))
    rng = torch.Generator().manual_seed(0)
    split = Split.from_offsets(
        torch.randint(15, (180,), generator=rng).numpy().astype("uint8"), torch.arange(0, 181, 10).numpy(),
        torch.randint(10, (18,), generator=rng).numpy(),
    )  # fmt: skip
    step = Step(run)
    plain = torch.optim.AdamW(theirs.parameters(), 1.0, (0.7, 0.8), 1e-4, 0.2)
    step.start(ours, step.optimizer(ours))
    assert step.engine is not None
    norms = []
    for number in range(3):
        rows = range(6 * number, 6 * number + 6)
        parts = [split.collate(rows[i : i + 3], max_length=32, index=range(i, i + 3)) for i in (0, 3)]
        rate = step.forward_backward(parts, number)
        step.engine.update()
        assert rate == learning_rate(run.optim, number, run.trainer.steps)
        torch.manual_seed(derive_seed(7, "dropout", number, 0))
        seed = torch.tensor(derive_seed(7, "attention", number))
        batches = [part.to("cpu").with_seed(seed) for part in parts]
        total = torch.stack([F.cross_entropy(theirs(batch), batch.label, reduction="sum") for batch in batches]).sum()
        plain.zero_grad()
        (total / 6).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)))
        plain.param_groups[0]["lr"] = rate
        plain.step()
    assert min(norms) > 0.5, "each is clipped"
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("fused", [False, True])
def test_evaluation_is_compiled_unless_kernels_compute_all_blocks(fused, monkeypatch):
    step = Step(run := configure(arguments()).config)
    module = build_modules(run, step=step)[1]
    monkeypatch.setattr(Encoder, "is_fused", lambda *_: fused)
    monkeypatch.setattr(type(module), "forward", lambda self, batch: f"eager {batch}")
    batch: Any = "batch"
    assert step.evaluate(module, batch) == "eager batch", "an eager run compiles nothing"
    monkeypatch.setattr(step_module, "compile_batched", lambda *_: lambda batch: f"compiled {batch}")
    step.compile_evaluation(module)
    assert step.evaluate(module, batch) == ("eager batch" if fused else "compiled batch")


def test_a_step_is_logged_when_the_next_one_is_on_its_way(small, monkeypatch):
    """To wait for the last one that was launched would leave a GPU idle. What nothing follows is logged at once."""
    done = []

    def noted(self, batches, step, rank):
        done.append(f"step {step + 1}")
        return genuine(self, batches, step, rank)

    genuine = Step.forward_backward
    monkeypatch.setattr(Step, "forward_backward", noted)
    monkeypatch.setattr(step_module, "log_row", lambda trainer, metrics, step: done.append(f"log {step}"))
    small("trainer.steps=8")
    assert done[:8] == ["step 1", "step 2", "step 3", "log 2", "step 4", "log 4", "step 5", "step 6"]
    assert done[8:] == ["step 7", "log 6", "step 8", "log 8"]


def test_clipping_bounds_the_update(small):
    # with a large eps AdamW's update is proportional to the gradient
    clipped = small("name=clipped", "optim.clip=1e-9", "optim.eps=1", "optim.weight_decay=0")
    start = build_modules(lra.load(clipped["directory"]).run)[1].model.state_dict()
    free = small("name=free", "optim.clip=null", "optim.eps=1", "optim.weight_decay=0")
    moved = {
        r["directory"]: sum((w - start[k]).norm() for k, w in read_checkpoint(r["directory"])[0].items())
        for r in (clipped, free)
    }
    assert moved[clipped["directory"]] < 1e-6 < moved[free["directory"]]


def test_a_loss_that_is_not_finite_stops_the_run(small, tmp_path):
    with pytest.raises(UsageError, match=r"training loss is (nan|inf) at step"):
        small("optim.lr=1e30", "optim.clip=null", "optim.warmup=0", "name=nan")
    assert '"status": "failed"' in (tmp_path / "checkpoints/runs/listops/flash/nan-s0/result.json").read_text()


@pytest.mark.parametrize("pretrain", ["none", "masked"])
def test_weights_that_diverge_at_the_last_step_are_not_scored(small, pretrain):
    """No later step sees them, and scores that are NaN have an accuracy: how often the first class is right."""
    far = ("optim.lr=1e10", "optim.schedule=constant", "optim.warmup=0", "optim.clip=null", f"pretrain={pretrain}")
    mend = "choose another checkpoint, or train anew and lower optim.lr, or set optim.clip=1$"
    with pytest.raises(UsageError, match=rf"the loss on val is (nan|inf), .*: {mend}"):
        small(*far, *ONE, "name=far")
    (run,) = Path("checkpoints/runs").glob("*/*/far-s0")
    assert json.loads((run / "result.json").read_text())["status"] == "failed" and not (run / "best.ckpt").exists()


def test_one_score_that_is_no_number_is_enough(small, monkeypatch):
    original = TaskModule.forward

    def forward(self, batch):
        scores = original(self, batch)
        return scores if self.training else torch.where(torch.arange(len(scores))[:, None] == 1, torch.nan, scores)

    monkeypatch.setattr(TaskModule, "forward", forward)
    with pytest.raises(UsageError, match="the loss on val is nan"):
        small(*ONE)


def test_who_scores_weights_is_told_what_their_run_lacks(small, monkeypatch):
    runs = {clip: small(*ONE, f"optim.clip={clip}", f"name=clip{clip}")["directory"] for clip in ("1", "null")}
    forward = TaskModule.forward
    monkeypatch.setattr(TaskModule, "forward", lambda self, batch: forward(self, batch) * torch.nan)
    for clip, mend in (("1", "lower optim.lr$"), ("null", "lower optim.lr, or set optim.clip=1$")):
        with pytest.raises(UsageError, match=f"the loss on test is nan, .* train anew and {mend}"):
            lra.test(f"init={runs[clip]}")


def test_a_run_has_the_rates_of_its_schedule_and_says_the_mean_loss(small):
    """AdamW and clipping would hide a factor of the loss."""
    result = small("optim.warmup=2", "trainer.steps=4", "trainer.eval_every=4", "trainer.log_every=1")
    logged = [row for row in curves.read_curves(Path(result["directory"], "metrics.csv")) if row["train/loss"]]
    config = OptimConfig(**result["config"]["optim"])
    assert [float(row["lr"]) for row in logged] == pytest.approx([learning_rate(config, step, 4) for step in range(4)])
    assert abs(float(logged[0]["train/loss"]) - math.log(10)) < 0.7


def test_weight_decay_takes_its_share_of_the_weights(small):
    one = (*ONE, "optim.lr=0.1", "optim.schedule=constant", "optim.warmup=0")
    runs = [small(*one, f"optim.weight_decay={decay}") for decay in (0.0, 0.5)]
    start = build_modules(lra.load(runs[0]["directory"]).run)[1].model.state_dict()
    free, decayed = (read_checkpoint(run["directory"])[0] for run in runs)
    assert all(torch.allclose(decayed[key], free[key] - 0.1 * 0.5 * start[key], atol=1e-6) for key in free)
    assert any(not torch.equal(decayed[key], free[key]) for key in free)
