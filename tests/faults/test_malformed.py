"""Bad input of every kind: one line that names it and the mend, exit code 2, and every file as it was."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lra.training.step import Step
from tests.faults import corpus, corpus_commands
from tests.test_cli import DATA, RUN, SHORT, Done, lra, process


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Every entry below a folder; locks of a store are no content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else "no file"
        for path in sorted(folder.rglob("*"))
        if path.suffix != ".lock" and not (path.is_dir() and path.name == "data")
    }


def refuses(around: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """One line with these words, exit code 2, and nothing around is new or gone."""
    before = snapshot(around)
    check(lra(*arguments), words)
    assert snapshot(around) == before


def check(done: Done, words: tuple[str, ...]) -> None:
    assert done.code == 2, done
    assert done.err.startswith("lra: ") and done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err, done.err


@pytest.fixture(autouse=True)
def around(tmp_path, monkeypatch):
    """A folder around the one that a command runs in, with the data beside it."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "file").write_text("x")
    monkeypatch.chdir(here)
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a finished run and its data, not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LRA_DATA", str(folder / "data"))
        assert lra("fit", *RUN, "name=done").code == 0
    return folder


def sampled(cases: Iterable[str], every: int = 3) -> list[Any]:
    """Every third case, and the others for make test-all."""
    marks = [() if number % every == 0 else pytest.mark.slow for number, _ in enumerate(cases)]
    return [pytest.param(case, marks=mark, id=ascii(case)) for case, mark in zip(cases, marks, strict=True)]


@pytest.mark.parametrize("argument", sampled(corpus_commands.FIELDS))
def test_a_field(argument, around):
    refuses(around, (*corpus_commands.SHOW, argument), corpus_commands.FIELDS[argument])


@pytest.mark.parametrize("command", sampled(corpus_commands.VERBS))
def test_a_command(command, around):
    refuses(around, tuple(command.split()), corpus_commands.VERBS[command])


@pytest.mark.parametrize("command", corpus_commands.TYPER)
def test_what_typer_refuses(command, around):
    before, done = snapshot(around), lra(*command.split())
    assert done.code == 2 and "Traceback" not in done.err and snapshot(around) == before
    assert all(word in done.err for word in corpus_commands.TYPER[command]), done.err


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


@pytest.mark.parametrize("name", ["ckpt", "safetensors"])
def test_a_checkpoint(name, around, made, monkeypatch):
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("trained"))
    good = made / "checkpoints/runs/listops/flash/done-s0" / {"ckpt": "best.ckpt"}.get(name, "model.safetensors")
    for case, (spoil, words) in {"ckpt": corpus.CKPT, "safetensors": corpus.SAFETENSORS}[name].items():
        file = around / f"{case}/spoilt.{name}"
        file.parent.mkdir()
        shutil.copy(good, file)
        spoil(file)
        for command in (("test", f"init={file}"), ("fit", *RUN, f"init={file}")):
            refuses(around, command, (f"spoilt.{name}", *words))


@pytest.mark.parametrize("case", sampled(corpus.STORES))
def test_a_store(case, around, made, monkeypatch):
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("trained"))
    shutil.copytree(made / "data", around / "data")
    spoil, words = corpus.STORES[case]
    (store,) = (around / "data").glob("listops@*")
    spoil(store)
    for command in (("data", "verify", *DATA), ("data", "info", *DATA), ("fit", *RUN, "name=other")):
        refuses(around, command, words)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_cut_or_changed_archive_gives_no_store(seed, around):
    """The checksum of gzip covers all but its own header, the first 30 bytes."""
    draw = random.Random(seed)
    file = corpus.archive(around / "release.gz", "lra_release/other")
    data = bytearray(file.read_bytes())
    data[draw.randrange(30, len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data if seed % 2 else data[: draw.randrange(1, len(data))])
    refuses(around, ("data", "prepare", "task=listops", "fresh=10", f"source={file}"), ("get it anew",))


def test_the_data_folder_is_a_file(around, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(around / "here/file"))
    refuses(around, ("data", "prepare", *DATA), ("LRA_DATA",))


def test_processes(around):
    """As it is typed: no traceback of an import, no warning above the line."""
    before = snapshot(around)
    check(process("fit", "task=listops", "attn=flahs", *SHORT), ("'flahs'", "'flash'"))
    check(process("data", "prepare", *DATA, LRA_DATA=str(around / "here/file")), ("LRA_DATA",))
    assert snapshot(around) == before
