"""`lra doctor`: a row for everything, whatever is missing or broken."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import warnings

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lra import doctor
from lra.cli import app
from lra.data.store import StoreContent, prepare_store
from lra.kernels import device
from lra.kernels.device import Ptxas
from lra.kernels.flash import tuning
from lra.kernels.flash.tuning import Tile, TileKey, TileTable
from lra.tasks.base import TaskData
from lra.training.data_verbs import task_data


def test_every_subject_has_a_row(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "nowhere" / "yet"))
    rows = dict(doctor.diagnose())
    assert {
        "Python",
        "lra",
        "torch",
        "triton",
        "CUDA of PyTorch",
        "flash",
        "flash-attn",
        "disk for data",
    } <= rows.keys()
    assert "does not exist yet" in rows["data"]
    assert "GB free" in rows["disk for data"] and "GB free" in rows["disk for runs"]
    if not torch.cuda.is_available():
        assert rows["GPU"].startswith("none: ") and rows["flash"] == "SDPA on the CPU (Triton needs a GPU)"
        assert rows["layers"] == "PyTorch (the kernels need a GPU)"


@pytest.mark.gpu
def test_the_gpu_is_named_and_the_kernels_are_run():
    rows = dict(doctor.diagnose())
    assert torch.cuda.get_device_name(0) in rows["GPU 0"] and "GB free" in rows["GPU 0"]
    assert rows["flash"].startswith("Triton works; ")
    assert "ptxas" in rows["ptxas"] and rows["tiles"] and "forward " in rows["  16 bits, deterministic"]


def test_the_kernel_check_compares_every_gradient():
    device = "cuda" if torch.cuda.is_available() else "cpu"  # there interpreted, by the root conftest
    ((subject, state),) = doctor._flash(device, torch.float32)
    assert subject == "flash" and state.startswith("Triton works; ")
    assert all(f"{name} " in state for name in ("out", "dq", "dk", "dv"))


@pytest.fixture
def hopper(monkeypatch):
    """As on a Hopper GPU without a table of its own; (capability, ptxas) may be changed."""
    pytest.importorskip("triton")
    gpu = {"capability": (9, 0), "ptxas": Ptxas("/new/ptxas", (13, 4), "TRITON_PTXAS_PATH")}
    monkeypatch.setattr(device, "compute_capability", lambda device=None: gpu["capability"])
    monkeypatch.setattr(device, "find_ptxas", lambda capability: gpu["ptxas"])
    monkeypatch.setattr(device, "count_multiprocessors", lambda device: 132)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    tuning.forget_tables()
    yield gpu
    tuning.forget_tables()


def test_a_ptxas_that_miscompiles_is_named_with_what_mends_it(hopper):
    assert dict(doctor._ptxas()) == {"ptxas": "13.4, /new/ptxas"}
    hopper["ptxas"] = Ptxas("/old/ptxas", (13, 1), "TRITON_PTXAS_PATH")
    tuning.forget_tables()
    assert dict(doctor._ptxas()) == {"ptxas": "13.1, /old/ptxas"}
    rows = dict(doctor._choices())
    assert rows["  16 bits"].startswith("forward ") and "; dkdv_dq " in rows["  16 bits"]
    for row in (rows["  16 bits"], rows["  layers"]):
        assert "ptxas 13.1 is known to miscompile" in row
        assert "nvidia-cuda-nvcc>=13.4" in row and "set TRITON_PTXAS_PATH=" in row
    assert rows["  layers"].startswith("PyTorch: ")
    hopper["capability"] = (8, 9)
    tuning.forget_tables()
    assert dict(doctor._choices())["  16 bits"].endswith("compute capability 9.0, not 8.9")


def test_the_kernel_of_each_call_is_named_with_its_tile_and_why(hopper):
    rows = dict(doctor._choices())
    assert re.fullmatch(
        r"hopper_forward \d+x\d+: at d = 64.*; hopper_specialized \d+x\d+: specialised warps are faster.*",
        rows["  d = 64, no dropout, 1,024 tokens"],
    )
    assert rows["  layers, width 64"].startswith("embed, project, feed_forward")
    assert rows["  layers, other norms or post-norm"].startswith("embed, table_gradient; PyTorch")
    assert len(rows) >= 20 and not any("\n" in row for row in rows.values())


def test_the_tables_of_tiles_are_named(hopper, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "load_tables", lambda: [])
    ((subject, state),) = doctor._tiles()
    assert subject == "tiles" and state.startswith("defaults") and "lra tune" in state

    measured = {"gpu": "NVIDIA Test", "versions": {"triton": "3.6.0"}, "ptxas": "13.4", "date": "2026-01-02T03:04:05Z"}
    tiles = {TileKey("forward", "bfloat16", 64, False): Tile(16, 16, 4, 1)}
    user = TileTable(tmp_path / "NVIDIA-Test.json", measured, "", tiles, {}, {})
    shipped = user._replace(path=tuning.FLASH_FOLDER / "tuned" / "sm_90.json")

    def tables():
        warnings.warn("old.json is not used", stacklevel=1)
        return [user, shipped]

    monkeypatch.setattr(tuning, "load_tables", tables)
    note, *rows = (state for _, state in doctor._tiles())
    assert note == "old.json is not used"
    assert rows[0].startswith("this machine's, 1 rows in ") and rows[1].startswith("shipped, 1 rows in ")
    assert all(row.endswith("measured on NVIDIA Test with Triton 3.6.0, ptxas 13.4, 2026-01-02") for row in rows)


def test_stores_are_listed_and_a_broken_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path))
    for version in (1, 2, 3):
        content = StoreContent("toy", version, {}, "generated", ("a", "b"), "toy@1", 0)
        store = prepare_store(content, lambda writer: writer.add("train", [np.zeros(5, np.uint8)] * 3, [0, 1, 0]))
        if version == 2:
            (store.path / "manifest.json").write_text("{")
        if version == 3:
            manifest = json.loads((store.path / "manifest.json").read_text())
            (store.path / "manifest.json").write_text(json.dumps(manifest | {"splits": None}))
    (tmp_path / ".toy@9-00000000.partial").mkdir()
    rows = dict(doctor.diagnose())
    sound, unreadable, strange = (state for subject, state in rows.items() if subject.startswith("  toy@"))
    assert sound.endswith("MB: train 3")
    assert "manifest.json is missing or unreadable" in unreadable
    assert strange.startswith("fails: ")
    assert not any("toy@9" in subject for subject in rows)


def test_the_mend_of_a_damaged_store_prepares_that_very_store(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path))

    def broken(unreadable: bool, *args: str) -> tuple[TaskData, str]:
        """A data module whose store is damaged, and what is said of that."""
        data = task_data(args)
        rows = [np.zeros(5, np.uint8)] * 3
        store = prepare_store(data.content(), lambda writer: writer.add("train", rows, [0, 1, 0]))
        (store.path / ("manifest.json" if unreadable else "train.labels.npy")).write_text("{")
        return data, dict(doctor.diagnose())[f"  {store.path.name}"]

    for args in (
        ("task=listops", "task.train=50", "task.data_seed=3", "task.max_length=600"),
        ("task=listops", "task.source=/a folder", "task.fresh=9"),
        ("task=pathx", "task.level=easy", "task.val=7"),
        ("task=path64", "task.source=/a folder"),
        ("task=text",),
        ("task=text", "task.source=/a folder"),  # not in its name
        ("task=retrieval", "task.dataset=scisumm", "task.source=/a folder"),
    ):
        data, said = broken(False, *args)
        words = shlex.split(said.partition("; run: ")[2])
        assert words[:3] == ["lra", "data", "prepare"] and words[-1] == "force=true"
        assert task_data(words[3:-1]).content() == data.content()
        shutil.rmtree(data.content().path)
    assert broken(True, "task=listops")[1].endswith("; run: lra data prepare task=listops force=true")
    data, said = broken(True, "task=listops", "task.train=50")
    assert said.endswith(f"; remove {data.content().path}, and the next command that needs it prepares it again")


def test_what_raises_is_a_row(tmp_path, monkeypatch):
    def broken():
        raise OSError("libcuda.so: cannot open\nand so on")

    monkeypatch.setattr(doctor, "_gpus", broken)
    (tmp_path / "flash_attn.py").write_text('raise ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEab")')
    monkeypatch.syspath_prepend(tmp_path)
    rows = dict(doctor.diagnose())
    assert rows["GPU"] == "fails: libcuda.so: cannot open"
    assert rows["flash-attn"] == "fails: undefined symbol: _ZN3c104cuda9SetDeviceEab"


def test_the_command_prints_the_rows():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "torch" in result.output and "disk for data" in result.output
