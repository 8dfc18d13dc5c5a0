"""Runs of a model with all options of rotations, norms and depth: how they are divided changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lra
from lra.training import checkpoints
from lra.training import step as step_module
from lra.training.step import Step
from tests.tasks.test_masked import SHORT, same
from tests.training.test_fit import interrupt_at

OPTIONS = ("model.positions=rotary", "model.rotary_share=0.5", "model.rotary_bands=heads", "model.qk_norm=true",
           "model.layer_drop=0.4")  # fmt: skip


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """`trained("field=value", …)` trains on ListOps for a few steps and returns the result."""
    monkeypatch.chdir(tmp_path)
    shared = ("task=listops", "attn=flash", "recipe=demo", "model.d_model=32", "model.d_ff=32", *SHORT, *OPTIONS,
              "trainer.accelerator=cpu", "batch.size=8", "batch.eval=16", "model.dropout=0.1", "trainer.steps=4",
              "trainer.eval_every=2", "trainer.log_every=1")  # fmt: skip

    def run(*args: str) -> dict[str, Any]:
        return lra.fit(*{arg.partition("=")[0]: arg for arg in (*shared, *args)}.values())

    return run


@pytest.mark.parametrize("attn", ["flash", "linear"])
def test_neither_layout_nor_micro_batches_nor_buffers_change_a_run(trained, monkeypatch, attn):
    packed = trained("name=packed", f"attn={attn}")
    same(packed, trained("name=padded", f"attn={attn}", "batch.layout=padded"))
    same(packed, trained("name=parts", f"attn={attn}", "batch.micro=3"))
    monkeypatch.setattr(Step, "captures", lambda *_: True)  # the captured step's buffers, without graphs
    monkeypatch.setattr(step_module.torch, "compile", lambda function, **options: function)
    same(packed, trained("name=static", f"attn={attn}", "batch.micro=3"))


def test_resuming_changes_nothing(trained, monkeypatch):
    whole = trained("name=whole")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(3, patch)
        trained("name=parts")
    parts = trained("name=parts", "resume=true")
    a, b = (checkpoints.read_checkpoint(result["directory"])[0] for result in (whole, parts))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) and parts["resumed"]
    assert parts["test"] == whole["test"]


def test_a_pretraining_and_a_denoising_have_them_too(trained):
    masked = trained("name=masked", "pretrain=masked")
    assert masked["config"]["model"]["layer_drop"] == 0.4 and masked["config"]["model"]["qk_norm"]
    moved = trained("name=tuned", f"init={masked['directory']}", "denoise=1")["transfer"]
    assert moved["fresh"] == ["head"] and not moved["left"]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("batch.layout=padded",), ("trainer.precision=bf16", "batch.micro=3")])
def test_captured_and_eager_agree_on_a_gpu(trained, options):
    shared = ("trainer.accelerator=gpu", "trainer.steps=40", "trainer.eval_every=40", "model.d_model=64", *options)
    eager, captured = (trained(f"name={engine}", f"engine={engine}", *shared) for engine in ("eager", "captured"))
    assert captured["engine"] == "captured"
    same(eager, captured, rel=0.02 if "trainer.precision=bf16" in options else 1e-3)
