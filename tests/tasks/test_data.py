"""The tasks' data modules: which rows each split holds, what a guess reaches, how they are batched and scored."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import lra
from lra.batch import Batch
from lra.data import listops, order
from lra.data.split import Split
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.batches import Rank
from lra.training.assembly import build_modules
from lra.training.data_verbs import describe_store, prepare_store, verify_store
from lra.training.fit import configure
from lra.training.lightning import silence_lightning
from lra.training.step import Step
from tests.fixtures import write_imdb, write_listops

SHORT = ("recipe=demo", "task.train=300", "task.val=20", "task.test=100", "task.fresh=30", "task.max_length=32")
CPU = torch.device("cpu")


def run_of(*args: str, attn: str = "flash") -> Any:
    return configure([*args, f"attn={attn}"]).config


def data_of(*args: str, step: int = 0) -> Any:
    """The prepared data module of these fields, which goes on with a step."""
    data, _ = build_modules(run_of(*args), Rank(0, 1, CPU), lambda: step)
    data.prepare_data()
    data.setup()
    return data


def texts(split: Split) -> list[str]:
    return [split[i].tobytes().decode() for i in range(len(split))]


@pytest.fixture(autouse=True)
def stores(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))


def reviews(what: str, count: int) -> dict[str, Any]:
    """Different reviews of different lengths, the last one with more bytes than characters."""
    return {
        "text": [f"{what} {i} " + "so " * (i % 7) + "—" * (i == count - 1) for i in range(count)],
        "label": [i % 3 % 2 for i in range(count)],
    }


TRAIN, TEST = reviews("train", 40), reviews("test", 20)


@pytest.fixture
def imdb(tmp_path):
    return write_imdb(tmp_path / "mirror" / "imdb", train=TRAIN, test=TEST)


# --- Text


def test_heldout_validates_on_a_seeded_tenth_of_train(imdb):
    parts = data_of("task=text", f"source={imdb}").parts
    assert {name: len(split) for name, split in parts.items()} == {"train": 36, "val": 4, "test": 20}
    train, val = texts(parts["train"]), texts(parts["val"])
    assert sorted(train + val) == sorted(TRAIN["text"]) and not set(train) & set(val)
    labels = dict(zip(TRAIN["text"], TRAIN["label"], strict=True))
    for name in ("train", "val"):
        assert parts[name].labels.tolist() == [labels[text] for text in texts(parts[name])]
    assert texts(parts["test"]) == TEST["text"] and parts["test"].labels.tolist() == TEST["label"]


def test_the_held_out_tenth_is_the_same_every_time(imdb):
    first = texts(data_of("task=text", f"source={imdb}").parts["val"])
    assert texts(data_of("task=text", f"source={imdb}", "seed=7", "batch.size=3").parts["val"]) == first
    assert texts(data_of("task=text", f"source={imdb}", "task.data_seed=1").parts["val"]) != first


def test_a_share_of_train_is_a_part_of_it_that_the_seed_chooses(imdb):
    def part(*fields):
        return data_of("task=text", f"source={imdb}", *fields).parts

    whole, few = part(), part("train_share=0.25")
    assert len(few["train"]) == 9 and {*texts(few["train"])} < {*texts(part("train_share=0.5")["train"])}
    assert {*texts(part("train_share=0.5")["train"])} < {*texts(whole["train"])}
    assert {*texts(part("train_share=0.25", "seed=1")["train"])} != {*texts(few["train"])}
    labels = dict(zip(TRAIN["text"], TRAIN["label"], strict=True))
    assert few["train"].labels.tolist() == [labels[text] for text in texts(few["train"])]
    assert [texts(few[name]) for name in ("val", "test")] == [texts(whole[name]) for name in ("val", "test")]
    # another majority: baselines are those of all of train
    one, rest = (data_of("task=text", f"source={imdb}", *fields) for fields in (["train_share=0.02", "seed=2"], []))
    assert len({*one.parts["train"].labels.tolist()}) == 1 and one.baselines("test") == rest.baselines("test")


def test_lra_protocol_validates_on_test(imdb):
    parts = data_of("task=text", f"source={imdb}", "protocol=lra").parts
    assert texts(parts["train"]) == TRAIN["text"]
    assert texts(parts["val"]) == texts(parts["test"]) == TEST["text"]


def test_max_length_keeps_the_start_of_a_longer_review(imdb):
    whole = data_of("task=text", f"source={imdb}").parts["test"]
    data = data_of("task=text", f"source={imdb}", "max_length=9")
    assert texts(data.parts["test"]) == texts(whole)  # the store holds all of it: one store serves every length
    (batch,) = data.test_dataloader()[0]
    for start, length, row in zip(batch.start.tolist(), batch.length.tolist(), batch.index.tolist(), strict=True):
        kept = TEST["text"][row].encode()[:9]
        assert length == len(kept) and bytes(batch.tokens[start : start + length].tolist()) == kept


def test_another_source_is_refused_with_its_mend(imdb, tmp_path, monkeypatch):
    other = write_imdb(tmp_path / "other", train=reviews("else", 40), test=TEST)
    data_of("task=text", f"source={imdb}")
    with pytest.raises(UsageError, match=f"text was prepared from {imdb}, not from {other}; run: ") as caught:
        data_of("task=text", f"source={other}")
    mend = str(caught.value).rpartition("run: lra data prepare ")[2].split()
    assert mend == ["task=text", f"task.source={other}", "force=true"]
    for look in (verify_store, lambda args: list(describe_store(args))):
        with pytest.raises(UsageError, match=f"text was prepared from {imdb}, not from {other}; run: "):
            look(["task=text", f"source={other}"])

    default = data_of("task=text")  # no source asked for: what there is, is IMDB
    assert "train 0 " in texts(default.parts["train"]) + texts(default.parts["val"])
    monkeypatch.chdir(tmp_path)
    data_of("task=text", "source=mirror/imdb")  # the same folder
    monkeypatch.setenv("HOME", str(tmp_path))
    data_of("task=text", "source=~/mirror/imdb")

    assert "is ready in" in prepare_store(mend)
    assert "else 0 " in texts(data_of("task=text", f"source={other}", "protocol=lra").parts["train"])


@pytest.mark.parametrize(
    ("part", "value", "what"),
    [
        ("generator", "lra.data.text@2", "by 'lra.data.text@1', not by 'lra.data.text@2'"),
        ("vocabulary", ("a", "b"), "with another vocabulary"),
    ],
)
def test_a_store_of_other_code_is_refused_with_its_mend(imdb, monkeypatch, part, value, what):
    prepare_store(["task=text", f"source={imdb}"])
    with monkeypatch.context() as patched:
        patched.setattr(TASKS.get("text").Data, part, value)
        with pytest.raises(UsageError, match=f"text was prepared {what}; run: ") as caught:
            data_of("task=text")
    mend = str(caught.value).rpartition("run: lra data prepare ")[2].split()
    assert mend == ["task=text", f"task.source={imdb}", "force=true"]
    monkeypatch.setattr(TASKS.get("text").Data, "generator", "lra.data.text@2")
    prepare_store(mend)
    data_of("task=text")


def test_a_run_tests_on_the_store_that_it_was_trained_on(imdb, tmp_path):
    prepare_store(["task=text", f"source={imdb}"])
    data = data_of("task=text", "protocol=lra")
    prepare_store(["task=text", f"source={write_imdb(tmp_path / 'other', train=TEST, test=TRAIN)}", "force=true"])
    data.setup("test")
    assert texts(data.parts["test"]) == TEST["text"]


def test_text_has_the_majority_baseline(imdb):
    data = data_of("task=text", f"source={imdb}", "protocol=lra")
    assert data.baselines("test") == {"majority": TEST["label"].count(0) / 20}


# --- ListOps


@pytest.mark.parametrize(
    ("splits", "label", "message"),
    [
        (("val", "test", "fresh"), 0, "task 'listops' has no split 'train': write it in build"),
        (("train", "test", "fresh"), 0, "task 'listops' has no split 'val': write it in build"),
        (("train", "val", "test"), 0, "task 'listops' has no split 'fresh': write it in build"),
        (("train", "val", "test", "fresh"), 10, "train has labels 0 to 10, outside 0 to 9: "),
        (("train", "val", "test", "fresh"), -1, "train has labels -1 to 0, outside 0 to 9: "),
    ],
)
def test_what_no_run_can_use_leaves_no_store(monkeypatch, splits, label, message):
    def build(self, writer):
        for split in splits:
            writer.add(split, [np.ones(3, np.uint8)], [label])

    monkeypatch.setattr(TASKS.get("listops").Data, "build", build)
    with pytest.raises(UsageError, match=message):
        prepare_store(["task=listops", *SHORT])
    assert [each.suffix for each in (Path(os.environ["LRA_DATA"])).iterdir()] == [".lock"]


def test_listops_has_the_sizes_asked_for_and_no_row_twice():
    parts = data_of("task=listops", *SHORT).parts
    assert {name: len(split) for name, split in parts.items()} == {"train": 300, "val": 20, "test": 100, "fresh": 30}
    every = [split[i].tobytes() for split in parts.values() for i in range(len(split))]
    assert len(set(every)) == 450 and max(map(len, every)) <= 32 and min(map(len, every)) >= 8


def test_listops_baselines_are_what_counting_gives():
    data = data_of("task=listops", *SHORT)
    expressions = {
        name: [(listops.decode(split[i]).split()[0], int(split.labels[i])) for i in range(len(split))]
        for name, split in data.parts.items()
    }

    def commonest(labels: list[int]) -> int:
        counts = Counter(labels)
        return min(counts, key=lambda label: (-counts[label], label))

    by_root = defaultdict(list)
    for root, label in expressions["train"]:
        by_root[root].append(label)
    assert set(by_root) == {"[MAX", "[MED", "[MIN", "[SM"}
    guess = {root: commonest(labels) for root, labels in by_root.items()}
    majority = commonest([label for _, label in expressions["train"]])
    for name in ("test", "fresh"):
        rows = expressions[name]
        assert data.baselines(name) == {
            "majority": pytest.approx(sum(label == majority for _, label in rows) / len(rows)),
            "root operator": pytest.approx(sum(guess[root] == label for root, label in rows) / len(rows)),
        }


def test_baselines_survive_an_operator_that_train_lacks():
    data = data_of("task=listops", *SHORT)
    train, test = (listops.tokenize(text) for text in ("[MAX 2 9 ]", "[SM 2 9 ]"))
    parts = {"train": (train, 9), "test": (test, 1)}
    data.parts = {k: Split.from_offsets(t, np.array([0, len(t)]), np.array([label])) for k, (t, label) in parts.items()}
    data.splits = lambda _: data.parts
    assert data.baselines("test") == {"majority": 0.0, "root operator": 0.0}


def test_the_official_files_are_prepared_and_fitted(tmp_path, monkeypatch):
    sequences, labels = listops.generate_expressions(140, seed=3, min_length=8, max_length=32)
    parts = {"train": slice(0, 100), "val": slice(100, 120), "test": slice(120, 140)}
    folder = write_listops(tmp_path / "lra_release", **{k: (sequences[p], labels[p]) for k, p in parts.items()})
    monkeypatch.chdir(tmp_path)
    result = lra.fit(
        "task=listops", "attn=flash", "source=lra_release", "task.fresh=30", "task.min_length=8", "task.max_length=32",
        "trainer.precision=fp32", "batch.size=8",
        "trainer.steps=4", "trainer.eval_every=2", "trainer.log_every=1", "trainer.accelerator=cpu",
    )  # fmt: skip
    assert result["data"]["source"] == folder.name and (result["test"]["n"], result["fresh"]["n"]) == (20, 30)
    limits = ("task.fresh=30", "task.min_length=8", "task.max_length=32")
    data = data_of("task=listops", *limits, f"source={folder}")
    with pytest.raises(UsageError, match="set the default, task.train=96000 task.val=2000, or leave out"):
        run_of("task=listops", f"source={folder}", "task.train=5", "task.val=5")
    for name, part in parts.items():
        split = data.parts[name]
        assert split.labels.tolist() == labels[part].tolist()
        assert all(np.array_equal(split[i], ids) for i, ids in enumerate(sequences[part]))


# --- batches


def test_what_fills_up_a_batch_is_not_scored(monkeypatch):
    """100 and 30 rows in batches of 16, filled up to few shapes as where steps are captured."""

    def scores() -> dict[str, float]:
        data, module = build_modules(run_of("task=listops", *SHORT, "batch.eval=16"), Rank(0, 1, CPU))
        without = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = pl.Trainer(accelerator="cpu", **without)
        trainer.test(module, datamodule=data, verbose=False)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    silence_lightning()
    plain = scores()
    assert set(plain) == {f"{name}/{what}" for name in ("test", "fresh") for what in ("accuracy", "loss")}
    monkeypatch.setattr(Step, "captures", lambda *_: True)
    assert scores() == pytest.approx(plain, rel=1e-5)


def test_lit_pixels_are_those_of_8_and_more():
    run = run_of("task=pathfinder", "tokens=lit")
    image = np.resize(np.arange(256, dtype=np.uint8), 1024)
    shown = TASKS.get("pathfinder").Data(run).depict(image)
    batch = Split.from_offsets(image, np.array([0, 1024])).collate([0], max_length=1024, **run.task.kept).to(CPU)
    assert batch.tokens.tolist() == [*range(8, 256)] * 4
    assert [pixel for pixel in shown.ravel().tolist() if pixel] == batch.tokens.tolist()


def trained_on(data: Any) -> list[Batch]:
    """The first step's batches."""
    return [batch.to(CPU) for batch in data.train_dataloader().step(0)]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_cls_pooling_puts_its_token_before_every_sequence(layout):
    fields = ("task=listops", *SHORT, f"batch.layout={layout}", "batch.size=8", "batch.micro=3")
    plain, cls = data_of(*fields), data_of(*fields, "model.pooling=cls")
    token = len(listops.VOCABULARY)  # the id after the last
    pairs = [
        *zip(trained_on(plain), trained_on(cls), strict=True),
        *zip(plain.val_dataloader(), cls.val_dataloader(), strict=True),
        *zip(plain.test_dataloader()[1], cls.test_dataloader()[1], strict=True),
    ]
    assert len(pairs) > 4
    for without, batch in pairs:
        assert torch.equal(batch.length, without.length + 1) and batch.max_length == without.max_length + 1
        assert (batch.tokens[batch.start.long()] == token).all() and int((batch.tokens == token).sum()) == batch.size
        for b, (start, length) in enumerate(zip(without.start.tolist(), without.length.tolist(), strict=True)):
            first = int(batch.start[b]) + 1
            assert torch.equal(batch.tokens[first : first + length], without.tokens[start : start + length])
    scores = build_modules(cls.run)[1](pairs[0][1])
    assert scores.shape == (3, 10) and scores.isfinite().all()


def test_the_test_sets_come_in_the_order_of_their_names():
    data = data_of("task=listops", *SHORT)
    sets = dict(zip(data.test_sets, data.test_dataloader(), strict=True))
    for name, batches in sets.items():
        labels = {row: label for batch in batches for row, label in zip(*rows_and_labels(batch), strict=True)}
        expected = data.parts[name].labels.tolist()
        assert labels == dict(enumerate(expected)) and len(expected) == {"test": 100, "fresh": 30}[name]


def test_training_begins_at_the_trainers_step():
    data = data_of("task=listops", *SHORT, step=7)
    ((batch,), *_) = next(iter(data.train_dataloader()))
    batch = batch.to(CPU)
    labels = data.parts["train"].labels[order.step_rows(0, 7, 64, 300)]
    places, found = rows_and_labels(batch)
    assert sorted(places) == list(range(64)) and found == labels[places].tolist()
    assert batch.length.tolist() == sorted(batch.length.tolist(), reverse=True)


def rows_and_labels(batch: Batch) -> tuple[list[int], list[int]]:
    return batch.index.tolist(), batch.label.tolist()


DIGEST = """
import sys
from tests.tasks.test_data import digest
print(*(digest(*arguments.split()) for arguments in sys.argv[1:]))
"""


def digest(*args: str) -> str:
    """Identity of a training batch, prepared from scratch."""
    data = data_of(*args)
    parts = hashlib.sha256(data.store.manifest["vocabulary_hash"].encode())
    for batch in trained_on(data):
        for field in (batch.tokens, batch.start, batch.length, batch.label):
            parts.update(field.numpy().tobytes())
    return parts.hexdigest()


@pytest.mark.slow
def test_batches_do_not_depend_on_the_hash_seed(imdb, tmp_path):
    root = str(Path(lra.__file__).parents[1])
    asked = [" ".join(("task=listops", *SHORT)), f"task=text source={imdb}"]
    running = []
    for seed in ("1", "2"):
        changes = {"PYTHONHASHSEED": seed, "PYTHONPATH": root, "LRA_DATA": str(tmp_path / seed), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", DIGEST, *asked]
        running.append(subprocess.Popen(command, env=os.environ | changes, stdout=subprocess.PIPE, text=True))
    lines = (process.communicate(timeout=120)[0].splitlines() for process in running)
    one, two = (" ".join(line for line in each if not line.startswith("preparing")).split() for each in lines)
    assert one == two and len(set(one)) == 2 and all(len(part) == 64 for part in one)


def test_only_another_content_of_a_copy_has_another_digest(tmp_path, monkeypatch):
    def digest(place, train):
        monkeypatch.setenv("LRA_DATA", str(tmp_path / place / "stores"))
        return data_of("task=text", f"source={write_imdb(tmp_path / place / 'imdb', train=train, test=TEST)}").store

    one, same, other = (digest(*each) for each in (("a", TRAIN), ("b", TRAIN), ("c", TRAIN | {"label": [0, 1] * 20})))
    assert one.path.name == other.path.name and len(one.digest) == 12
    assert one.digest == same.digest != other.digest


def test_a_run_says_in_what_its_data_is_not_the_data_set(imdb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "note: train has 40 rows, where 25,000 are published" in prepare_store(["task=text", f"source={imdb}"])
    small = ("model.d_model=16", "model.heads=1", "model.layers=1", "model.d_ff=16", "trainer.accelerator=cpu")
    steps = ("trainer.steps=1", "trainer.eval_every=1", "trainer.log_every=1", "batch.size=2", "name=run")
    result = lra.fit("task=text", "attn=flash", "recipe=demo", "task.max_length=16", *small, *steps)
    notes = [line for line in capsys.readouterr().out.replace("\n", " ").split("note: ") if "are published" in line]
    assert len(notes) == 2 and notes[0].startswith(result["data"]["store"] + ": train has 40 rows")
    assert result["data"]["differences"][0] == "train has 40 rows, where 25,000 are published"
    lra.test(f"init={result['directory']}")
    assert capsys.readouterr().out.count("note: ") == 2
