"""Text: bytes of reviews, from a folder laid out like the Hub's repository."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import lra
from lra.data import hub, imdb
from lra.data.store import StoreContent, prepare_store
from lra.errors import UsageError
from tests.fixtures import IMDB_CARD, write_imdb

TEXTS = ["Fine.", "naïve — 映画", "", "a\nb\t<br />c\x00"]


@pytest.fixture
def mirror(tmp_path):
    """Makes a mirror; a split's columns can be replaced."""

    def make(**splits):
        columns = {split: {"text": TEXTS, "label": [0, 1, 0, 1]} for split in ("train", "test")}
        return write_imdb(tmp_path / "hub" / "imdb", **(columns | splits))

    return make


def store(source):
    content = StoreContent("text", 1, {}, str(source), imdb.VOCABULARY, imdb.GENERATOR, None)
    return prepare_store(content, lambda writer: imdb.build_imdb(writer, source))


def test_bytes_and_labels(mirror):
    made = store(mirror(test={"text": ["only"], "label": [1]}))
    assert made.splits == ("train", "test")
    train = made.split("train")
    assert [train[i].tobytes().decode() for i in range(4)] == TEXTS
    assert train.tokens.dtype == np.uint8 and train.labels.tolist() == [0, 1, 0, 1]
    assert len(made.split("test")) == 1 and len(imdb.VOCABULARY) == 256


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"label": [0, 1]}, "no column 'text'"),
        ({"text": ["a", "b"]}, "no column 'label'"),
        ({"text": ["a", "b"], "label": [0, 2]}, "label other than 0 and 1"),
        ({"text": ["a", "b"], "label": [-1, -1]}, "label other than 0 and 1"),
        ({"text": ["a", "b"], "label": [0, None]}, "label other than 0 and 1"),
        ({"text": ["a", None], "label": [0, 1]}, "text that is not a string"),
        ({"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())}, "no rows"),
    ],
)
def test_other_data_is_refused(mirror, train, message):
    columns = {"text": ["a", "b"], "label": [0, 1]}
    source = mirror(train=train, test={name: columns[name] for name in train} if len(train) < 2 else columns)
    with pytest.raises(UsageError, match=message) as caught:
        store(source)
    assert "lra data prepare task=text source=" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_split(mirror):
    source = mirror()
    (source / "README.md").write_text(IMDB_CARD.replace("split: test", "split: validation"))
    with pytest.raises(UsageError, match="no rows in its split 'test'"):
        store(source)


@pytest.mark.parametrize("source", ["/nowhere/imdb", "."])
def test_folder_without_the_data(tmp_path, monkeypatch, source):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UsageError, match="cannot load IMDB from.*lra data prepare task=text source=") as caught:
        store(source)
    assert "\n" not in str(caught.value)


SCRIPT = """
import sys
from pathlib import Path
import lra
from lra.data import hub, imdb
from lra.data.store import StoreContent, prepare_store
from lra.errors import UsageError
content = StoreContent("text", 1, {}, sys.argv[1], imdb.VOCABULARY, imdb.GENERATOR, None)
try:
    prepare_store(content, lambda writer: imdb.build_imdb(writer, sys.argv[1]))
except UsageError as error:
    print(error)
"""


def run(source, tmp_path):
    """In a process of its own, whose home is empty and whose Hub is a port where nothing listens."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    keep |= {"HOME": str(tmp_path / "home"), "LRA_DATA": str(tmp_path / "data"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    (tmp_path / "home").mkdir()
    began = time.monotonic()
    command = [sys.executable, "-c", SCRIPT, str(source)]
    done = subprocess.run(command, env=keep, capture_output=True, text=True, check=True)
    return done, time.monotonic() - began


def test_a_mirror_leaves_nothing_in_the_home(mirror, tmp_path):
    run(mirror(), tmp_path)
    assert (tmp_path / "data").exists() and not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]


def test_no_network_is_one_line_at_once(tmp_path):
    done, seconds = run(imdb.HUB, tmp_path)
    assert done.stdout.count("\n") == 2 and "the Hub does not answer" in done.stdout
    assert "lra data prepare task=text source=<folder" in done.stdout
    assert "Retry" not in done.stderr and seconds < 15  # the Hub's client alone would retry for 24


@pytest.mark.realdata
def test_real_imdb():
    made = store(Path(os.environ["LRA_TEST_DATA"]) / imdb.HUB)
    for name, unique in (("train", 24_904), ("test", 24_801)):
        split = made.split(name)
        assert len(split) == 25_000 and np.bincount(split.labels).tolist() == [12_500, 12_500]
        assert len({split[i].tobytes() for i in range(25_000)}) == unique


def test_a_full_disk_is_named_where_it_is(tmp_path, monkeypatch):
    def full(_):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("a library's own error") from error

    monkeypatch.setenv("LRA_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(hub, "offline_variable", lambda: "")
    monkeypatch.setattr(hub, "_download", full)
    monkeypatch.setattr(hub, "_cache", lambda: str(tmp_path / "cache"))
    disk = f"{tmp_path}/cache: free some, or set HF_HOME to a folder of a larger disk"
    with pytest.raises(UsageError, match=f"^no space left for the download in {disk}$"):
        lra.fit("task=text", "attn=flash", "trainer.accelerator=cpu", "source=stanfordnlp/none")
