"""Schedules, seeds, and the step's arithmetic."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lra
from lra.config.schema import OptimConfig
from lra.data.split import Split
from lra.errors import UsageError
from lra.tasks.base import TaskModule
from lra.training import curves
from lra.training import step as step_module
from lra.training.checkpoints import read
from lra.training.fit import build, configure
from lra.training.seeding import derive
from lra.training.step import PIECE, PIECES, AdamW, Step, learning_rate
from tests.training.conftest import arguments
from tests.training.test_fit import interrupt_at

ONE = ("trainer.steps=1", "trainer.eval_every=1", "trainer.log_every=1")


def rates(schedule: Any, warmup: int, steps: int, lr: float = 1.0) -> list[float]:
    config = OptimConfig(lr=lr, schedule=schedule, warmup=warmup)
    return [learning_rate(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_rises_to_the_peak(schedule):
    assert rates(schedule, 4, 10)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_decay_ends_at_zero_with_the_last_update():
    linear, cosine = rates("linear", 2, 10), rates("cosine", 2, 10)
    assert linear[-1] == 0 and math.isclose(cosine[-1], 0, abs_tol=1e-12)
    assert math.isclose(linear[5], 0.5) and math.isclose(cosine[5], 0.5)
    assert math.isclose(linear[3], 0.75) and math.isclose(cosine[3], 0.5 + 0.5 * math.sqrt(0.5))
    assert rates("constant", 2, 10)[-1] == 1


def test_rsqrt_peaks_at_lr_over_the_root_of_the_warmup():
    values = rates("rsqrt", 100, 400, lr=0.05)
    assert math.isclose(max(values), 0.005) and values.index(max(values)) == 99
    assert math.isclose(values[24], 0.05 / 4 / 10), "a quarter of the warmup"
    assert math.isclose(values[0], 0.05 / 100 / 10) and math.isclose(values[399], 0.05 / 20)
    assert math.isclose(rates("rsqrt", 0, 4)[3], 0.5), "without a warmup"


def test_seeds_differ_by_purpose_and_step_and_stay_put():
    seeds = {derive(0, p, s) for p in ("dropout", "attention") for s in range(100)} | {derive(1, "dropout", 0)}
    assert len(seeds) == 201 and all(0 <= seed < 1 << 62 for seed in seeds)
    assert derive(0, "dropout", 7) == 1856790709148308229


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
    assert unbroken[::2] == unbroken[1::2] == [derive(0, "attention", step) for step in range(12)]
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
    assert [of_batches for _, of_batches in seeds] == [derive(5, "attention", number) for number in (3, 3, 4, 4)]


def test_accumulation_does_not_change_the_run(small):
    # SDPA draws dropout from PyTorch's generator. A key's bias has no gradient but what rounding leaves, of which AdamW
    # would make steps without a larger eps
    shared = ("model.attn_dropout=0", "optim.eps=1e-5")
    whole, parts = small(*shared, "name=whole", "trainer.log_every=1"), small(*shared, "batch.micro=3", "name=parts")
    a, b = (read(result["directory"])[0] for result in (whole, parts))
    assert all(torch.allclose(a[key], b[key], atol=1e-6) for key in a)
    each, pairs = (losses(result) for result in (whole, parts))
    assert pairs == pytest.approx([(one + two) / 2 for one, two in zip(each[::2], each[1::2], strict=True)], rel=1e-4)


def losses(result: dict[str, Any]) -> list[float]:
    """As a run has logged them."""
    rows = curves.read(Path(result["directory"], "metrics.csv"))
    return [float(row["train/loss"]) for row in rows if row["train/loss"]]


def test_steps_are_those_of_plain_adamw(one_thread):
    """Seeds, micro-batches, the mean of the loss, clipping, rates and the optimiser's fields are as asked for."""
    fields = ("attn=standard", "batch.size=6", "optim.betas=[0.7,0.8]", "optim.eps=1e-4", "optim.clip=0.5",
              "optim.weight_decay=0.2", "optim.lr=0.01", "optim.warmup=2", "seed=7")  # fmt: skip
    run = configure(arguments(*fields)).config
    ours, theirs = (build(run)[1].train() for _ in range(2))
    rng = torch.Generator().manual_seed(0)
    split = Split.from_offsets(
        torch.randint(15, (180,), generator=rng).numpy().astype("uint8"), torch.arange(0, 181, 10).numpy(),
        torch.randint(10, (18,), generator=rng).numpy(),
    )  # fmt: skip
    step = Step(run)
    optimizer, plain = step.optimizer(ours), torch.optim.AdamW(theirs.parameters(), 1.0, (0.7, 0.8), 1e-4, 0.2)
    step.start(ours, optimizer)
    norms = []
    for number in range(3):
        rows = range(6 * number, 6 * number + 6)
        parts = [split.collate(rows[i : i + 3], max_length=32, index=range(i, i + 3)) for i in (0, 3)]
        rate = step.take(ours, optimizer, parts, number)
        assert rate == learning_rate(run.optim, number, run.trainer.steps)
        torch.manual_seed(derive(7, "dropout", number, 0))
        seed = torch.tensor(derive(7, "attention", number))
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


def test_a_step_is_logged_when_the_next_one_is_on_its_way(small, monkeypatch):
    """To wait for the last one that was launched would leave a GPU idle. What nothing follows is logged at once."""
    done = []

    def noted(self, module, optimizer, batches, step, *rest):
        done.append(f"step {step + 1}")
        return take(self, module, optimizer, batches, step, *rest)

    take = Step.take
    monkeypatch.setattr(Step, "take", noted)
    monkeypatch.setattr(step_module, "record", lambda trainer, metrics, step: done.append(f"log {step}"))
    small("trainer.steps=8")
    assert done[:8] == ["step 1", "step 2", "step 3", "log 2", "step 4", "log 4", "step 5", "step 6"]
    assert done[8:] == ["step 7", "log 6", "step 8", "log 8"]


def test_clipping_bounds_the_update(small):
    # with a large eps AdamW's update is proportional to the gradient
    clipped = small("name=clipped", "optim.clip=1e-9", "optim.eps=1", "optim.weight_decay=0")
    start = build(lra.load(clipped["directory"]).run)[1].model.state_dict()
    free = small("name=free", "optim.clip=null", "optim.eps=1", "optim.weight_decay=0")
    moved = {
        r["directory"]: sum((w - start[k]).norm() for k, w in read(r["directory"])[0].items()) for r in (clipped, free)
    }
    assert moved[clipped["directory"]] < 1e-6 < moved[free["directory"]]


def test_a_loss_that_is_not_finite_stops_the_run(small, tmp_path):
    with pytest.raises(UsageError, match=r"training loss is (nan|inf) at step"):
        small("optim.lr=1e30", "optim.clip=null", "optim.warmup=0", "name=nan")
    assert '"status": "failed"' in (tmp_path / "checkpoints/runs/listops/flash/nan-s0/result.json").read_text()


def test_an_optimiser_is_fused_as_its_device_wants_whatever_the_checkpoint_says():
    weight = torch.nn.Parameter(torch.ones(3))
    before, after = (AdamW([weight], fused=fused) for fused in (False, True))
    weight.grad = torch.ones(3)
    before.step()
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0]["fused"] and not before.param_groups[0]["fused"]
    after.step()
    assert after.state[weight]["step"] == 2


@pytest.mark.parametrize("most", [PIECES, 1])
def test_the_fused_update_in_pieces_is_that_of_whole_tensors(most, monkeypatch):
    """As many as they come to, or as few as that many."""
    cuts, update = [], torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *lists, **options: cuts.append(len(lists[0])) or update(*lists, **options)
    )
    monkeypatch.setattr(step_module, "PIECES", most)
    torch.manual_seed(0)
    start = [torch.randn(3), torch.randn(2 * PIECE + 5), torch.randn(PIECE // 64, 64), torch.zeros(0, 4)]
    updated = []
    for kind in (AdamW, torch.optim.AdamW):
        weights = [torch.nn.Parameter(each.clone()) for each in start]
        optimizer = kind(weights, 0.01, (0.8, 0.9), 1e-5, weight_decay=0.3, fused=True)
        for step in range(3):
            for weight in weights[step == 1 :]:  # once one has no gradient
                weight.grad = torch.cos(weight.detach() + step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
        updated.append([*weights, *moments])
    for ours, theirs in zip(*updated, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert max(cuts) == (6 if most > 1 else 4)


def test_an_optimiser_that_was_captured_on_a_gpu_goes_on_on_a_cpu():
    weight = torch.nn.Parameter(torch.ones(3))
    before, after = AdamW([weight], fused=False), AdamW([weight], fused=False)
    weight.grad = torch.ones(3)
    before.step()
    before.param_groups[0].update(lr=torch.tensor(1e-3), capturable=True)
    after.load_state_dict(before.state_dict())
    after.param_groups[0]["lr"] = 1e-3  # as the eager step does
    after.step()
    assert after.state[weight]["step"] == 2


@pytest.mark.parametrize("pretrain", ["none", "masked"])
def test_weights_that_diverge_at_the_last_step_are_not_scored(small, pretrain):
    """No later step sees them, and scores that are NaN have an accuracy: how often the first class is right."""
    far = ("optim.lr=1e10", "optim.schedule=constant", "optim.warmup=0", "optim.clip=null", f"pretrain={pretrain}")
    with pytest.raises(UsageError, match=r"the loss on val is (nan|inf), .* a lower optim.lr, or optim.clip=1"):
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


def test_a_run_has_the_rates_of_its_schedule_and_says_the_mean_loss(small):
    """AdamW and clipping would hide a factor of the loss."""
    result = small("optim.warmup=2", "trainer.steps=4", "trainer.eval_every=4", "trainer.log_every=1")
    logged = [row for row in curves.read(Path(result["directory"], "metrics.csv")) if row["train/loss"]]
    config = OptimConfig(**result["config"]["optim"])
    assert [float(row["lr"]) for row in logged] == pytest.approx([learning_rate(config, step, 4) for step in range(4)])
    assert abs(float(logged[0]["train/loss"]) - math.log(10)) < 0.7


def test_weight_decay_takes_its_share_of_the_weights(small):
    one = (*ONE, "optim.lr=0.1", "optim.schedule=constant", "optim.warmup=0")
    runs = [small(*one, f"optim.weight_decay={decay}") for decay in (0.0, 0.5)]
    start = build(lra.load(runs[0]["directory"]).run)[1].model.state_dict()
    free, decayed = (read(run["directory"])[0] for run in runs)
    assert all(torch.allclose(decayed[key], free[key] - 0.1 * 0.5 * start[key], atol=1e-6) for key in free)
    assert any(not torch.equal(decayed[key], free[key]) for key in free)
