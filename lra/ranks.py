"""Which rank of a run this process is, and who started the ranks, according to environment variables.

Three launchers are supported: lra itself, torchrun and srun. Variables of other launchers, or left behind by an image
or a batch job, never change a run. They are ignored if they agree with a single process, and refused if they state
more ranks.

- lra starts `trainer.devices` ranks on this machine, unless another launcher has started them.
- The ranks of torchrun are joined.
- A step of srun with several tasks is joined if `trainer.devices` is the number of its tasks on a node. A batch script
  without srun is no step.
- `MASTER_ADDR` and `MASTER_PORT` count under torchrun and srun only. The processes of a grid get none of these
  variables.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lra.errors import UsageError

STARTER_VARIABLE = "LRA_STARTER"  # the process that started this one as a rank, by its id
# what launchers say of a process: how many ranks there are, and which one it is
COUNT_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE")
PLACE_VARIABLES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK",
    "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PALS_RANKID", "FLUX_TASK_RANK",
)  # fmt: skip
STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID")  # two names of one variable; a batch script has neither
# Lightning reads these as numbers when it is imported
READ_BY_LIGHTNING = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Launch:
    """How the ranks of a run are started, and which one this process is.

    Attributes:
        by: the launcher that starts the ranks.
        local: number of ranks on this node, and on every other node.
        local_rank: this rank's place among them.
        address: the address of rank 0.
        port: the port on which rank 0 listens; None if rank 0 will choose it.
        name: tells this run from others that meet at the same port.
    """

    by: Literal["lra", "torchrun", "srun"]
    rank: int
    world: int
    local: int
    local_rank: int
    node: int = 0
    address: str = "127.0.0.1"
    port: int | None = None
    name: str = "lra"


def check_variables() -> None:
    """UsageError for a variable with which Lightning can't be imported."""
    for name in READ_BY_LIGHTNING:
        try:
            int(os.environ.get(name, "0"))
        except ValueError:
            raise UsageError(f"{name}={os.environ[name]} is not a number: unset {name}") from None


def detect_launch(devices: int, given: bool = False, started: int | None = None) -> Launch:
    """The launch to which a run with `trainer.devices` belongs. UsageError if the variables contradict it.

    Args:
        devices: number of ranks on each node in the configuration.
        given: whether the user set it. A default of 1 may mean that nobody thought of it.
        started: number of ranks in the process group that this process has already started.
    """
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" in environ:
        launch = _torchrun(environ)
        _agree(devices, launch.local, given, f"torchrun started {launch.local}")
        return launch
    if started is not None and environ.get(STARTER_VARIABLE) == str(os.getpid()):
        _agree(devices, started, given, f"a run before it in this program started {started}")
        return Launch("lra", 0, started, started, 0)
    if environ.get(STARTER_VARIABLE) == str(os.getppid()):
        launch = _child(environ)
        if launch.rank:
            _agree(devices, launch.world, given, f"the program was started with {launch.world}")
            return launch
        # a rank 0 has started this process for something else: the variables are of that run
        return Launch("lra", 0, devices, devices, 0)
    if (tasks := _tasks(environ)) > 1:
        launch = _srun(environ, tasks)
        _agree(devices, launch.local, True, f"srun started {launch.local}", f", or {_unset(environ)}")
        _refuse_others(environ, launch.rank, launch.world, joined=True)
        return launch
    _refuse_others(environ, 0, 1, joined=False)
    return Launch("lra", 0, devices, devices, 0)


def started_ranks() -> int | None:
    """Returns the number of ranks in the process group that this process has started; None if it has none."""
    distributed = sys.modules.get("torch.distributed")  # without PyTorch there is no group, and it is not imported here
    return distributed.get_world_size() if distributed is not None and distributed.is_initialized() else None


def without_ranks(environ: Environment) -> dict[str, str]:
    """An environment without the variables of launchers, for a process that is no rank of this one's run."""
    of_launchers = {*COUNT_VARIABLES, *PLACE_VARIABLES, *STEP_VARIABLES, STARTER_VARIABLE}
    of_launchers |= {"LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {
        name: value
        for name, value in environ.items()
        if name not in of_launchers and not name.startswith("TORCHELASTIC_")
    }


def _agree(devices: int, local: int, given: bool, who: str, otherwise: str = "") -> None:
    """Refuses a number of devices that differs from the number of ranks that were started."""
    if devices != local and (given or devices > 1):
        ranks = f"{who} rank{'s' * (local > 1)} on this machine"
        raise UsageError(f"trainer.devices={devices}, but {ranks}: set trainer.devices={local}{otherwise}")


def _torchrun(environ: Environment) -> Launch:
    mend = "start the run with torchrun, or unset TORCHELASTIC_RUN_ID"
    rank, world, local_rank, local = (
        _number(environ, name, mend, least)
        for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    if world % local or rank >= world or rank % local != local_rank:
        raise UsageError(
            f"torchrun's variables contradict each other (RANK={rank}, WORLD_SIZE={world}, LOCAL_RANK={local_rank}, "
            f"LOCAL_WORLD_SIZE={local}): give every node the same number of ranks, or unset TORCHELASTIC_RUN_ID"
        )
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        "torchrun", rank, world, local, local_rank, rank // local, environ.get("MASTER_ADDR") or "127.0.0.1",
        _port(environ, mend), f"lra/{environ['TORCHELASTIC_RUN_ID']}/{attempt}",
    )  # fmt: skip


def _child(environ: Environment) -> Launch:
    mend = f"unset {STARTER_VARIABLE}"
    local_rank = _number(environ, "LOCAL_RANK", mend) if "LOCAL_RANK" in environ else 0
    world = _number(environ, "WORLD_SIZE", mend, 1) if local_rank else 1
    if local_rank >= world:
        raise UsageError(f"LOCAL_RANK={local_rank}, but WORLD_SIZE={world}: {mend}")
    return Launch("lra", local_rank, world, world, local_rank, port=_port(environ, mend) if local_rank else None)


def _tasks(environ: Environment) -> int:
    """The tasks of the step of srun that this process is in; 0 outside of one, as in a batch script."""
    counted = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    return _number(environ, counted, _unset(environ)) if counted and _first(environ, *STEP_VARIABLES) else 0


def _srun(environ: Environment, tasks: int) -> Launch:
    mend = f"start the run with srun, or {_unset(environ)}"
    if sys.stdin is not None and sys.stdin.isatty():  # a shell, which one task of several runs
        raise UsageError(f"this is a terminal in a step of {tasks} tasks, which do not all run this program: {mend}")
    rank, local_rank = (_number(environ, name, mend) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    counted = _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    nodes = _number(environ, counted, mend, 1) if counted else 1
    node = _number(environ, "SLURM_NODEID", mend) if "SLURM_NODEID" in environ else 0
    spread = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # 2(x3) is two on each of three nodes, 2,1 is uneven
    if tasks % nodes or "," in spread:
        raise UsageError(f"{tasks} tasks on {nodes} nodes: give each node as many, with srun --ntasks-per-node=")
    local = tasks // nodes
    if rank >= tasks or local_rank >= local or node >= nodes:
        raise UsageError(
            f"SLURM's variables contradict each other (SLURM_PROCID={rank} of {tasks}, SLURM_LOCALID={local_rank} of "
            f"{local}, SLURM_NODEID={node} of {nodes}): {mend}"
        )
    job = _number(environ, "SLURM_JOB_ID", mend) if "SLURM_JOB_ID" in environ else 0
    step = _number(environ, str(_first(environ, *STEP_VARIABLES)), mend)
    given = "MASTER_PORT" in environ
    port = _port(environ, "unset it, or give a free port") if given else 15000 + (job + 1009 * step) % 10000
    return Launch("srun", rank, tasks, local, local_rank, node, _address(environ, nodes), port, f"lra/{job}.{step}")


def _address(environ: Environment, nodes: int) -> str:
    """Where the first node of a step is."""
    listed = _first(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    if nodes == 1:
        return "127.0.0.1"
    if address := environ.get("MASTER_ADDR"):
        return address
    if listed is None:
        raise UsageError(f"SLURM does not name the {nodes} nodes: set MASTER_ADDR to the first one's name")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", environ[listed])
    assert first is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])  # gpu[03-05,09],login2 begins with gpu03


def _refuse_others(environ: Environment, rank: int, world: int, joined: bool) -> None:
    """Refuses the variables of a launcher that says another number of ranks, or another one of them, than what holds.

    Args:
        joined: whether srun started the ranks. What is counted on each node is then no place among all ranks.
    """
    of_node = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK") if joined else ()
    for names, holds in ((COUNT_VARIABLES, world), (PLACE_VARIABLES, rank)):
        for name in names:
            if name in environ and name not in of_node and environ[name].strip() != str(holds):
                what = f"srun says {holds}" if joined else "lra knows no launcher that started this process as a rank"
                mend = "" if joined else "; trainer.devices=, torchrun and srun start several ranks"
                raise UsageError(f"{name}={_shown(environ[name])}, but {what}: unset {name}{mend}")


def _first(environ: Environment, *names: str) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _number(environ: Environment, name: str, mend: str, least: int = 0) -> int:
    value = environ.get(name)
    if value is None:
        raise UsageError(f"{name} is not set: {mend}")
    if not re.fullmatch(r"\d{1,18}", value.strip(), re.ASCII) or int(value) < least:
        raise UsageError(f"{name}={_shown(value)} is not a whole number from {least}: {mend}")
    return int(value)


def _port(environ: Environment, mend: str) -> int:
    port = _number(environ, "MASTER_PORT", mend, 1)
    if port > 65535:
        raise UsageError(f"MASTER_PORT={port} is not a port, which is at most 65535: {mend}")
    return port


def _unset(environ: Environment) -> str:
    return f"unset {' '.join(name for name in STEP_VARIABLES if name in environ)} for a run of this process alone"


def _shown(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:40]}…"
