"""A run's directory: its name, who works there, what is refused, and files that are replaced whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lra.errors import UsageError
from lra.files import replace_file
from lra.training import fit
from lra.training.run_directory import (
    RunDirectory,
    claim_directory,
    had_gpu_alone,
    is_claimed,
    is_vacant,
    locked_shared,
    time_and_memory,
    write_text,
)

TINY = ("task=listops", "attn=flash", "recipe=demo")
SCORES = {"accuracy": 0.5, "plus_minus": 0.1, "n": 10, "baselines": {"majority": 0.1}}
MADE = {"date": "2026-01-02T03:04:05Z", "gpu": None, "commit": None}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """`directory("field=value", …)` is a run's, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: RunDirectory(fit.configure([*TINY, *args]))


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The names of `os.fsync` and `os.replace`, as they are called."""
    made: list[str] = []
    for name in ("fsync", "replace"):
        genuine = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, genuine=genuine: made.append(name) or genuine(*args))
    return made


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path, calls):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replace_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old" and not calls
    assert path.read_bytes() == b"new" and [*tmp_path.iterdir()] == [path]
    assert calls == ["fsync", "replace"], "the content is on the disk before the name is"


def test_all_that_was_written_is_on_the_disk_before_the_file_is_replaced(tmp_path, monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    with replace_file(tmp_path / "file") as file:
        file.write(b"four")  # which Python keeps in a buffer
    assert sizes == [4]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_file_alone(tmp_path, calls, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), replace_file(path) as file:
        file.write(b"half of the ne")
        raise error
    assert path.read_bytes() == b"old" and [*tmp_path.iterdir()] == [path] and not calls


def test_a_file_that_can_not_be_replaced_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError), replace_file(tmp_path / "folder") as file:
        file.write(b"new")
    assert [*tmp_path.iterdir()] == [tmp_path / "folder"]


def test_two_processes_write_beside_each_other(tmp_path, monkeypatch):
    """Each has a file of its own, which a cleaner knows by its name."""
    path = tmp_path / "file"
    with replace_file(path) as one:
        one.write(b"one")
        (aside,) = tmp_path.glob(".file.[0-9]*")
        monkeypatch.setattr(os, "getpid", lambda: int(aside.suffix[1:]) + 1)
        with replace_file(path) as other:
            other.write(b"other")
        assert path.read_bytes() == b"other"
    assert path.read_bytes() == b"one" and [*tmp_path.iterdir()] == [path]


def test_text_is_written_as_utf8(tmp_path):
    write_text(tmp_path / "file", "9 × π\n")
    assert (tmp_path / "file").read_bytes() == "9 × π\n".encode()


def test_a_run_is_named_by_what_it_computes(directory):
    assert directory("seed=3").path == Path("checkpoints/runs/listops/flash/demo-s3")
    computing = ("engine=eager", "trainer.accelerator=cpu", "trainer.devices=1", "batch.micro=2", "batch.eval=5")
    other = directory("optim.lr=0.1", *computing, "resume=auto", "init=there/last.ckpt")
    assert other.path.name == "demo+init=there_last.ckpt,optim.lr=0.1-s0"
    assert directory("optim.lr=0.1", "name=mine").path.name == "mine-s0"


def test_a_long_name_is_cut_and_says_which_it_is(directory):
    steps = [f"trainer.steps={number}" for number in (1000, 2000)]
    long = ("optim.lr=0.0123456789", "optim.weight_decay=0.0123456789", "optim.eps=0.0123456789", "optim.warmup=3")
    one, other = (directory(*long, step).path.name for step in steps)
    assert one != other and len(one) == len(other) == len("demo+-s0") + 80 + 1 + 8
    assert directory(*long, steps[0]).path.name == one


def touch(directory: RunDirectory, *names: str) -> None:
    """An unfinished run with these files."""
    directory.path.mkdir(parents=True, exist_ok=True)
    write_text(directory.path / "config.yaml", yaml.safe_dump(directory.config))
    for name in names:
        (directory.path / name).touch()


def test_where_a_copy_of_published_data_lies_is_no_part_of_a_run(directory):
    def text(*args):
        return RunDirectory(fit.configure(["task=text", "attn=flash", "recipe=amos2024", *args]))

    plain, copied = text(), text("task.source=some/imdb")
    assert plain.path == copied.path and plain.path.name == "amos2024-s0"
    assert plain.config["init"] == copied.config["init"], "its stages, too"
    with copied.opened(None):
        pass
    for other in ((), ("task.source=elsewhere/imdb",)):
        text("resume=auto", *other).check()
    with pytest.raises(UsageError, match="holds a run with another configuration .batch.size: "):
        text("resume=auto", "name=amos2024", "batch.size=8").check()
    paths = {RunDirectory(fit.configure(["task=listops", "attn=flash", *more])).path for more in ((), ("source=lra",))}
    assert len(paths) == 2, "LRA's expressions are not those that are generated"


def test_where_training_starts(directory):
    assert [directory(f"resume={resume}").checkpoint() for resume in ("false", "auto", "true")] == [None] * 3
    touch(directory(), "last.ckpt")
    last = directory().last
    assert [directory(f"resume={resume}").checkpoint() for resume in ("false", "auto", "true")] == [None, last, last]
    assert directory(f"resume={last}").checkpoint() == last


def refused(directory: RunDirectory, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        directory.check()
    assert "\n" not in str(error.value)


def test_what_is_refused_before_a_run_begins(directory):
    directory("resume=auto").check()
    refused(directory("resume=true"), "resume=true, but .* has no last.ckpt: leave resume out to start there")
    refused(directory("resume=none.ckpt"), "resume=none.ckpt: no such checkpoint; resume is false, true, auto or a")
    refused(directory(f"init={90 * '字'}"), "too long for a folder: choose a name=")
    touch(directory(), "last.ckpt")
    refused(directory(), "holds an unfinished run: add resume=auto to go on, or name= to start another")
    refused(directory(f"resume={directory().path}"), f"no such checkpoint; give resume={directory().last}")
    for resume in ("auto", "true", directory().last):
        directory(f"resume={resume}").check()
    touch(directory("name=other"), "last.ckpt")
    other = directory("name=other").last
    refused(directory(f"resume={other}"), "resume=auto goes on with it, name= starts another from")
    refused(
        directory("name=other", "optim.lr=0.5"), r"another configuration \(optim.lr: \S+ -> 0.5\): choose another name="
    )
    (directory().path / "config.yaml").write_text("a: [")
    refused(directory("resume=auto"), "config.yaml is damaged or no configuration of a run: move .* away")


def ended(directory: RunDirectory, status: Any = "finished", **more: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"task": directory.task, "config": directory.config, "test": SCORES, "environment": MADE}
    return directory.finish(status, facts | more)


def test_a_result_says_how_a_run_ended_and_where(directory):
    run = directory()
    touch(run)
    assert run.result() is None and not run.finished
    assert ended(run, "failed")["status"] == "failed" and not run.finished
    said = ended(run)
    assert run.finished and run.result() == said and (said["status"], said["directory"]) == ("finished", str(run.path))
    run.check()  # nothing is to be done
    ended(run, task="listops@0")
    refused(run, "holds a result of listops@0, and the task is now listops@1: move it away, or choose another name=")
    (run.path / "result.json").write_text("{")
    refused(run, r"result.json is not a whole result.*: remove it, then resume=auto makes it anew")


def test_a_directory_is_opened_by_one_process_and_cleaned(directory):
    run = directory("resume=auto", "optim.lr=1e-3")
    with run.opened(None):
        assert yaml.safe_load((run.path / "config.yaml").read_text()) == run.config
        session = json.loads((run.path / "env.json").read_text())[0]
        assert session["versions"]["python"] and session["overrides"][-1] == "optim.lr=1e-3"
        assert is_claimed(run.path)
        with pytest.raises(UsageError, match="another process works in"), run.opened(None):
            pass
        ended(run, "failed")
        (run.path / ".last.ckpt.123").touch()
    assert not is_claimed(run.path)
    with run.opened(None):
        assert {each.name for each in run.path.iterdir()} == {"claim", "config.yaml", "env.json"}
    run.last.touch()
    with pytest.raises(UsageError, match="another process has worked in .*: the same command again goes on from there"):
        run.opened(None).__enter__()
    with run.opened(run.last):
        ended(run)
    with pytest.raises(UsageError, match="another process has finished .*: the same command again prints its result"):
        run.opened(run.last).__enter__()
    assert not is_claimed(run.path), "who was refused holds nothing"


def test_a_claim_is_of_one_process_and_ends_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr("lra.training.run_directory.CLAIM_PATIENCE_S", 0.0)
    assert not is_claimed(tmp_path / "none")
    held = claim_directory(tmp_path / "run")
    assert held is not None and claim_directory(tmp_path / "run") is None and is_claimed(tmp_path / "run")
    with locked_shared(tmp_path / "run") as rests:
        assert not rests
    os.close(held)
    assert not is_claimed(tmp_path / "run")
    with locked_shared(tmp_path / "run") as rests:
        assert rests and claim_directory(tmp_path / "run") is None
    assert is_vacant(tmp_path / "run")


def test_a_folder_without_a_run_is_vacant(tmp_path):
    assert is_vacant(tmp_path / "none") and is_vacant(tmp_path)
    for name, left in (("claim", True), ("log.txt", True), ("config.yaml", False)):
        (tmp_path / name).touch()
        assert is_vacant(tmp_path) == left
    assert not is_vacant(tmp_path / "claim"), "a file"


def test_what_a_run_took_is_said_where_it_is_known():
    new = {"wall_seconds": 9.0, "train_seconds": 5.0, "peak_gpu_bytes": 7, "session_seconds": 2.0}
    old = {"session_seconds": 2.0, "peak_gpu_bytes": 7}
    assert time_and_memory(new) == time_and_memory(new | {"resumed": True}) == (9.0, 7)
    assert time_and_memory(old) == (2.0, 7) and time_and_memory(old | {"resumed": True}) == (None, None)
    assert [had_gpu_alone(each) for each in ({"runs_per_device": 1}, {"runs_per_device": 2}, {})] == [
        True,
        False,
        False,
    ]


def test_what_was_opened_can_be_taken_back(directory):
    """For ranks that did not meet: the same command finds the directory as it was."""
    run = directory("resume=auto")
    with run.opened(None):
        run.withdraw()
    assert {each.name for each in run.path.iterdir()} == {"claim"}
    with run.opened(None):
        ended(run, "failed")
    before = {each.name: each.read_bytes() for each in run.path.iterdir()}
    with run.opened(None):
        assert not (run.path / "result.json").exists()
        run.withdraw()
    assert {each.name: each.read_bytes() for each in run.path.iterdir()} == before
