"""Memory that runs out, of a GPU or of the machine: what is recorded, and what is said to change."""

import json

import pytest
import torch

import lra
from lra.errors import UsageError, is_out_of_memory
from lra.tasks.base import TaskModule
from lra.training import faults
from lra.training.clock import RUNS_PER_DEVICE
from lra.training.early_validation import EarlyValidation
from lra.training.step import Step
from tests.training.test_faults import inject


def gpu(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def cpu(*_):
    return torch.empty(1 << 60, dtype=torch.uint8)


@pytest.fixture(params=[gpu, cpu])
def full(request):
    """Raises what PyTorch does."""
    return request.param


def test_what_memory_that_ran_out_is_and_what_is_none(full):
    with pytest.raises(RuntimeError) as raised:
        full()
    assert is_out_of_memory(raised.value) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not agree")) and not is_out_of_memory(
        ValueError(str(raised.value))
    )


def test_running_out_of_memory_says_what_to_change(small, monkeypatch, tmp_path, full):
    with monkeypatch.context() as patch:
        patch.setattr(Step, "__call__", full)
        change = r"set batch.micro=4 and resume=auto, gradients are then accumulated to batch.size=8$"
        with pytest.raises(UsageError, match=f"^out of CPU memory at batch.micro=8: {change}"):
            small("name=oom")
    result = json.loads((tmp_path / "checkpoints/runs/listops/flash/oom-s0/result.json").read_text())
    assert result["status"] == "oom" and "batch.micro=4" in result["error"]
    assert small("name=oom", "batch.micro=4", "resume=auto")["status"] == "finished"
    monkeypatch.setattr(TaskModule, "validation_step", full)
    with pytest.raises(UsageError, match=r"^out of CPU memory at batch.eval=250: set batch.eval=125 and resume=auto$"):
        small("name=validation")
    monkeypatch.setenv(RUNS_PER_DEVICE, "3")
    advice = r"set batch.eval=125 and resume=auto; 2 more on this CPU have their share of it$"
    with pytest.raises(UsageError, match=advice):
        small("name=beside")


def test_no_room_for_validation_is_found_long_before_it(small, monkeypatch, tmp_path, full):
    forward = TaskModule.forward
    monkeypatch.setattr(TaskModule, "forward", lambda self, batch: (forward if self.training else full)(self, batch))
    with pytest.raises(UsageError, match=r"^out of CPU memory at batch.eval=250: set batch.eval=125 and resume=auto$"):
        small("name=early", "trainer.steps=400", "trainer.eval_every=400")
    result = json.loads((tmp_path / "checkpoints/runs/listops/flash/early-s0/result.json").read_text())
    assert result["status"] == "oom" and result["steps"] == EarlyValidation.STEPS


def test_a_batch_scored_early_changes_nothing(small, monkeypatch):
    monkeypatch.setattr(EarlyValidation, "STEPS", 2)
    early = small("name=early")
    monkeypatch.setattr(EarlyValidation, "STEPS", 1000)
    late = small("name=late")
    assert early["test"] == late["test"] and early["val"] == late["val"]


def test_a_fault_whose_culprit_does_not_fit_is_still_said(small, monkeypatch, full):
    inject(monkeypatch, "loss", 3)
    monkeypatch.setattr(faults, "find_culprit", full)
    with pytest.raises(UsageError, match="^the training loss or a gradient is not finite at step 3: "):
        small()


def test_running_out_of_memory_while_scoring_says_what_to_change(finished, monkeypatch, full):
    monkeypatch.setattr(TaskModule, "test_step", full)
    with pytest.raises(UsageError, match=r"^out of CPU memory at batch.eval=7: set batch.eval=3$"):
        lra.test(f"init={finished}", "batch.eval=7")


def test_another_error_while_scoring_is_raised_as_it_is(finished, monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes do not agree")

    monkeypatch.setattr(TaskModule, "test_step", broken)
    with pytest.raises(RuntimeError, match="shapes do not agree"):
        lra.test(f"init={finished}")
