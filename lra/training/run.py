"""A run's directory: its name, who works there, what state it is in, and the files it ends with.

The claim on a directory is a lock (flock) on its file `claim`. It belongs to the open file: whoever inherits that holds
the claim too, and it ends with the last of them, however that one ends.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from lra import environment
from lra.config.compose import ComposedConfig, list_differences
from lra.config.schema import LATER_FIELDS
from lra.errors import UsageError, naming, unusable
from lra.tasks import TASKS, versioned
from lra.training.saved import End, read_config, read_environments, whole_result

RUNS = Path("checkpoints") / "runs"
CURVES = "metrics.csv"
# what a directory holds beside a run's own files: who works there, what its processes said, and the first failure
CLAIM, LOG, FIRST_FAILURE = "claim", "log.txt", "failed.json"
CLAIMED = "LRA_CLAIMED"  # the run's directory whose claim a process has inherited
PATIENCE_S = 0.5  # `claimed` is in a claim's way for an instant
# fields of what computes, in which portions: the same steps of the same global batches, and the same scores
COMPUTING = ("engine", "trainer.accelerator", "trainer.devices", "batch.micro", "batch.eval")
# fields that choose or continue a run, or that may be others when it goes on: none of them names its directory. The
# version of the task does not either: a run of an older one stays where it is
NOT_NAMED = ("seed", "name", "resume", "draws", "task.version", *COMPUTING)


class RunDirectory:
    """`checkpoints/runs/<task>/<attn>/<recipe>[+<overrides>]-s<seed>` below the current folder."""

    def __init__(self, composed: ComposedConfig):
        run = composed.config
        self.overrides = [str(override) for override in composed.overrides if override.field not in NOT_NAMED]
        middle = run.name or "+".join([run.recipe, *([_short(",".join(self.overrides))] if self.overrides else [])])
        self.path = RUNS / run.task.name / run.attn.name / f"{middle}-s{run.seed}"
        self.best, self.last = self.path / "best.ckpt", self.path / "last.ckpt"
        self.weights, self.curves = self.path / "model.safetensors", self.path / CURVES
        self.config = run.to_saved_dict()
        self.task = versioned(run.task)
        self.versions = hasattr(run.task, "version")  # whether a field chooses one
        newest = self.task == f"{run.task.name}@{TASKS.get(run.task.name).facts.version}"
        self.asked = f"the task is {self.task} by now" if newest else f"{self.task} is asked for"
        self.resume = run.resume
        self._before: dict[Path, bytes | None] = {}  # what `opened` has replaced

    def result(self) -> dict[str, Any] | None:
        """The result of a run that ended by itself, which lies here now; UsageError if it is not whole."""
        file = self.path / "result.json"
        try:
            return whole_result(file) | {"directory": str(self.path)}
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UsageError(
                f"{file} is no whole result ({error}): remove it, then resume=auto makes it anew"
            ) from None

    @property
    def finished(self) -> bool:
        result = self.result()
        return result is not None and result["status"] == "finished"

    def check(self) -> None:
        """Refuses to go on in a directory that belongs to another configuration or holds an unfinished run."""
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
            if changed := list_differences(saved, self.config, COMPUTING):
                more = f", with resume={self.last} to go on from it" if self.last.exists() else ""
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

    def refuse_version(self, what: str, task: str) -> None:
        """UsageError if a run or a result is of another version of the task: of other data, or another protocol."""
        if task != self.task:
            raise UsageError(
                f"{self.path} holds a {what} of {task}, and {self.asked}: "
                f"{self.mend(task)}move it away, or choose another name="
            )

    def mend(self, task: str) -> str:
        """The beginning of a mend, where a field of the task chooses the version that `task` names."""
        same, (_, _, number) = self.same_task(task), task.partition("@")
        return f"give task.version={number} to go on with it, " if self.versions and same else ""

    def same_task(self, task: str) -> bool:
        """Whether it is this one, of any version."""
        return task.partition("@")[0] == self.task.partition("@")[0]

    def task_of(self, saved: Mapping[str, Any]) -> str:
        """The task and version of a saved configuration, which is ours where it states none."""
        task = saved.get("task")
        if not self.versions or not isinstance(task, dict) or not self.same_task(str(task.get("name"))):
            return self.task
        number = task.get("version", LATER_FIELDS["task.version"])
        return f"{task['name']}@{number}" if isinstance(number, int) else self.task

    def checkpoint(self) -> Path | None:
        """Where training starts: a checkpoint, or None for the beginning."""
        if self.resume in ("true", "auto"):
            return self.last if self.last.exists() else None
        return None if self.resume == "false" else Path(self.resume)

    @contextmanager
    def opened(self, checkpoint: Path | None, step: int = 0) -> Iterator[None]:
        """The directory with its configuration and environment, claimed; UsageError if somebody works there.

        Args:
            checkpoint: what `checkpoint` said when the run was prepared, which may have taken hours.
            step: how many steps it has behind it.
        """
        inherited = os.environ.get(CLAIMED) == str(self.path)
        held = None if inherited else claim(self.path)
        if held is None and not inherited:
            raise UsageError(f"another process works in {self.path}: wait for it, or choose another name=")
        try:
            if self.finished:  # since it was looked at
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
        """Takes back what `opened` wrote: nothing of the run has happened."""
        for file, content in self._before.items():
            if content is None:
                file.unlink(missing_ok=True)
            else:
                with replacing(file) as out:
                    out.write(content)

    def _open(self, step: int) -> None:
        sessions = read_environments(self.path / "env.json")
        sessions.append({"step": step, "overrides": self.overrides} | environment.describe())
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for aside in self.path.glob(".*.[0-9]*"):  # of processes that were killed
                aside.unlink()
            files = (self.path / name for name in ("result.json", "env.json", "config.yaml"))
            self._before = {file: file.read_bytes() if file.exists() else None for file in files}
            (self.path / "result.json").unlink(missing_ok=True)
            write(self.path / "env.json", json.dumps(sessions, indent=2) + "\n")
            write(self.path / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
        except OSError as error:
            raise UsageError(unusable(error, self.path) or f"cannot write to {self.path} ({error})") from error

    def finish(self, status: End, result: dict[str, Any]) -> dict[str, Any]:
        """Writes result.json, last and whole."""
        result = {"status": status, "directory": str(self.path)} | result
        write(self.path / "result.json", json.dumps(result, indent=2) + "\n")
        return result


def claim(path: Path) -> int | None:
    """The descriptor of a file that holds the claim on a run's directory, or None if somebody works there.

    Creates the directory. Close it, or hand it to the process that does the work.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = os.open(path / CLAIM, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(f"cannot write to {path} ({error.strerror}): start in another folder") from None
    until = time.monotonic() + PATIENCE_S
    while not _lock(file, fcntl.LOCK_EX, path):
        if time.monotonic() > until:
            os.close(file)
            return None
        time.sleep(0.02)
    return file


def claimed(path: Path) -> bool:
    """Whether somebody works in a run's directory."""
    try:
        file = os.open(path / CLAIM, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _lock(file, fcntl.LOCK_SH, path)  # shared: two that look don't see each other
    finally:
        os.close(file)


@contextmanager
def at_rest(path: Path) -> Iterator[bool]:
    """Whether nobody works in a run's directory; then nobody begins to until the end."""
    try:
        file = os.open(path / CLAIM, os.O_RDONLY | os.O_CREAT, 0o666)
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
        raise UsageError(f"{path}/{CLAIM} can't be locked ({error.strerror}): start on another file system") from None
    return True


def vacant(path: Path) -> bool:
    """Whether there is no run: nothing at all, or what a process leaves that was refused before it began one."""
    return not path.exists() or (path.is_dir() and {each.name for each in path.iterdir()} <= {CLAIM, LOG})


def unshared(result: Mapping[str, Any]) -> bool:
    """Whether a run had its GPU to itself: its speed and its want of memory are its own. Not known of old results."""
    return result.get("runs_per_device") == 1


def spent(result: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """(seconds of the whole run, most bytes of a GPU). Old results of resumed runs know those of the last session."""
    if "wall_seconds" in result:
        return result["wall_seconds"], result.get("peak_gpu_bytes")
    return (None, None) if result.get("resumed") else (result.get("session_seconds"), result.get("peak_gpu_bytes"))


def write(path: Path, text: str) -> None:
    """Replaces a file of text, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` in one step when all is written: a reader sees the old or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path):
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave the name without the content
            os.replace(aside, path)
    finally:
        with suppress(OSError):  # there is none: it is in place, or could not be opened
            aside.unlink()


def _short(overrides: str) -> str:
    plain = overrides.replace("/", "_").replace(" ", "")
    return plain if len(plain) <= 100 else f"{plain[:80]}~{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
