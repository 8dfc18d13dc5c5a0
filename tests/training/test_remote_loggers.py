"""Curves on W&B, MLflow and Trackio: what is sent, to which run, and that a failing service ends nothing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lra.config.compose import flatten
from lra.errors import UsageError
from lra.training import curves
from lra.training.clock import Clock
from lra.training.remote_loggers import SERVICES, RemoteLogger, watched
from lra.training.run_files import LINKS_FILE, read_links
from lra.training.tally import Tally
from tests.command_line import RUN, lra
from tests.training.services import Calls, stand_in
from tests.training.test_fit import interrupt_at

RUN_NAME = "name=watched"
NAME = "listops/flash/watched-s0"


def sent(calls: Calls, kind: str) -> list[Any]:
    return [content for name, content in calls if name == kind]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_gets_configuration_curves_speed_and_scores(small, monkeypatch, capfd, service):
    calls: Calls = []
    stand_in(monkeypatch, service, calls)
    result = small(RUN_NAME, f"logger=csv,{service}", "trainer.log_grad_norm=true")
    (begun,), (config,) = sent(calls, "init"), sent(calls, "config")
    assert begun["name"] == NAME and begun["id"] is None and begun["project"] == "lra"
    assert {key: str(value) for key, value in config.items()} == {
        key: str(value) for key, value in flatten(result["config"])
    }
    logged = sent(calls, "log")
    by_step: dict[int, dict[str, float]] = {}
    for row in logged:
        by_step.setdefault(row.get("step", row.get("trainer/global_step")), {}).update(row)
    path = Path(result["directory"])
    for row in curves.read_curves(path / "metrics.csv"):
        for tag in ("train/loss", "lr", "val/loss", "val/accuracy", "train/grad_norm"):
            assert not row[tag] or by_step[int(row["step"])][tag] == pytest.approx(float(row[tag]))
    trained = [row for row in logged if "train/loss" in row]
    assert all(row["speed/tokens_per_second"] > row["speed/steps_per_second"] > 0 for row in trained[2:])
    last = logged[-1]
    assert (last["test/accuracy"], last["fresh/loss"]) == (result["test"]["accuracy"], result["fresh"]["loss"])
    assert last["final/parameters"] == result["parameters"]
    assert calls[-1] == ("end", 0) and len(sent(calls, "end")) == 1
    assert "many lines" not in capfd.readouterr().out
    assert set(read_links(path)) == {service} and not (path / "tensorboard").exists()
    assert not any(text.startswith(("logger", "trainer.log_grad")) for text in result["overrides"])


@pytest.mark.parametrize("service", SERVICES)
def test_a_resumed_run_goes_on_in_the_same_one_and_another_does_not(small, monkeypatch, service):
    calls: Calls = []
    stand_in(monkeypatch, service, calls)
    with monkeypatch.context() as patch:
        interrupt_at(10, patch)
        with pytest.raises(RuntimeError):
            small(RUN_NAME, f"logger=csv,{service}")
    assert sent(calls, "end") == ([1] if service != "trackio" else [0])
    known = read_links(Path("checkpoints/runs", NAME))[service]["id"]
    small(RUN_NAME, f"logger=csv,{service}", "resume=auto")
    small("name=other", f"logger=csv,{service}")
    assert [begun["id"] for begun in sent(calls, "init")] == [None, known, None]


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_service_that_fails_is_told_once_and_ends_nothing(small, monkeypatch, capsys, fails):
    calls: Calls = []
    stand_in(monkeypatch, "trackio", calls)

    def fail(*_: Any, **__: Any) -> None:
        calls.append(("failed", None))
        raise ConnectionError("no network")

    monkeypatch.setattr(f"trackio.{fails}", fail)
    result = small(RUN_NAME, "logger=csv,trackio")
    told = [line for line in capsys.readouterr().out.splitlines() if "trackio" in line]
    assert told == ["note: logger=trackio failed, the run goes on without it (ConnectionError: no network)"]
    assert result["status"] == "finished" and len(sent(calls, "failed")) == 1


def test_other_ranks_send_nothing(monkeypatch, tmp_path):
    calls: Calls = []
    stand_in(monkeypatch, "trackio", calls)
    for first in (False, True):
        trainer: Any = SimpleNamespace(loggers=[RemoteLogger("trackio", tmp_path)], is_global_zero=first)
        step: Any = SimpleNamespace(tokens=0)
        trainer.world_size, trainer.global_step = 2, 1
        with watched(trainer, Clock(), step, {}, False):
            curves.log_row(trainer, {"train/loss": 1.0}, 1)
        assert bool(calls) == first


def test_what_is_watched_changes_neither_name_nor_configuration_nor_weights(small, monkeypatch):
    stand_in(monkeypatch, "trackio", [])
    plain = small()
    path = Path(plain["directory"])
    before = {name: (path / name).read_bytes() for name in ("config.yaml", "metrics.csv")}
    ended = plain["provenance"]["ended"]
    (path / "result.json").unlink()
    (path / "last.ckpt").unlink()
    again = small("logger=csv,tensorboard,trackio", "trainer.log_grad_norm=true", "resume=auto")
    assert again["directory"] == plain["directory"] and again["provenance"]["ended"] == ended
    assert (path / "config.yaml").read_bytes() == before["config.yaml"]
    rows = curves.read_curves(path / "metrics.csv")
    assert [row.pop("train/grad_norm") != "" for row in rows] == [row["train/loss"] != "" for row in rows]
    assert before["metrics.csv"].decode().splitlines() == [",".join(rows[0]), *(",".join(row.values()) for row in rows)]


@pytest.mark.parametrize("clip", ["null", "1e-3", "1e9"])
def test_the_norm_is_that_of_the_whole_gradient_before_clipping(small, monkeypatch, clip):
    norms: list[float] = []
    judge = Tally.judge

    def judged(self: Tally, flat: torch.Tensor) -> None:
        norms.append(math.sqrt(float(flat[:-1].double().square().sum())))
        judge(self, flat)

    monkeypatch.setattr(Tally, "judge", judged)
    path = Path(small(f"optim.clip={clip}", "trainer.log_grad_norm=true")["directory"])
    shown = [float(row["train/grad_norm"]) for row in curves.read_curves(path / "metrics.csv") if row["train/loss"]]
    means = [sum(norms[at : at + 2]) / 2 for at in range(0, len(norms), 2)]
    assert shown == pytest.approx(means, rel=1e-5) and len(shown) == 6


def test_a_resumed_run_keeps_the_column_of_norms(small, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(10, patch)
        with pytest.raises(RuntimeError):
            small("trainer.log_grad_norm=true")
    path = Path(small("resume=auto")["directory"])
    rows = curves.read_curves(path / "metrics.csv")
    assert [bool(row["train/grad_norm"]) for row in rows if row["train/loss"]] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("csv,wandb", "logger=wandb needs a package that is not installed: pip install wandb"),
        ("csv,comet", r"logger=csv,comet: write \[csv\|tensorboard\|wandb\|mlflow\|trackio,…\]"),
        ("tensorboard", "leaves out metrics.csv, which resumed runs read: set logger=csv,tensorboard"),
        ("csv,csv", "logger=csv,csv names one twice"),
    ],
)
def test_what_can_not_log_is_refused(small, monkeypatch, given, message):
    monkeypatch.setattr("lra.training.remote_loggers.util", SimpleNamespace(find_spec=lambda name: None))
    with pytest.raises(UsageError, match=message):
        small(f"logger={given}")
    assert not Path("checkpoints").exists()


def test_the_end_of_a_run_says_where_to_look(here, monkeypatch):
    stand_in(monkeypatch, "wandb", [])
    done = lra("fit", *RUN, "logger=csv,tensorboard,wandb", "name=run")
    folder = "checkpoints/runs/listops/flash/run-s0"
    assert f"tensorboard tensorboard --logdir {folder}\n" in done.out
    assert "wandb       https://wandb.example/run\n" in done.out
    (Path(folder) / LINKS_FILE).write_text("{")
    again = lra("fit", *RUN, "logger=csv", "name=run")
    assert "tensorboard --logdir" in again.out and "wandb" not in again.out


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_the_real_package_keeps_a_run_without_a_network(small, monkeypatch, tmp_path, service):
    """In W&B's file of an offline run, MLflow's file store, and Trackio's database."""
    if util.find_spec(service) is None:
        pytest.skip(f"{service} is not installed")
    for name, value in {
        "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        interrupt_at(10, patch)
        with pytest.raises(RuntimeError):
            small(RUN_NAME, f"logger=csv,{service}")
    path = Path("checkpoints/runs", NAME)
    known = read_links(path)
    result = small(RUN_NAME, f"logger=csv,{service}", "resume=auto")
    assert read_links(path)[service]["id"] == known[service]["id"]
    kept = {"wandb": _kept_by_wandb, "mlflow": _kept_by_mlflow, "trackio": _kept_by_trackio}[service](path, tmp_path)
    rows = curves.read_curves(path / "metrics.csv")
    losses = {int(row["step"]): pytest.approx(float(row["train/loss"])) for row in rows if row["train/loss"]}
    # what lay behind the last checkpoint is sent again
    assert {step: loss for step, loss in kept if loss is not None} == losses
    assert result["status"] == "finished"


def _kept_by_wandb(path: Path, _: Path) -> list[tuple[int, Any]]:
    from importlib import import_module

    record = import_module("wandb.proto.wandb_internal_pb2").Record
    found, command = [], read_links(path)["wandb"]["link"].removeprefix("wandb sync ")
    sessions = sorted(Path().glob(f"{command}/*.wandb"))
    assert len(sessions) == 2
    for file in sessions:
        events, until = [], time.monotonic() + 20
        while not any(event.HasField("exit") for event in events) and time.monotonic() < until:
            time.sleep(0.1)  # another process writes it
            events = [record.FromString(content) for content in _leveldb_records(file.read_bytes()[7:])]
        for event in events:
            row = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in event.history.item}
            if "train/loss" in row:
                found.append((row["trainer/global_step"], row["train/loss"]))
    return found


def _leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log in blocks of 32 kB, the first of which has lost its 7 bytes of W&B's own."""
    place, whole = 0, b""
    while place + 7 <= len(log):
        if 32768 - (place + 7) % 32768 < 7:  # no header has room in the rest of a block
            place += 32768 - (place + 7) % 32768
            continue
        size, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        whole += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def _kept_by_mlflow(path: Path, _: Path) -> list[tuple[int, Any]]:
    from importlib import import_module

    client = import_module("mlflow").MlflowClient()
    run = read_links(path)["mlflow"]["id"]
    there = client.get_run(run)
    assert there.info.status == "FINISHED" and there.data.params["task.name"] == "listops"
    assert there.info.run_name == NAME and "test/accuracy" in there.data.metrics
    return [(each.step, each.value) for each in client.get_metric_history(run, "train/loss")]


def _kept_by_trackio(_: Path, folder: Path) -> list[tuple[int, Any]]:
    import sqlite3

    with sqlite3.connect(folder / "trackio" / "lra.db") as there:
        rows = there.execute("select step, metrics, run_id from metrics order by id").fetchall()
    assert len({run for *_, run in rows}) == 1
    return [(step, json.loads(metrics).get("train/loss")) for step, metrics, _ in rows]
