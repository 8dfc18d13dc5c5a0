"""Runs of a model with all options of rotations, norms and depth: how they are divided changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

import lra
from tests.config.effects import merged
from tests.equal_learning import check_captured, check_layouts_and_buffers, check_resuming
from tests.tasks.test_masked import SHORT

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
        return lra.fit(*merged(*shared, *args))

    return run


@pytest.mark.parametrize("attn", ["flash", "linear"])
def test_neither_layout_nor_micro_batches_nor_buffers_change_a_run(trained, monkeypatch, attn):
    check_layouts_and_buffers(trained, monkeypatch, f"attn={attn}")


def test_resuming_changes_nothing(trained, monkeypatch):
    check_resuming(trained, monkeypatch)


def test_a_pretraining_and_a_denoising_have_them_too(trained):
    masked = trained("name=masked", "pretrain=masked")
    assert masked["config"]["model"]["layer_drop"] == 0.4 and masked["config"]["model"]["qk_norm"]
    moved = trained("name=tuned", f"init={masked['directory']}", "denoise=1")["transfer"]
    assert moved["fresh"] == ["head"] and not moved["left"]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("batch.layout=padded",), ("trainer.precision=bf16", "batch.micro=3")])
def test_captured_and_eager_agree_on_a_gpu(trained, options):
    check_captured(trained, "model.d_model=64", *options, rel=0.02 if "trainer.precision=bf16" in options else 1e-3)
