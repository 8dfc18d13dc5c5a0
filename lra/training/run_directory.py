"""A run's directory: its name, the process that works there, its state, and its files.

A process claims a directory by a lock (flock) on its file `claim`. The lock belongs to the open file. A process that
inherits the file also holds the claim. The claim ends when the last of them ends, for any reason.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lra import environment
from lra.config.compose import ComposedConfig, list_differences
from lra.config.schema import LATER_FIELDS, UNSAVED_FIELDS
from lra.config.start_rules import START
from lra.errors import UsageError, explain_system_error
from lra.files import replace_file
from lra.tasks import TASKS, is_published, versioned_name
from lra.training.run_files import EndStatus, read_config, read_environments, read_whole_result

RUNS_FOLDER = Path("checkpoints") / "runs"
CURVES_FILE, PREDICTIONS_FILE = "metrics.csv", "predictions.npz"
# files beside those of the run: its claim, the output of its processes, and the first failure
CLAIM_FILE, LOG_FILE, FIRST_FAILURE_FILE = "claim", "log.txt", "failed.json"
CLAIM_VARIABLE = "LRA_CLAIMED"  # names the directory whose claim a process has inherited
CLAIM_PATIENCE_S = 0.5  # `is_claimed` holds the lock for an instant
# fields of hardware and micro-batching: they change neither the steps nor the scores
HARDWARE_FIELDS = ("engine", "trainer.accelerator", "trainer.devices", "batch.micro", "batch.eval")
RESUME_FIELDS = ("name", "trainer.steps", "trainer.epochs", *HARDWARE_FIELDS)  # they may change when a run resumes
# fields that are no part of a directory's name: they choose or continue a run, or may change when it resumes. The
# version of the task is one of them, so a run of an older version keeps its directory
UNNAMED_FIELDS = ("seed", "name", "task.version", *UNSAVED_FIELDS, *HARDWARE_FIELDS)


class RunDirectory:
    """`checkpoints/runs/<task>/<attn>/<recipe>[+<overrides>]-s<seed>` below the current folder."""

    def __init__(self, composed: ComposedConfig):
        run = composed.config
        # fields that only say where data lies
        self.places = ("task.source",) if is_published(run.task) else ()
        unnamed = (*UNNAMED_FIELDS, *self.places)
        self.overrides = [str(override) for override in composed.overrides if override.field not in unnamed]
        middle = run.name or "+".join([run.recipe, *([short_name(",".join(self.overrides))] if self.overrides else [])])
        self.path = RUNS_FOLDER / run.task.name / run.attn.name / f"{middle}-s{run.seed}"
        self.best, self.last = self.path / "best.ckpt", self.path / "last.ckpt"
        self.weights, self.curves = self.path / "model.safetensors", self.path / CURVES_FILE
        self.predictions = self.path / PREDICTIONS_FILE
        self.config = run.to_saved_dict()
        self.task = versioned_name(run.task)
        self.versions = hasattr(run.task, "version")  # whether a field chooses one
        newest = self.task == f"{run.task.name}@{TASKS.get_declared(run.task.name).facts.version}"
        self.asked = f"the task is now {self.task}" if newest else f"{self.task} is asked for"
        self.resume = run.resume
        self._before: dict[Path, bytes | None] = {}  # what `opened` has replaced

    def result(self) -> dict[str, Any] | None:
        """Returns the result of a run that has ended, or None. UsageError if the file is not whole."""
        file = self.path / "result.json"
        try:
            return read_whole_result(file) | {"directory": str(self.path)}
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UsageError(
                f"{file} is not a whole result ({error}): remove it, then resume=auto makes it anew"
            ) from None

    @property
    def finished(self) -> bool:
        result = self.result()
        return result is not None and result["status"] == "finished"

    def check(self) -> None:
        """Raises a UsageError if the directory has another configuration, or an unfinished run that is not resumed."""
        if len(os.fsencode(self.path.name)) > 255:
            raise UsageError(f"{self.path.name} is too long for a folder: choose a name=")
        path = Path(self.resume)
        if self.resume not in ("false", "true", "auto") and not (path.suffix == ".ckpt" and os.path.isfile(path)):
            last = path / self.last.name
            mend = f"give resume={last}" if os.path.isfile(last) else "resume is false, true, auto or a .ckpt file"
            raise UsageError(f"resume={self.resume}: no such checkpoint; {mend}")
        file = self.path / "config.yaml"
        if file.exists():
            saved = read_config(file)
            if saved is None:
                raise UsageError(
                    f"{file} is damaged or no configuration of a run: move {self.path} away, or choose another name="
                )
            self.refuse_version("run", self.task_of(saved))
            if changed := self.list_changes(saved, HARDWARE_FIELDS):
                can_resume = not self.list_changes(saved, RESUME_FIELDS)
                go_on = f"resume={self.last} to go on from it" if can_resume else f"init={self.last} to start from it"
                more = f", with {go_on}" if self.last.exists() else ""
                if (recipe := saved.get("recipe")) != self.config["recipe"]:  # as where init=, which names it, is gone
                    more += f"; or give recipe={recipe}, which that run has"
                raise UsageError(
                    f"{self.path} holds a run with another configuration ({'; '.join(changed)}): "
                    f"choose another name={more}"
                )
        if (result := self.result()) is not None:
            self.refuse_version("result", result["task"])
            if result["status"] == "finished":
                return
        elsewhere = path.suffix == ".ckpt" and path.resolve().parent != self.path.resolve()
        if elsewhere and self.last.exists():
            raise UsageError(
                f"{self.path} holds an unfinished run: resume=auto goes on with it, name= starts another from {path}"
            )
        if self.resume == "true" and not self.last.exists():
            raise UsageError(f"resume=true, but {self.path} has no last.ckpt: leave resume out to start there")
        if self.resume == "false" and file.exists():
            raise UsageError(
                f"{self.path} holds an unfinished run: add resume=auto to go on, or name= to start another"
            )

    def list_changes(self, saved: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
        """Lists the fields in which this run differs from a saved configuration, but for `ignored` and `places`."""
        return list_differences(saved, self.config, (*ignored, *self.places))

    def refuse_version(self, what: str, task: str) -> None:
        """Raises a UsageError if a run or a result is of another version of the task."""
        if task != self.task:
            raise UsageError(
                f"{self.path} holds a {what} of {task}, and {self.asked}: "
                f"{self.mend(task)}move it away, or choose another name="
            )

    def mend(self, task: str) -> str:
        """Returns the beginning of a mend if a field of the task chooses the version that `task` names."""
        same, (_, _, number) = self.same_task(task), task.partition("@")
        return f"give task.version={number} to go on with it, " if self.versions and same else ""

    def same_task(self, task: str) -> bool:
        """Whether `task` is the task of this run, in any version."""
        return task.partition("@")[0] == self.task.partition("@")[0]

    def task_of(self, saved: Mapping[str, Any]) -> str:
        """Returns task and version of a saved configuration; those of this run if it states none."""
        task = saved.get("task")
        if not self.versions or not isinstance(task, dict) or not self.same_task(str(task.get("name"))):
            return self.task
        number = task.get("version", LATER_FIELDS["task.version"])
        return f"{task['name']}@{number}" if isinstance(number, int) else self.task

    def checkpoint(self) -> Path | None:
        """Returns the checkpoint from which training resumes; None if it starts anew."""
        if self.resume in ("true", "auto"):
            return self.last if self.last.exists() else None
        return None if self.resume == "false" else Path(self.resume)

    @contextmanager
    def opened(self, checkpoint: Path | None, step: int = 0, later: int = 0) -> Iterator[None]:
        """Claims the directory and writes its configuration and environment.

        Args:
            checkpoint: the result of `checkpoint` before the run was prepared, which may have taken hours.
            step: number of steps that this checkpoint has completed.
            later: number of runs that follow in the same command, each of which starts from the one before.

        Raises:
            UsageError: another process works in the directory, or has changed it.
        """
        inherited = os.environ.get(CLAIM_VARIABLE) == str(self.path)
        held = None if inherited else claim_directory(self.path)
        if held is None and not inherited:
            said, mend = f"another process works in {self.path}", "wait for it, or choose another name="
            if later:
                said = f"{said}, a run before this one"
                mend = f"wait for it, then give the same command again; or {START * later}name= trains one of your own"
            raise UsageError(f"{said}: {mend}", of_earlier_run=later > 0)
        try:
            if self.finished:  # since the last check
                raise UsageError(f"another process has finished {self.path}: the same command again prints its result")
            self.check()
            if self.checkpoint() != checkpoint:
                raise UsageError(
                    f"another process has worked in {self.path}: the same command again goes on from there"
                )
            self._open(step)
            yield
        finally:
            if held is not None:
                os.close(held)

    def withdraw(self) -> None:
        """Takes back what `opened` wrote, because the run did not begin."""
        for file, content in self._before.items():
            if content is None:
                file.unlink(missing_ok=True)
            else:
                with replace_file(file) as out:
                    out.write(content)

    def _open(self, step: int) -> None:
        sessions = read_environments(self.path / "env.json")
        sessions.append({"step": step, "overrides": self.overrides} | environment.describe())
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for aside in self.path.glob(".*.[0-9]*"):  # left by killed processes
                aside.unlink()
            files = (self.path / name for name in ("result.json", "env.json", "config.yaml"))
            self._before = {file: file.read_bytes() if file.exists() else None for file in files}
            for name in ("result.json", PREDICTIONS_FILE):  # of an earlier session
                (self.path / name).unlink(missing_ok=True)
            write_text(self.path / "env.json", json.dumps(sessions, indent=2) + "\n")
            write_text(self.path / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
        except OSError as error:
            raise UsageError(
                explain_system_error(error, self.path) or f"cannot write to {self.path} ({error})"
            ) from error

    def finish(self, status: EndStatus, result: dict[str, Any]) -> dict[str, Any]:
        """Writes result.json, as the last file of a run."""
        result = {"status": status, "directory": str(self.path)} | result
        write_text(self.path / "result.json", json.dumps(result, indent=2) + "\n")
        return result


def claim_directory(path: Path) -> int | None:
    """Claims a run's directory and creates it if it is missing.

    Returns:
        The descriptor of the file that holds the claim, or None if another process works there. Close it, or hand it to
        the process that does the work.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = os.open(path / CLAIM_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(f"cannot write to {path} ({error.strerror}): start in another folder") from None
    until = time.monotonic() + CLAIM_PATIENCE_S
    while not _lock(file, fcntl.LOCK_EX, path):
        if time.monotonic() > until:
            os.close(file)
            return None
        time.sleep(0.02)
    return file


def is_claimed(path: Path) -> bool:
    """Whether a process works in a run's directory."""
    try:
        file = os.open(path / CLAIM_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _lock(file, fcntl.LOCK_SH, path)  # shared, so that two checks do not see each other
    finally:
        os.close(file)


@contextmanager
def locked_shared(path: Path) -> Iterator[bool]:
    """Whether nobody works in a run's directory; then nobody begins to until the end."""
    try:
        file = os.open(path / CLAIM_FILE, os.O_RDONLY | os.O_CREAT, 0o666)
    except OSError:  # there is no claim, and none can be made: of somebody else's runs, which may only be read
        yield True
        return
    try:
        yield _lock(file, fcntl.LOCK_SH, path)
    finally:
        os.close(file)


def _lock(file: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise UsageError(
            f"{path}/{CLAIM_FILE} can't be locked ({error.strerror}): start on another file system"
        ) from None
    return True


def is_vacant(path: Path) -> bool:
    """Whether a directory has no run: it is missing, or has only the claim and log of a refused one."""
    return not path.exists() or (path.is_dir() and {each.name for each in path.iterdir()} <= {CLAIM_FILE, LOG_FILE})


def had_gpu_alone(result: Mapping[str, Any]) -> bool:
    """Whether a run had its GPU alone, so that its speed and memory are its own. False for old results."""
    return result.get("runs_per_device") == 1


def time_and_memory(result: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Returns (seconds of the whole run, peak bytes on a GPU). Old results of resumed runs do not know them."""
    if "wall_seconds" in result:
        return result["wall_seconds"], result.get("peak_gpu_bytes")
    return (None, None) if result.get("resumed") else (result.get("session_seconds"), result.get("peak_gpu_bytes"))


def write_text(path: Path, text: str) -> None:
    """Replaces a text file in one step, like `replace_file`."""
    with replace_file(path) as file:
        file.write(text.encode())


def short_name(overrides: str) -> str:
    """The part of a folder's or file's name that says these overrides. A long one ends with a hash of all of them."""
    plain = overrides.replace("/", "_").replace(" ", "")
    return plain if len(plain) <= 100 else f"{plain[:80]}~{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
