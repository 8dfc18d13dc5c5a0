"""Cells on slots: shared between commands, retried, interrupted and taken up; the process only stands for `lra fit`."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from lra.errors import UsageError
from lra.experiments.grid import local_launcher
from lra.experiments.grid.cells import cell_state, with_stages
from lra.experiments.grid.local_launcher import LocalLauncher, list_slots
from lra.training.run_directory import claim_directory, is_claimed
from tests.experiments.runs import GRID, cells, command, made, started, stub, until


@pytest.fixture(autouse=True)
def short_ticks(here, monkeypatch):
    monkeypatch.setattr(local_launcher, "TICK_S", 0.02)
    monkeypatch.setattr(local_launcher, "LOOK_S", 0.05)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def work(todo, line, slots=1):
    """The states at the end, and what was said."""
    said: list[str] = []
    states = LocalLauncher(todo, [None] * slots, say=said.append, command=line).work()
    return [states[cell] for cell in todo], said


def worker(cell) -> int:
    """The process that works on a cell."""
    for entry in Path("/proc").iterdir():
        with_claim = f"{cell.directory.path}/claim"
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                files = [os.readlink(file) for file in (entry / "fd").iterdir()]
                if any(file.endswith(with_claim) and file.startswith(os.getcwd()) for file in files):
                    return int(entry.name)
        except OSError:
            continue
    raise AssertionError("nobody works on it")


def test_each_cell_is_run_once_and_never_again():
    todo = cells(2, ("listops",), ("flash", "standard"))
    states, said = work(todo, stub(todo, "finish"), slots=2)
    assert [state.status for state in states] == ["done"] * 4 and not said
    assert sorted(started()) == sorted(str(cell.directory.path) for cell in todo)
    log = (todo[0].directory.path / "log.txt").read_text().splitlines()
    assert log[0].endswith(f"{' '.join(map(str, todo[0].args))} resume=auto")
    assert log[1] == f"start 1 {max(1, torch.get_num_threads() // 2)}"
    work(todo, stub(todo, "fail"))
    assert len(started()) == 4


def test_two_commands_share_the_cells():
    todo = cells(2, ("listops",), ("flash", "standard"))
    line = stub(todo, "finish", seconds=0.3)
    both = [command(todo, line), command(todo, line)]
    for one in both:
        one.join(30)
    assert [one.exitcode for one in both] == [0, 0]
    assert sorted(started()) == sorted(str(cell.directory.path) for cell in todo)
    assert {cell_state(cell).status for cell in todo} == {"done"}


def test_what_another_command_has_done_just_before_the_claim_stays(monkeypatch):
    (cell,) = todo = cells(1)

    def late(path):
        made(cell, "finished", 0.4)
        return claim_directory(path)

    monkeypatch.setattr(local_launcher, "claim_directory", late)
    (state,), said = work(todo, stub(todo, "finish"))
    assert state.accuracy == cell_state(cell).accuracy == 0.4 and not started() and not said
    assert not is_claimed(cell.directory.path)


def test_a_failing_run_is_retried_once_and_keeps_both_tracebacks():
    (cell,) = todo = cells(1)
    (state,), _ = work(todo, stub(todo, "fail"))
    assert str(state) == "failed twice: oh" and len(started()) == 2
    tracebacks = [
        json.loads((cell.directory.path / name).read_text())["traceback"] for name in ("failed.json", "result.json")
    ]
    assert tracebacks == ["start 1", "start 2"]
    work(todo, stub(todo, "finish"))
    assert len(started()) == 2  # final
    assert (cell.directory.path / "log.txt").read_text().count("start ") == 2


def test_a_run_that_fails_once_is_done():
    todo = cells(1)
    (state,), _ = work(todo, stub(todo, "fail", "finish"))
    assert state.status == "done" and (todo[0].directory.path / "failed.json").exists()


def test_out_of_memory_is_not_run_again():
    todo = cells(1)
    made(todo[0], "oom")
    work(todo, stub(todo, "finish"))
    assert not started()


def test_what_starts_from_a_run_that_is_out_of_memory_is_not_run():
    todo = with_stages(GRID.cells(("listops",), ("flash",), 1, "curriculum"))
    states, said = work(todo, stub(todo, "oom"))
    assert [state.status for state in states] == ["OOM"] * 3 and all(state.final for state in states) and not said
    assert started() == [str(todo[0].directory.path)]


def test_out_of_memory_beside_others_is_run_again_alone():
    todo = cells(2, ("listops",), ("flash", "standard"))
    states, said = work(todo, stub(todo, "oom", "finish", seconds=0.1), slots=2)
    assert [state.status for state in states] == ["done"] * 4 and not said
    assert sorted(started()) == sorted(2 * [str(cell.directory.path) for cell in todo])
    first, second = cells(2, ("text",))
    made(first, "oom", runs_per_device=2)
    assert not cell_state(first).final and str(cell_state(first)).startswith(
        "OOM beside other runs, to be retried alone: "
    )
    (path,) = {str(first.directory.path)}
    log = first.directory.path / "log.txt"
    (state, other), _ = work([first, second], stub([first, second], "oom", "finish", seconds=0.1), slots=2)
    assert str(state) == "OOM: too much" and state.final and (state.result or {})["runs_per_device"] == 1
    assert other.status == "done" and started().count(path) == 1 and log.read_text().count("start ") == 1


def test_a_cell_of_several_gpus_has_them_to_itself():
    (cell,) = GRID.cells(("listops",), ("flash",), 1, fields=("trainer.devices=2",))
    assert LocalLauncher([cell], ["0", "1", "2"])._room(cell, False) == ["0", "1"], "and no more"
    local = LocalLauncher([cell], ["0", "1", "2", "0", "1", "2"])
    local.free.remove("0")
    room = local._room(cell, False)
    assert room == ["1", "2", "1", "2"]
    found = local._environment(room)
    assert (found["CUDA_VISIBLE_DEVICES"], found["LRA_RUNS_PER_DEVICE"]) == ("1,2", "1")
    local.free.remove("1")
    assert local._room(cell, False) == []


def test_out_of_memory_beside_strangers_is_given_up_in_the_end(monkeypatch):
    todo = cells(1)
    monkeypatch.setattr(LocalLauncher, "_environment", lambda *_: {**os.environ, "LRA_RUNS_PER_DEVICE": "2"})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (state,), _ = work(todo, stub(todo, "oom"))
    assert state.crowded and len(started()) == 2


def test_a_run_that_dies_is_taken_up_once_in_a_call_and_again_in_the_next():
    todo = cells(1)
    (state,), said = work(todo, stub(todo, "die"))
    assert state.status == "interrupted" and len(started()) == 2
    assert [line.rpartition(", ")[2] for line in said] == ["taken up once more", "given up until the next call"]
    assert "ended without a result (signal 9, checkpoints/runs/listops/flash/demo-s0/log.txt: start 1 " in said[0]
    (state,), said = work(todo, stub(todo, "die", "die", "die", "finish"))
    assert state.status == "done" and len(started()) == 4 and len(said) == 1


def test_a_run_that_is_refused_is_not_tried_again_before_the_next_call():
    todo = with_stages(GRID.cells(("listops",), ("flash",), 1, "curriculum"))
    states, said = work(todo, stub(todo, "refuse", "finish"))
    assert [str(state) for state in states] == ["refused: no data here: prepare it", "open", "open"]
    assert started() == [str(todo[0].directory.path)] and cell_state(todo[0]).status == "open"
    log = todo[0].directory.path / "log.txt"
    assert said == [
        f"{todo[0]}: ended without a result (exit code 2, {log}: lra: no data here: prepare it), "
        "given up until the next call"
    ]
    states, _ = work(todo, stub(todo, "refuse", "finish"))
    assert [state.status for state in states] == ["done", "refused", "open"], "the second, at its first start"


def test_kill_a_run_then_the_command_and_the_next_call_completes():
    todo = cells(2)
    first = command(todo, stub(todo, "wait"), slots=2)
    until(lambda: len(started()) == 2 and all(cell.directory.last.exists() for cell in todo))
    first.kill()
    first.join()
    assert [cell_state(cell).status for cell in todo] == ["running elsewhere"] * 2  # they work on
    os.kill(worker(todo[0]), signal.SIGKILL)
    until(lambda: not is_claimed(todo[0].directory.path))
    second = command(todo, stub(todo, "wait", "finish"))
    until(lambda: cell_state(todo[0]).status == "done")
    assert second.is_alive() and len(started()) == 3  # it waits for the other
    os.kill(worker(todo[1]), signal.SIGKILL)
    second.join(20)
    assert second.exitcode == 0 and len(started()) == 4
    assert [cell_state(cell).status for cell in todo] == ["done"] * 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_runs_and_then_the_command(number, code):
    todo = cells(2)
    one = command(todo, stub(todo, "wait"), slots=2)
    until(lambda: all(cell.directory.last.exists() for cell in todo))
    os.kill(one.pid, number)
    one.join(20)
    assert one.exitcode == code
    assert [cell_state(cell).status for cell in todo] == ["interrupted"] * 2  # nobody has a claim
    assert str(cell_state(todo[0])) == "interrupted, goes on from last.ckpt"


def test_what_a_dead_run_leaves_behind_does_not_keep_its_claim(here):
    todo = cells(1)
    (here / "child.py").write_text(
        "import os, signal, time\n"
        "if os.fork():\n    time.sleep(0.2)\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    )
    (state,), said = work(todo, [*stub(todo, "finish")[:1], "child.py"])
    assert state.status == "open" and len(said) == 2
    until(lambda: not is_claimed(todo[0].directory.path))


def test_slots_are_the_gpus_that_are_seen(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert list_slots(None) == list_slots(1) == [None]
    with pytest.raises(UsageError, match="devices=2, but this machine has 0 GPUs: give 1, or leave it out"):
        list_slots(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert list_slots(None) == ["0", "1", "2"] and list_slots(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-a, 7")
    assert list_slots(None) == ["5", "GPU-a", "7"]
    for devices in (0, 4):
        with pytest.raises(UsageError, match=f"devices={devices}, but this machine has 3 GPUs: give 1 to 3"):
            list_slots(devices)


def test_a_run_knows_how_many_share_its_gpu():
    (cell,) = todo = cells(1)
    see = [sys.executable, "-c", "import os; print(os.environ['LRA_RUNS_PER_DEVICE'])"]
    for places, shared in ((["0", "1"], 1), (["0", "1", "0", "1"], 2), ([None] * 3, 3)):
        LocalLauncher(todo, places, command=see).work()
        assert (cell.directory.path / "log.txt").read_text().splitlines()[-1] == str(shared)


def test_a_run_sees_its_slots_gpu_and_the_users_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    local = LocalLauncher([], ["3", "GPU-a"])
    environment = local._environment(["GPU-a"])
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("GPU-a", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local._environment([None])["CUDA_VISIBLE_DEVICES"] == ""


def test_a_cell_whose_folder_can_not_be_written_stops_no_other(monkeypatch):
    first, second = cells(2, ("listops",))[:2]
    genuine, log = Path.open, first.directory.path / "log.txt"

    def opened(path, mode="r", *rest, **named):
        if path == log and "a" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return genuine(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", opened)
    states, said = work([first, second], stub([first, second], "finish"))
    assert [state.status for state in states] == ["refused", "done"]
    assert len(said) == 1 and "log.txt can't be used (No space left on device)" in said[0]
