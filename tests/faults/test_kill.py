"""SIGKILL at any moment, and damage to the files of a run: what goes on ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import lra
from lra.data.store import Store
from lra.errors import UsageError
from lra.training import checkpoints, curves
from tests.faults.driver import Moment, fit
from tests.training.conftest import arguments

OWN = ("name=run", "batch.eval=8", "trainer.log_every=1")
FIELDS = arguments(*OWN)
RUN = Path("checkpoints/runs/listops/flash/run-s0")
SPENT = (
    "train_seconds",
    "steps_per_second",
    "first_step_seconds",
    "validation_seconds",
    "wall_seconds",
    "resumed",
    "environment",
    "peak_gpu_bytes",
    "runs_per_device",
    "kernels",  # of the last session: it may only score
)

# where an unbroken run can be killed, and how many such calls it has
PHASES: dict[str, list[tuple[Moment, int]]] = {
    "data": [
        (Moment("build"), 1), (Moment("add"), 4), (Moment("complete"), 1), (Moment("hash"), 12), (Moment("sync"), 15),
        (Moment("rename"), 1),
    ],
    "beginning": [
        (Moment("open"), 1), (Moment("replace", file="env.json"), 1), (Moment("replace", file="config.yaml"), 1),
        (Moment("setup"), 1),
    ],
    "training": [(Moment("step"), 12), (Moment("log"), 15), (Moment("rewrite"), 1)],
    "validation": [(Moment("validate"), 9), (Moment("tell"), 3)],
    "checkpoint": [
        (Moment("save"), 5), (Moment("replace", file="best.ckpt"), 2), (Moment("replace", file="last.ckpt"), 3),
    ],
    "result": [
        (Moment("test"), 6), (Moment("weights"), 1), (Moment("replace", file="model.safetensors"), 1),
        (Moment("finish"), 1), (Moment("replace", file="result.json"), 1),
    ],
}  # fmt: skip


def drawn(seed: int) -> list[Moment]:
    """One to three moments, the first of the phase whose turn it is, the others anywhere in what a resumed run does."""
    draw = random.Random(seed)
    names = list(PHASES)
    phases = [names[seed % len(names)], *draw.choices(names[1:], k=draw.randrange(3))]
    moments = []
    for phase in phases:
        moment, calls = draw.choice(PHASES[phase])
        when = draw.choice(("before", "half", "after") if moment.function == "save" else ("before", "after"))
        moments.append(moment._replace(count=draw.randint(1, calls), when=when))
    return moments


def name(moments: list[Moment]) -> str:
    return ",".join("-".join(str(part) for part in moment if part) for moment in moments)


def slow(seed: int) -> Any:
    return pytest.param(drawn(seed), marks=pytest.mark.slow, id=f"seed{seed}-{name(drawn(seed))}")


# where something could be lost: the store, half a checkpoint, the curves, one checkpoint of two, the result
CHAIN = [
    Moment("rename"), Moment("save", 4, "half"), Moment("rewrite"), Moment("replace", 1, "after", "best.ckpt"),
    Moment("replace", file="result.json"),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the unbroken run."""
    folder = tmp_path_factory.mktemp("whole")
    code, output = fit(folder, *FIELDS)
    assert code == 0, output
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed at step 11, its checkpoints those of step 8. Not to be changed."""
    folder = tmp_path_factory.mktemp("broken")
    assert fit(folder, *FIELDS, kill=Moment("step", 11))[0] == -9
    return folder


def plain(value: Any) -> Any:
    """What can be compared by ==, and means the same in another folder."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.numpy().tobytes()
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, str) and str(RUN) in value:
        return value[value.index(str(RUN)) :]
    return value


def checkpoint(folder: Path, file: str) -> Any:
    """All that a checkpoint holds but the time that training took, and a score that Lightning saves and never reads."""
    held = torch.load(folder / RUN / file, map_location="cpu", weights_only=True)
    del held["callbacks"]["Clock"]
    for state in held["callbacks"].values():
        state.pop("current_score", None)
    return plain(held)


def result(folder: Path) -> dict[str, Any]:
    """All that a result says but when, how long, and by which of several commands."""
    said = json.loads((folder / RUN / "result.json").read_text())
    said["overrides"] = [field for field in said["overrides"] if not field.startswith("resume=")]
    return {key: value for key, value in said.items() if key not in SPENT}


def inspect(folder: Path, whole: Path) -> None:
    """Whatever has its final name is whole, and the unbroken run's."""
    for store in (folder / "data").glob("[!.]*"):
        Store.open(store).verify()
    run = folder / RUN
    for file in run.glob("[!.]*"):
        if file.suffix == ".ckpt":
            assert zipfile.ZipFile(file).testzip() is None
            assert torch.load(file, map_location="cpu", weights_only=True)["global_step"] in (4, 8, 12)
    if (run / "model.safetensors").exists():
        assert (run / "model.safetensors").read_bytes() == (whole / RUN / "model.safetensors").read_bytes()
        load_file(run / "model.safetensors")
    if (run / "metrics.csv").exists():
        rows, wanted = curves.read_curves(run / "metrics.csv"), curves.read_curves(whole / RUN / "metrics.csv")
        assert rows == wanted[: len(rows)]
    if (run / "config.yaml").exists():
        assert yaml.safe_load((run / "config.yaml").read_text()) == result(whole)["config"]
    if (run / "env.json").exists():
        json.loads((run / "env.json").read_text())
    if (run / "result.json").exists():
        assert result(folder) == result(whole)


def same(folder: Path, whole: Path) -> None:
    """Bitwise the same run: data, curves, weights, moments, counts, where it was in its data, and scores."""
    (store,), (wanted,) = ([*(each / "data").glob("listops*")] for each in (folder, whole))
    assert Store.open(store).manifest["files"] == Store.open(wanted).manifest["files"]
    for file in ("metrics.csv", "config.yaml", "model.safetensors"):
        assert (folder / RUN / file).read_bytes() == (whole / RUN / file).read_bytes(), file
    for file in ("best.ckpt", "last.ckpt"):
        assert checkpoint(folder, file) == checkpoint(whole, file), file
    assert result(folder) == result(whole)


def test_the_same_command_twice_computes_the_same(tmp_path, whole):
    assert fit(tmp_path, *FIELDS)[0] == 0
    same(tmp_path, whole)
    steps = [int(row["step"]) for row in curves.read_curves(tmp_path / RUN / "metrics.csv") if row["train/loss"]]
    assert steps == [*range(1, 13)]


def killed(folder: Path, whole: Path, moments: list[Moment], fields: Sequence[str] = FIELDS) -> int:
    """A run that is killed at these moments, one after the other, and goes on to its end; returns how many there were.

    What is left to do after the first kill may have no such moment any more.
    """
    kills = 0
    for moment in moments:
        code, output = fit(folder, *fields, "resume=auto", kill=moment)
        if code == 0:
            break
        assert code == -9, output
        kills += 1
        inspect(folder, whole)
    code, output = fit(folder, *fields, "resume=auto")
    assert code == 0, output
    same(folder, whole)
    return kills


MOMENTS = [pytest.param(CHAIN, id="chain", marks=pytest.mark.slow), *map(slow, range(16))]


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_killed_run_ends_as_an_unbroken_one(tmp_path, whole, moments):
    assert killed(tmp_path, whole, moments) >= (len(CHAIN) if moments is CHAIN else 1)


@pytest.fixture(scope="module")
def whole_on_gpu(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, list[str]]:
    """As `whole`, and the fields, of an engine on a GPU."""
    folder = tmp_path_factory.mktemp(request.param)
    fields = arguments(*OWN, "trainer.accelerator=gpu", "attn.deterministic=true", f"engine={request.param}")
    code, output = fit(folder, *fields)
    assert code == 0, output
    return folder, fields


@pytest.mark.gpu
@pytest.mark.parametrize("whole_on_gpu", ["eager", "captured"], indirect=True)
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_run_killed_on_a_gpu_ends_as_an_unbroken_one(tmp_path, whole_on_gpu, moments):
    whole, fields = whole_on_gpu
    assert killed(tmp_path, whole, moments, fields) >= (len(CHAIN) if moments is CHAIN else 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_by_the_clock_ends_as_an_unbroken_one(tmp_path, whole, seed):
    draw = random.Random(seed)
    line = [sys.executable, "-m", "lra", "fit", *FIELDS, "resume=auto"]
    paths = {"PYTHONPATH": str(Path(lra.__file__).parents[1]), "LRA_DATA": str(tmp_path / "data")}
    process = subprocess.Popen(line, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"} | paths)
    until = time.monotonic() + 60
    while not (tmp_path / "data").exists():  # the imports are over
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 1.5))
    process.kill()
    process.wait()
    inspect(tmp_path, whole)
    code, output = fit(tmp_path, *FIELDS, "resume=auto")
    assert code == 0, output
    same(tmp_path, whole)


def flipped(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 8
    file.write_bytes(data)


def largest(file: Path) -> zipfile.ZipInfo:
    """The largest tensor of a checkpoint."""
    with zipfile.ZipFile(file) as archive:
        return max((each for each in archive.infolist() if "/data/" in each.filename), key=lambda each: each.file_size)


DAMAGES = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "a bit of a tensor": lambda file: flipped(file, largest(file).header_offset + largest(file).file_size // 2),
    "a bit of the first name": lambda file: flipped(file, 32),
    "a bit of the pickle": lambda file: flipped(file, 600),
    "a bit of the directory": lambda file: flipped(file, zipfile.ZipFile(file).start_dir),
}


def copy(folder: Path, to: Path) -> dict[Path, bytes]:
    """A copy's files, but for what was printed."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return files(to)


def files(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != "output.txt"}


FIRST = ("truncated", "a bit of a tensor")


@pytest.mark.parametrize(
    "damage", [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES if name not in FIRST)]
)
def test_a_damaged_checkpoint_is_refused_and_the_other_one_goes_on(tmp_path, whole, broken, damage):
    copy(broken, tmp_path)
    DAMAGES[damage](tmp_path / RUN / "last.ckpt")
    before = files(tmp_path)
    code, output = fit(tmp_path, *FIELDS, "resume=auto")
    first, error = output.splitlines()
    assert first == f"{RUN}: 12 steps, then the test"
    assert code == 2 and error.startswith(f"lra: {RUN}/last.ckpt can't be read as a checkpoint of lra (")
    mend = f"resume={RUN}/best.ckpt"
    assert f"it is damaged or of another program; {RUN}/best.ckpt is whole: {mend} goes on there" in error
    assert files(tmp_path) == before
    if damage == "a bit of a tensor":
        code, output = fit(tmp_path, *FIELDS, mend)
        assert code == 0, output
        same(tmp_path, whole)


@pytest.mark.slow
def test_without_another_whole_checkpoint_a_run_begins_anew(tmp_path, whole, broken):
    copy(broken, tmp_path)
    DAMAGES["truncated"](tmp_path / RUN / "last.ckpt")
    DAMAGES["a bit of a tensor"](tmp_path / RUN / "best.ckpt")
    code, output = fit(tmp_path, *FIELDS, "resume=auto")
    assert code == 2 and "of another program; without it, resume=auto begins anew" in output
    (tmp_path / RUN / "last.ckpt").unlink()
    code, output = fit(tmp_path, *FIELDS, "resume=auto")
    assert code == 0, output
    same(tmp_path, whole)


@pytest.mark.slow
def test_a_run_whose_best_checkpoint_is_damaged_starts_over(tmp_path, whole, broken):
    copy(broken, tmp_path)
    DAMAGES["a bit of a tensor"](tmp_path / RUN / "best.ckpt")
    before = files(tmp_path)
    for last in (f"{RUN}/last.ckpt", f"{tmp_path}/{RUN}/last.ckpt"):
        code, output = fit(tmp_path, *FIELDS, f"resume={last}")
        assert code == 2 and f"remove {Path(last).name}, and resume=auto starts over" in output
    assert files(tmp_path) == before
    (tmp_path / RUN / "last.ckpt").unlink()
    code, output = fit(tmp_path, *FIELDS, "resume=auto")
    assert code == 0, output
    same(tmp_path, whole)


@pytest.mark.parametrize(
    ("damaged", "other"),
    [(("best.ckpt",), "model.safetensors"), (("best.ckpt", "model.safetensors"), "last.ckpt"),
     (("model.safetensors",), "best.ckpt")],
)  # fmt: skip
def test_what_a_damaged_checkpoint_names_can_be_scored(tmp_path, monkeypatch, whole, damaged, other):
    copy(whole, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "data"))
    for name in damaged:
        flipped(RUN / name, (RUN / name).stat().st_size // 2)
    with pytest.raises(UsageError, match=f"{RUN}/{other} is whole: (init={RUN}/{other}) takes its weights") as refused:
        lra.test(f"init={RUN / damaged[0]}")
    assert "resume=" not in str(refused.value)
    assert lra.test(f"init={RUN / other}")["test"]


def test_any_flipped_bit_is_noticed_or_without_effect(tmp_path, broken):
    file, draw = tmp_path / "some.ckpt", random.Random(0)
    shutil.copy(broken / RUN / "last.ckpt", file)
    data, (weights, identity) = file.read_bytes(), checkpoints.read_checkpoint(file)
    size, noticed = len(data), 0
    anywhere = [draw.randrange(size) for _ in range(20)]
    for at in anywhere + [draw.randrange(size - 9000, size) for _ in range(20)]:  # and in the directory at the end
        flipped(file, at)
        try:
            there, who = checkpoints.read_checkpoint(file)
        except UsageError as error:
            assert "damaged" in str(error)
            noticed += 1
        else:
            assert who == identity and all(torch.equal(there[key], value) for key, value in weights.items())
        file.write_bytes(data)
    assert noticed > 20


def test_a_run_whose_folder_was_moved_keeps_its_best(tmp_path, whole, broken):
    copy(broken, tmp_path)
    code, output = fit(tmp_path, *FIELDS, "resume=auto")
    assert code == 0, output
    same(tmp_path, whole)  # the best is of step 8, as good as the last


@pytest.mark.slow
def test_half_a_row_of_the_curves_is_none(tmp_path, whole, broken):
    copy(broken, tmp_path)
    with (tmp_path / RUN / "metrics.csv").open("a") as file:
        file.write("11,2.30417370")
    assert curves.read_curves(tmp_path / RUN / "metrics.csv") == curves.read_curves(broken / RUN / "metrics.csv")
    assert fit(tmp_path, *FIELDS, "resume=auto")[0] == 0
    same(tmp_path, whole)
