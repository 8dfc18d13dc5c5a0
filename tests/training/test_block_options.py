"""Runs of models of other norms, their places, no feed-forward layers and no positions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lra
from lra.bench.step import measure_step
from lra.errors import UsageError
from lra.models.norms import BatchNorm
from lra.training import checkpoints
from lra.training.fit import configure
from tests.config.effects import merged
from tests.equal_learning import check_captured, check_layouts_and_buffers, check_resuming, same, use_static_buffers
from tests.tasks.test_masked import SHORT
from tests.training.conftest import arguments
from tests.training.test_faults import kept_before, state
from tests.training.test_ranks import alone
from tests.training.test_transfer import build, moved, refused, saved  # noqa: F401 - a fixture

BATCH = ("model.norm=batch",)
KINDS = {  # models like those of these papers
    "mega": ("model.post_norm=true", *BATCH, "model.positions=none"),
    "mamba": ("model.norm=rms", "model.positions=none", "model.d_ff=0", "model.classifier=linear"),
    "vaswani": ("model.post_norm=true", "model.positions=sinusoidal"),
    "s4": (*BATCH, "model.d_ff=0", "model.classifier=linear", "model.pooling=cls"),
}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """`trained("field=value", …)` trains on ListOps for a few steps and returns the result."""
    monkeypatch.chdir(tmp_path)
    shared = ("task=listops", "attn=flash", "recipe=demo", "model.d_model=32", "model.d_ff=32", *SHORT,
              "trainer.accelerator=cpu", "batch.size=8", "batch.eval=16", "model.dropout=0.1", "model.attn_dropout=0",
              "trainer.steps=4", "trainer.eval_every=2", "trainer.log_every=1")  # fmt: skip

    def run(*args: str) -> dict[str, Any]:
        return lra.fit(*merged(*shared, *args))

    return run


@pytest.mark.parametrize("kind", ["mamba", "vaswani"])
def test_neither_layout_nor_micro_batches_nor_buffers_change_a_run(trained, monkeypatch, kind):
    check_layouts_and_buffers(trained, monkeypatch, *KINDS[kind])


@pytest.mark.parametrize("kind", ["mega", "s4"])
def test_neither_layout_nor_buffers_change_a_run_with_batch_norms(trained, monkeypatch, kind):
    """Micro-batches do: each has statistics of its own."""
    packed = trained("name=packed", *KINDS[kind])
    same(packed, trained("name=padded", *KINDS[kind], "batch.layout=padded"))
    use_static_buffers(monkeypatch)
    same(packed, trained("name=static", *KINDS[kind]))
    weights = checkpoints.read_checkpoint(packed["directory"])[0]
    running = [value for name, value in weights.items() if "running_mean" in name]
    assert running and all(value.any() for value in running)


@pytest.mark.parametrize(
    "options", [("trainer.average=ema",), pytest.param((), marks=pytest.mark.slow)], ids=["ema", "plain"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_resuming_changes_nothing(trained, monkeypatch, kind, options):
    check_resuming(trained, monkeypatch, *KINDS[kind], *options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pretraining_and_a_denoising_have_them_too(trained, kind):
    for objective in ("masked", "causal"):
        first = trained(f"name={objective}", f"pretrain={objective}", *KINDS[kind])
        tuned = trained(f"name=tuned-{objective}", f"init={first['directory']}", *KINDS[kind], "denoise=1")
        assert "head" in tuned["transfer"]["fresh"] and tuned["status"] == "finished"


def test_a_step_that_is_left_out_changes_no_running_statistics(small, monkeypatch):
    """Its statistics are NaN. Those before it are kept, also if it ends the run."""
    before, left_out = kept_before(6, monkeypatch), []
    forward, update = BatchNorm.forward, BatchNorm.update_running

    def poisoned(self: BatchNorm, x: torch.Tensor, batch: Any) -> torch.Tensor:
        sixth = self.training and len(left_out) // 5 == 5  # there are five norms
        return forward(self, x * torch.nan if sixth else x, batch)

    def counted(self: BatchNorm, out: torch.Tensor) -> None:
        left_out.append(float(out))
        update(self, out)

    monkeypatch.setattr(BatchNorm, "forward", poisoned)
    monkeypatch.setattr(BatchNorm, "update_running", counted)
    result = small("name=skipping", "trainer.on_nan=skip", *BATCH)
    assert left_out[25:30] == [1.0] * 5 and sum(left_out) == 5 and len(left_out) == 5 * 12
    assert all(value.isfinite().all() for value in state(Path(result["directory"], "last.ckpt")).values())
    left_out.clear()
    with pytest.raises(UsageError, match="at step 6: lower optim.lr"):
        small("name=bad", *BATCH)
    fault = torch.load("checkpoints/runs/listops/flash/bad-s0/fault.pt", weights_only=True)
    assert before and all(torch.equal(fault["state_dict"][name], value) for name, value in before.items())


def test_an_average_has_running_statistics_of_its_own(small):
    plain, mean = (small(f"name={name}", *BATCH, f"trainer.average={name}") for name in ("none", "ema"))
    raw = torch.load(Path(plain["directory"], "last.ckpt"), weights_only=True)["state_dict"]
    kept = torch.load(Path(mean["directory"], "last.ckpt"), weights_only=True)
    key = "model.encoder.norm.running_mean"
    assert torch.equal(kept["training_weights"][key], raw[key]) and not torch.equal(kept["state_dict"][key], raw[key])


@pytest.mark.slow
def test_two_devices_agree_on_the_running_statistics_of_a_step(tmp_path, small):
    """The same sequences, each device's share normalised by itself, as micro-batches are."""
    shared = (*BATCH, "model.attn_dropout=0", "trainer.steps=4")
    one = small(*shared, "name=one", "batch.micro=4")
    line = [sys.executable, "-m", "lra", "fit", *arguments(*shared, "name=two", "trainer.devices=2")]
    run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=alone())
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    two = json.loads((tmp_path / "checkpoints/runs/listops/flash/two-s0/result.json").read_text())
    assert two["world_size"] == 2
    a, b = (checkpoints.read_checkpoint(tmp_path / result["directory"])[0] for result in (one, two))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_them_is_measured(trained, kind):
    fields = merged("task=listops", "attn=flash", "recipe=demo", "model.d_model=32", *SHORT, "batch.size=4",
                    "trainer.accelerator=cpu", "model.d_ff=32", *KINDS[kind])  # fmt: skip
    found = measure_step([*fields, "steps=2", "warmup=1", "loops=eager", "profile=false"])
    assert [record.status for record in found.loops] == ["ok"], found.loops


def test_they_are_left_out_of_what_is_saved_where_they_change_nothing():
    plain = configure(arguments()).config.to_saved_dict()["model"]
    assert not {"norm", "post_norm"} & plain.keys()
    saved_fields = configure(arguments("model.norm=rms", "model.post_norm=true")).config.to_saved_dict()["model"]
    assert saved_fields["norm"] == "rms" and saved_fields["post_norm"]


@pytest.mark.parametrize("field", ["model.norm=rms", "model.norm=batch", "model.post_norm=true"])
def test_weights_of_other_norms_do_not_fit(saved, field):  # noqa: F811
    name, value = field.removeprefix("model.").split("=")
    default = "layer" if name == "norm" else "False"
    shown = value if name == "norm" else "True"
    refused(f"model.{name} {default} here {shown}; use the model fields", "pathfinder", saved("pathfinder"), field)
    refused(f"model.{name} {shown} here {default}; use the model fields", "pathfinder", saved("pathfinder", field))


def test_a_model_without_positions_moves_to_any_resolution(saved):  # noqa: F811
    fields = ("model.positions=none", *BATCH)
    path = saved("pathfinder", *fields)
    module, said = moved("path64", path, *fields)
    weights = checkpoints.read_checkpoint(path)[0]
    assert said.same == len(weights) and said.scale is None and said.resized is None and not said.fresh
    assert all(torch.equal(module.model.state_dict()[key], value) for key, value in weights.items())
    for field in ("positions.resize=bilinear", "positions.scale=image"):
        refused(f"{field}: model.positions=none has none, leave it out", "path64", path, *fields, field)
    refused("model.positions none here rotary", "path64", path, *BATCH, "model.positions=rotary")
    cls = saved("pathfinder", *fields, "pretrain=masked")
    assert moved("pathfinder", cls, *fields, "model.pooling=cls")[1].fresh == ["head", "CLS"]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("batch.layout=padded",), ("trainer.precision=bf16", "batch.micro=3")])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_and_eager_agree_on_a_gpu(trained, kind, options):
    rel = 0.02 if "trainer.precision=bf16" in options else 1e-3
    check_captured(trained, *KINDS[kind], "model.d_model=64", *options, rel=rel)
