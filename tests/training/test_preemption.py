"""SIGINT, SIGTERM and SIGUSR1: a run that they end goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import lra
from lra.experiments.grid.local_launcher import LocalLauncher
from lra.training.preemption import Preemption
from tests.experiments import runs
from tests.training.conftest import arguments
from tests.training.test_faults import same, state

RUN = Path("checkpoints/runs/listops/flash")
RARE = ("trainer.steps=44", "trainer.eval_every=22", "trainer.log_every=11")  # a stride of one step

# python -c <this> <moment> <count> <signal> <fields of lra fit>: the signal comes at that call of the moment's function
DRIVER = """
import os, sys
import lra
from lra.tasks.base import TaskData, TaskModule
from lra.training.lightning import WholeCheckpointIO
from lra.training.step import Step
moment, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
of, name = {
    "step": (Step, "__call__"), "validation": (TaskModule, "validation_step"), "test": (TaskModule, "test_step"),
    "setup": (TaskData, "setup"), "checkpoint": (WholeCheckpointIO, "save_checkpoint"),
}[moment]
genuine, calls = getattr(of, name), 0

def call(*args, **kwargs):
    global calls
    calls += 1
    if calls == count and os.environ.get("LOCAL_RANK", "0") == "0":
        os.kill(os.getpid(), number)
    return genuine(*args, **kwargs)

setattr(of, name, call)
lra.fit(*sys.argv[4:])  # Lightning starts other ranks with sys.argv as it is
"""


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(lra.__file__).parents[1])}


def signalled(moment: str, count: int, number: signal.Signals, *args: str) -> subprocess.CompletedProcess[str]:
    """A run in which a signal comes at a call of something."""
    script = Path("driver.py")
    script.write_text(DRIVER)
    line = [sys.executable, str(script), moment, str(count), str(int(number)), *arguments(*args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, env=environment())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`whole(*options)`: the directory of the unbroken run, made once."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*options: str) -> Path:
        if options not in made:
            folder = tmp_path_factory.mktemp("whole")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                lra.fit(*arguments("name=run", *options))
            made[options] = folder / RUN / "run-s0"
        return made[options]

    return make


def goes_on(whole: Path, *options: str) -> None:
    """Resumes the run of this folder, and compares all that it leaves with the unbroken one."""
    assert not (RUN / "run-s0/result.json").exists()
    assert lra.fit(*arguments("name=run", *options), "resume=auto")["status"] == "finished"
    assert (whole / "metrics.csv").read_text() == (RUN / "run-s0/metrics.csv").read_text()
    assert same(state(whole / "best.ckpt"), state(RUN / "run-s0/best.ckpt"))
    assert same(state(whole / "last.ckpt"), state(RUN / "run-s0/last.ckpt"))
    loops, wanted = (torch.load(path / "last.ckpt", weights_only=True)["loops"] for path in (RUN / "run-s0", whole))
    counts = [each["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] for each in (loops, wanted)]
    assert counts[0] == counts[1]


INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("moment", "count", "number", "step", "options"),
    [
        pytest.param("setup", 1, TERM, 0, (), marks=pytest.mark.slow),
        pytest.param("step", 1, USR1, 0, (), marks=pytest.mark.slow),  # the first stride compiles
        pytest.param("step", 6, TERM, 6, (), marks=pytest.mark.slow),
        ("step", 6, INT, 6, ()),
        pytest.param("step", 4, TERM, 4, (), marks=pytest.mark.slow),  # validation is next
        pytest.param("validation", 1, USR1, 4, (), marks=pytest.mark.slow),
        pytest.param("checkpoint", 1, TERM, 4, (), marks=pytest.mark.slow),
        pytest.param("checkpoint", 2, TERM, 4, (), marks=pytest.mark.slow),
        pytest.param("step", 12, TERM, 12, (), marks=pytest.mark.slow),
        pytest.param("test", 1, TERM, 12, (), marks=pytest.mark.slow),
        pytest.param("test", 1, INT, 12, (), marks=pytest.mark.slow),
        pytest.param("step", 5, TERM, 5, RARE, marks=pytest.mark.slow),
        pytest.param("step", 24, USR1, 24, RARE, marks=pytest.mark.slow),
        pytest.param("step", 44, TERM, 44, RARE, marks=pytest.mark.slow),
        pytest.param("step", 24, TERM, 24, (*RARE, "trainer.average=ema"), marks=pytest.mark.slow),
        pytest.param("step", 5, TERM, 5, (*RARE, "trainer.average=tail"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_ended_by_a_signal_goes_on_bitwise(
    tmp_path, monkeypatch, one_thread, whole, moment, count, number, step, options
):
    monkeypatch.chdir(tmp_path)
    ended = signalled(moment, count, number, "name=run", *options)
    assert ended.returncode == 128 + number, ended.stderr
    kept = "add resume=auto to go on" if step else "nothing is kept yet, resume=auto starts over"
    assert f"{number.name} after step {step}: {kept}" in ended.stdout
    goes_on(whole(*options), *options)


@pytest.mark.slow
def test_a_signal_at_any_time_loses_nothing(tmp_path, monkeypatch, one_thread, whole):
    monkeypatch.chdir(tmp_path)
    line = [sys.executable, "-m", "lra", "fit", *arguments("name=run"), "resume=auto"]
    draw = random.Random(0)
    for _ in range(4):
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
        assert process.stdout is not None
        while "engine eager" not in (heard := process.stdout.readline()):  # what the run is: imports are over
            assert heard
        time.sleep(draw.random())
        process.terminate()
        said = process.communicate(timeout=60)[0]
        if (RUN / "run-s0/result.json").exists():  # it came too late
            (RUN / "run-s0/result.json").unlink()
            break
        assert process.returncode == 143, said
    goes_on(whole())


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = DRIVER.replace("    return genuine", "    time.sleep(60 * (calls >= count))\n    return genuine")
    Path("driver.py").write_text(script.replace("import os, sys", "import os, sys, time"))
    line = [sys.executable, "driver.py", "step", "3", str(int(TERM)), *arguments("name=run")]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(6)
    assert process.poll() is None  # it has had one, and is in the step
    process.terminate()
    assert process.wait(20) == -TERM
    assert not (RUN / "run-s0/last.ckpt").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_is_not_the_first_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kill = "os.kill(os.getpid(), number)"
    monkeypatch.setattr(sys.modules[__name__], "DRIVER", DRIVER.replace(kill, f"{kill}; {kill}"))
    assert signalled("step", 3, INT, "name=run").returncode == -INT
    assert not (RUN / "run-s0/last.ckpt").exists()


def test_a_background_job_goes_on_after_ctrl_c(monkeypatch):
    before = signal.signal(INT, signal.SIG_IGN)
    try:
        with Preemption(mock.Mock(), Path("last.ckpt"), mock.Mock()).listening(mock.Mock()):
            assert signal.getsignal(INT) is signal.SIG_IGN and signal.getsignal(TERM) is not signal.SIG_DFL
        assert signal.getsignal(INT) is signal.SIG_IGN
    finally:
        signal.signal(INT, before)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_all_ranks_stop_at_the_same_step(tmp_path, monkeypatch, whole, launcher):
    monkeypatch.chdir(tmp_path)
    Path("driver.py").write_text(DRIVER)
    fields = arguments("name=run", "trainer.eval_every=12", *["trainer.devices=2"] * (launcher == "lightning"))
    start = [sys.executable, *(["-m", "torch.distributed.run", "--nproc-per-node=2"] * (launcher == "torchrun"))]
    line = [*start, "driver.py", "step", "5", str(int(TERM)), *fields]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=240, env=environment())
    assert ended.returncode == (143 if launcher == "lightning" else 1), ended.stderr  # torchrun has codes of its own
    # in the stride of steps 5 and 6, which the ranks know a stride later
    assert ended.stdout.count("SIGTERM after step 8: add resume=auto to go on") == 1
    assert torch.load(RUN / "run-s0/last.ckpt", weights_only=True)["global_step"] == 8
    assert not (RUN / "run-s0/result.json").exists()
    program = ["-m", "lra", "fit", *fields, "resume=auto"]
    done = subprocess.run([*start, *program], capture_output=True, text=True, timeout=240, env=environment())
    assert done.returncode == 0, done.stderr
    assert (RUN / "run-s0/result.json").exists()


@pytest.mark.slow
def test_a_stopped_grid_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(lra.__file__).parents[1]))
    todo = runs.GRID.cells(("listops",), ("flash",), 1, fields=runs.TINY)
    path = todo[0].directory.path
    Path("driver.py").write_text(DRIVER.replace("os.kill(os.getpid(), number)", "time.sleep(2)").replace(
        "import os, sys", "import os, sys, time"
    ).replace("calls == count and", "calls > 1 and not open('reached', 'w').close() and"
    ))  # fmt: skip
    slow = runs.command(todo, [sys.executable, "driver.py", "step", "0", "0"])
    runs.until(lambda: Path("reached").exists(), 60)
    os.kill(slow.pid, TERM)
    slow.join(60)
    assert slow.exitcode == 143 and not (path / "result.json").exists()
    assert torch.load(path / "last.ckpt", weights_only=True)["global_step"] == 2
    states = LocalLauncher(todo, [None]).work()
    assert states[todo[0]].status == "done"


COMPILERS = """
import os, signal
from lra.training.preemption import start_compilers

if __name__ == "__main__":
    start_compilers()
    from torch._inductor.async_compile import AsyncCompile
    pool = AsyncCompile.process_pool()
    pool.submit(os.getpid).result(60)
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.killpg(0, signal.SIGTERM)
    print(pool.process.pid, pool.submit(os.getpid).result(60))
"""


@pytest.mark.slow
def test_what_compiles_outlives_a_signal_to_the_group_but_not_the_run(tmp_path):
    script = tmp_path / "compilers.py"
    script.write_text(COMPILERS)
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    process = subprocess.run(
        [sys.executable, script], env=environment() | threads, capture_output=True, text=True, timeout=120,
        start_new_session=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    until = time.monotonic() + 30
    while any(Path("/proc", pid).exists() for pid in process.stdout.split()) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(process.stdout.split()) == 2 and not any(Path("/proc", pid).exists() for pid in process.stdout.split())
