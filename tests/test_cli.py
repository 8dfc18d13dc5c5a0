"""The command line as its users meet it: what it prints, and one line for everything they can mend."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from lra.config import registry
from lra.data.writer import StoreWriter
from lra.environment import current_commit, package_versions
from lra.training.step import Step
from tests.command_line import DATA, ROOT, RUN, lra, process, refused


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The empty folder that each test runs in, with an empty data folder elsewhere."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "data"))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What a finished run printed, and its directory: not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LRA_DATA", str(folder / "data"))
        done = lra("fit", *RUN, "name=done")
        return done, folder / "checkpoints/runs/listops/flash/done-s0"


@pytest.fixture
def store(tmp_path):
    """A prepared store, to be damaged."""
    assert lra("data", "prepare", *DATA).code == 0
    (path,) = (path for path in (tmp_path / "data").iterdir() if path.is_dir())
    return path


def test_tasks_are_listed():
    done = lra("ls", "tasks")
    assert done.code == 0 and not done.err
    rows = {row[0]: row[1:] for row in done.rows}
    assert rows["listops"][:3] == ["1", "10", "1999"] and rows["listops"][3].startswith("ListOps: ")
    assert rows["text"][:3] == ["1", "2", "4096"]


def test_attentions_are_listed():
    rows = {row[0]: row[1:] for row in lra("ls", "attns").rows}
    assert rows["flash"][:5] == ["yes", "yes", "yes", "yes", "1-128"] and "FlashAttention" in rows["flash"][5]
    assert rows["linformer"][2] == "no" and rows["standard"][3] == "no"


def test_what_an_attention_needs_is_listed_with_it(monkeypatch):
    monkeypatch.setattr(registry, "_is_installed", lambda name: False)
    rows = {row[0]: row[1:] for row in lra("ls", "attns").rows}
    assert rows["flash_attn"][5].startswith("Needs flash_attn") and "FlashAttention-3" in rows["flash_attn"][5]


@pytest.mark.parametrize("what", ["tasks", "attns"])
def test_a_catalogue_fits_100_columns(what):
    lines = lra("ls", what, width=100).out.splitlines()
    assert lines and max(map(len, lines)) <= 100
    words = " ".join(cell for row in lra("ls", what, width=100).rows for cell in row[-1].split())
    assert all(" ".join(row[-1].split()) in words for row in lra("ls", what).rows)


def test_the_versions_are_printed():
    done = lra("--version")
    installed = package_versions()
    assert done.code == 0 and not done.err
    assert done.out.startswith(f"lra {installed['lra'] or 'not installed'}")
    assert f", torch {installed['torch']}, triton {installed['triton'] or 'not installed'}" in done.out
    assert current_commit() is None or f"commit {current_commit()}" in done.out


def test_recipes_are_listed():
    rows = {row[0]: row[1:] for row in lra("ls", "recipes").rows}
    everything = "listops text retrieval image pathfinder path64 pathx path256"
    assert rows["demo"] == [everything, "minutes on two CPU cores, with less data and short sequences"]
    assert {"listops", "text"} <= set(rows["xiong2021"][0].split()) and "tay2021" in rows


def test_the_configuration_is_shown_with_its_origins():
    done = lra("config", "show", *RUN, "model.d_ff=9", "model.attn_dropout=0.1")
    rows = {field: (value, origin) for field, value, origin, _ in done.rows}
    what = {row[0]: row[3] for row in done.rows}
    assert rows["model.d_ff"] == ("9", "command line")
    assert rows["model.d_model"] == ("64", "recipe/demo.yaml")
    assert rows["batch.eval"] == ("250", "recipe/demo.yaml listops")
    assert rows["task.data_seed"] == ("0", "default")
    assert rows["recipe"] == ("demo", "command line")
    assert rows["model.attn_dropout"] == ("0.1", "command line")
    assert what["model.attn_dropout"].endswith("; here 0.1016 is dropped") and "here" not in what["model.dropout"]
    assert rows["optim.betas"][0] == "[0.9,0.98]" and rows["attn.deterministic"][0] == "false"
    assert rows["init"][0] == "null" and what["init"].startswith("text or null; weights to start from: ")
    assert what["model.pooling"].startswith("mean, max, cls or last; ")


def test_the_configuration_fits_100_columns_and_what_it_shows_may_be_typed():
    lines = lra("config", "show", *RUN, width=100).out.splitlines()
    assert max(map(len, lines)) <= 100
    shown = [f"{row[0]}={row[1]}" for row in lra("config", "show", *RUN).rows]
    again = lra("config", "show", "task=listops", "attn=flash", *shown)
    assert again.code == 0 and [f"{row[0]}={row[1]}" for row in again.rows] == shown


def test_the_default_recipe_is_the_tasks():
    rows = {row[0]: tuple(row[1:3]) for row in lra("config", "show", "task=text", "attn=flash").rows}
    assert rows["recipe"] == ("xiong2021", "task/text.yaml")


def test_data_is_prepared_verified_and_described(here, tmp_path):
    first, again = lra("data", "prepare", *DATA), lra("data", "prepare", *DATA)
    assert first.code == again.code == 0
    assert first.out == "preparing listops: generating 80 examples …\n" + again.out
    assert re.fullmatch(rf"listops is ready in {tmp_path}/data/listops@1-[0-9a-f]{{8}}\n", again.out)
    assert lra("data", "verify", *DATA).out.endswith(": every file is as the manifest says\n")
    rows = dict(lra("data", "info", *DATA).rows)
    assert "train=50" in rows["parameters"] and rows["source"] == "generated, by lra.data.listops@1, seed 0"
    assert re.match(r"50; length \d+ to \d+, mean [\d.]+; labels 0: [\d.]+%, ", rows["train"])
    assert re.search(" sha256 [0-9a-f]{64}$", rows["vocabulary"])
    date = rows["prepared"]
    with mock.patch.object(StoreWriter, "finish", lambda _: pytest.fail("built again")):
        assert dict(lra("data", "info", *DATA).rows)["prepared"] == date
        assert lra("data", "prepare", *DATA, "force=false").code == 0
    with mock.patch.object(StoreWriter, "finish", autospec=True, side_effect=StoreWriter.finish) as built:
        assert lra("data", "prepare", *DATA, "force=true").code == 0
    assert built.call_count == 1 and not list(here.iterdir())


def test_fit_ends_with_the_scores_and_where_its_files_lie(trained):
    done, directory = trained
    result = json.loads((directory / "result.json").read_text())
    assert done.code == 0 and not done.err
    rows = {row[0]: row[1:] for row in done.rows}
    assert list(rows) == ["test", "fresh"]
    assert rows["fresh"][3:] == [f"{100 * share:.2f}%" for share in result["fresh"]["baselines"].values()]
    assert rows["test"][0] == f"{100 * result['test']['accuracy']:.2f}%" and rows["fresh"][2] == "10"
    *_, summary, checkpoint, curves, config, tensorboard = done.out.splitlines()
    assert tensorboard.split() == ["tensorboard", "tensorboard", "--logdir", "checkpoints/runs/listops/flash/done-s0"]
    accuracy, best = result["test"]["accuracy"], max(result["test"]["baselines"].values())
    assert summary.startswith(f"test accuracy {100 * accuracy:.2f}%, strongest baseline ")
    assert summary.endswith(f" {100 * best:.2f}%")
    for line, what, name in (
        (checkpoint, "checkpoint", "best.ckpt"),
        (curves, "curves", "metrics.csv"),
        (config, "config", "config.yaml"),
    ):
        assert line.split() == [what, f"checkpoints/runs/listops/flash/done-s0/{name}"]
        assert (directory / name).is_file()


def test_the_same_command_prints_the_same_result(trained, monkeypatch):
    first, directory = trained
    monkeypatch.chdir(directory.parents[4])
    with mock.patch.object(Step, "__call__", lambda *_: pytest.fail("trained again")):
        again = lra("fit", *RUN, "name=done")
    assert again.code == 0 and len(again.out.splitlines()) > 5 and first.out.endswith(again.out)


def test_brackets_in_a_name_are_no_markup():
    done = lra("fit", *RUN, "name=[red]x[b]")
    assert done.code == 0 and done.out.count("checkpoints/runs/listops/flash/[red]x[b]-s0") == 5


def test_a_checkpoint_is_scored(trained, here):
    first, directory = trained
    for init in (directory, directory / "best.ckpt", directory / "model.safetensors"):
        done = lra("test", f"init={init}")
        assert done.code == 0 and done.rows == first.rows
    assert not list(here.iterdir())


def test_a_finished_run_may_be_read_by_others(trained):
    """A file that only its owner can read helps nobody who shares the folder."""
    modes = {path.name: path.stat().st_mode & 0o777 for path in trained[1].iterdir() if path.is_file()}
    assert len(set(modes.values())) == 1, modes


def test_doctor_answers():
    done = lra("doctor")
    assert done.code == 0 and not done.err and "Python" in done.out and str(Path.cwd().parent / "data") in done.out


@pytest.mark.parametrize("arguments", [["fits"], ["ls", "task"], ["fit", "--resume"], []])
def test_what_typer_refuses_exits_with_2_too(arguments):
    done = lra(*arguments)
    assert done.code == 2 and "Traceback" not in done.out + done.err


FIT = ["fit", *RUN]
REFUSED = {
    # what is asked for does not exist, or is not written so
    "fit": "task= and attn= missing: task= is one of image, listops, path256",
    "fit task=listop attn=flash": "unknown task 'listop': did you mean 'listops'",
    "fit task=listops attn=flas": "unknown attention 'flas': did you mean 'flash'",
    "fit task=listops attn=flash recipe=dem": "unknown recipe 'dem': did you mean 'demo'",
    "fit task=text attn=flash recipe=rotary": "recipe 'rotary' has no section for task 'text'",
    "fit task=listops attn=flash model.dmodel=3": "unknown field 'model.dmodel': did you mean 'model.d_model'",
    "fit task=listops attn=flash task.protocol=lra": "unknown field 'task.protocol'",
    "fit task=listops attn=flash resume": "'resume' is not of the form field=value",
    "fit task=listops attn=flash [/b]": r"'\[/b\]' is not of the form field=value",
    "fit task=listops attn=flash optim.lr=": "'optim.lr=' is not of the form field=value",
    "fit task=listops attn=flash seed=1 seed=1": "seed= is given twice",
    "fit task=listops attn=flash train=5 task.train=6": "task.train= is given twice",
    "fit task=listops attn=flash batch.size=many": "batch.size=many",
    "config show task=listops attn=flash model.pooling=sum": "model.pooling=sum",
    # values that can't be
    "fit task=listops attn=flash seed=-1": "seed=-1 is negative",
    "fit task=text attn=flash task.data_seed=-1": "task.data_seed=-1 is out of range: choose 0 to 4294967295",
    "fit task=pathx attn=flash tokens=lit background=1": "task.background is a share .* below 1, not 1.0",
    "fit task=pathx attn=flash background=0.1": "task.background needs tokens=lit: tokens=all keeps the whole",
    "fit task=listops attn=flash task.train=0": "task.train=0 must be at least 1",
    "fit task=listops attn=flash model.heads=3": "model.d_model=64 is not a multiple of model.heads=3",
    "fit task=listops attn=flash model.attn_dropout=0.999": "model.attn_dropout=0.999 .* use at most 0.998",
    "config show task=listops attn=flash model.attn_dropout=0.999": "use at most 0.998",
    "fit task=listops attn=flash trainer.eval_every=10000": "no validation",
    "fit task=listops attn=flash trainer.steps=5003": "250 must divide trainer.steps=5003: .* last 3 steps",
    f"fit task=listops attn=flash name={'x' * 300}": "too long for a folder",
    f"fit task=listops attn=flash source={'据' * 80}": "too long for a folder: choose a name=",
    "fit task=listops attn=flash model.d_model=512": "attn=flash supports head dimensions 1 to 128, not 256",
    "fit task=pathx attn=butterfly attn.block=2": "block=2: 16384 tokens would be 8192 x 8192 blocks, choose larger",
    f"fit task=listops attn=butterfly attn.block={10**12}": "attn.block=10*: a side is at most 65536",
    f"fit task=listops attn=butterfly attn.globals={10**26}": "attn.globals=.* must be at least 0 and at most 65536",
    f"fit task=listops attn=linformer attn.k={10**12}": "attn.k=.* must be at least 1 and at most 65536",
    "fit task=listops attn=flash model.axes=2": "model.axes=2 needs an image task",
    # what is said before any data is prepared
    "fit task=listops attn=flash resume=true": "resume=true, but checkpoints/runs/.* has no last.ckpt",
    "fit task=listops attn=flash resume=yes": "resume=yes: no such checkpoint; resume is false, true, auto",
    "fit task=listops attn=flash init=nowhere": "no checkpoint at nowhere",
    "fit task=listops attn=flash init=[/b]": r"no checkpoint at \[/b\]",
    f"fit task=listops attn=flash init={'x' * 300}": "no checkpoint at xxx",
    "fit task=listops attn=flash trainer.accelerator=gpu": "PyTorch finds no GPU: lra doctor says",
    "fit task=listops attn=flash trainer.accelerator=cpu trainer.devices=2 batch.size=5": (
        "batch.size=5 is not a multiple of the 2 devices"
    ),
    "fit task=listops attn=flash attn.impl=triton": "attn.impl='triton' needs CUDA .* use attn.impl='sdpa'",
    # test
    "test": "lra test needs one init=",
    "test task=listops": "lra test needs one init=",
    "test init=a init=b": "init= is given twice",
    "test init=nowhere": "no checkpoint at nowhere",
    "test init=nowhere optim.lr=1 seed=1 name=a": "optim.lr=1 name=a: used only in training, it changes no score",
    "test init=nowhere train_share=0.5 mask_loss=all head=kept": "mask_loss=all head=kept: used only in training",
    f"test init={'x' * 300}": "no checkpoint at xxx",
    # data
    "data prepare": "task= missing: task= is one of",
    "data prepare task=listops model.d_model=3": "model.d_model=3 has no meaning for data",
    "data prepare task=listops seed=3": "seed=3 has no meaning for data",
    "data prepare task=listops attn=flash": "attn=flash has no meaning for data",
    "data prepare task=listops force=maybe": "force=maybe: write true or false",
    "data prepare task=listops force": "'force' is not of the form field=value",
    "data prepare task=listops source=/nowhere": "/nowhere is not a readable file or folder: name LRA",
    "data prepare task=pathx source=/nowhere": "/nowhere is not a readable file or folder: name LRA",
    "data prepare task=retrieval dataset=scisumm": "papers.parquet and pairs_.* dataset=scisumm source=",
    "data prepare task=pathx data_seed=4294967296": "task.data_seed=4294967296 is out of range",
    "data prepare task=path64 level=harder": "task.level=harder",
    "data prepare task=pathx source=/nowhere task.train=5": "task.train: only for generated data",
    "data prepare task=retrieval": "these pairs are on no hub; get LRA's release, .* dataset=lra source=",
    "data show task=listops split=dev": "listops is not prepared",
    f"data prepare task=retrieval source={'x' * 300}": "xxx can't be used .File name too long.: name another",
    "data prepare task=text source=/nowhere": "cannot load IMDB from /nowhere",
    f"data prepare task=text source={'x' * 300}": "xxx can't be used .File name too long.: name another",
    "data info task=listops": "listops is not prepared: .*; run: lra data prepare task=listops$",
    "data verify task=text": "text is not prepared: .*; run: lra data prepare task=text$",
}


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command[:60])
def test_bad_input_is_one_line_and_leaves_nothing(command, here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("lra.kernels.impl._interpreted", lambda: False)  # which the tests may be
    monkeypatch.setattr(StoreWriter, "add", lambda *_: pytest.fail("prepared data before refusing"))
    refused(lra(*command.split()), REFUSED[command])
    assert not list(here.iterdir())


def test_the_command_that_mends_is_the_one_for_this_store(here):
    """The recipe, too, changes what a task's data is: the plain command would prepare another store."""
    error = refused(lra("data", "info", *DATA), "is not prepared")
    command = error.strip().rpartition("run: lra ")[2].split()
    assert lra(*command).code == 0 and lra("data", "info", *DATA).code == 0


def test_no_data_and_no_network(here, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    hub = {"HOME": str(home), "HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = process("fit", "task=text", "attn=flash", "trainer.accelerator=cpu", **hub)  # no warning above the line
    refused(done, "cannot load IMDB from stanfordnlp/imdb .*lra data prepare task=text source=<folder")
    assert not list(here.iterdir())


def test_a_flipped_byte_is_found_by_verify(store, here):
    file = store / "train.tokens.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    error = refused(lra("data", "verify", *DATA), f"{file} is corrupt")
    assert lra(*error.strip().rpartition("run: lra ")[2].split()).code == 0  # prepares it anew
    assert lra("data", "verify", *DATA).code == 0 and not list(here.iterdir())


def test_a_truncated_file_is_refused_by_every_verb(store, here, trained):
    file = store / "test.labels.npy"
    os.truncate(file, file.stat().st_size - 1)
    message = f"{file} has 207 bytes instead of 208; run: lra data prepare task=listops task.train=50 .*force=true"
    for verb in (["data", "verify", *DATA], ["data", "info", *DATA], ["data", "prepare", *DATA], FIT):
        refused(lra(*verb), message)
    refused(lra("test", f"init={trained[1]}"), message)
    assert not list(here.iterdir())


def test_a_checkpoint_of_another_vocabulary_is_refused(trained, here, tmp_path):
    checkpoint = torch.load(trained[1] / "best.ckpt", weights_only=True)
    checkpoint["lra"] |= {"vocabulary": "0" * 64, "task": "text@1"}
    torch.save(checkpoint, tmp_path / "text.ckpt")
    message = "trained on the vocabulary of text@1, not of listops@1: choose a checkpoint of this task"
    for use in ("init", "resume"):
        refused(lra(*FIT, f"{use}={tmp_path / 'text.ckpt'}"), message)
    refused(lra("test", f"init={tmp_path / 'text.ckpt'}"), message)
    refused(lra("test", f"init={trained[1]}", "task=text"), "vocabulary of listops@1, not of text@1")
    assert not list(here.iterdir())


def test_a_checkpoint_that_does_not_fit_is_refused(trained, here, tmp_path):
    path = trained[1] / "last.ckpt"
    refused(lra(*FIT, "model.d_ff=64", f"init={path}"), f"{path} does not fit this model: model.d_ff 128 here 64")
    refused(lra(*FIT, "model.d_ff=64", f"resume={path}"), r"another configuration \(model.d_ff: 128 -> 64\): give its")
    refused(lra(*FIT, f"resume={trained[1]}"), f"no such checkpoint; give resume={trained[1]}/last.ckpt")
    refused(lra(*FIT, f"resume={trained[1] / 'model.safetensors'}"), "no such checkpoint; resume is .* or a .ckpt file")
    refused(lra(*FIT, f"resume={trained[1] / 'last.ckpt'}"), "has 4 steps behind it: raise trainer.steps")
    (tmp_path / "broken.ckpt").write_bytes((trained[1] / "last.ckpt").read_bytes()[:5000])
    for use in ("init", "resume"):
        refused(lra(*FIT, f"{use}={tmp_path / 'broken.ckpt'}"), "broken.ckpt can't be read as a checkpoint")
    assert not list(here.iterdir())


@pytest.mark.parametrize("verb", ["fit", "test"])
def test_an_interrupt_outside_of_training_says_nothing(verb, trained, monkeypatch):
    command, where = {
        "fit": (FIT, "lra.training.assembly.build_modules"),
        "test": (("test", f"init={trained[1]}"), "lra.tasks.base.TaskModule.test_step"),
    }[verb]
    monkeypatch.setenv("LRA_DATA", str(trained[1].parents[4] / "data"))
    before = signal.getsignal(signal.SIGINT)
    try:
        with mock.patch(where, lambda *_: signal.raise_signal(signal.SIGINT)):
            done = lra(*command)
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores it from the first one on
    assert done.code == 130 and not done.err.strip(), done


def test_an_unwritable_folder_is_one_line(here):
    (here / "checkpoints").write_text("a file where the folder would be")
    refused(lra(*FIT), r"cannot write to checkpoints/runs/.* \(Not a directory\): start in another folder")


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(here):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = here / "checkpoints/runs/listops/flash/full-s0"
    with mock.patch("lra.training.checkpoints.save_weights", full):
        refused(lra(*FIT, "name=full"), "checkpoints/runs/listops/flash/full-s0 can't be used .*resume=auto goes on")
    assert (run / "last.ckpt").exists() and not (run / "result.json").exists(), "nothing of the run failed"
    assert lra(*FIT, "name=full", "resume=auto").code == 0


def test_at_the_end_of_the_process_no_garbage_is_searched_for():
    program = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 0)); from lra.cli import main"
    )
    command = [sys.executable, "-c", f"{program}; sys.argv[1:] = ['--version']; main()"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines()[-1] == "True"
