"""`launcher=slurm`: with commands that stand for those of SLURM, and with a SLURM on loopback that runs `lra fit`."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lra.errors import UsageError
from lra.experiments import accuracy
from lra.experiments.grid import local_launcher, slurm
from lra.experiments.grid.cells import cell_state
from lra.experiments.grid.slurm import SLURM_FOLDER, ArrayTask, SlurmLauncher, SlurmResources
from lra.training.fit import fit
from lra.training.run_directory import claim_directory, is_claimed
from tests.experiments.runs import GRID, TINY, cells, made, started, stub, until

submitit = pytest.importorskip("submitit", reason="needs submitit: pip install submitit")

ROOT = Path(__file__).parents[3]
DAEMONS = ("munged", "slurmctld", "slurmd")
LACKING = [name for name in (*DAEMONS, "sbatch", "srun", "squeue", "scancel", "scontrol") if not shutil.which(name)]
REFUSED = "#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n"


@pytest.fixture
def here(here, no_gpus, monkeypatch):
    """A folder, and there what stands for SLURM: sbatch puts its tasks into the file queue, which squeue prints."""
    monkeypatch.setattr(slurm, "LOOK_S", 0.02)
    monkeypatch.setattr(local_launcher, "TICK_S", 0.02)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    folder = here / "bin"
    folder.mkdir()
    for name, text in {
        "srun": "",
        "sbatch": """
            cp "$1" script; echo >>submissions; id=$(wc -l <submissions)
            last=$(sed -nE 's/^#SBATCH --array=0-([0-9]+)%.*/\\1/p' "$1")
            if [ -n "$last" ]; then seq -f "${id}_%g" 0 "$last" >>queue; else echo "$id" >>queue; fi
            echo "Submitted batch job $id" """,
        "squeue": "[ ! -e down ] || { echo 'squeue: error: no answer' >&2; exit 1; }; cat queue",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return here


def array(todo, said=None, most=None, **options):
    return SlurmLauncher(todo, SlurmResources(**options), most, say=(said if said is not None else []).append)


def ends(array, act=lambda: Path("queue").write_text("")):
    """Lets the tasks leave the queue at the first look at it."""
    array.watch = lambda states: act()
    return array.work()


def test_what_is_left_is_submitted_as_one_array(here):
    todo = cells(2, ("listops",), ("flash", "standard"))
    made(todo[0], "finished")
    made(todo[1], "oom")
    said: list[str] = []
    more = {"qos": "long", "constraint": "h200|h100", "exclude": "n[1-3],n7", "setup": "module load a\n. env.sh"}
    states = ends(array(todo, said, 1, partition="gpu", cpus=4, mem="32G", account="me", time=90, **more))
    assert [state.status for state in states.values()] == ["done", "OOM", "open", "open"]
    script = set(Path("script").read_text().splitlines())
    asked = {"array=0-1%1", "partition=gpu", "cpus-per-task=4", "mem=32G", "account=me", "time=90", "gres=gpu:1"}
    asked |= {"qos=long", "constraint='h200|h100'", "exclude='n[1-3],n7'", "requeue", "signal=USR2@90"}
    assert {*(f"#SBATCH --{flag}" for flag in asked), "module load a", ". env.sh"} <= script
    (line,) = (line for line in script if line.startswith("srun"))
    assert "--cpus-per-task=4" in line
    assert json.loads((SLURM_FOLDER / "1.json").read_text()) == {
        "1_0": str(todo[2].directory.path), "1_1": str(todo[3].directory.path)
    }  # fmt: skip
    tasks = [pickle.loads((SLURM_FOLDER / f"1_{i}_submitted.pkl").read_bytes()).function for i in (0, 1)]
    assert tasks == [ArrayTask(todo[2]), ArrayTask(todo[3])]
    assert said == [
        "submitted: array 1, 2 tasks, at most 1 at once",
        f"{todo[2]}: task 1_0 ended without a result, given up until the next call; see {SLURM_FOLDER}/1_0_0_log.out",
        f"{todo[3]}: task 1_1 ended without a result, given up until the next call; see {SLURM_FOLDER}/1_1_0_log.out",
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_a_damaged_record_of_an_array_is_named(here, content):
    SLURM_FOLDER.mkdir(parents=True)
    (SLURM_FOLDER / "1.json").write_bytes(content)
    with pytest.raises(UsageError, match=f"{SLURM_FOLDER}/1.json is damaged: scancel 1, then remove it"):
        array(cells()).plan()


def test_what_is_queued_or_worked_on_is_not_submitted_again(here):
    todo = cells(2, ("listops",), ("flash", "standard"))

    def interrupt():
        raise KeyboardInterrupt

    said: list[str] = []
    with pytest.raises(SystemExit) as left:
        ends(array(todo[:2], said), interrupt)
    assert left.value.code == 130
    assert said[1] == "array 1 goes on: the same command watches it again, scancel 1 ends it"
    held = claim_directory(todo[2].directory.path)
    with pytest.raises(SystemExit):
        ends(array(todo, said := []), interrupt)
    assert said[0] == "submitted: array 2, 1 tasks, at most 1 at once"
    assert said[1] == "array 1 2 goes on: the same command watches it again, scancel 1 2 ends it"
    assert json.loads((SLURM_FOLDER / "2.json").read_text()) == {"2": str(todo[3].directory.path)}
    os.close(held or 0)
    Path("queue").write_text("1_1\n")  # the others' tasks have ended
    assert array(todo).queued() == {todo[1]: "1_1"}
    assert "an array of 3 tasks, at most 3 at once" in array(todo).plan()[1]


def test_an_interruption_waits_until_what_is_submitted_is_written_down(here):
    sbatch = here / "bin/sbatch"
    text = sbatch.read_text().replace("/bin/sh", "/bin/bash")  # dash would take no signal as put off
    sbatch.write_text(text.replace("cp ", "kill -INT $PPID $$; cp ", 1))  # as a terminal does
    said: list[str] = []
    with pytest.raises(SystemExit) as left:
        array(cells(), said).work()
    assert left.value.code == 130 and (SLURM_FOLDER / "1.json").exists()
    assert said == [
        "submitted: array 1, 2 tasks, at most 2 at once",
        "array 1 goes on: the same command watches it again, scancel 1 ends it",
    ]


def test_it_watches_until_the_runs_have_ended_and_while_the_controller_is_down(here):
    todo, said, looks = cells(), [], []

    def act():
        looks.append(0)
        if len(looks) == 2:
            Path("down").touch()
        if len(looks) == 5:
            Path("down").unlink(missing_ok=True)
            for cell in todo:
                made(cell, "finished")

    states = ends(array(todo, said), act)
    assert [state.status for state in states.values()] == ["done", "done"]  # although the queue still has them
    assert said[1:] == ["squeue fails (squeue: error: no answer): is the controller up?; asked again until it answers"]
    ends(array(todo, said := []))
    assert not said and Path("submissions").read_text().count("\n") == 1


def test_the_command_plans_and_submits(here):
    args = ["tasks=listops", "attns=flash", "seeds=2", "recipe=demo", "launcher=slurm", "devices=1", "slurm.gres=null"]
    args.append("slurm.setup=module load cuda")
    before = sorted(here.rglob("*"))
    report = accuracy.reproduce("table3", args, dry_run=True)
    assert report.lines[1] == "2 remain to be run; slots: 1"
    assert report.lines[-1] == (
        "would be submitted: an array of 2 tasks, at most 1 at once, each with slurm.partition=null "
        "slurm.account=null slurm.time=1440 slurm.gres=null slurm.cpus=null slurm.mem=null "
        "slurm.qos=null slurm.constraint=null slurm.exclude=null slurm.setup='module load cuda'"
    )
    assert sorted(here.rglob("*")) == before
    (here / "bin/squeue").write_text("#!/bin/sh\n")  # all tasks have left the queue
    said: list[str] = []
    report = accuracy.reproduce("table3", args, said.append)
    assert "submitted: array 1, 2 tasks, at most 1 at once" in said and "--gres" not in Path("script").read_text()
    assert report.wrong


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["slurm.time=3"], "slurm.time=3 needs launcher=slurm: add that, or leave it out"),
        (["launcher=slurm", "slurm.tiem=3"], "slurm: unknown field 'tiem': did you mean 'time'?"),
        (["launcher=slurm", "slurm.time=1h"], "slurm: time=1h: write an integer"),
        (["launcher=slurm", "slurm.time=0"], "slurm.time=0: it is at least 1"),
        (["launcher=slurm", "devices=0"], "devices=0: with launcher=slurm it is how many tasks run at once"),
        (
            ["launcher=slurm", "trainer.devices=2"],
            "trainer.devices=2, but a cell can have 1 here: lower it, or give slurm.gres=gpu:2",
        ),
        (["launcher=slurm", "trainer.devices=4", "slurm.gres=gpu:h200:2"], "a cell can have 2 here: lower it, or give"),
    ],
)
def test_bad_input_is_refused_before_anything_is_submitted(here, args, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        accuracy.reproduce("table3", ["seeds=1", *args])
    assert not Path("submissions").exists()


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:4", 4), ("gpu", 1), ("gpu:h200", 1), ("gpu:h200:4", 4), ("gpu:4(S:0-1)", 4),
        ("nvme:2,gpu:a100_3g.20gb:2", 2), ("gpu:a:1,gpu:b:2", 3), ("nvme:2", None), ("gpus:2", None), (None, None),
    ],
)  # fmt: skip
def test_the_gpus_of_a_job_are_those_that_gres_names(gres, gpus):
    assert SlurmResources(gres=gres).gpus == gpus


@pytest.mark.parametrize("gres", ["gpu:4", "null"])
def test_a_cell_may_have_several_gpus_of_its_job(here, monkeypatch, gres):
    args = ["tasks=listops", "attns=flash", "seeds=1", "recipe=demo", "launcher=slurm", "trainer.devices=4"]
    report = accuracy.reproduce("table3", [*args, f"slurm.gres={gres}"], dry_run=True)
    assert "an array of 1 tasks" in report.lines[-1]
    for name, value in (("SLURM_JOB_NAME", "lra"), ("SLURM_CPUS_PER_TASK", "8"), ("CUDA_VISIBLE_DEVICES", "2,3,4,5")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")  # back after the test, although the task sets it
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    see = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'])"
    (cell,) = GRID.cells(("listops",), ("flash",), 1, fields=("trainer.devices=4",))
    ArrayTask(cell, [sys.executable, "-c", see])()
    assert (cell.directory.path / "log.txt").read_text().splitlines()[-1] == "2,3,4,5 2"


def test_what_is_lacking_is_named(here, monkeypatch, capfd):
    (here / "bin/sbatch").write_text(REFUSED)
    with pytest.raises(UsageError, match=r"sbatch refuses the array: error: invalid partition specified: gpu"):
        array(cells()).work()
    assert not list(SLURM_FOLDER.glob("*.json")) and capfd.readouterr().err == ""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="there is no srun here: call it on the cluster"):
        array(cells()).work()
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UsageError, match=r"launcher=slurm needs submitit: pip install submitit"):
        array(cells()).work()


@pytest.mark.slow  # processes that import PyTorch
def test_a_task_that_is_told_to_end_is_requeued_and_goes_on(here, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (cell,) = todo = cells(1)
    executor = submitit.LocalExecutor("logs")
    executor.update_parameters(timeout_min=60)
    job = executor.submit(ArrayTask(cell, stub(todo, "wait", "finish")))
    until(cell.directory.last.exists, 60)
    (process,) = Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text().split()
    os.kill(int(process), signal.SIGUSR2)
    until(lambda: cell_state(cell).status == "done", 60)
    job.wait()
    assert len(started()) == 2
    assert (cell.directory.path / "log.txt").read_text().count("$ ") == 2


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A SLURM of one node with two CPUs, whose daemons run as the user that tests."""
    if LACKING:
        pytest.skip(f"needs {', '.join(LACKING)}: apt-get install slurmctld slurmd slurm-client munge")
    home = tmp_path_factory.mktemp("slurm")
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    (home / "key").write_bytes(os.urandom(1024))
    (home / "key").chmod(0o600)
    for name in ("state", "spool"):
        (home / name).mkdir()
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    settings = {
        "ClusterName": "test", "SlurmctldHost": "localhost", "SlurmctldPort": ports[0], "SlurmdPort": ports[1],
        "SlurmUser": user, "SlurmdUser": user, "AuthType": "auth/munge",
        "AuthInfo": f"socket={home}/socket,cred_expire=5",  # a requeued job waits that long
        "ProctrackType": "proctrack/pgid", "TaskPlugin": "task/none", "MpiDefault": "none",
        "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CPU", "SchedulerParameters": "sched_interval=1",
        "StateSaveLocation": home / "state", "SlurmdSpoolDir": home / "spool", "KillWait": 10, "ReturnToService": 2,
        "SlurmctldPidFile": home / "slurmctld.pid", "SlurmdPidFile": home / "slurmd.pid",
        "SlurmdParameters": "config_overrides",
    }  # fmt: skip
    nodes = ["NodeName=localhost CPUs=2 State=UNKNOWN", "PartitionName=main Nodes=localhost Default=YES"]
    lines = [f"{name}={value}" for name, value in settings.items()]
    conf = home / "slurm.conf"
    conf.write_text("\n".join([*lines, *nodes, ""]))
    munge = [f"--{name}-file={home}/{file}" for name, file in (("key", "key"), ("pid", "pid"), ("seed", "seed"))]
    arguments = {
        "munged": ["--foreground", "--force", f"--socket={home}/socket", f"--log-file={home}/munged.log", *munge],
        "slurmctld": ["-D", "-i", "-f", conf],
        "slurmd": ["-D", "-N", "localhost", "-f", conf],
    }
    running = []
    try:
        for name, given in arguments.items():
            with (home / f"{name}.out").open("w") as out:
                running.append(subprocess.Popen([name, *map(str, given)], stdout=out, stderr=subprocess.STDOUT))
            if name == "munged":
                until((home / "socket").exists)
        environment = os.environ | {"SLURM_CONF": str(conf)}

        def said(*line: str) -> str:
            return subprocess.run(line, env=environment, capture_output=True, text=True).stdout.strip()

        until(lambda: said("sinfo", "-h", "-o", "%T") == "idle", 30)
        yield {"SLURM_CONF": str(conf)}
        said("scancel", "--me")
        until(lambda: not said("squeue", "-h"), 30)  # else its steps outlive the daemons
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(30)


class Command:
    """`lra reproduce table3 launcher=slurm` on a cluster, in a process of its own."""

    ARGS = ("tasks=listops", "attns=flash", "recipe=demo", "launcher=slurm", "slurm.gres=null", "slurm.time=30")

    def __init__(self, cluster, *args):
        environment = os.environ | cluster | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-m", "lra", "reproduce", "table3", *self.ARGS, *args]
        self.process = subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def end(self, code: int, seconds: float = 200.0) -> str:
        out, _ = self.process.communicate(timeout=seconds)
        assert self.process.returncode == code, out
        return out


LONGER = (*(field for field in TINY if not field.startswith("trainer.")), "trainer.accelerator=cpu",
          "trainer.steps=600", "trainer.eval_every=50", "trainer.log_every=10")  # fmt: skip


def control(cluster, *line: str) -> None:
    subprocess.run(line, env=os.environ | cluster, check=True)


def directories(here: Path) -> list[Path]:
    return [file.parent for file in sorted(here.glob("checkpoints/runs/*/*/*/last.ckpt"))]


@pytest.mark.slow  # two runs on a real SLURM, each in two parts
def test_tasks_are_requeued_in_mid_training_and_end_as_if_unbroken(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ("seeds=2", "devices=2", *LONGER)
    first = Command(cluster, *args)
    until(lambda: list((tmp_path / SLURM_FOLDER).glob("*.json")), 60)
    (record,) = (tmp_path / SLURM_FOLDER).glob("*.json")
    first.process.send_signal(signal.SIGINT)
    assert f"array {record.stem} goes on" in first.end(130)
    runs = [tmp_path / path for path in json.loads(record.read_text()).values()]
    # each at once when it can be, for it is short: as ahead of the time limit, and as a preemption begins
    for task, (run, name) in enumerate(zip(runs, ("USR2", "TERM"), strict=True)):
        until((run / "last.ckpt").exists, 120)
        assert is_claimed(run) and not (run / "result.json").exists()
        control(cluster, "scancel", f"--signal={name}", f"{record.stem}_{task}")
    until(lambda: not any(map(is_claimed, runs)), 30)
    planned = Command(cluster, *args, "--dry-run").end(0)
    assert f"in the queue: {record.stem}_0, {record.stem}_1" in planned and "nothing would be submitted" in planned
    second = Command(cluster, *args).end(0)
    assert "submitted" not in second and len(list((tmp_path / SLURM_FOLDER).glob("*.json"))) == 1
    for seed, run in enumerate(runs):
        result = json.loads((run / "result.json").read_text())
        log = (run / "log.txt").read_text().splitlines()
        commands = [line for line in log if line.startswith("$ ")]
        assert result["resumed"] and len(commands) == 2
        assert all(" -m lra fit task=listops attn=flash recipe=demo" in line for line in commands)
        assert all(line.endswith(" resume=auto") for line in commands) and "requeu" not in "\n".join(log)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        unbroken = fit("task=listops", "attn=flash", "recipe=demo", f"seed={seed}", *LONGER, f"name=unbroken{seed}")
        torch.set_num_threads(threads)
        for part in ("test", "val"):
            assert result[part] == unbroken[part]
    assert "submitted" not in Command(cluster, *args).end(0)


@pytest.mark.slow  # likewise, one run in three parts
def test_a_cancelled_task_is_not_requeued_and_the_next_call_submits_it(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", cluster["SLURM_CONF"])
    args = ("seeds=1", *LONGER)
    refused = Command(cluster, *args, "slurm.partition=none").end(2)
    assert "sbatch refuses the array: error: " in refused and "partition" in refused.split("refuses")[1]
    assert slurm._queued_tasks(["9998"]) == slurm._queued_tasks(["9998", "9999"]) == set()  # unknown, or long gone
    first = Command(cluster, *args)
    until(lambda: directories(tmp_path), 120)
    (record,) = (tmp_path / SLURM_FOLDER).glob("*.json")
    (run,) = directories(tmp_path)
    control(cluster, "scontrol", "requeue", record.stem)
    until(lambda: (run / "log.txt").read_text().count("$ ") == 2 and is_claimed(run), 60)
    control(cluster, "scancel", record.stem)
    assert f"task {record.stem} ended without a result" in first.end(1)
    assert not is_claimed(run) and not (run / "result.json").exists()
    second = Command(cluster, *args).end(0)
    assert "submitted: array" in second and json.loads((run / "result.json").read_text())["resumed"]
