"""Checks that a run learns the same, however it is computed. `train("field=value", …)` fits a small run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lra.training import checkpoints
from lra.training import step as step_module
from lra.training.step import Step
from tests.training.test_fit import interrupt_at

Result = dict[str, Any]
Train = Callable[..., Result]


def same(a: Result, b: Result, rel: float = 1e-4) -> None:
    """Two results have the same number of predictions and nearly the same loss on each test set."""
    scored = [name for name, value in a.items() if isinstance(value, dict) and "plus_minus" in value]
    assert "test" in scored
    for name in scored:
        assert a[name]["n"] == b[name]["n"] and a[name]["loss"] == pytest.approx(b[name]["loss"], rel=rel)


def use_static_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go through the captured step's buffers on a CPU, neither compiled nor in graphs."""
    monkeypatch.setattr(Step, "captures", lambda *_: True)
    monkeypatch.setattr(step_module.torch, "compile", lambda function, **options: function)


def check_layouts_and_buffers(
    train: Train, monkeypatch: pytest.MonkeyPatch, *fields: str, check: Callable[[Result, Result], None] = same
) -> Result:
    """Neither the layout nor micro-batches nor buffers change a run. Returns the packed run's result."""
    packed = train("name=packed", *fields)
    check(packed, train("name=padded", *fields, "batch.layout=padded"))
    check(packed, train("name=parts", *fields, "batch.micro=3"))
    use_static_buffers(monkeypatch)
    check(packed, train("name=static", *fields, "batch.micro=3"))
    return packed


def check_resuming(train: Train, monkeypatch: pytest.MonkeyPatch, *fields: str) -> None:
    """A run that is interrupted in its third step and resumed ends with the unbroken run's weights and scores."""
    whole = train("name=whole", *fields)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(3, patch)
        train("name=parts", *fields)
    parts = train("name=parts", *fields, "resume=true")
    a, b = (checkpoints.read_checkpoint(result["directory"])[0] for result in (whole, parts))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) and parts["resumed"]
    assert parts["test"] == whole["test"]


def check_captured(train: Train, *fields: str, rel: float = 1e-3) -> None:
    """On a GPU the captured step and the eager one learn nearly the same."""
    shared = ("trainer.accelerator=gpu", "trainer.steps=40", "trainer.eval_every=40", *fields)
    eager, captured = (train(f"name={engine}", f"engine={engine}", *shared) for engine in ("eager", "captured"))
    assert captured["engine"] == "captured"
    same(eager, captured, rel=rel)
