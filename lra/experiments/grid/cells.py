"""The state of a cell, read from its run directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lra.errors import UsageError
from lra.experiments.grid.grid import Cell
from lra.training import curves
from lra.training.run_directory import FIRST_FAILURE_FILE, HARDWARE_FIELDS, had_gpu_alone, is_claimed, is_vacant
from lra.training.run_files import EndStatus, read_config, read_result

CellStatus = Literal["done", "OOM", "failed", "running", "running elsewhere", "interrupted", "refused", "open"]
ScoredSplit = Literal["test", "val"]  # whose accuracy is shown: test reports, validation chooses
STATUS_OF_END: dict[EndStatus, CellStatus] = {"finished": "done", "oom": "OOM", "failed": "failed"}


@dataclass(frozen=True)
class CellState:
    """What is known of a cell."""

    status: CellStatus
    result: dict[str, Any] | None = None  # result.json, of a run that ended by itself
    # nothing is left to do: done, out of a GPU's memory alone, failed for the second time, or, in this call, refused
    final: bool = False
    resumes: bool = False  # there is a last.ckpt to go on from

    @property
    def begun(self) -> bool:
        """Whether the cell needs no run to start from: it is final, has its own checkpoint, or another process runs
        it.
        """
        return self.final or self.resumes or self.status == "running elsewhere"

    @property
    def crowded(self) -> bool:
        """Whether the run was out of memory beside others, and must have a GPU to itself."""
        return self.status == "OOM" and not self.final

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test set of a run that is done."""
        return self.scored("test")

    def scored(self, split: ScoredSplit) -> float | None:
        """Accuracy of a run that is done: on the test set, or the best on the validation set.

        None for other runs, and for results without that of validation.
        """
        return self.result.get(split, {}).get("accuracy") if self.result and self.status == "done" else None

    def __str__(self) -> str:
        return self.describe()

    def describe(self, split: ScoredSplit = "test") -> str:
        """The state in words. A run that is done is said with its accuracy on this split."""
        if self.status == "done":
            shown = {"test": "test", "val": "validation"}[split]
            return f"done, {shown} accuracy {100 * (self.scored(split) or 0.0):.2f}%"
        if self.status in ("failed", "OOM", "refused"):
            error = str((self.result or {}).get("error", "")).partition("\n")[0]
            again = " twice" if self.status == "failed" else ""
            if not self.final:
                again = " beside other runs, to be retried alone" if self.crowded else ", to be retried once"
            return f"{self.status}{again}" + (f": {error}" if error else "")
        if self.status == "interrupted":
            return "interrupted, goes on from last.ckpt" if self.resumes else "interrupted, starts over"
        return self.status


def cell_state(cell: Cell) -> CellState:
    """The state of a cell that this process does not work on. Writes nothing.

    UsageError if the directory holds a run of another configuration.
    """
    state = state_on_disk(cell)
    return state if state.final or not is_claimed(cell.directory.path) else CellState("running elsewhere")


def state_on_disk(cell: Cell) -> CellState:
    """The state of a cell that no other process works on: its claim is held here, or its process has ended."""
    directory = cell.directory
    if is_vacant(directory.path):
        return _blocked_by_stage(cell) or CellState("open")
    result = read_result(directory.path / "result.json")
    same = _computes_the_same(cell, result)
    if result is None or not (same or result["status"] == "finished"):
        return CellState("interrupted", resumes=directory.last.exists())
    status = STATUS_OF_END[result["status"]]
    final = {"done": True, "OOM": had_gpu_alone(result), "failed": (directory.path / FIRST_FAILURE_FILE).exists()}[
        status
    ]
    return CellState(status, result, final, directory.last.exists())


def _blocked_by_stage(cell: Cell) -> CellState | None:
    """The state out of memory, if the last stage with a result was. The cell would need that stage's weights."""
    for stage in reversed(cell.stages):
        if is_vacant(path := stage.directory.path):
            continue
        state = state_on_disk(stage)
        if state.status != "OOM" or not state.final:
            return None
        error = (state.result or {}).get("error", "out of memory")
        return CellState("OOM", {"error": f"of its stage {path}: {error}"}, final=True)
    return None


def clear_result(cell: Cell) -> None:
    """Makes room for the next result, under the claim. The first failure is kept aside; any other result goes."""
    file = cell.directory.path / "result.json"
    if (result := read_result(file)) and result["status"] == "failed":
        file.replace(file.with_name(FIRST_FAILURE_FILE))
    else:
        file.unlink(missing_ok=True)


def has_begun(cell: Cell) -> bool:
    """Whether a cell needs no run to start from."""
    return cell_state(cell).begun


def with_stages(cells: Iterable[Cell], begun: Callable[[Cell], bool] = has_begun) -> list[Cell]:
    """The cells, each after the stages that it still needs, which are none before a run that has `begun`.

    A run that is both a cell and a stage, or a stage of several cells, is listed once.
    """
    cells = list(cells)
    asked = {cell.directory.path: cell for cell in cells}
    found: dict[Path, Cell] = {}
    for cell in cells:
        chain = [cell]
        for stage in reversed(cell.stages):
            if begun(chain[0]):
                break
            chain.insert(0, stage)
        for each in chain:
            path = each.directory.path
            found.setdefault(path, asked.get(path, each))
    return list(found.values())


def count_states(states: Iterable[CellState]) -> str:
    """How many cells are in which state, in words."""
    counts = Counter(state.status for state in states)
    parts = [f"{counts[name]} {name}" for name in get_args(CellStatus) if counts[name]]
    return f"cells: {counts.total()}, {', '.join(parts)}"


def read_progress(cell: Cell) -> tuple[int, int, float | None]:
    """The last step, the step of the last validation and the best validation accuracy, from a run's metrics.csv.

    These are zeros and None if the file is missing or can't be read: the run itself, or its merging, reports that.
    """
    step, validated, best = 0, 0, None
    try:
        rows = curves.read_curves(cell.directory.curves)
    except (OSError, UsageError):
        return 0, 0, None
    for row in rows:
        step = int(row["step"])
        if accuracy := row.get("val/accuracy"):
            validated, best = step, max(best or 0.0, float(accuracy))
    return step, validated, best


def _computes_the_same(cell: Cell, result: Mapping[str, Any] | None) -> bool:
    """Whether the run computed on the same hardware, in the same portions.

    On other hardware it may not fail, nor lack memory. UsageError if the directory holds another run.
    """
    path = cell.directory.path
    file = path / "config.yaml"
    if not file.exists():
        if result is not None:
            raise UsageError(f"{path} holds a result without a config.yaml: remove the directory")
        return True
    found = read_config(file)
    if found is None:
        raise UsageError(f"{file} is damaged: remove the directory")
    cell.directory.refuse_version("run", cell.directory.task_of(found))
    if changed := cell.directory.list_changes(found, HARDWARE_FIELDS):
        raise UsageError(
            f"{path} holds a run with another configuration ({'; '.join(changed)}): move it away, or choose name="
        )
    if result is not None:
        cell.directory.refuse_version("result", result["task"])
    return not cell.directory.list_changes(found)
