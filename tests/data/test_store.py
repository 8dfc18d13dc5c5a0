"""The prepared store: what is written is read back, and nothing half-written is ever taken for whole."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lra.data import store
from lra.data.store import Store, prepare_store
from lra.errors import UsageError
from tests.data.toy import build, content, sequences


def test_root_follows_the_environment(monkeypatch, tmp_path):
    assert store.data_root() == tmp_path / "stores"
    monkeypatch.delenv("LRA_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert str(store.data_root()) == "/some/cache/lra"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(store.data_root()) == "/home/someone/.cache/lra"


def test_a_root_that_can_not_be_is_one_line(monkeypatch):
    monkeypatch.setenv("LRA_DATA", "/tmp/" + "x" * 300)
    with pytest.raises(UsageError, match="is not prepared"):
        Store.open(content().path)
    with pytest.raises(UsageError, match="cannot write to .*: set LRA_DATA to another folder"):
        prepare_store(content(), build)


def test_folder_is_named_after_the_content(data_root):
    path = store.store_folder("toy", 1, {"b": 1, "a": [2]})
    assert path.parent == data_root and path.name == "toy@1-" + store._hash({"a": [2], "b": 1})[:8]
    assert path == store.store_folder("toy", 1, {"a": (2,), "b": 1})
    assert (
        len({path, store.store_folder("toy", 2, {"b": 1, "a": [2]}), store.store_folder("toy", 1, {"b": 2, "a": [2]})})
        == 3
    )


def paired(writer):
    writer.add_documents(sequences())
    writer.add_pairs("train", np.array([[0, 1], [4, 4]]), [1, 0])
    writer.add_documents([np.array([2, 2])])
    writer.add_pairs("train", np.array([[5, 0]]), [1])
    writer.add_pairs("test", np.array([[3, 2]]), [0])
    writer.baseline("first token", {"train": 0.75, "test": 0.5})


def test_pairs_and_baselines_round_trip():
    made = prepare_store(content(), paired)
    documents = [*sequences(), np.array([2, 2])]
    train = made.pairs("train")
    assert made.splits == ("train", "test") and len(train) == 3 and train.labels.tolist() == [1, 0, 1]
    for row, (one, other) in enumerate([(0, 1), (4, 4), (5, 0)]):
        first, second = train[row]
        assert np.array_equal(first, documents[one]) and np.array_equal(second, documents[other])
    assert made.manifest["splits"]["train"] == {"count": 3, "labels": {"0": 1, "1": 2}}
    assert made.manifest["documents"]["count"] == 6
    assert made.manifest["baselines"] == {"first token": {"train": 0.75, "test": 0.5}}
    made.verify()
    with (made.path / "test.pairs.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(UsageError, match=r"test\.pairs\.npy is corrupt"):
        made.verify()


def test_the_mend_of_an_imported_store_names_its_source(tmp_path):
    made = prepare_store(content(source=str(tmp_path / "a folder")), build, command="lra data prepare task=toy")
    (made.path / "train.tokens.npy").write_bytes(b"")
    mend = f"run: lra data prepare task=toy 'task.source={tmp_path}/a folder' force=true$"
    with pytest.raises(UsageError, match=mend):
        Store.open(made.path, "lra data prepare task=toy")


@pytest.mark.parametrize("pairs", [[[0, 5]], [[-1, 0]]])
def test_a_pair_of_no_document_is_refused(pairs):
    def build(writer):
        writer.add_documents(sequences())
        writer.add_pairs("train", np.array(pairs), [0])

    with pytest.raises(UsageError, match="a document outside 0 to 4"):
        prepare_store(content(), build)


def test_round_trip(data_root):
    made = prepare_store(content(), build)
    assert made.path.parent == data_root and made.splits == ("train", "test")
    train, test = made.split("train"), made.split("test")
    expected = [*sequences(), np.array([2, 2, 2, 2])]
    assert len(train) == 6 and all(np.array_equal(train[i], expected[i]) for i in range(6))
    assert train.lengths.tolist() == [len(s) for s in expected]
    assert train.labels.tolist() == [0, 1, 2, 1, 0, 7] and train.tokens.dtype == np.uint8
    assert test[1].tolist() == [2, 0] and test.labels.dtype == np.int64
    assert not train.tokens.flags.writeable
    made.verify()
    part = train.subset([5, 1])
    assert len(part) == 2 and part[0].tolist() == [2, 2, 2, 2] and part.labels.tolist() == [7, 1]
    assert part.tokens is train.tokens


def test_manifest_describes_the_store():
    made = prepare_store(content(), build)
    manifest = json.loads((made.path / "manifest.json").read_text())
    assert manifest["format"] == store.FORMAT and manifest["task"] == "toy" and manifest["params"] == {"n": 3}
    assert manifest["vocabulary"] == ["a", "b", "c"] and manifest["generator"] == "test@1" and manifest["seed"] == 0
    assert manifest["vocabulary_hash"] == store.vocabulary_hash(("a", "b", "c"))
    assert manifest["vocabulary_hash"] != store.vocabulary_hash(("a", "c", "b"))
    test = manifest["splits"]["test"]
    assert test == {"count": 2, "tokens": 4, "labels": {"1": 2}, "length": {"min": 2, "mean": 2.0, "max": 2}}
    parts = ("tokens.npy", "offsets.npy", "labels.npy")
    assert set(manifest["files"]) == {f"{split}.{part}" for split in ("train", "test") for part in parts}
    assert {path.name for path in made.path.iterdir()} == {*manifest["files"], "manifest.json"}
    assert manifest["date"].endswith("Z") and manifest["versions"]["numpy"] == np.__version__


def test_large_vocabulary_is_uint16_and_empty_splits_work():
    ids = sequences(high=60_000)
    wide = content(vocabulary=[str(i) for i in range(60_000)], params={"wide": True})

    def build_wide(writer):
        writer.add("train", ids, range(5))
        writer.add("none", [], [])
        writer.add("blank", [np.empty(0, np.uint8)] * 2, [0, 1])

    made = prepare_store(wide, build_wide)
    train = made.split("train")
    assert train.tokens.dtype == np.uint16 and all(np.array_equal(train[i], ids[i]) for i in range(5))
    assert len(made.split("none")) == 0 and made.split("blank")[1].size == 0


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        ([[3]], [0], "outside 0 to 2"),
        ([[-1]], [0], "outside"),
        ([[1]], [0, 1], "2 labels"),
        ([[1.5]], [0], "train: token ids are float64, and must be integers"),
        ([[1], [2]], [0, 0.5], "train: labels are float64, and must be integers"),
        ([[1]], ["0"], "train: labels are <U1, and must be integers"),
    ],
)
def test_writer_refuses_what_it_cannot_hold(ids, labels, message):
    with pytest.raises(UsageError, match=message):
        prepare_store(content(), lambda writer: writer.add("train", [np.array(i) for i in ids], labels))
    assert not content().path.exists()


def test_an_empty_sequence_may_have_any_type():
    made = prepare_store(content(), lambda writer: writer.add("train", [np.array([1, 2]), np.array([])], [0, 1]))
    assert [each.tolist() for each in made.split("train")] == [[1, 2], []]


def test_existing_store_is_reused_and_force_replaces_it():
    first = prepare_store(content(), build)
    reused = prepare_store(content(), lambda writer: pytest.fail("built again"))
    assert reused.path == first.path
    again = prepare_store(content(), lambda writer: writer.add("train", [np.array([1])], [4]), force=True)
    assert again.path == first.path and again.splits == ("train",) and again.split("train")[0].tolist() == [1]
    assert first.splits == ("train", "test") and first.split("train")[5].tolist() == [2, 2, 2, 2]  # its readers keep it
    assert {path.name for path in first.path.parent.iterdir()} <= {first.path.name, f".{first.path.name}.lock"}


def build_another(writer):
    """As `build`, in files of the same sizes."""
    writer.add("train", [np.ones_like(ids) for ids in [*sequences(), range(4)]], [2, 2, 1, 1, 1, 6])
    writer.add("test", np.array([[1, 1], [1, 1]]), [3, 3])


@pytest.mark.parametrize("mapped", [0, 1, 3])
def test_a_store_that_is_replaced_while_it_is_opened_is_all_the_new_one(mapped, monkeypatch):
    path, loaded, load = prepare_store(content(), build).path, [], np.load

    def replacing(*args, **options):
        loaded.append(args)
        if len(loaded) == mapped + 1:
            prepare_store(content(), build_another, force=True)
        return load(*args, **options)

    monkeypatch.setattr(np, "load", replacing)
    opened = Store.open(path)
    train, test = map(opened.split, opened.splits)
    assert set(train.tokens) == set(test.tokens) == {1} and {*train.labels, *test.labels} == {1, 2, 3, 6}


def test_a_store_that_goes_while_it_is_opened_is_not_prepared(monkeypatch):
    path = prepare_store(content(), build).path
    monkeypatch.setattr(store, "_map", lambda *_: shutil.rmtree(path, ignore_errors=True))
    with pytest.raises(UsageError, match="toy is not prepared"):
        Store.open(path)


def test_nothing_is_visible_before_everything_is_on_disk(monkeypatch):
    path, synced = content().path, []

    def sync(target):
        if target != path.parent:  # the last one, after the rename
            assert not path.exists()
            synced.append(target.name)

    monkeypatch.setattr(store, "_sync", sync)

    def watched(writer):
        build(writer)
        assert not path.exists() and not list(path.parent.rglob("manifest.json"))

    prepare_store(content(), watched)
    assert synced[-2:] == ["manifest.json", f".{path.name}.partial"] and len(synced) == 8


def test_failed_force_keeps_the_old_store():
    prepare_store(content(), build)
    with pytest.raises(UsageError, match="bad input"):

        def fails(writer):
            raise UsageError("bad input")

        prepare_store(content(), fails, force=True)
    Store.open(content().path).verify()


@pytest.mark.parametrize("killed", [False, True])
def test_a_store_that_could_not_be_replaced_is_there_again(killed):
    prepare_store(content(), build)
    rename = Path.rename

    def fails(self, target):
        if not self.name.endswith(".partial"):
            return rename(self, target)
        if killed:  # nobody tidies up
            patch.setattr(store, "_clean_up", lambda path: None)
        raise OSError(errno.EIO, "no")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no"):
        patch.setattr(Path, "rename", fails)
        prepare_store(content(), build, force=True)
    assert content().path.exists() != killed
    prepare_store(content(), lambda writer: pytest.fail("it is there")).verify()
    assert not [each.name for each in content().path.parent.iterdir() if each.name.endswith((".old", ".partial"))]


SLOW_BUILD = """
import sys, time
import numpy as np
from lra.data.store import StoreContent, prepare_store

def build(writer):
    writer.add("train", [np.array([0, 1, 2])], [1])
    print("building", flush=True)
    time.sleep(float(sys.argv[1]))

prepare_store(StoreContent("toy", 1, {"n": 3}, "made up", ["a", "b", "c"], "test@1", 0), build)
"""


def start_slow_build(seconds):
    """In a process of its own (not a fork: torch has threads)."""
    return subprocess.Popen([sys.executable, "-c", SLOW_BUILD, str(seconds)], stdout=subprocess.PIPE, text=True)


def test_two_processes_build_once():
    processes = [start_slow_build(1) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(outputs) == ["", "preparing toy: reading made up …\nbuilding\n"]
    Store.open(content().path).verify()


def test_killed_build_leaves_no_store_and_no_rubbish():
    path = content().path
    partial = path.with_name(f".{path.name}.partial")
    with start_slow_build(60) as process:
        assert process.stdout and [process.stdout.readline() for _ in range(2)][-1] == "building\n"
        process.kill()
    assert partial.exists()
    with pytest.raises(UsageError, match="not prepared"):
        Store.open(path)
    prepare_store(content(), build).verify()
    assert not partial.exists()


def test_missing_store():
    with pytest.raises(UsageError, match="toy is not prepared.*lra data prepare task=toy"):
        Store.open(content().path, "lra data prepare task=toy")


def damage_missing(path):
    (path / "test.labels.npy").unlink()


def damage_truncated(path):
    file = path / "test.labels.npy"
    os.truncate(file, file.stat().st_size - 1)


def damage_manifest(path):
    (path / "manifest.json").write_text("{")


def damage_no_manifest(path):
    (path / "manifest.json").unlink()


def damage_format(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": store.FORMAT + 1}))


def damage_content(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "params": {"level": "easy"}}))


def damage_checksum(path):
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["test.labels.npy"]["sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_content, r"holds another store, of toy@1 with \{'level': 'easy'\}"),
        (damage_checksum, "manifest.json is missing or unreadable"),
        (damage_missing, "test.labels.npy has no bytes"),
        (damage_truncated, "test.labels.npy has 143 bytes instead of 144"),
        (damage_manifest, "manifest.json is missing or unreadable"),
        (damage_no_manifest, "manifest.json is missing or unreadable"),
        (damage_format, f"manifest.json has format {store.FORMAT + 1}, this lra reads format {store.FORMAT}"),
    ],
)
def test_damage_is_named_with_its_mend(damage, message):
    path = prepare_store(content(), build).path
    damage(path)
    command = "lra data prepare task=toy"
    for reader in (partial(Store.open, path), partial(prepare_store, content(), build)):
        with pytest.raises(UsageError, match=message) as caught:
            reader(command=command)
        assert str(caught.value).endswith(f"; run: {command} force=true") and "\n" not in str(caught.value)
        with pytest.raises(UsageError, match=f"; remove {path}, and the next command that needs it prepares it again$"):
            reader()
    prepare_store(content(), build, force=True).verify()


def test_verify_finds_a_flipped_bit():
    made = prepare_store(content(), build)
    file = made.path / "train.tokens.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    Store.open(made.path)  # cheap, so it does not see it
    with pytest.raises(UsageError, match="train.tokens.npy is corrupt"):
        made.verify()


def test_unknown_split():
    with pytest.raises(UsageError, match="no split 'val': choose from train, test"):
        prepare_store(content(), build).split("val")


def test_who_waits_for_another_process_says_so(monkeypatch):
    path = content().path
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(store, "PATIENCE_S", 0)
    with path.with_name(f".{path.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        timer = threading.Timer(0.2, lambda: fcntl.flock(held, fcntl.LOCK_UN))
        timer.start()
        with pytest.warns(UserWarning, match=f"another process prepares {path}: this one waits for it") as told:
            prepare_store(content(), build)
        timer.join()
    assert len(told) == 1


def test_a_store_of_other_files_that_takes_the_place_while_one_is_opened(monkeypatch):
    path, load = prepare_store(content(), build).path, np.load

    def replacing(*args, **options):
        monkeypatch.setattr(np, "load", load)
        prepare_store(content(), paired, force=True)
        return load(*args, **options)

    monkeypatch.setattr(np, "load", replacing)
    assert len(Store.open(path).pairs("train")) == 3
