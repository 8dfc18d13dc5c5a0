"""What a run took: the time of its steps and nothing else, over all its sessions."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lra.tasks.base import TaskModule
from lra.training import clock as clock_module
from lra.training.clock import RUNS_PER_DEVICE, Clock
from lra.training.lightning import WholeCheckpointIO
from lra.training.narrator import Narrator
from lra.training.run_directory import time_and_memory
from tests.training.test_fit import interrupt_at

ON_CPU: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))  # a trainer, or a model
PAUSE = 0.5  # seconds, of which there are more than a small run's steps take


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method"), [(WholeCheckpointIO, "save_checkpoint"), (TaskModule, "on_validation_epoch_end")]
)
def test_a_runs_time_and_expected_pace_are_of_its_steps(small, monkeypatch, capsys, one_thread, owner, method):
    slow = getattr(owner, method)

    def pausing(*args: Any, **kwargs: Any) -> Any:
        time.sleep(PAUSE)
        return slow(*args, **kwargs)

    monkeypatch.setattr(owner, method, pausing)
    monkeypatch.setattr(Narrator, "PROBE", 2)  # validation and checkpoints, after step 4, are within
    small()
    result = small("name=again")
    assert result["train_seconds"] < 2 * PAUSE, "three validations, each with two checkpoints"
    pace = [line.partition("training at ")[2].partition(" ms")[0] for line in capsys.readouterr().out.splitlines()]
    assert [float(text) < 1e3 * PAUSE / 6 for text in pace if text] == [True, True]


def test_what_a_run_takes_is_that_of_all_its_sessions(monkeypatch):
    now = iter((0.0, 10.0, 25.0, 100.0, 104.0, 104.0))  # made, begun, saved; made, begun, asked
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: next(now))
    first = Clock()
    first.begin(ON_CPU, "a CPU")
    saved = first.state_dict() | {"peak": 7}
    assert saved["wall"] == 15
    later = Clock()
    later.begin(ON_CPU, "a CPU")
    later.load_state_dict(saved)
    assert (later.wall(), later.peak()) == (15, 7)


@pytest.mark.parametrize(("options", "steps"), [((), 8), (("batch.micro=4",), 6)])
def test_a_runs_speed_is_of_what_it_was_computed_with_last(small, monkeypatch, options, steps):
    """Each session's first stride, of two steps, is apart; the first session's last checkpoint is that of step 4."""
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setenv(RUNS_PER_DEVICE, "3")
        interrupt_at(7, patch)
        small()
    (last,) = Path("checkpoints").rglob("last.ckpt")
    before = torch.load(last, weights_only=True)["callbacks"]["Clock"]
    result = small("resume=auto", *options)
    clock = torch.load(last, weights_only=True)["callbacks"]["Clock"]
    assert (before["steps"], clock["steps"]) == (2, steps)
    assert result["steps_per_second"] == round(steps / clock["seconds"], 2)
    spent = before["seconds"] if options else 0.0
    assert clock["elsewhere"] == spent and result["train_seconds"] == round(spent + clock["seconds"], 1)
    assert result["runs_per_device"] == (1 if options else 3), "of those seconds, too"
    assert clock["validation"] > before["validation"] > 0
    assert result["validation_seconds"] == round(clock["validation"], 1)


def test_what_a_run_took_before_it_was_counted_is_unknown():
    clock = Clock()
    clock.load_state_dict({"seconds": 1.0, "steps": 2})
    assert clock.wall() is None
    assert time_and_memory({"resumed": True, "session_seconds": 9.0, "peak_gpu_bytes": 5}) == (None, None)
    assert time_and_memory({"resumed": False, "session_seconds": 9.0, "peak_gpu_bytes": 5}) == (9, 5)
    assert time_and_memory({"resumed": True, "wall_seconds": 19.0, "peak_gpu_bytes": 6}) == (19, 6)


def test_a_run_remembers_that_its_gpu_was_shared(monkeypatch):
    monkeypatch.setenv(RUNS_PER_DEVICE, "3")
    first = Clock()
    monkeypatch.delenv(RUNS_PER_DEVICE)
    later = Clock()
    assert (first.sharing, later.sharing) == (3, 1)
    later.load_state_dict(first.state_dict())
    assert later.sharing == 3
    later.on_exception(ON_CPU, ON_CPU, RuntimeError())
    assert later.sharing == 3
    later.on_exception(ON_CPU, ON_CPU, MemoryError())
    assert later.sharing == 1  # alone it was out of memory


def test_a_run_sees_who_came_and_went_between(monkeypatch):
    device = torch.device("cuda", 0)
    there: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=device))
    now, others = [0.0], iter((1, 4, 1))  # beginning, a later validation, end
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(clock_module.environment, "gpu_processes", lambda uuid: next(others))
    clock = Clock()
    clock.on_train_start(there, there)
    for seconds in (Clock.LOOK / 2, Clock.LOOK, 1.5 * Clock.LOOK):
        now[0] = seconds
        clock.on_validation_start(there, there)
    clock.on_train_end(there, there)
    assert (clock.sharing, next(others, None)) == (4, None)
