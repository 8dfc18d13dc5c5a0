"""Runs cells on this machine: a process of `lra fit` for each slot, which is a GPU, or the CPU if there is none.

Commands that share a folder share the cells: the one that holds the claim on a cell works on it. A process keeps its
claim when the command that started it is killed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lra import ranks
from lra.errors import UsageError, explain_system_error
from lra.experiments.grid import cells
from lra.experiments.grid.cells import CellState
from lra.experiments.grid.grid import Cell
from lra.training.clock import RUNS_PER_DEVICE
from lra.training.run_directory import CLAIM_VARIABLE, LOG_FILE, claim_directory

FIT_COMMAND = (sys.executable, "-m", "lra", "fit")
TICK_S, LOOK_S = 0.2, 1.0  # seconds between looks at our own processes, and at cells that others work on
EXIT_REFUSED = 2  # exit code of a process whose input was refused, or that was out of memory (see its result)
# processes that end without a result, or for want of memory beside others, before a call gives a cell up
MOST_DEATHS = 2

Slot = str | None  # the value of CUDA_VISIBLE_DEVICES; None leaves it as it is
CellStates = Mapping[Cell, CellState]


def list_slots(devices: int | None) -> Sequence[Slot]:
    """So many slots; by default all GPUs, or one if there is none. UsageError if there are fewer GPUs."""
    gpus = torch.cuda.device_count()
    most = max(gpus, 1)
    if devices is not None and not 1 <= devices <= most:
        numbers = f"1 to {most}" if most > 1 else "1"
        raise UsageError(f"devices={devices}, but this machine has {gpus} GPUs: give {numbers}, or leave it out")
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = outer.split(",")[:gpus] if outer else [str(i) for i in range(gpus)]
    return [name.strip() for name in names][:devices] or [None]


@dataclass(frozen=True)
class RunningProcess:
    """A process and its slots: one, or those of all its GPUs."""

    process: subprocess.Popen[bytes]
    slots: Sequence[Slot]


class LocalLauncher:
    """Works on cells until each is done, out of memory, failed twice, refused, or given up because its processes
    die.

    A cell that was out of memory beside others runs again with all slots of a GPU.

    Args:
        todo: the cells, in this order.
        slots: of this machine. Runs in slots of one name share its GPU, and their results say so.
        watch: is called with all states several times a second.
        say: is called with lines on what states don't tell.
        command: runs with a cell's arguments and `resume=auto`.
    """

    def __init__(
        self,
        todo: Sequence[Cell],
        slots: Sequence[Slot],
        watch: Callable[[CellStates], None] = lambda states: None,
        say: Callable[[str], None] = lambda line: None,
        command: Sequence[str] = FIT_COMMAND,
    ):
        self.states: dict[Cell, CellState] = {cell: cells.cell_state(cell) for cell in todo}
        self.free, self.slots, self.watch, self.say, self.command = list(slots), list(slots), watch, say, command
        self.starts = {cell.directory.path: cell for cell in todo}
        self.children: dict[Cell, RunningProcess] = {}
        self.deaths: Counter[Cell] = Counter()
        self.looked = time.monotonic()

    def work(self) -> CellStates:
        """Returns the final states. On SIGINT and SIGTERM it raises SystemExit, 130 or 143, when all processes have
        ended.
        """
        with catch_signals(signal.SIGINT, signal.SIGTERM) as signals:
            try:
                self.watch(self.states)
                while self.children or self._left():
                    if signals:
                        raise SystemExit(128 + signals[0])
                    self._reap()
                    self._fill()
                    self.watch(self.states)
                    time.sleep(TICK_S)
            finally:
                self._stop(signals)
            # a cell that could not begin, because its stage is out of memory, is out of memory, too
            self.states |= {cell: cells.cell_state(cell) for cell, state in self.states.items() if not state.final}
            self.watch(self.states)
        return self.states

    def _left(self) -> list[Cell]:
        """Cells that may yet run here: not final, not running here, not given up, and not behind a run that can't be
        had.
        """
        return [
            cell
            for cell, state in self.states.items()
            if not state.final and cell not in self.children and self.deaths[cell] < MOST_DEATHS
            if not (before := self._before(cell)) or self._reachable(before)
        ]

    def _before(self, cell: Cell) -> Cell | None:
        """The cell from which the recipe starts this one, if this one has not begun and that one is to be done here."""
        start = cell.composed.config.init if cell.composed.start and not self.states[cell].begun else None
        return self.starts.get(Path(start)) if start else None

    def _reachable(self, cell: Cell) -> bool:
        """Whether a cell is done, or may yet be."""
        state, before = self.states[cell], self._before(cell)
        if state.final or self.deaths[cell] >= MOST_DEATHS:
            return state.status == "done"
        return before is None or self._reachable(before)

    def _fill(self) -> None:
        """Gives each free slot a cell that nobody works on."""
        if time.monotonic() - self.looked >= LOOK_S:
            self.looked = time.monotonic()
            for cell in self._left():
                with self._refused(cell):
                    self.states[cell] = cells.cell_state(cell)
        for cell in self._left():
            if not self.free:
                break
            before, state = self._before(cell), self.states[cell]
            ready = before is None or self.states[before].status == "done"
            if ready and state.status != "running elsewhere" and (room := self._room(cell, state.crowded)):
                with self._refused(cell):
                    self._start(cell, room)

    @contextmanager
    def _refused(self, cell: Cell) -> Iterator[None]:
        """Turns an error of one cell's directory into its state: the other cells go on."""
        try:
            yield
        except (UsageError, OSError) as error:
            said = str(error) if isinstance(error, UsageError) else explain_system_error(error, cell.directory.path)
            if said is None:
                raise
            self.states[cell] = CellState("refused", {"error": said}, final=True)
            self.say(f"{cell}: refused, {said}")

    def _room(self, cell: Cell, alone: bool) -> Sequence[Slot]:
        """A free slot, or all slots of GPUs that have no run; empty if that is not available."""
        gpus = cell.composed.config.trainer.devices
        if gpus == 1 and not alone:
            return self.free[:1]
        whole = [name for name in dict.fromkeys(self.free) if self.free.count(name) == self.slots.count(name)]
        return [slot for slot in self.slots if slot in whole[:gpus]] if len(whole) >= gpus else []

    def _start(self, cell: Cell, room: Sequence[Slot]) -> None:
        path = cell.directory.path
        held = claim_directory(path)
        if held is None:
            self.states[cell] = CellState("running elsewhere")
            return
        try:
            self.states[cell] = cells.state_on_disk(cell)  # others may have gone on since it was looked at
            if self.states[cell].final:
                return
            cells.clear_result(cell)
            arguments = [*self.command, *map(str, cell.args), "resume=auto"]
            with (path / LOG_FILE).open("ab") as log:
                log.write(f"$ {shlex.join(arguments)}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    arguments, env=self._environment(room) | {CLAIM_VARIABLE: str(path)}, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=subprocess.STDOUT, pass_fds=(held,),
                    start_new_session=True,  # the terminal's Ctrl-C is for the command
                )  # fmt: skip
            for slot in room:
                self.free.remove(slot)
            self.children[cell] = RunningProcess(process, room)
            self.states[cell] = CellState("running")
        finally:
            os.close(held)  # the process has it now

    def _environment(self, room: Sequence[Slot]) -> dict[str, str]:
        share = str(max(1, torch.get_num_threads() // len(self.slots)))  # of what a single process would take
        threads = {"OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share}
        sharing = {RUNS_PER_DEVICE: str(self.slots.count(room[0]) // room.count(room[0]))}
        shared = threads | ranks.without_ranks(os.environ) | sharing
        names = [name for name in dict.fromkeys(room) if name is not None]
        return shared | {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else shared

    def _ended(self) -> Iterator[tuple[Cell, RunningProcess]]:
        """Yields the processes that have ended, and forgets them."""
        for cell, child in list(self.children.items()):
            if child.process.poll() is not None:
                with suppress(ProcessLookupError, PermissionError):  # what it has left behind would keep its claim
                    os.killpg(child.process.pid, signal.SIGKILL)
                del self.children[cell]
                self.free += child.slots
                yield cell, child

    def _reap(self) -> None:
        for cell, child in self._ended():
            with self._refused(cell):
                self.states[cell] = cells.state_on_disk(cell)
            state, code = self.states[cell], child.process.returncode
            if state.status == "refused":
                continue
            if state.result is None:
                self.deaths[cell] += MOST_DEATHS if code == EXIT_REFUSED else 1  # the same input would be refused again
                again = "given up until the next call" if self.deaths[cell] >= MOST_DEATHS else "taken up once more"
                self.say(f"{cell}: ended without a result ({_ending(cell, code)}), {again}")
                if code == EXIT_REFUSED:
                    error = _last_line(cell).removeprefix("lra: ")
                    self.states[cell] = CellState("refused", {"error": error}, final=True)
            elif state.crowded:  # by others than this command's, perhaps, which are still there
                self.deaths[cell] += 1

    def _stop(self, signals: Sequence[int]) -> None:
        """Ends the remaining processes, after a signal or an error."""
        if self.children:
            self.say(f"stopping {len(self.children)} runs; a second signal kills them")
        for child in self.children.values():
            child.process.terminate()
        ended: list[Cell] = []
        while self.children:
            if len(signals) > 1:
                for child in self.children.values():
                    child.process.kill()
            ended += [cell for cell, _ in self._ended()]
            time.sleep(TICK_S / 4)
        if ended:
            self.states |= {cell: cells.state_on_disk(cell) for cell in ended}
            self.watch(self.states)


def _ending(cell: Cell, code: int) -> str:
    """How a process ended, and its last line."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    said = _last_line(cell)
    return f"{how}, {cell.directory.path / LOG_FILE}" + (f": {said}" if said else "")


def _last_line(cell: Cell) -> str:
    """The last line that a cell's process printed; empty if there is none, or its folder is gone."""
    try:
        log = (cell.directory.path / LOG_FILE).read_text(errors="replace")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    return "" if last.startswith("$ ") else last


@contextmanager
def catch_signals(*numbers: signal.Signals) -> Iterator[list[int]]:
    """Yields a list of those of these signals that arrive meanwhile, in their order."""
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in numbers}
    for number in before:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
