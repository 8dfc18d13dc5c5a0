"""Runs cells on a SLURM cluster: one job array, submitted through submitit, with one task for each cell.

A task runs its cell as the local launcher does, and the run directory holds the cell's state. The queue is asked only
about cells that have not ended there. `checkpoints/slurm/<array>.json` says which task has which cell. The run
directories do not say so, as a directory that exists belongs to a run that has started.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

from filelock import FileLock, Timeout

from lra.config.options import parse_options
from lra.config.override import Override
from lra.errors import UsageError, shorten
from lra.experiments.grid import cells
from lra.experiments.grid.grid import Cell
from lra.experiments.grid.local_launcher import FIT_COMMAND, CellStates, LocalLauncher, catch_signals, list_slots
from lra.reading import read_json
from lra.training.run_directory import RUNS_FOLDER, write_text

# records of arrays, and the files of submitit; tasks print to <task>_0_log.out
SLURM_FOLDER = RUNS_FOLDER.parent / "slurm"
PATIENCE_S = 10.0  # for another command that submits, before a line says so
LOOK_S = 5.0  # between looks at the queue and at the run directories
TIME_LIMITS = 1000  # of one run, each followed by a requeue; submitit asks for some number


@dataclass(frozen=True)
class SlurmResources:
    """What sbatch is asked for, for each cell: `slurm.<field>=`. null leaves it to the cluster."""

    partition: str | None = None
    account: str | None = None
    time: int = 1440  # minutes, after which a run is requeued
    gres: str | None = "gpu:1"
    cpus: int | None = None
    mem: str | None = None  # as sbatch takes it: 32G
    qos: str | None = None
    constraint: str | None = None  # features of nodes, as sbatch takes them: "h200|h100"
    exclude: str | None = None  # nodes, as sbatch takes them: node[1-3],node7
    setup: str | None = None  # lines of shell that run before lra in each job: "module load cuda; source env.sh"

    def __post_init__(self) -> None:
        for name in ("time", "cpus"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"slurm.{name}={value}: it is at least 1")
        if self.gres and re.search(r"\d{5}", self.gres):
            raise UsageError(f"slurm.gres={shorten(self.gres)} asks for more GPUs than there are: write gpu:1, say")

    @property
    def gpus(self) -> int | None:
        """GPUs of a job, as gpu:4 or gpu:h200:4 state them; None if `gres` has none, and the cluster decides."""
        counts = re.findall(r"(?:^|,)gpu\b(?::[^:,(]*[^:,(\d][^:,(]*)?(?::(\d+))?", self.gres or "")
        return sum(int(count or 1) for count in counts) or None


def parse_resources(args: Sequence[Override], launcher: str) -> SlurmResources:
    """The resources in the arguments `slurm.<field>=`. UsageError if one is unknown, or the launcher is another."""
    if args and launcher != "slurm":
        raise UsageError(f"{args[0]} needs launcher=slurm: add that, or leave it out")
    own = [Override(override.field.removeprefix("slurm."), override.text) for override in args]
    return parse_options(SlurmResources, own, "slurm: ")


@dataclass(frozen=True)
class ArrayTask:
    """What an array task does. submitit calls `checkpoint` to requeue it."""

    cell: Cell
    command: Sequence[str] = FIT_COMMAND

    def __call__(self) -> None:
        gpus = self.cell.composed.config.trainer.devices  # each has a process
        if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):  # also where tasks aren't bound to theirs
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(cpus) // gpus)))
        places = list_slots(gpus) if gpus > 1 else [None]  # one is what SLURM gives, or a CPU
        try:
            LocalLauncher(cells.with_stages([self.cell]), places, say=print, command=self.command).work()
        except SystemExit as end:
            # SIGTERM: of preemption while the job still runs, of scancel when it does not
            if end.code == 128 + signal.SIGTERM and _running():
                signal.raise_signal(signal.Signals[f"SIG{_submitit().JobEnvironment.USR_SIG}"])  # requeues
            raise

    def checkpoint(self) -> Any:
        """The task again: `resume=auto` knows where to continue."""
        return _submitit().helpers.DelayedSubmission(self)


class SlurmLauncher:
    """Submits the cells that are left, and watches until none of their tasks is in the queue.

    Args:
        todo: the cells, in this order.
        resources: for each of them.
        most: tasks that run at once; all by default.
        watch: is called with all states every few seconds.
        say: is called with lines on what states don't tell.
        command: runs with a cell's arguments and `resume=auto`.

    Raises:
        UsageError: without submitit, away from a cluster, and for what sbatch refuses.
    """

    def __init__(
        self,
        todo: Sequence[Cell],
        resources: SlurmResources,
        most: int | None = None,
        watch: Callable[[CellStates], None] = lambda states: None,
        say: Callable[[str], None] = lambda line: None,
        command: Sequence[str] = FIT_COMMAND,
    ):
        if most is not None and most < 1:
            raise UsageError(f"devices={most}: with launcher=slurm it is how many tasks run at once, at least 1")
        self.resources, self.most, self.watch, self.say, self.command = resources, most, watch, say, command
        self.todo = list(todo)
        self.states: CellStates = {cell: cells.cell_state(cell) for cell in todo}

    def work(self) -> CellStates:
        """Returns the states when nothing is queued or runs. On SIGINT it raises SystemExit(130); the array
        continues.
        """
        executor = self._executor()
        tasks: dict[Cell, str] = {}
        # kept to the end: Python drops a Ctrl-C that comes while its finaliser runs
        lock = FileLock(SLURM_FOLDER / "lock")
        try:
            with self._turn(lock):  # one command at a time sees what is queued and adds to it
                tasks = self.queued()
                if new := self._new(tasks):
                    with _defer_interrupt():  # else it may be submitted and nowhere written down
                        tasks |= self._submit(executor, new)
            self._follow(tasks)
        except KeyboardInterrupt:
            arrays = " ".join(sorted({task.partition("_")[0] for task in tasks.values()}))
            goes_on = f"array {arrays} goes on: the same command watches it again, scancel {arrays} ends it"
            self.say(goes_on if arrays else "left, with nothing in the queue")
            raise SystemExit(130) from None
        return self.states

    def _turn(self, lock: FileLock) -> Any:
        """The lock, held. Says so if it has to wait for another command."""
        try:
            return lock.acquire(timeout=PATIENCE_S)
        except Timeout:
            self.say(f"another command submits tasks and holds {lock.lock_file}: waiting for it")
            return lock.acquire()

    def plan(self) -> list[str]:
        """Lines on what would be submitted. Submits nothing."""
        tasks = self.queued()
        lines = [f"in the queue: {', '.join(sorted(tasks.values()))}"] if tasks else []
        if not (new := self._new(tasks)):
            return [*lines, "nothing would be submitted"]
        asked = dataclasses.asdict(self.resources).items()
        shown = " ".join(
            f"slurm.{name}={'null' if value is None else shlex.quote(str(value))}" for name, value in asked
        )
        many = f"an array of {len(new)} tasks, at most {min(self.most or len(new), len(new))} at once"
        lines.append(f"would be submitted: {many}, each with {shown}")
        try:
            _submission()
        except UsageError as error:
            lines.append(f"but not from here: {error}")
        return lines

    def queued(self) -> dict[Cell, str]:
        """The cells whose task is in the queue, and that task."""
        owners: dict[str, str] = {}
        for file in SLURM_FOLDER.glob("*.json"):
            try:
                owners |= {str(task): str(path) for task, path in read_json(file).items()}
            except (ValueError, AttributeError):
                raise UsageError(f"{file} is damaged: scancel {file.stem}, then remove it") from None
        mine = {str(cell.directory.path): cell for cell in self.todo}
        live = _queued_tasks(sorted({task.partition("_")[0] for task, path in owners.items() if path in mine}))
        return {mine[path]: task for task, path in owners.items() if path in mine and task in live}

    def _new(self, tasks: dict[Cell, str]) -> list[Cell]:
        """Cells that are not queued, not worked on and not final."""
        self.states = {cell: cells.cell_state(cell) for cell in self.todo}  # after the queue, which they may have left
        states = self.states.items()
        return [cell for cell, s in states if not s.final and s.status != "running elsewhere" and cell not in tasks]

    def _executor(self) -> Any:
        submitit = _submission()
        try:
            SLURM_FOLDER.mkdir(parents=True, exist_ok=True)
            executor = submitit.SlurmExecutor(SLURM_FOLDER, max_num_timeout=TIME_LIMITS)
        except OSError as error:
            raise UsageError(f"cannot write to {SLURM_FOLDER} ({error.strerror}): start in another folder") from None
        own, cpus = self.resources, self.resources.cpus
        asked = {
            "partition": own.partition, "account": own.account, "gres": own.gres, "mem": own.mem, "qos": own.qos,
            "constraint": own.constraint, "exclude": own.exclude, "setup": own.setup and own.setup.splitlines(),
        }  # fmt: skip
        executor.update_parameters(
            **{name: value for name, value in asked.items() if value is not None},
            # srun does not take over what sbatch was given
            **({"cpus_per_task": cpus, "srun_args": [f"--cpus-per-task={cpus}"]} if cpus else {}),
            job_name="lra", time=own.time, array_parallelism=self.most or len(self.todo), stderr_to_stdout=True,
            additional_parameters={"requeue": True},  # also where the cluster's default is not to
        )  # fmt: skip
        return executor

    def _submit(self, executor: Any, new: Sequence[Cell]) -> dict[Cell, str]:
        # copies, without what the cells have composed
        tasks = [ArrayTask(dataclasses.replace(cell), self.command) for cell in new]
        try:
            with redirect_stderr(io.StringIO()):  # submitit prints what sbatch says, and has it in the error
                jobs = executor.submit_array(tasks)
        except _submitit().core.utils.FailedJobError as error:
            lines = str(error).splitlines()
            said = [line.removeprefix("sbatch: ") for line in lines if line.startswith("sbatch: ")]
            raise UsageError(f"sbatch refuses the array: {' '.join(said) or error}") from None
        ids = [job.job_id for job in jobs]
        array = ids[0].partition("_")[0]
        owners = {task: str(cell.directory.path) for task, cell in zip(ids, new, strict=True)}
        write_text(SLURM_FOLDER / f"{array}.json", json.dumps(owners, indent=2) + "\n")
        self.say(f"submitted: array {array}, {len(new)} tasks, at most {min(self.most or len(new), len(new))} at once")
        return dict(zip(new, ids, strict=True))

    def _follow(self, tasks: dict[Cell, str]) -> None:
        """Waits until no cell is in the queue or worked on. Removes from `tasks` what has ended."""
        silent = False
        while True:
            self.states = {
                cell: state if state.final else cells.cell_state(cell) for cell, state in self.states.items()
            }
            self.watch(self.states)
            for cell in list(tasks):
                if self.states[cell].final:
                    del tasks[cell]
            if not tasks and not any(state.status == "running elsewhere" for state in self.states.values()):
                return
            time.sleep(LOOK_S)
            try:
                queued = self.queued()
            except UsageError as error:  # the controller may come back
                if not silent:
                    self.say(f"{error}; asked again until it answers")
                silent = True
                continue
            silent = False
            for cell, task in list(tasks.items()):
                if cell not in queued:
                    del tasks[cell]
                    if not cells.cell_state(cell).final:
                        log = SLURM_FOLDER / f"{task}_0_log.out"
                        self.say(f"{cell}: task {task} ended without a result, given up until the next call; see {log}")


def _queued_tasks(arrays: Sequence[str]) -> set[str]:
    """The tasks of these arrays that wait or run, `<array>_<index>`."""
    if not arrays:
        return set()
    done = _call(["squeue", "--noheader", "--array", "--format=%i", f"--jobs={','.join(arrays)}"])
    if done.returncode and "Invalid job id" not in done.stderr:  # that is a single array, which ended long ago
        raise UsageError(f"squeue fails ({done.stderr.strip()}): is the controller up?")
    return set(done.stdout.split())


def _running() -> bool:
    """Whether the array task of this process still runs."""
    if "SLURM_JOB_ID" not in os.environ:
        return False
    # not that variable's: of one of an array's tasks it is the array's
    job = _submitit().JobEnvironment().job_id
    return _call(["squeue", "--noheader", "--format=%T", f"--jobs={job}"]).stdout.strip() == "RUNNING"


def _call(line: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(line, capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError(f"launcher=slurm, but there is no {line[0]} here: call it on the cluster") from None


def _submission() -> Any:
    """submitit; UsageError if nothing can be submitted from here."""
    submitit = _submitit()
    if shutil.which("srun") is None:
        raise UsageError("launcher=slurm, but there is no srun here: call it on the cluster")
    return submitit


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError:
        raise UsageError("launcher=slurm needs submitit: pip install submitit") from None


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Delays SIGINT to the end of the block, for this process and those that it starts there."""
    with catch_signals(signal.SIGINT) as arrived:  # any thread may be given it
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit this, not a handler
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if arrived:
        signal.raise_signal(signal.SIGINT)
