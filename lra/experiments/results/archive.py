"""`lra results pack` and `lra results merge`: runs from one machine to another, as one .tar.xz file.

A folder of released weights is merged as the run that it was. An archive holds `<task>/<attn>/<run>/<file>`, as below
`checkpoints/runs`. It is not trusted: everything is unpacked aside and checked before the first run is put in place.
Each run is moved under the claim on its directory. So a run that a process works on is never touched.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lra.config.compose import list_differences
from lra.config.options import parse_options
from lra.errors import UsageError, is_disk_full
from lra.experiments.results.unpack import CHECKPOINT_FILES, SMALL_FILES, unpack_runs
from lra.files import check_archive_name, is_plain_name, refuse_existing_archive, write_archive
from lra.training import checkpoints, curves
from lra.training.predictions import read_predictions
from lra.training.run_directory import (
    CLAIM_FILE,
    FIRST_FAILURE_FILE,
    HARDWARE_FIELDS,
    PREDICTIONS_FILE,
    RUNS_FOLDER,
    claim_directory,
    had_gpu_alone,
    is_claimed,
    is_vacant,
    locked_shared,
)
from lra.training.run_files import END_STATUSES, EndStatus, read_config, read_whole_result

# in which order files come to a run's directory, and leave it in reverse: a run cut off there starts over, and the next
# merge replaces it
FILE_ORDER = {"config.yaml": -1, "last.ckpt": 1, "result.json": 2}
Decision = tuple[str, str]  # `added`, `replaced`, `completed`, `kept` or `refused`, and why or with which files
BUSY: Decision = ("kept", "a process works on it here")


@dataclass(frozen=True)
class PackOptions:
    out: str = ""
    runs: str = str(RUNS_FOLDER)
    # of finished runs: nothing, what others start from, or what goes on
    checkpoints: Literal["none", "weights", "last", "best", "all"] = "none"

    def __post_init__(self) -> None:
        check_archive_name(self.out, "lra results pack")


@dataclass(frozen=True)
class MergeOptions:
    runs: str = str(RUNS_FOLDER)


@dataclass(frozen=True)
class StoredRun:
    """A run's directory on the disk."""

    path: Path

    @property
    def name(self) -> str:
        """`<task>/<attn>/<run>`."""
        return "/".join(self.path.parts[-3:])

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def config(self) -> dict[str, Any]:
        config = read_config(self.path / "config.yaml")
        if config is None:
            raise UsageError(f"{self.name}/config.yaml is not a configuration of a run: get it again, or move it away")
        return config

    def result(self) -> dict[str, Any] | None:
        """The result; None if the run has not ended. UsageError if it can't be read."""
        return self._ended("result.json", END_STATUSES)

    def failure(self) -> dict[str, Any] | None:
        """The first result of a run that failed and was tried again. UsageError if it is another one."""
        return self._ended(FIRST_FAILURE_FILE, ("failed",))

    def _ended(self, name: str, ends: Sequence[EndStatus]) -> dict[str, Any] | None:
        try:
            result = read_whole_result(self.path / name)
            if result["status"] not in ends:
                raise ValueError(f"it lacks a status of {', '.join(ends)}")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UsageError(
                f"{self.name}/{name} is not a whole result ({error}): do the run again, or leave it out"
            ) from None
        return result

    def finished(self) -> dict[str, Any] | None:
        """The result of a run that reached its end."""
        result = self.result()
        return result if result and result["status"] == "finished" else None

    def ended(self) -> int:
        """0 if the run has not ended, 1 if it is to be tried again, 2 if it is final."""
        if (result := self.result()) is None:
            return 0
        again = {"finished": False, "failed": self.failure() is None, "oom": not had_gpu_alone(result)}
        return 1 if again[result["status"]] else 2

    def steps(self) -> int:
        """The steps from which the run can be continued: those behind its last.ckpt."""
        try:
            return checkpoints.read_progress(self.path / "last.ckpt")[0] if self.has("last.ckpt") else 0
        except Exception:  # of many kinds, depending on where the damage is
            raise UsageError(f"{self.name}/last.ckpt can't be read: leave that run out") from None

    def check_curves(self) -> None:
        """UsageError if reports could not read its metrics.csv."""
        try:
            curves.read_curves(self.path / "metrics.csv")
        except FileNotFoundError:
            return
        except UsageError:
            raise UsageError(f"{self.name}/metrics.csv can't be read: leave that run out") from None

    def check_predictions(self) -> None:
        """UsageError if its predictions.npz could not be compared with others."""
        try:
            read_predictions(self.path / PREDICTIONS_FILE)
        except UsageError:
            raise UsageError(f"{self.name}/{PREDICTIONS_FILE} can't be read: leave that run out") from None

    def check_weights(self, config: dict[str, Any]) -> None:
        """UsageError if its model.safetensors is damaged, or belongs to another run."""
        try:
            _, identity = checkpoints.read_checkpoint(self.path / "model.safetensors")
        except UsageError:
            raise UsageError(f"{self.name}/model.safetensors can't be read: leave that run out") from None
        if changed := list_differences(config, identity["config"], HARDWARE_FIELDS):
            raise UsageError(f"{self.name}/model.safetensors is another run's ({'; '.join(changed)}): get it again")

    def check(self, names: Sequence[str]) -> None:
        """UsageError if its files are damaged or belong to several runs. Of the checkpoints, only those named count."""
        config = self.config()
        try:
            task, attn, seed = config["task"]["name"], config["attn"]["name"], config["seed"]
        except (KeyError, TypeError):
            raise UsageError(f"{self.name}/config.yaml is not a configuration of a run: get it again") from None
        if self.path.parts[-3:-1] != (task, attn) or not self.path.name.endswith(f"-s{seed}"):
            raise UsageError(f"{self.name} holds a run of {task}, {attn}, seed {seed}: get it again")
        for name, result in (("result.json", self.result()), (FIRST_FAILURE_FILE, self.failure())):
            if result and (changed := list_differences(config, result["config"], HARDWARE_FIELDS)):
                raise UsageError(f"config.yaml and {name} of {self.name} differ ({'; '.join(changed)}): get it again")
        self.check_curves()
        self.check_predictions()
        if "last.ckpt" in names:
            self.steps()
        if "model.safetensors" in names and self.has("model.safetensors"):
            self.check_weights(config)


def pack_runs(args: Sequence[str]) -> list[str]:
    """Writes an archive of the runs below `runs` that ended, finished or not. Returns lines to print.

    With checkpoints it also packs unfinished runs that can be continued, with best.ckpt and last.ckpt. A run that a
    process works on is left out, as its files may not belong together.
    """
    options = parse_options(PackOptions, args)
    with ExitStack() as held:
        return _pack(Path(options.runs), Path(options.out), options.checkpoints, held)


def _pack(folder: Path, out: Path, checkpoints: str, held: ExitStack) -> list[str]:
    refuse_existing_archive(out)
    packed, notes = [], []
    for run in _runs(folder):
        names, note = _chosen(run, checkpoints, held)
        packed += [(run, name) for name in names if run.has(name)]
        notes += [note] if note else []
    count = len({run.path for run, _ in packed})
    if not count:
        why = "; ".join(notes) or "name the folder above <task>/<attn>/<run>"
        raise UsageError(f"runs={folder} has no run that can be packed: {why}")
    size = write_archive(out, ((f"{run.name}/{name}", run.path / name) for run, name in packed))
    return [*notes, f"{count} runs, {len(packed)} files, {size}"]


def merge_runs(file: str | Path, args: Sequence[str] = ()) -> list[str]:
    """Adds the runs of an archive, or of a released run's folder, to those below `runs`. Returns lines to print.

    A run that a process works on stays. So does a finished one, which gets the checkpoints that it lacks. Another run
    gives way to a finished one, to one with more steps, and, if it has not ended, to one that has ended with as many.

    Raises:
        UsageError: and changes nothing, if anything in the file is wrong, if a run's directory has another
            configuration, or if it has another finished result of the same one.
    """
    file, folder = Path(file), Path(parse_options(MergeOptions, args).runs)
    released = (file / "config.yaml").is_file()
    if not (file.is_file() or released):
        raise UsageError(f"{file} is not a file: name an archive of lra results pack, or a folder of checkpoints/")
    with _staging(folder, file) as staging:
        (_copy if released else unpack_runs)(file, staging / "new")
        arrived = [_checked(run, file) for run in _runs(staging / "new")]
        if not arrived:
            raise UsageError(f"{file} holds no runs: get it again")
        looked = [_look(run, StoredRun(folder / run.name)) for run in arrived]
        if refused := [why for action, why in looked if action == "refused"]:
            raise UsageError(f"{file} is not merged: {'; '.join(refused)}")
        decided = [
            seen if seen[0] == "kept" else _settle(run, StoredRun(folder / run.name), staging / "old" / run.name)
            for run, seen in zip(arrived, looked, strict=True)
        ]
    lines = [
        f"{run.name}: {action}{', ' + why if why else ''}" for run, (action, why) in zip(arrived, decided, strict=True)
    ]
    actions = [action for action, _ in decided]
    return [*lines, ", ".join(f"{actions.count(each)} {each}" for each in ("added", "replaced", "completed", "kept"))]


@contextmanager
def _staging(folder: Path, source: Path) -> Iterator[Path]:
    """A folder on the disk of the runs, to rename from. Folders that were made for it go with it if they stay empty."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".merge-", dir=folder, ignore_cleanup_errors=True) as staging:
            yield Path(staging)
    except OSError as error:
        if source != folder and error.filename and Path(error.filename).is_relative_to(source):
            raise  # of what is merged, which the error names
        said = f"it can't be written to ({error.strerror or error})"
        what = "there is no space left" if is_disk_full(error) else said
        raise UsageError(f"runs={folder}: {what}, name another folder") from error
    finally:
        with suppress(OSError):  # not empty
            for each in made:
                each.rmdir()


def _runs(folder: Path) -> Iterator[StoredRun]:
    """The directories of runs. Hidden ones do not count."""
    for file in sorted(folder.glob("*/*/*/config.yaml")):
        if not any(part.startswith(".") for part in file.relative_to(folder).parts):
            yield StoredRun(file.parent)


def _chosen(run: StoredRun, checkpoints: str, held: ExitStack) -> tuple[Sequence[str], str]:
    """The files of a run to pack, and a note on what is left out. Nobody works on the run until `held` ends."""
    try:
        if not run.finished() and not held.enter_context(locked_shared(run.path)):  # a finished one changes no more
            return (), f"left out: {run.name}, a process works on it: pack it when that has ended"
        names, note = _wanted(run, checkpoints)
        run.check(names)  # or no machine would merge the archive
    except UsageError as error:
        return (), f"left out: {run.name}, {error}"
    return names, note


def _wanted(run: StoredRun, checkpoints: str) -> tuple[Sequence[str], str]:
    result = run.result()
    if result and result["status"] == "finished":
        asked = CHECKPOINT_FILES[checkpoints]
        missing = ", ".join(name for name in asked if not run.has(name))
        return (*SMALL_FILES, *asked), f"{run.name}: has no {missing}" if missing else ""
    if checkpoints != "none" and run.has("last.ckpt"):
        return (*SMALL_FILES, "best.ckpt", "last.ckpt"), ""
    if result:  # out of memory, or failed: a table shows it
        return SMALL_FILES, ""
    why = ", and has no last.ckpt" if checkpoints != "none" else ": checkpoints=last takes it along"
    return (), f"left out: {run.name}, unfinished{why}"


def _copy(source: Path, folder: Path) -> None:
    """Copies a finished run's files to the place below `folder` that its result states. UsageError if it is not
    finished.
    """
    run = StoredRun(source)
    if not (result := run.finished()):
        raise UsageError(f"{source} has no finished run's result.json: name a folder of checkpoints/")
    place = str(result.get("directory", source)).split("/")[-3:]
    if len(place) != 3 or not all(map(is_plain_name, place)):
        raise UsageError(f"{source}/result.json has {'/'.join(place)!r} as its directory: get it again")
    target = folder.joinpath(*place)
    target.mkdir(parents=True, exist_ok=True)
    for name in (*SMALL_FILES, *CHECKPOINT_FILES["all"]):
        if run.has(name):
            shutil.copyfile(source / name, target / name)


def _checked(run: StoredRun, file: Path) -> StoredRun:
    """An unpacked run, if its files belong to one run, and to the one that its place states."""
    try:
        run.check(CHECKPOINT_FILES["all"])
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    if not run.has("result.json") and not run.has("last.ckpt"):
        raise UsageError(f"{file}: {run.name} has neither a result.json nor a last.ckpt: get it again")
    return run


def _look(new: StoredRun, old: StoredRun) -> Decision:
    """What would become of a run. Changes nothing."""
    return BUSY if old.path.is_dir() and is_claimed(old.path) else _decide(new, old)


def _settle(new: StoredRun, old: StoredRun, aside: Path) -> Decision:
    """Does what becomes of a run. What was there before goes `aside`."""
    if (held := claim_directory(old.path)) is None:
        return BUSY
    try:
        action, why = _decide(new, old)  # once more: a process may have gone on, or ended, until the claim was held
        if action == "completed":
            for name in _lacking(old, new):
                os.replace(new.path / name, old.path / name)
        elif action in ("added", "replaced"):
            _place(new.path, old.path, aside)
        return "kept" if action == "refused" else action, why
    finally:
        os.close(held)


def _decide(new: StoredRun, old: StoredRun) -> Decision:
    """What becomes of a run that no process works on."""
    if not (old.path / "config.yaml").exists():
        if is_vacant(old.path):
            return "added", ""
        return "refused", f"{old.path} is not a run's directory: move it away"
    if changed := list_differences(old.config(), new.config(), HARDWARE_FIELDS):
        return "refused", f"{old.path} holds a run with another configuration ({'; '.join(changed)})"
    ours, theirs = old.finished(), new.finished()
    if ours and theirs and ours != theirs:
        return "refused", f"{old.path} has another finished result of the same configuration: remove one of them"
    if ours:
        lacking = _lacking(old, new) if theirs else []
        return ("completed", ", ".join(lacking)) if lacking else ("kept", "it is finished here")
    if theirs:
        return "replaced", "it was unfinished here"
    here, there = old.steps(), new.steps()
    if here == there and new.ended() > old.ended():
        return "replaced", "it was to be tried again here" if old.ended() else "it had not ended here"
    return "replaced" if there > here else "kept", f"{here} steps here, {there} there"


def _lacking(old: StoredRun, new: StoredRun) -> list[str]:
    """The files of `new` that `old` lacks."""
    return [name for name in (*SMALL_FILES, *CHECKPOINT_FILES["all"]) if new.has(name) and not old.has(name)]


def _place(new: Path, target: Path, aside: Path) -> None:
    """Moves the files of a run into a claimed directory, and all that was there, except the claim, `aside`."""
    aside.mkdir(parents=True)
    moves = [(file, aside / file.name) for file in reversed(_in_order(target)) if file.name != CLAIM_FILE]
    moves += [(file, target / file.name) for file in _in_order(new)]
    try:
        for source, to in moves:
            os.replace(source, to)
    except BaseException:
        for source, to in reversed(moves):
            if not os.path.lexists(source):
                os.replace(to, source)
        raise


def _in_order(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda file: FILE_ORDER.get(file.name, 0))
