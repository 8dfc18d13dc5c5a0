"""Several devices: who starts their processes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lra
from lra.errors import UsageError
from lra.ranks import STARTER_VARIABLE
from lra.tasks.base import TaskModule
from lra.training.fit import configure
from lra.training.hardware import crowding_note, trainer_hardware
from tests.training.conftest import arguments


@pytest.mark.slow
@pytest.mark.parametrize("option", ["-c", "-"])
def test_a_program_that_is_no_file_is_refused_before_anything_is_written(option, tmp_path):
    """Lightning would start sys.argv[0] again, and kill both processes as the second one ends."""
    program = f"import lra; lra.fit(*{arguments('trainer.devices=2')})"
    command, given = ([option, program], None) if option == "-c" else ([option], program)
    environment = os.environ | {"PYTHONPATH": str(Path(lra.__file__).parents[1])}
    run = subprocess.run([sys.executable, *command], cwd=tmp_path, input=given, env=environment, capture_output=True,
                         text=True, timeout=240)  # fmt: skip
    assert "UsageError: trainer.devices=2 needs a script file, `lra fit` or torchrun: " in run.stderr
    assert run.returncode == 1 and not list(tmp_path.iterdir())


def test_files_modules_and_launchers_start_several_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STARTER_VARIABLE, "")  # back after the test, although the first rank sets it
    run, main = configure(arguments("trainer.devices=2")).config, SimpleNamespace(__spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", main)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", [__file__])
    assert trainer_hardware(run)["devices"] == 2
    for name in ("-c", "-", ""):
        monkeypatch.setattr(sys, "argv", [name])
        with pytest.raises(UsageError, match="trainer.devices=2 needs a script file"):
            lra.fit(*arguments("trainer.devices=2"))
        assert not list(tmp_path.iterdir()), "it is refused before anything is written"
        assert trainer_hardware(configure(arguments()).config)["devices"] == 1
    with monkeypatch.context() as patch:
        patch.setattr(main, "__spec__", "as python -m has it")
        assert trainer_hardware(run)["devices"] == 2
    for name, value in ((STARTER_VARIABLE, os.getppid()), ("LOCAL_RANK", 1), ("WORLD_SIZE", 2), ("MASTER_PORT", 29500)):
        monkeypatch.setenv(name, str(value))
    assert trainer_hardware(run)["devices"] == 2


def test_processes_on_a_cpu_are_asked_for_by_name_and_counted(monkeypatch):
    monkeypatch.setenv(STARTER_VARIABLE, "")
    monkeypatch.setattr(sys, "argv", [__file__])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("lra.training.hardware._cores", lambda: 2)
    with pytest.raises(UsageError, match="trainer.devices=4, but PyTorch finds no GPU: .* trainer.accelerator=cpu"):
        trainer_hardware(configure(arguments("trainer.devices=4", "trainer.accelerator=auto")).config)
    four = configure(arguments("trainer.devices=4")).config
    assert trainer_hardware(four)["devices"] == 4
    assert crowding_note(four) == "trainer.devices=4: so many processes share 2 cores of this CPU"
    assert crowding_note(configure(arguments("trainer.devices=2")).config) is None
    with pytest.raises(UsageError, match="trainer.devices=64, but this CPU has 2 cores"):
        trainer_hardware(configure(arguments("trainer.devices=64")).config)


@pytest.mark.parametrize(("precision", "computed"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_is_what_matrices_are_multiplied_in(small, monkeypatch, precision, computed):
    seen, original = set(), TaskModule.loss

    def loss(self, batch):
        if self.training:
            seen.add((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return original(self, batch)

    monkeypatch.setattr(TaskModule, "loss", loss)
    small(f"trainer.precision={precision}", "trainer.steps=2", "trainer.eval_every=2")
    assert seen == {computed}
