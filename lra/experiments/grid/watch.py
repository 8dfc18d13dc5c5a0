"""The table of a grid while cells run: in the terminal, as lines in a pipe, and as a text file."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from lra.experiments.grid import cells
from lra.experiments.grid.cells import CellState, ScoredSplit
from lra.experiments.grid.grid import Cell
from lra.experiments.grid.local_launcher import CellStates
from lra.experiments.reproduction import format_mean_std
from lra.terminal import Terminal
from lra.training.output import format_duration
from lra.training.run_directory import RUNS_FOLDER, write_text

FILE_S = 3.0  # between two versions of the text file


class RunPace:
    """How far a run is, by its metrics.csv, and its steps per second with validation, from the times of that file."""

    def __init__(self, cell: Cell):
        self.cell = cell
        self.written = self._written()  # before what is read, so that nothing written meanwhile is missed
        self.first: tuple[float, int] | None = None  # time, step; what was there before says nothing of the pace
        self.last: tuple[float, int] | None = None
        self.step, _, self.best = cells.read_progress(cell)

    def update(self) -> None:
        written = self._written()
        if written is None or written == self.written:
            return
        self.written = written
        self.step, _, self.best = cells.read_progress(self.cell)
        self.last = written, self.step
        if self.first is None or self.step < self.first[1]:
            self.first = self.last

    @property
    def rate(self) -> float | None:
        """Steps per second; None before two rows were written."""
        if self.first is None or self.last is None or self.last[0] <= self.first[0]:
            return None
        return (self.last[1] - self.first[1]) / (self.last[0] - self.first[0]) or None

    def __str__(self) -> str:
        steps = self.cell.composed.config.trainer.steps
        parts = [f"{self.step}/{steps}"]
        if self.best is not None:
            parts.append(f"val {100 * self.best:.2f}")
        if rate := self.rate:
            parts += [f"{rate:,.1f}/s", f"{format_duration((steps - self.step) / rate)} left"]
        return ", ".join(parts)

    def _written(self) -> float | None:
        try:
            return self.cell.directory.curves.stat().st_mtime
        except OSError:  # the run itself says what is wrong with its folder
            return None


class GridWatch:
    """Shows the states that it is called with. It is a context manager.

    Args:
        name: what runs; the text file is `checkpoints/<name>.txt`.
        about: what that is, for the title.
        say: is called with a line for each change of a cell's state, unless the terminal shows the table.
        console: the table is drawn there, if it is a terminal.
        split: whose accuracy is shown.
        upright: a row for each column of the cells, and a column for each attention.
    """

    def __init__(
        self,
        name: str,
        about: str,
        say: Callable[[str], None],
        console: Console | None = None,
        split: ScoredSplit = "test",
        upright: bool = False,
    ):
        self.console = console or Terminal()
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self.file, self.title = RUNS_FOLDER.parent / f"{name}.txt", f"{name}: {about}"
        self.split: ScoredSplit = split
        self.upright = upright
        self.say = self.console.print if self.live else say  # above the table
        self.paces: dict[Cell, RunPace] = {}
        self.seen: CellStates = {}
        self.saved, self.failing = 0.0, False

    def __enter__(self) -> GridWatch:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.seen:
            self._save(self._table(self.seen))
        if self.live:
            self.live.stop()

    def __call__(self, states: CellStates) -> None:
        """Draws what has changed."""
        running = [cell for cell, state in states.items() if state.status.startswith("running")]
        self.paces = {cell: self.paces.get(cell) or RunPace(cell) for cell in running}
        for pace in self.paces.values():
            pace.update()
        if not self.live:
            self._tell(states)
        self.seen = dict(states)
        due = time.monotonic() - self.saved >= FILE_S
        if self.live or due:
            table = self._table(states)
            if self.live:
                self.live.update(table, refresh=True)
            if due:
                self._save(table)

    def _tell(self, states: CellStates) -> None:
        if not self.seen:
            self.say(cells.count_states(states.values()))
        for cell, state in states.items():
            if self.seen and self.seen[cell] != state:
                self.say(f"{cell}: {state.describe(self.split)}")

    def _table(self, states: CellStates) -> Group:
        counted = f"{cells.count_states(states.values())}; {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}"
        columns, attns = (tuple(dict.fromkeys(getattr(c, name) for c in states)) for name in ("column", "attn"))
        table = Table(*(("setting", *attns) if self.upright else ("attention", *columns)), show_lines=True)
        for row in columns if self.upright else attns:
            cell = [(row, attn) for attn in attns] if self.upright else [(column, row) for column in columns]
            table.add_row(row, *(self._text(states, *place) for place in cell))
        refusals = dict.fromkeys(str(state) for state in states.values() if state.status == "refused")
        return Group(self.title, table, *refusals, counted)

    def _text(self, states: CellStates, column: str, attn: str) -> str:
        """The mean of the seeds that are done, a line for each that runs, and the other states."""
        own = {cell: state for cell, state in states.items() if (cell.column, cell.attn) == (column, attn)}
        lines = [format_scores(own.values(), self.split)]
        if lines[0] and len(own) > 1:
            lines[0] += f" ({sum(state.status == 'done' for state in own.values())} of {len(own)})"
        for cell, state in own.items():
            if cell in self.paces:
                elsewhere = ", elsewhere" if state.status == "running elsewhere" else ""
                lines.append(f"s{cell.seed}: {self.paces[cell]}{elsewhere}")
        lines.append(format_others(own, ("failed", "OOM", "interrupted", "refused")))
        return "\n".join(line for line in lines if line)

    def _save(self, table: Group) -> None:
        self.saved = time.monotonic()
        text = io.StringIO()
        Terminal(file=text, width=1000, color_system=None).print(table)
        plain = "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, plain)
        except OSError as error:  # not worth stopping the runs for
            if not self.failing:
                self.say(f"{self.file} can't be written: {error.strerror}")
            self.failing = True


def format_scores(states: Iterable[CellState], split: ScoredSplit = "test") -> str:
    """Mean accuracy of the done cells in %, with the standard deviation if there are several; empty if none is done."""
    return format_mean_std([100 * score for state in states if (score := state.scored(split)) is not None], 2)


def format_others(states: CellStates, named: Sequence[str]) -> str:
    """The seeds in one of the named states: `OOM s0 s3, failed s4`."""
    parts = []
    for status in named:
        if seeds := [f"s{cell.seed}" for cell, state in states.items() if state.status == status]:
            parts.append(" ".join([status, *seeds]))
    return ", ".join(parts)
