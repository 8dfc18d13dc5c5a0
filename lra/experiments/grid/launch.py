"""Runs the cells of a grid where the user wants them, or says what that would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lra import environment
from lra.errors import UsageError
from lra.experiments.grid import cells, plan
from lra.experiments.grid.grid import Cell, Grid
from lra.experiments.grid.local_launcher import CellStates, LocalLauncher, list_slots
from lra.experiments.grid.slurm import SlurmLauncher, SlurmResources
from lra.experiments.grid.watch import TEST_ACCURACY, GridWatch, Score
from lra.experiments.reproduction import Reproduction

MOST_RUNS_PER_DEVICE = 64  # each is a process that imports PyTorch


@dataclass(frozen=True)
class LaunchOptions:
    """Where the cells of a grid run."""

    launcher: Literal["local", "slurm"] = "local"
    devices: int | None = None  # GPUs, all by default; with launcher=slurm tasks of the array that run at once
    per_device: int = 1  # runs that share a GPU: small ones leave it idle, and one compiles while another trains

    def __post_init__(self) -> None:
        if not 1 <= self.per_device <= MOST_RUNS_PER_DEVICE:
            limit = "at least 1" if self.per_device < 1 else f"at most {MOST_RUNS_PER_DEVICE}"
            raise UsageError(f"per_device={self.per_device}: it is how many runs share a GPU, {limit}")
        if self.per_device > 1 and self.launcher == "slurm":
            raise UsageError("per_device= is for launcher=local: with slurm each run has what slurm.gres= asks for")


class Launch:
    """Cells, and the places for them. UsageError if a cell needs more GPUs than there are.

    Args:
        chosen: the cells, in this order.
        options: where they run.
        resources: what each gets from SLURM.
    """

    def __init__(self, chosen: Sequence[Cell], options: LaunchOptions, resources: SlurmResources):
        self.chosen, self.options, self.resources = chosen, options, resources
        self.slurm = options.launcher == "slurm"
        self.slots = [] if self.slurm else [*list_slots(options.devices)] * options.per_device
        self.wide = max(cell.composed.config.trainer.devices for cell in chosen)
        self.most = resources.gpus or self.wide if self.slurm else len({*self.slots})
        if self.wide > self.most:
            more = f", or give slurm.gres=gpu:{self.wide}" if self.slurm else ""
            raise UsageError(f"trainer.devices={self.wide}, but a cell can have {self.most} here: lower it{more}")

    def plan(self, alone: plan.MeasuredSpeeds, command: str = "") -> Reproduction:
        """What exists, what is left, and how long that takes. Starts and writes nothing. Arguments: of `make_plan`."""
        states = {cell: cells.cell_state(cell) for cell in cells.with_stages(self.chosen)}
        places = self.options.devices or len(self.chosen) if self.slurm else self.most // self.wide
        at_once = len(self.slots) if not self.slurm and self.wide == 1 else places
        made = plan.make_plan(states, at_once, places, alone, command)
        submission = SlurmLauncher(self.chosen, self.resources, self.options.devices).plan() if self.slurm else []
        return made._replace(lines=[*made.lines, *submission])

    def run(self, table: Grid, progress: Callable[[str], None], score: Score = TEST_ACCURACY) -> CellStates:
        """Runs what is left, and returns the states of the cells and of the stages that ran here.

        Args:
            table: what is shown meanwhile.
            progress: is called with a line for each change of a cell's state, unless a terminal shows the table.
            score: what is shown of a cell that is done.

        Raises:
            SystemExit: on SIGINT (130) and SIGTERM (143), when all runs have ended. A job array continues.
        """
        environment.warn_unclean()
        # an array's task runs its cell's stages itself
        todo = self.chosen if self.slurm else cells.with_stages(self.chosen)
        with GridWatch(table, progress, score=score) as watch:
            launcher = (
                SlurmLauncher(todo, self.resources, self.options.devices, watch, watch.say)
                if self.slurm
                else LocalLauncher(todo, self.slots, watch, watch.say)
            )
            return launcher.work()
