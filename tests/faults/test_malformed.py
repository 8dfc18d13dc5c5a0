"""Bad input of every kind: one line that names it and the mend, exit code 2, and every file as it was."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lra.training.step import Step
from tests.command_line import DATA, ROOT, RUN, SHORT, lra, process
from tests.experiments.runs import until
from tests.faults import corpus, corpus_commands, corpus_runs, corpus_sources
from tests.faults.refusals import PLACE, check, refuses, snapshot
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("around")


@pytest.mark.parametrize("argument", sampled(corpus_commands.FIELDS, 6))
def test_a_field(argument, around):
    refuses(around, (*corpus_commands.SHOW, argument), corpus_commands.FIELDS[argument])


@pytest.mark.parametrize("command", sampled(corpus_commands.VERBS, 5))
def test_a_command(command, around):
    refuses(around, tuple(command.split()), corpus_commands.VERBS[command])


@pytest.mark.parametrize("case", corpus.LISTOPS)
def test_listops_files(case, around):
    spoil, words = corpus.LISTOPS[case]
    spoil(folder := corpus.listops_files(around / "official"))
    refuses(around, ("data", "prepare", "task=listops", "fresh=10", f"source={folder}"), words)


@pytest.mark.parametrize("case", corpus.ARCHIVES)
def test_an_archive(case, around):
    spoil, words = corpus.ARCHIVES[case]
    spoil(file := around / "release.gz")
    refuses(around, ("data", "prepare", "task=listops", "fresh=10", f"source={file}"), words)


@pytest.mark.parametrize(
    "case", sampled([(name, case) for name, source in corpus_sources.SOURCES.items() for case in source.cases], 5)
)
def test_a_source(case, around):
    make, command, cases = corpus_sources.SOURCES[case[0]]
    spoil, words = cases[case[1]]
    spoil(folder := make(around / "source"))
    refuses(around, ("data", "prepare", *command, f"source={folder}"), words)


CHECKPOINTS = {
    ("best.ckpt", case): spoiling for case, spoiling in (corpus.CKPT | corpus_runs.CKPT).items()
} | {
    ("model.safetensors", case): spoiling for case, spoiling in (corpus.SAFETENSORS | corpus_runs.SAFETENSORS).items()
}  # fmt: skip


@pytest.mark.parametrize("case", sampled(CHECKPOINTS))
def test_a_checkpoint(case, around, made, monkeypatch):
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("trained"))
    spoil, words = CHECKPOINTS[case]
    good = made / PLACE / case[0]
    shutil.copy(good, file := around / f"spoilt{good.suffix}")
    spoil(file)
    for command in (("test", f"init={file}"), ("fit", *RUN, f"init={file}")):
        refuses(around, command, (file.name, *words))


@pytest.mark.parametrize("case", sampled(corpus_runs.DIRECTORIES, 6))
def test_a_directory(case, around, made, monkeypatch):
    """Of a finished run, which the same command would print; also where that is not read first."""
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("trained"))
    spoil, words = corpus_runs.DIRECTORIES[case]
    shutil.copytree(made / PLACE, run := around / "here" / PLACE)
    spoil(run)
    for more in ((), ("resume=auto",)):
        refuses(around, ("fit", *RUN, "name=done", *more), words)


def spoiled(case: Any, around: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copies the data of a run and damages its store; returns the words that are to be said. Nothing may train."""
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("trained"))
    shutil.copytree(made / "data", around / "data")
    spoil, words = case
    (store,) = (around / "data").glob("listops@*")
    spoil(store)
    return words


@pytest.mark.parametrize("case", sampled(corpus.STORES, 4))
def test_a_store(case, around, made, monkeypatch):
    words = spoiled(corpus.STORES[case], around, made, monkeypatch)
    for command in (("data", "verify", *DATA), ("data", "info", *DATA), ("fit", *RUN, "name=other")):
        refuses(around, command, words)


@pytest.mark.parametrize("case", sampled(corpus_runs.STORES, 4))
def test_the_content_of_a_store(case, around, made, monkeypatch):
    """Only `verify` reads all bytes, but none makes a run compute something else or end in a traceback."""
    words = spoiled(corpus_runs.STORES[case], around, made, monkeypatch)
    for command in (("data", "show", *DATA), ("test", f"init={made / PLACE}")):
        refuses(around, command, words)
    assert lra("data", "verify", *DATA).code == 2


@pytest.mark.parametrize("case", sampled(corpus_runs.ARCHIVES, 4))
def test_results_to_merge(case, around, made):
    make, words = corpus_runs.ARCHIVES[case]
    make(file := around / "results.tar.xz", made / PLACE)
    refuses(around, ("results", "merge", str(file)), words)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_cut_or_changed_archive_gives_no_store(seed, around):
    """The checksum of gzip covers all but its own header, the first 30 bytes."""
    draw = random.Random(seed)
    file = corpus.archive(around / "release.gz", "lra_release/other")
    data = bytearray(file.read_bytes())
    data[draw.randrange(30, len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data if seed % 2 else data[: draw.randrange(1, len(data))])
    refuses(around, ("data", "prepare", "task=listops", "fresh=10", f"source={file}"), ("get it again",))


def test_what_a_kill_left_half_written_goes(around, made):
    shutil.copytree(made / "data", around / "data")
    run = Path(PLACE).with_name("killed-s0")
    run.mkdir(parents=True)
    for name in (".config.yaml.17", ".last.ckpt.170401", ".model.safetensors.5"):
        (run / name).write_text("half")
    assert lra("fit", *RUN, "name=killed").code == 0
    assert not [*run.glob(".*")]


def test_how_a_run_was_called_last_is_no_part_of_its_result(around, made):
    shutil.copytree(made / "data", around / "data")
    assert lra("fit", *RUN, "name=done", "resume=auto").code == 0
    here, there = (json.loads((folder / PLACE / "result.json").read_text()) for folder in (Path(), made))
    assert here["overrides"] == there["overrides"] and "name=done" in here["overrides"]


def test_a_weights_file_of_an_earlier_version_is_read(around, made):
    shutil.copytree(made / "data", around / "data")
    shutil.copy(made / PLACE / "model.safetensors", file := around / "model.safetensors")
    now = lra("test", f"init={file}")
    corpus_runs.earlier(lambda *_: None)(file)
    assert lra("test", f"init={file}") == now and now.code == 0


@pytest.mark.slow
def test_without_a_home(around, monkeypatch):
    """The user's folder is then the one that the system knows."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("LRA_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    done = process("data", "info", *DATA, "task.data_seed=4294967295")
    check(done, ("listops is not prepared", ".cache/lra/listops@1-", "lra data prepare"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [("optim.lr=1e30",), ("pretrain=masked", "mask=0.0001")], ids=" ".join)
def test_a_run_of_two_processes_that_fails_leaves_none(options, around, made):
    shutil.copytree(made / "data", around / "data")
    line = [sys.executable, "-m", "lra", "fit", *RUN, "trainer.devices=2", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # all of a session of its own, and a file for the output: a pipe would be waited for as long as anybody holds it
    with Path("output").open("w+") as output:
        run = subprocess.Popen(line, stdout=output, stderr=output, env=environment, start_new_session=True)
        code = run.wait(200)
        output.seek(0)
        said = output.read()
    assert code == 2 and "Traceback" not in said and said.count("lra: ") in (1, 2), said  # both may say it
    until(lambda: not members(run.pid))


def members(session: int) -> list[str]:
    """Command lines of the processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append((folder / "cmdline").read_text())
        except OSError:  # it has just ended
            continue
    return found


PROCESSES = {  # as it is typed: no traceback of an import, no warning above the line
    ("fit", "task=listops", "attn=flahs", *SHORT): ("'flahs'", "'flash'"),
    ("data", "prepare", "task=listops", "source=file"): ("file", "not a tar archive"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", PROCESSES)
def test_a_process(command, around):
    before = snapshot(around)
    check(process(*command), PROCESSES[command])
    assert snapshot(around) == before


@pytest.mark.slow
def test_a_process_meets_a_bomb(around):
    """Pillow only warns of some, and datasets tells on its own of what it can't read."""
    for data, case in (("image", "a PNG of 100 million pixels"), ("text", "no text"), ("pathfinder", "a GIF")):
        make, command, cases = corpus_sources.SOURCES[data]
        spoil, words = cases[case]
        spoil(folder := make(around / data))
        check(process("data", "prepare", *command, f"source={folder}"), words)


CURVES = (  # what a run can't go on with
    b"\xff\xfe\x00\x01" * 99, b"step,train/loss\n1," + b"x" * 1_000_000 + b"\n", b"\x01" * 500 + b"\n",
    b"step,val/accuracy\n1,high\n", b"step,val/accuracy\n" + b"9" * 5000 + b",0.1\n", b"step\n1,2,3\n",
)  # fmt: skip


@pytest.mark.parametrize("content", CURVES, ids=lambda content: ascii(content)[:20])
def test_curves_are_looked_at_before_a_run_goes_on(content, around, made, monkeypatch):
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("trained"))
    shutil.copytree(made / "data", around / "data")
    shutil.copytree(made / PLACE, run := around / "here" / PLACE)
    (run / "result.json").unlink()
    (run / "metrics.csv").write_bytes(content)
    refuses(around, ("fit", *RUN, "name=done", "resume=auto"), ("metrics.csv can't be read as curves", "move it away"))


def test_what_others_wrote_does_not_reach_a_terminal(around, made):
    evil, seen = "\x1b[2J\x9b1m\u202e", r"\x1b[2J\x9b1m\u202e"
    shutil.copytree(made / "data", around / "data")
    shutil.copytree(made / PLACE, run := around / "here" / PLACE)
    result = json.loads((run / "result.json").read_text())
    result |= {"directory": evil}
    result["test"]["baselines"] |= {evil: 0.9}
    (run / "result.json").write_text(json.dumps(result))
    done = lra("fit", *RUN, "name=done")
    assert done.code == 0 and seen in done.out and not {*evil} & {*done.out} - {*"[2J1m"}
    assert f"{PLACE}/best.ckpt" in done.out  # where it lies, whatever the file says
    [store] = (around / "data").glob("listops@*")
    manifest = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps(manifest | {"notes": [evil], "date": evil}))
    for command in ("info", "prepare"):
        done = lra("data", command, *DATA)
        assert done.code == 0 and seen in done.out and "\x1b" not in done.out
    result["environment"] |= {"commit": evil, "gpu": evil}
    (run / "result.json").write_text(json.dumps(result))
    done = lra("report", "table3", "recipe=demo", "tasks=listops", "attns=flash", "seeds=1", *DATA[2:], *SHORT,
               "out=out")  # fmt: skip
    assert done.code == 0 and seen in done.out and "\x1b" not in done.out
    for ending in ("md", "csv", "tex", "html"):
        text = Path(f"out/table3.{ending}").read_text()
        assert "\x1b" not in text and "x1b" in text


def test_a_checkpoint_without_a_state_to_go_on_from(around, made, monkeypatch):
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("trained"))
    shutil.copytree(made / "data", around / "data")
    held = torch.load(made / PLACE / "last.ckpt", weights_only=True)
    for name in ("callbacks", "global_step"):
        torch.save({key: value for key, value in held.items() if key != name}, around / "part.ckpt")
        resume = f"resume={around / 'part.ckpt'}"
        refuses(around, ("fit", *RUN, "name=other", resume), ("part.ckpt has weights, and not what", "init="))


def test_a_compile_cache_that_was_cut_short(around, made, monkeypatch):
    """It is met in the first step, after all checks; with the folder away the run goes on."""
    from triton.compiler.compiler import CompiledKernel

    shutil.copytree(made / "data", around / "data")
    (entry := around / "cache/KEY").mkdir(parents=True)
    (entry / "kernel.json").touch()
    group = {"kernel.json": str(entry / "kernel.json")}
    with monkeypatch.context() as patch:
        patch.setattr(Step, "__call__", lambda *_: CompiledKernel(None, group, "hash"))
        done = lra("fit", *RUN, "name=cached")
    check(done, ("the compile cache is damaged", f"{entry} has a file", "remove that folder; then resume=auto goes on"))
    assert (entry / "kernel.json").exists()
    assert lra("fit", *RUN, "name=cached", "resume=auto").code == 0
