"""Optimisers by name, parameter groups, and schedules."""

import math
from typing import Any

import pytest
import torch

from lra.config.schema import OptimConfig
from lra.training import optim
from lra.training.optim import learning_rate


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


def test_an_optimiser_is_fused_as_its_device_wants_whatever_the_checkpoint_says():
    weight = torch.nn.Parameter(torch.ones(3))
    before, after = (optim.AdamW([weight], fused=fused) for fused in (False, True))
    weight.grad = torch.ones(3)
    before.step()
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0]["fused"] and not before.param_groups[0]["fused"]
    after.step()
    assert after.state[weight]["step"] == 2


@pytest.mark.parametrize("most", [optim.PIECES, 1])
def test_the_fused_update_in_pieces_is_that_of_whole_tensors(most, monkeypatch):
    """As many as they come to, or as few as that many."""
    cuts, update = [], torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *lists, **options: cuts.append(len(lists[0])) or update(*lists, **options)
    )
    monkeypatch.setattr(optim, "PIECES", most)
    torch.manual_seed(0)
    start = [torch.randn(3), torch.randn(2 * optim.PIECE + 5), torch.randn(optim.PIECE // 64, 64), torch.zeros(0, 4)]
    updated = []
    for kind in (optim.AdamW, torch.optim.AdamW):
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
    before, after = optim.AdamW([weight], fused=False), optim.AdamW([weight], fused=False)
    weight.grad = torch.ones(3)
    before.step()
    before.param_groups[0].update(lr=torch.tensor(1e-3), capturable=True)
    after.load_state_dict(before.state_dict())
    after.param_groups[0]["lr"] = 1e-3  # as the eager step does
    after.step()
    assert after.state[weight]["step"] == 2
