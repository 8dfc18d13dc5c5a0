"""Where cells run: the options of every command that runs cells, and the launcher that these choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from lra import environment
from lra.config.options import split_options
from lra.config.override import Override
from lra.errors import UsageError
from lra.experiments.grid import cells, plan
from lra.experiments.grid.cells import ScoredSplit
from lra.experiments.grid.grid import Cell
from lra.experiments.grid.local_launcher import CellStates, LocalLauncher, list_slots
from lra.experiments.grid.slurm import SlurmLauncher, SlurmResources, parse_resources
from lra.experiments.grid.watch import GridWatch
from lra.experiments.reproduction import Reproduction
from lra.training.run_directory import FIRST_FAILURE_FILE, LOG_FILE

MOST_RUNS_PER_DEVICE = 64  # each is a process that imports PyTorch


@dataclass(frozen=True)
class LaunchOptions:
    """Where cells run."""

    launcher: Literal["local", "slurm"] = "local"
    devices: int | None = None  # GPUs, all by default; with launcher=slurm tasks of the array that run at once
    per_device: int = 1  # runs that share a GPU: small ones leave it idle, and one compiles while another trains

    def __post_init__(self) -> None:
        if not 1 <= self.per_device <= MOST_RUNS_PER_DEVICE:
            limit = "at least 1" if self.per_device < 1 else f"at most {MOST_RUNS_PER_DEVICE}"
            raise UsageError(f"per_device={self.per_device}: it is how many runs share a GPU, {limit}")
        if self.per_device > 1 and self.launcher == "slurm":
            raise UsageError("per_device= is for launcher=local: with slurm each run has what slurm.gres= asks for")


OptionsT = TypeVar("OptionsT", bound=LaunchOptions)


def split_launch_options(
    schema: type[OptionsT], overrides: Sequence[Override]
) -> tuple[OptionsT, SlurmResources, list[Override]]:
    """Returns a `schema` of the arguments that are its fields, the resources, and the other arguments."""
    options, others = split_options(schema, overrides)
    own = [override for override in others if override.field.startswith("slurm.")]
    return options, parse_resources(own, options.launcher), [each for each in others if each not in own]


class Launch:
    """The cells of a command and the places where they run.

    Args:
        chosen: the cells. Stages that they need are added.
        options: say which launcher, and how many run at once.
        resources: for each cell, with launcher=slurm.

    Raises:
        UsageError: for more GPUs than this machine or a job has.
    """

    def __init__(self, chosen: Sequence[Cell], options: LaunchOptions, resources: SlurmResources):
        self.chosen, self.options, self.resources = list(chosen), options, resources
        self.slurm = options.launcher == "slurm"
        self.slots = [] if self.slurm else [*list_slots(options.devices)] * options.per_device
        self.wide = max(cell.composed.config.trainer.devices for cell in chosen)  # GPUs of the largest cell
        self.most = resources.gpus or self.wide if self.slurm else len({*self.slots})  # GPUs that a cell can have
        if self.wide > self.most:
            more = f", or give slurm.gres=gpu:{self.wide}" if self.slurm else ""
            raise UsageError(f"trainer.devices={self.wide}, but a cell can have {self.most} here: lower it{more}")

    def plan(
        self, alone: plan.MeasuredSpeeds | None = None, command: str = "", split: ScoredSplit = "test"
    ) -> Reproduction:
        """What is there, what is left, and its time, as `make_plan` says. Starts and writes nothing."""
        states = {cell: cells.cell_state(cell) for cell in cells.with_stages(self.chosen)}
        places = self.options.devices or len(self.chosen) if self.slurm else self.most // self.wide
        slots = len(self.slots) if not self.slurm and self.wide == 1 else places
        made = plan.make_plan(states, slots, places, alone or plan.MeasuredSpeeds(), command, split)
        submission = SlurmLauncher(self.chosen, self.resources, self.options.devices).plan() if self.slurm else []
        return made._replace(lines=[*made.lines, *submission])

    def work(self, watch: GridWatch) -> CellStates:
        """Runs what is left, and returns the states of the cells and of the stages that ran here.

        Raises:
            UsageError: for a run directory that holds another configuration.
            SystemExit: on SIGINT (130) and SIGTERM (143), when all runs have ended. A job array continues.
        """
        environment.warn_unclean()
        say: Callable[[str], None] = watch.say
        with watch:
            if self.slurm:  # an array's task runs its cell's stages itself
                return SlurmLauncher(self.chosen, self.resources, self.options.devices, watch, say).work()
            return LocalLauncher(cells.with_stages(self.chosen), self.slots, watch, say).work()


def describe_unfinished(states: CellStates) -> tuple[list[str], bool]:
    """A line for each cell that is not done, with the reason, and whether one failed, was refused or is left."""
    lines = []
    for cell, state in states.items():
        path, log = cell.directory.path, cell.directory.path / LOG_FILE
        if state.status == "failed":
            lines.append(f"{cell}: {state}; tracebacks in {path}: remove {FIRST_FAILURE_FILE} there to try again")
        elif state.status != "done":
            ended = state.status in ("interrupted", "refused", "open") and log.exists()
            lines.append(f"{cell}: {state}" + (f"; see {log}" if ended else ""))
    return lines, any(not state.final or state.status in ("failed", "refused") for state in states.values())
