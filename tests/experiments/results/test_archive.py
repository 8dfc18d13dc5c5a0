"""Results carried in an archive: what is packed, and what merging keeps."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import multiprocessing
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from lra.cli import app
from lra.errors import UsageError
from lra.experiments.results import archive
from lra.experiments.results.archive import merge_runs, pack_runs
from lra.training.run_directory import CLAIM_FILE, FIRST_FAILURE_FILE, LOG_FILE, claim_directory
from tests.experiments.results.archives import DONE, FAILED, GOING, SMALL, listed, make, names, packed

CONTINUED = SMALL - {"result.json"} | {"best.ckpt", "last.ckpt"}


@pytest.mark.parametrize(
    ("checkpoints", "done", "going"),
    [
        ("none", SMALL, None),
        ("weights", SMALL | {"model.safetensors"}, CONTINUED),
        ("best", SMALL | {"best.ckpt"}, CONTINUED),
        ("last", SMALL | {"last.ckpt"}, CONTINUED),
        ("all", SMALL | {"best.ckpt", "last.ckpt", "model.safetensors"}, CONTINUED),
    ],
)
def test_what_is_packed(runs, checkpoints, done, going):
    found = names(packed(runs, f"checkpoints={checkpoints}"))
    assert found.get(DONE) == done and found.get(GOING) == going
    assert found[FAILED] == (SMALL if checkpoints == "none" else SMALL | {"best.ckpt", "last.ckpt"})


def test_what_is_left_out_is_named_and_nothing_lies_aside(runs, tmp_path):
    (runs / FAILED / "result.json").write_text("{")
    lines = pack_runs([f"runs={runs}", f"out={tmp_path / 'a.tar.xz'}"])
    assert [line.partition(", ")[0] for line in lines[:2]] == [f"left out: {FAILED}", f"left out: {GOING}"]
    assert lines[-1].startswith("1 runs, 4 files") and {path.name for path in tmp_path.iterdir()} == {
        "there",
        "a.tar.xz",
    }


def test_a_finished_run_without_the_checkpoint_asked_for_is_named(runs, tmp_path):
    (runs / DONE / "model.safetensors").unlink()
    args = [f"runs={runs}", f"out={tmp_path / 'a.tar.xz'}"]
    assert pack_runs([*args, "checkpoints=weights"])[:-1] == [f"{DONE}: has no model.safetensors"]
    assert pack_runs([args[0], f"out={tmp_path / 'b.tar.xz'}", "checkpoints=last"])[:-1] == []


def test_an_archive_that_is_there_is_not_replaced(runs):
    """It may have checkpoints that are nowhere else any more."""
    out = packed(runs, "checkpoints=last")
    before = out.read_bytes()
    with pytest.raises(UsageError, match="is there already: name another file, or remove it first"):
        pack_runs([f"runs={runs}", f"out={out}"])
    assert out.read_bytes() == before


def test_a_run_that_a_process_works_on_is_left_out(runs):
    held = [claim_directory(runs / name) for name in (DONE, FAILED, GOING)]  # the second one is tried again
    out = packed(runs, "checkpoints=last")
    assert names(out) == {DONE: SMALL | {"last.ckpt"}}
    lines = pack_runs([f"runs={runs}", f"out={runs.parent}/2.tar.xz", "checkpoints=last"])
    why = "a process works on it: pack it when that has ended"
    assert lines[:-1] == [f"left out: {name}, {why}" for name in (FAILED, GOING)]
    for file in held:
        os.close(file or 0)
    assert set(names(packed(runs, "checkpoints=last"))) == {DONE, FAILED, GOING}


def test_nobody_begins_with_a_run_while_it_is_packed(runs, monkeypatch):
    begun, add = [], tarfile.TarFile.addfile
    started = lambda: [claim_directory(runs / name) for name in (FAILED, GOING)]  # noqa: E731
    monkeypatch.setattr(tarfile.TarFile, "addfile", lambda *args: begun.append(started()) or add(*args))
    monkeypatch.setattr("lra.training.run_directory.CLAIM_PATIENCE_S", 0)
    packed(runs, "checkpoints=last")
    assert len(begun) > 10 and all(found == [None, None] for found in begun)
    for file in started():
        os.close(file or 0)


def test_runs_in_which_nothing_may_be_written_are_packed(runs):
    (runs / GOING / CLAIM_FILE).mkdir()  # root may write everywhere
    assert GOING in names(packed(runs, "checkpoints=last"))


def test_merging_brings_the_same_files_and_again_nothing(runs, target):
    file = packed(runs, "checkpoints=all")
    assert merge_runs(file, [f"runs={target}"])[-1] == "3 added, 0 replaced, 0 completed, 0 kept"
    there = listed(runs)
    del there[f"{GOING}/model.safetensors"], there[f"{FAILED}/model.safetensors"]
    before = listed(target)
    assert before == there
    assert merge_runs(file, [f"runs={target}"])[-1] == "0 added, 0 replaced, 0 completed, 3 kept"
    assert listed(target) == before and {path.name for path in target.iterdir()} == {"listops"}


def test_a_folder_that_is_no_finished_run_of_its_own_is_refused(runs, target, tmp_path):
    released = shutil.copytree(runs / DONE, tmp_path / "released")
    made = json.loads((released / "result.json").read_text())
    for changed, message in (
        ({"status": "failed"}, "has no finished run's result.json"),
        ({"directory": "flash/xiong2021-s0"}, "has 'flash/xiong2021-s0' as its directory"),
        ({"directory": "x/../../.."}, "has '../../..' as its directory: get it again"),
        ({"directory": 5}, "it lacks a text as directory"),
        ({"directory": "checkpoints/runs/text/flash/xiong2021-s0"}, "holds a run of listops, flash, seed 0"),
        ({"directory": f"checkpoints/runs/{DONE}", "config": made["config"] | {"seed": 1}}, "config.yaml and result"),
    ):
        (released / "result.json").write_text(json.dumps(made | changed))
        with pytest.raises(UsageError, match=message):
            merge_runs(released, [f"runs={target}"])
    assert not target.exists()


def test_a_finished_run_stays(runs, target):
    make(runs, GOING, "failed", 9000)
    make(target, GOING, "finished", 500)
    before = listed(target / GOING)
    assert "it is finished here" in merge_runs(packed(runs, "checkpoints=all"), [f"runs={target}"])[2]
    assert listed(target / GOING) == before


def test_a_finished_run_gets_the_checkpoints_that_it_lacks(runs, target):
    merge_runs(packed(runs), [f"runs={target}"])
    (target / DONE / "last.ckpt").write_bytes(b"its own")
    file = packed(runs, "checkpoints=all")
    lines = merge_runs(file, [f"runs={target}"])
    assert f"{DONE}: completed, best.ckpt, model.safetensors" in lines
    assert lines[-1] == "1 added, 1 replaced, 1 completed, 0 kept"  # the others go on from their last.ckpt
    assert listed(target / DONE) == listed(runs / DONE) | {"last.ckpt": b"its own"}
    assert merge_runs(file, [f"runs={target}"])[-1] == "0 added, 0 replaced, 0 completed, 3 kept"


def test_no_checkpoint_of_an_unfinished_run_completes_a_finished_one(runs, target):
    (make(target, GOING) / "last.ckpt").unlink()
    assert f"{GOING}: kept, it is finished here" in merge_runs(packed(runs, "checkpoints=last"), [f"runs={target}"])


def test_another_finished_result_is_refused_by_name_and_nothing_is_added(runs, target):
    make(target, DONE, accuracy=0.1)
    before = listed(target)
    with pytest.raises(UsageError, match=f"{DONE} has another finished result of the same configuration"):
        merge_runs(packed(runs), [f"runs={target}"])
    assert listed(target) == before and {path.name for path in target.iterdir()} == {"listops"}


def test_an_unfinished_run_gives_way_to_a_finished_one(runs, target):
    make(target, DONE, None, 9000)
    assert f"{DONE}: replaced, it was unfinished here" in merge_runs(packed(runs), [f"runs={target}"])
    assert set(listed(target / DONE)) == SMALL  # nothing of the other run is left


# a signal may have ended it at 490, past its last validation
@pytest.mark.parametrize(("steps", "action"), [(250, "replaced"), (490, "replaced"), (500, "kept"), (1000, "kept")])
def test_of_two_unfinished_runs_the_one_with_more_steps_stays(runs, target, steps, action):
    make(target, GOING, None, steps)
    lines = merge_runs(packed(runs, "checkpoints=last"), [f"runs={target}"])
    assert f"{GOING}: {action}, {steps} steps here, 500 there" in lines
    assert torch.load(target / GOING / "last.ckpt")["global_step"] == max(steps, 500)


def test_a_run_that_a_process_works_on_stays(runs, target):
    make(target, GOING, None, 250)
    held = [claim_directory(target / name) for name in (GOING, DONE)]  # the other one has just been begun
    before, file = listed(target), packed(runs, "checkpoints=last")
    lines = merge_runs(file, [f"runs={target}"])
    assert {f"{name}: kept, a process works on it here" for name in (GOING, DONE)} < set(lines)
    assert {name: content for name, content in listed(target).items() if FAILED not in name} == before
    for file_held in held:
        os.close(file_held or 0)
    assert merge_runs(file, [f"runs={target}"])[-1] == "1 added, 1 replaced, 0 completed, 1 kept"


def test_a_run_that_a_process_begins_meanwhile_stays(runs, target, monkeypatch):
    make(target, GOING, None, 250)
    held, decide = [], archive._decide

    def begun(new, old):
        decided = decide(new, old)
        if old.name == GOING and not held:
            held.append(claim_directory(target / GOING))
            make(target, GOING, None, 750)
        return decided

    file = packed(runs, "checkpoints=last")
    monkeypatch.setattr(archive, "_decide", begun)
    assert f"{GOING}: kept, a process works on it here" in merge_runs(file, [f"runs={target}"])
    assert torch.load(target / GOING / "last.ckpt")["global_step"] == 750 and claim_directory(target / GOING) is None
    os.close(held[0])


def test_a_run_that_a_process_has_worked_on_meanwhile_is_looked_at_again(runs, target, monkeypatch):
    make(target, GOING, None, 250)
    file = packed(runs, "checkpoints=last")
    late = lambda path: make(target, GOING, None, 750) and claim_directory(path)  # noqa: E731
    monkeypatch.setattr(archive, "claim_directory", late)
    assert f"{GOING}: kept, 750 steps here, 500 there" in merge_runs(file, [f"runs={target}"])
    assert torch.load(target / GOING / "last.ckpt")["global_step"] == 750


def test_who_opened_the_claim_before_a_merge_has_it_after(runs, target):
    make(target, GOING, None, 250)
    os.close(claim_directory(target / GOING) or 0)
    with (target / GOING / CLAIM_FILE).open() as opened:
        assert f"{GOING}: replaced, 250 steps here, 500 there" in merge_runs(
            packed(runs, "checkpoints=last"), [f"runs={target}"]
        )
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert claim_directory(target / GOING) is None


def test_a_merge_that_is_killed_loses_nothing_and_mixes_no_checkpoints(runs, target, monkeypatch):
    shutil.rmtree(runs / FAILED)
    shutil.rmtree(runs / GOING)
    file, replace = packed(runs, "checkpoints=all"), os.replace
    theirs, moment, killed = set(listed(runs / DONE).items()), 0, True
    while killed:
        ours = set(listed(make(target, DONE, None, 250)).items())
        does = iter([replace] * moment)
        monkeypatch.setattr(archive.os, "replace", lambda *paths, does=does: next(does, lambda *_: os._exit(9))(*paths))
        process = multiprocessing.get_context("fork").Process(target=merge_runs, args=(file, [f"runs={target}"]))
        process.start()
        process.join()
        monkeypatch.undo()
        killed = process.exitcode == 9
        there = listed(target)
        if killed:
            assert ours | theirs <= {(Path(name).name, content) for name, content in there.items()}
        left = {(name, content) for name, content in listed(target / DONE).items() if name.endswith(".ckpt")}
        assert left <= ours or left <= theirs or "last.ckpt" not in dict(left), moment
        if "result.json" in listed(target / DONE):
            assert set(listed(target / DONE).items()) == theirs
        merge_runs(file, [f"runs={target}"])
        assert set(listed(target / DONE).items()) == theirs
        shutil.rmtree(target)
        moment += 1
    assert moment > 10


def test_what_cannot_be_continued_replaces_nothing(runs, target):
    make(target, FAILED, None, 250)
    assert f"{FAILED}: kept, 250 steps here, 0 there" in merge_runs(packed(runs), [f"runs={target}"])


@pytest.mark.parametrize("marks", [(), (CLAIM_FILE, LOG_FILE)])
def test_what_a_cell_refused_early_leaves_gives_way(runs, target, marks):
    (target / DONE).mkdir(parents=True)
    for name in marks:
        (target / DONE / name).touch()
    assert f"{DONE}: added" in merge_runs(packed(runs), [f"runs={target}"])
    assert set(listed(target / DONE)) == SMALL


def test_a_place_with_something_else_is_refused(runs, target):
    (target / DONE).mkdir(parents=True)
    (target / DONE / "notes.txt").touch()
    with pytest.raises(UsageError, match=f"{DONE} is not a run's directory: move it away"):
        merge_runs(packed(runs), [f"runs={target}"])


def test_a_run_that_failed_twice_stays_so(runs, target):
    folder = make(runs, FAILED, "failed")
    shutil.copy(folder / "result.json", folder / FIRST_FAILURE_FILE)
    merge_runs(packed(runs), [f"runs={target}"])
    assert set(listed(target / FAILED)) == SMALL | {FIRST_FAILURE_FILE}


@pytest.mark.parametrize("steps", [0, 500])
@pytest.mark.parametrize("status", ["oom", "failed"])
def test_a_run_that_ended_replaces_one_that_has_not_and_is_no_further(runs, target, status, steps):
    make(runs, FAILED, status, steps)
    make(target, FAILED, None, steps)
    if not steps:
        (target / FAILED / "last.ckpt").unlink()
    file = packed(runs, "checkpoints=last" if steps else "checkpoints=none")
    assert f"{FAILED}: replaced, it had not ended here" in merge_runs(file, [f"runs={target}"])
    assert json.loads((target / FAILED / "result.json").read_text())["status"] == status
    assert f"{FAILED}: kept, {steps} steps here, {steps} there" in merge_runs(file, [f"runs={target}"])


@pytest.mark.parametrize(
    ("status", "first", "last"), [("failed", {}, {}), ("oom", {"runs_per_device": 2}, {"runs_per_device": 1})]
)
def test_an_end_for_good_replaces_one_to_be_tried_again_in_any_order(runs, target, tmp_path, status, first, last):
    make(runs, FAILED, status, **first)
    early = packed(runs, "checkpoints=last").rename(tmp_path / "early.tar.xz")
    folder = make(runs, FAILED, status, **last)
    if status == "failed":
        (folder / "failed.json").write_text((folder / "result.json").read_text())
    late = packed(runs, "checkpoints=last")
    for order, said in (((early, late), "replaced, it was to be tried again here"), ((late, early), "kept")):
        shutil.rmtree(target, ignore_errors=True)
        notes = [note for file in order for note in merge_runs(file, [f"runs={target}"])]
        assert any(note.startswith(f"{FAILED}: {said}") for note in notes)
        assert archive.StoredRun(target / FAILED).ended() == 2


def test_another_configuration_is_refused_with_its_fields(runs, target):
    folder = make(target, DONE)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["optim"]["lr"] = 0.5
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(UsageError, match=r"another configuration \(optim.lr: 0.5 -> 0.0001\)"):
        merge_runs(packed(runs), [f"runs={target}"])


def test_a_failed_rename_leaves_the_old_run(runs, target, monkeypatch):
    make(target, DONE, None)
    before, replace = listed(target), archive.os.replace

    def fail(source, target):
        if "new" in Path(source).parts:
            raise OSError(28, "No space left on device")
        replace(source, target)

    file = packed(runs)
    monkeypatch.setattr(archive.os, "replace", fail)
    with pytest.raises(UsageError, match="no space left"):
        merge_runs(file, [f"runs={target}"])
    assert listed(target) == before


def test_an_archive_that_may_not_be_read_is_named_not_the_runs(runs, target, monkeypatch):
    file, genuine = packed(runs), io.open

    def opened(path, *rest, **named):  # root may read all
        if path == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return genuine(path, *rest, **named)

    monkeypatch.setattr(io, "open", opened)
    with pytest.raises(PermissionError, match=str(file)):
        merge_runs(file, [f"runs={target}"])


def test_bad_input_is_one_line(tmp_path):
    for args, message in (
        ([], "needs an out=<file>.tar.xz"), (["out=a.zip"], "needs an out="), ([f"out={tmp_path}/a.tar.xz"], "no run"),
        (["out=a.tar.xz", "checkpoints=some"], "write none"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            pack_runs([f"runs={tmp_path}", *args])
    with pytest.raises(UsageError, match="is not a file: name an archive"):
        merge_runs(tmp_path / "none.tar.xz")


def test_the_commands(runs, target, tmp_path):
    out = str(tmp_path / "a.tar.xz")
    done = CliRunner().invoke(app, ["results", "pack", f"runs={runs}", f"out={out}"])
    assert done.exit_code == 0 and "2 runs, 8 files" in done.output, done.output
    done = CliRunner().invoke(app, ["results", "merge", out, f"runs={target}"])
    assert done.exit_code == 0 and "2 added, 0 replaced, 0 completed, 0 kept" in done.output, done.output
    shutil.rmtree(target)
    assert isinstance(CliRunner().invoke(app, ["results", "merge", str(target)]).exception, UsageError)


def test_weights_are_read_before_they_are_placed(runs, target, tmp_path):
    weights = runs / DONE / "model.safetensors"
    released = shutil.copytree(runs / DONE, tmp_path / "released")
    for content, message in (
        (weights.read_bytes()[:-1], "can't be read"),
        ((runs / FAILED / "model.safetensors").read_bytes(), "is another run's .seed: 0 -> 1"),
    ):
        (released / "model.safetensors").write_bytes(content)
        with pytest.raises(UsageError, match=f"{DONE}/model.safetensors {message}"):
            merge_runs(released, [f"runs={target}"])
    assert not target.exists()
    weights.write_bytes(content)
    out = tmp_path / "a.tar.xz"
    [note, _] = pack_runs([f"runs={runs}", f"out={out}", "checkpoints=weights"])[:2]
    assert note.startswith(f"left out: {DONE}, {DONE}/model.safetensors is another run's") and DONE not in names(out)
    out.unlink()
    pack_runs([f"runs={runs}", f"out={out}"])
    assert DONE in names(out), "they are not packed"


def test_curves_that_cant_be_read_are_not_packed_and_missing_ones_come_later(runs, target, tmp_path):
    first = shutil.copytree(runs / DONE, tmp_path / "released")
    (first / "metrics.csv").unlink()
    merge_runs(first, [f"runs={target}"])
    assert f"{DONE}: completed, metrics.csv" in merge_runs(packed(runs, "checkpoints=weights"), [f"runs={target}"])
    (runs / DONE / "metrics.csv").write_text("garbage\nmore\n")
    out = tmp_path / "a.tar.xz"
    assert f"left out: {DONE}, {DONE}/metrics.csv can't be read: leave that run out" in pack_runs(
        [f"runs={runs}", f"out={out}"]
    )
    merge_runs(out, [f"runs={tmp_path / 'other'}"])
