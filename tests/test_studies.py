"""The studies of benchmarks/studies: they measure what they say, and pages show what they write."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from benchmarks.pages import kernels, readme
from benchmarks.studies.exactness import study as exactness
from benchmarks.studies.kinks import study as kinks
from benchmarks.studies.learnability import study as cnn
from benchmarks.studies.learning import study as learning
from benchmarks.studies.levels import study as levels
from benchmarks.studies.overlap import study as overlap
from benchmarks.studies.plateau import settings
from benchmarks.studies.plateau import study as plateau
from benchmarks.studies.prepare import study as prepare
from lra.kernels.testing import Case
from lra.tasks.image import Image
from lra.training.fit import configure
from tests.fixtures import pngs, write_cifar10, write_imdb


def test_preparing_is_timed_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    fields = ["task=listops", "recipe=demo", "task.train=30", "task.val=5", "task.test=5", "task.fresh=5"]
    out = tmp_path / "studies" / "prepare" / "cpu" / "some.json"
    assert prepare.main(["--task", *fields, "--task", *fields, "min_length=9", "--out", str(out)]) == 0
    stores = json.loads(out.read_text())["stores"]
    assert [store["examples"] for store in stores] == [45, 45] and all(store["bytes"] > 500 for store in stores)
    assert not list((tmp_path / "stores").iterdir()) and capsys.readouterr().out.count("\n{") == 2
    row = readme.prepare(tmp_path).splitlines()[2]
    assert row.startswith("| [listops@1](benchmarks/studies/prepare/cpu/some.json) | `recipe=demo` `task.train=30`")
    assert prepare.main(["--task", "task=listop"]) == 2
    assert capsys.readouterr().err.startswith("prepare: unknown task 'listop'")


def test_test_examples_that_are_in_train_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    texts = {"train": ["good", "bad", "dull", *map(str, range(7))], "test": ["bad", "new", "bad", "go"]}
    columns = {split: {"text": some, "label": [i % 2 for i in range(len(some))]} for split, some in texts.items()}
    mirror, out = write_imdb(tmp_path / "imdb", **columns), tmp_path / "studies" / "overlap" / "cpu" / "some.json"
    assert overlap.main(["--task", "task=text", f"source={mirror}", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["stores"] == [{"task": "text@1", "fields": [], "test": 4, "in_train": 2}]
    assert readme.overlap(tmp_path).splitlines()[2].endswith("|  | 2 | 4 |")


def test_a_pair_of_documents_is_the_same_in_either_order():
    pairs = SimpleNamespace(pairs=np.array([[0, 1], [1, 0]]))
    made: Any = SimpleNamespace(manifest={"files": {"documents.tokens.npy": {}}}, pairs=lambda split: pairs)
    assert overlap.examples(made, "test") == [(0, 1), (0, 1)]


def test_learnability_reports_its_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    for resolution in (32, 64, 128, 256):
        assert cnn.ResidualCNN(resolution).receptive_field >= resolution
    fields = ["task=pathfinder", "task.train=40", "task.val=4", "task.test=12"]
    out = tmp_path / "studies" / "learnability" / "cpu" / "tiny.json"
    options = ["--steps", "3", "--batch", "8", "--log-every", "2", "--out", str(out)]
    assert cnn.main([*fields, *options]) == 0
    result = json.loads(out.read_text())
    assert [point["step"] for point in result["curve"]] == [2, 3] and result["n"] == 12
    assert set(result["baselines"]) == {"majority", "marker distance"}
    assert readme.learnability(tmp_path).splitlines()[2].startswith("| [pathfinder@2]")
    assert cnn.main(["task=listops", "batch.size=0"]) == 2


def test_grey_levels_of_test_images_move_by_one(tmp_path, monkeypatch, capsys):
    assert levels.main(["pathfinder", "--count", "8", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*/pathfinder.json")
    result = json.loads(file.read_text())
    assert result["checkpoint"] == "checkpoints/pathfinder" and result["n"] == 8
    assert set(result["accuracy"]) == {"rounded", "truncated", "moved"}
    task = configure(["task=pathfinder", "attn=flash", "task.version=1"]).config.task
    pixels, labels = levels.variants(task, 70)
    change = {name: these.astype(int) - pixels["rounded"] for name, these in pixels.items()}
    assert np.unique(change["truncated"]).tolist() == [-1, 0] and np.unique(change["moved"]).tolist() == [-1, 0, 1]
    assert pixels["rounded"].shape == (70, 1024) and set(labels) == {0, 1}
    assert levels.main(["pathfinder", "--count", "20001"]) == 2
    assert "--count 20001 is more than the 20000 test images" in capsys.readouterr().err


def test_grey_levels_of_photographs_move_by_one(tmp_path, capsys):
    colours = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), np.uint8)
    columns = {"img": pngs(colours), "label": [*range(10)]}
    source = write_cifar10(tmp_path / "cifar10", train=columns, test=columns)
    pixels, labels = levels.variants(Image.Config(source=str(source)), 7)
    assert labels.tolist() == [*range(7)] and pixels["moved"].shape == (7, 1024)
    read = [np.asarray(PIL.Image.fromarray(image).convert("L")).ravel() for image in colours[:7]]
    assert np.array_equal(pixels["rounded"], read)  # as the store of the task has them
    change = {name: these.astype(int) - pixels["rounded"] for name, these in pixels.items()}
    assert np.unique(change["truncated"]).tolist() == [-1, 0] and np.unique(change["moved"]).tolist() == [-1, 0, 1]
    given = ["--count", "3", "--source", str(source), "--out", str(tmp_path / "out")]
    assert levels.main(["image", *given]) == 0 and "image: rounded " in capsys.readouterr().out
    assert levels.main(["pathfinder", *given]) == 2 and "are drawn: leave it out" in capsys.readouterr().err
    assert levels.main(["listops", *given]) == 2 and "choose other weights" in capsys.readouterr().err


def test_settings_of_the_plateau_are_runs():
    assert {setting.start for setting in settings.SETTINGS.values()} - {None} == {*settings.PRETRAININGS}
    folders = []
    for name, setting in settings.SETTINGS.items():
        run = configure(plateau.merged(*plateau.training(name, 3), "init=null")).config
        assert run.seed == 3 and run.pretrain == "none" and run.trainer.steps == 8000
        folders.append(run.name)
        if setting.start:
            before = configure(plateau.pretraining(setting.start, 3)).config
            same = ("d_model", "heads", "layers", "d_ff", "axes", "positions", "pixels")
            assert all(getattr(before.model, field) == getattr(run.model, field) for field in same), name
            assert before.pretrain == "masked" and f"{before.name}-s3" in plateau.training(name, 3)[-1]
    assert len({*folders}) == len(folders)


def test_the_step_at_which_a_plateau_ends(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("step,train/loss,val/loss,val/accuracy\n1,0.7,,\n2,,0.69,0.5\n4,,0.5,0.76\n6,,0.6,0.7\n")
    points = plateau.curve(file)
    assert [point["step"] for point in points] == [2, 4, 6] and plateau.first_step(points) == 4
    assert plateau.first_step(points, 0.8) is None


@pytest.fixture
def fits(here, monkeypatch, no_gpus):
    """Exit codes of `lra fit` by the names of the runs; None: until it is ended. It writes a curve if it is 0."""
    codes: dict[str, int | None] = {}

    class Fit:
        def __init__(self, command, **_):
            path = plateau.directory(command[command.index("fit") + 1 :]).path
            self.returncode = codes.pop(path.name)  # once
            if self.returncode == 0:
                write_curve(path)

        def poll(self):
            return self.returncode

        def terminate(self):
            self.returncode = self.returncode or -15

        kill = terminate

        def wait(self, _=None):
            return self.returncode

    monkeypatch.setattr(plateau, "subprocess", SimpleNamespace(Popen=Fit, TimeoutExpired=subprocess.TimeoutExpired))
    return codes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nothing"], "nothing: no setting, choose from"),
        (["mean", "--each", "0"], "--each 0 must be at least 1"),
        (["mean", "--fields", "foo"], "'foo' is not of the form field=value"),
        (["mean", "--fields", "seed=3", "name=a"], "seed=3 name=a: the study gives each run its own, leave it out"),
        # which its pretraining can have
        (["hard, pretrained on lit", "--fields", "mask=0.3"], "mask=0.3 says how tokens are hidden"),
    ],
)
def test_bad_input_of_the_plateau_is_one_line_and_starts_nothing(given, message, fits, here, capsys):
    assert plateau.main([*given, "--minutes", "0", "--out", "out"]) == 2 and not list(here.iterdir())
    said = capsys.readouterr().err
    assert said.startswith(f"plateau: {message}") and said.count("\n") == 1


def test_fields_of_the_plateau_replace_those_of_its_settings():
    changed = configure(plateau.training("mean", 0, ["level=hard", "model.pooling=max"])).config
    assert (changed.task.level, changed.model.pooling) == ("hard", "max")


def write_curve(folder):
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("step,val/loss,val/accuracy\n2,0.6,0.8\n")


def test_only_finished_runs_of_the_plateau_have_a_result(fits, here, capsys):
    """Not those that are refused, cut, or would start from a pretraining that is not there."""
    write_curve(plateau.directory(plateau.training("mean", 0)).path)  # an old one
    fits |= {"mean-s0": 2, "cls-s0": 0, "pretrained-lit-s0": -15}
    assert plateau.main(["mean", "cls", "hard, pretrained on lit", "--out", "out"]) == 2 and not fits
    (file,) = here.glob("out/*/*.json")
    assert file.name == "cls-s0.json" and json.loads(file.read_text())["step"] == 2
    assert capsys.readouterr() == (
        "cls, seed 0: 2 steps, at best 80.0%, 75% at step 2\n",
        "plateau: no result of pretrained-lit-s0, mean-s0, hard+pretrained-on-lit-s0 (not begun): "
        "see their logs in logs, or give more --minutes\n",
    )


def test_runs_of_the_plateau_are_ended_in_time(fits, here, monkeypatch):
    monkeypatch.setattr(plateau, "LEAST", 0)
    plateau.LOGS.mkdir()
    fits["mean-s0"] = None
    commands = {(name, 0): plateau.training(name, 0) for name in ("mean", "cls")}
    assert plateau.run_all(commands, 0, 1, time.monotonic() + 0.4) == {("mean", 0): -15}


def test_a_turned_image_keeps_its_pixels():
    batch = torch.arange(8 * 16, dtype=torch.uint8).view(8, 4, 4)
    turned = cnn.turned(batch, torch.Generator().manual_seed(0))
    assert [sorted(image.flatten().tolist()) for image in turned] == [
        sorted(image.flatten().tolist()) for image in batch
    ]
    assert not torch.equal(turned, batch) and torch.equal(turned[0], batch[0].flip(1)) | torch.equal(
        turned[0], batch[0]
    )


def test_exactness_leaves_no_case_out(tmp_path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = Case((20, 0), dtype=torch.float16, head_dim=16, dropout=0.1)
    wide, causal = Case((9,), head_dim=200), dataclasses.replace(case, causal=True)
    outcomes = [exactness.measure(number, one, device=device) for number, one in enumerate([case, wide])]
    made_with = {"gpu": "GPU", "date": "2026-01-02", "versions": {"torch": "2", "triton": "3"}}
    result: dict[str, Any] = {"environment": made_with, "ptxas": None, **exactness.summarise(outcomes)}
    assert [failure["number"] for failure in result["failures"]] == [1]
    assert "head dimensions up to 128" in result["failures"][0]["error"]
    assert all(0 < result["ratios"][name][0] <= 1 and result["ratios"][name][1] is None for name in result["ratios"])
    assert result["dtypes"]["float32"]["worst"]["out"] is None
    assert "hopper_shared_short did not run" in str(exactness.measure(0, causal, "shared-keys", device).error)

    exactness.write(result, tmp_path / "studies" / "exactness" / "cpu" / "flash.json")
    table = kernels.exactness(tmp_path)
    assert table.count("\n| [flash]") == 2
    assert "2 cases, 1 with dropout, 2 packed, 0 padded, 0 causal, lengths 0 to 20" in table


def test_exactness_needs_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exactness.main(["--out", str(tmp_path / "none.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_losses_differ_by_the_largest_share_on_either_side():
    losses = {"eager": [2.0, 4.0], "captured": [1.0, 4.4], "captured, padded": [2.2, 4.0]}
    records = [
        {"task": "listops", "variant": name, "seed": seed, "losses": [loss * (1 + seed) for loss in found]}
        for seed in range(2)
        for name, found in losses.items()
    ]
    learning.compare(records)
    assert [record["difference"] for record in records] == pytest.approx([0.0, 0.5, 0.1] * 2)


def test_a_kink_is_a_value_of_either_sign_and_can_be_taken_alike():
    whole = torch.tensor([[[1.0, -2.0]], [[-1e-8, 3.0]]])  # two steps of one sample
    halves = torch.tensor([[[1.0, -2.0]], [[2e-8, 3.0]]])
    kink = kinks.first(whole, halves)
    assert (
        kink is not None
        and kink[:3] == (1, 0, 0)
        and kink.whole < 0 < kink.halves
        and kinks.first(whole, whole) is None
    )
    relu, hidden = torch.nn.ReLU(), list[torch.Tensor]()
    with kinks.watched(hidden, kink):
        for step, expected in enumerate([[1.0, 0.0], [1.0, 1.0]]):  # without the kink [0, 1]
            x = whole[step].clone().requires_grad_()
            relu(x).sum().backward()
            assert x.grad is not None and x.grad.tolist() == [expected]
        relu.eval()(whole[0])
    assert torch.equal(torch.stack(hidden), whole) and "watched" not in torch.nn.ReLU.forward.__qualname__


def test_runs_share_the_gpus_that_are_visible(monkeypatch):
    really, found = subprocess.run, []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a record names the GPU, and there may be no driver
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")

    def run(command, **options):
        if "fit" not in command:
            return really(command, **options)
        found.append(options["env"]["CUDA_VISIBLE_DEVICES"])
        return subprocess.CompletedProcess(command, 1, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert learning.main(["--part", "noise", "--tasks", "listops", "--seeds", "2"]) == 1  # as every run failed
    assert {*found} <= {"2", "3", "2,3", "3,2"} and len(found) == 8 and any("," in gpus for gpus in found)


def test_halves_of_each_task_are_half_its_batch():
    for job in learning.jobs(["exact"], list(learning.TASKS), 1, []):
        run = configure(job.args).config
        assert run.batch.size == (2 if "halves" in job.variant else 1) * (run.batch.micro or run.batch.size)
