"""Who started the ranks of a run: a table of environments, and what each means."""

import os
import sys
from types import SimpleNamespace

import pytest

from lra import ranks
from lra.errors import UsageError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "first", "MASTER_PORT": "29500",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
CHILD = {ranks.STARTER_VARIABLE: str(os.getppid()), "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
LEFT = {ranks.STARTER_VARIABLE: str(os.getppid()), "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}


@pytest.fixture
def detect(monkeypatch):
    """`detect(environment, …)` is `ranks.detect_launch` with nothing else in the environment."""

    def found(environment, *args):
        monkeypatch.setattr(os, "environ", dict(environment))
        return ranks.detect_launch(*args)

    return found


@pytest.mark.parametrize(
    ("environment", "devices", "by", "rank", "world", "local"),
    [
        ({}, 1, "lra", 0, 1, 1),
        ({}, 2, "lra", 0, 2, 2),
        ({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "NODE_RANK": "0"}, 2, "lra", 0, 2, 2),
        ({"MASTER_ADDR": "elsewhere", "MASTER_PORT": "abc"}, 2, "lra", 0, 2, 2),
        (BATCH, 1, "lra", 0, 1, 1),
        (BATCH | {"SLURM_NTASKS": "1"}, 2, "lra", 0, 2, 2),
        (BATCH | {"SLURM_NTASKS": "abc"}, 2, "lra", 0, 2, 2),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, 2, "lra", 0, 2, 2),
        (STEP, 2, "srun", 1, 2, 2),
        (STEP | {"SLURM_NNODES": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "a"}, 1, "srun", 1, 2, 1),
        (STEP | {"PMI_SIZE": "2", "PMI_RANK": "1", "LOCAL_RANK": "0"}, 2, "srun", 1, 2, 2),
        (TORCHRUN, 1, "torchrun", 1, 4, 2),
        (TORCHRUN, 2, "torchrun", 1, 4, 2),
        (TORCHRUN | STEP, 2, "torchrun", 1, 4, 2),
        (CHILD, 2, "lra", 1, 2, 2),
        (LEFT, 2, "lra", 0, 2, 2),
    ],
)
def test_the_launch_is_what_was_asked_for(detect, environment, devices, by, rank, world, local):
    launch = detect(environment, devices)
    assert (launch.by, launch.rank, launch.world, launch.local) == (by, rank, world, local)


@pytest.mark.parametrize(
    ("environment", "devices", "said"),
    [
        ({"LOCAL_RANK": "1"}, 1, "LOCAL_RANK=1, but lra knows no launcher.*: unset LOCAL_RANK"),
        ({"RANK": "1"}, 1, "RANK=1"),
        ({"NODE_RANK": "1"}, 1, "NODE_RANK=1"),
        ({"WORLD_SIZE": "-1"}, 1, "WORLD_SIZE=-1"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, 2, "WORLD_SIZE=2"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, 1, "OMPI_COMM_WORLD_SIZE=2"),
        ({"PMIX_RANK": "1"}, 1, "PMIX_RANK=1"),
        (STEP, 1, "trainer.devices=1, but srun started 2 ranks.*: set trainer.devices=2, or unset SLURM_STEP_ID"),
        (STEP, 4, "srun started 2 ranks"),
        (STEP | {"SLURM_NTASKS": "abc"}, 2, "SLURM_NTASKS=abc"),
        (STEP | {"SLURM_PROCID": "5"}, 2, "contradict each other"),
        (STEP | {"SLURM_NTASKS": "3", "SLURM_NNODES": "2"}, 2, "--ntasks-per-node"),
        (STEP | {"OMPI_COMM_WORLD_SIZE": "4"}, 2, "OMPI_COMM_WORLD_SIZE=4, but srun says 2"),
        (STEP | {"MASTER_PORT": "abc"}, 2, "MASTER_PORT=abc"),
        (STEP | {"SLURM_NNODES": "2", "SLURM_LOCALID": "0"}, 1, "set MASTER_ADDR"),
        (TORCHRUN, 4, "trainer.devices=4, but torchrun started 2"),
        (TORCHRUN | {"LOCAL_RANK": "5"}, 1, "contradict each other"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, 1, "at most 65535"),
        ({"TORCHELASTIC_RUN_ID": "left"}, 1, "RANK is not set"),
        (CHILD | {"LOCAL_RANK": "5"}, 2, "LOCAL_RANK=5, but WORLD_SIZE=2"),
        (CHILD | {ranks.STARTER_VARIABLE: "1234567"}, 2, "WORLD_SIZE=2"),
    ],
)
def test_ranks_that_nobody_asked_for_are_refused(detect, environment, devices, said):
    with pytest.raises(UsageError, match=said):
        detect(environment, devices)


def test_one_device_that_the_user_named_is_not_several(detect):
    with pytest.raises(UsageError, match="trainer.devices=1, but torchrun started 2"):
        detect(TORCHRUN, 1, True)


def test_a_second_run_of_a_program_has_the_ranks_of_the_first(detect):
    own = {ranks.STARTER_VARIABLE: str(os.getpid()), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    assert detect(own, 2, True, 2).world == 2
    assert detect(own, 1, False, 2).world == 2
    with pytest.raises(UsageError, match="trainer.devices=1, but a run before it in this program started 2"):
        detect(own, 1, True, 2)


def test_a_shell_of_one_task_is_no_rank(detect, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(UsageError, match="this is a terminal in a step of 2 tasks"):
        detect(STEP, 2)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,09],login2", "gpu03"), ("a,b", "a"), ("rack[1-2]node[3,5]", "rack1node3"), ("gpu[7-8]-ib", "gpu7-ib")],
)
def test_rank_0_is_on_the_first_node(detect, nodes, first):
    step = STEP | {"SLURM_NNODES": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": nodes}
    assert detect(step, 1).address == first


def test_a_process_of_a_grid_is_no_rank_of_its_command(detect):
    assert detect(ranks.without_ranks(TORCHRUN | STEP | CHILD | {"OMPI_COMM_WORLD_SIZE": "2"}), 1).world == 1


def test_a_rank_that_is_no_number_is_refused_before_lightning_reads_it(monkeypatch):
    monkeypatch.setenv("RANK", "abc")
    with pytest.raises(UsageError, match="RANK=abc is not a number: unset RANK"):
        ranks.check_variables()
