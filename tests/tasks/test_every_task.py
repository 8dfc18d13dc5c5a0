"""Every task from its data to its test score, at small size: prepare, verify, draw, fit, test."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lra
from lra.config.compose import flatten
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.training.data_verbs import describe_store, format_text, prepare_store, show_examples, verify_store
from lra.training.evaluate import test as score
from lra.training.fit import configure
from tests.fixtures import pngs, write_aan_papers, write_cifar10, write_imdb

MODEL = ("model.d_model=32", "model.layers=1", "model.d_ff=64", "optim.lr=3e-3", "optim.warmup=10")
FEW = ("task.train=24", "task.val=6", "task.test=12")


def reviews(count: int) -> dict[str, Any]:
    """Praise and blame, told apart by their bytes."""
    return {
        "text": [f"{i} {'aaaa' if i % 2 else 'zzzz'} " * 5 for i in range(count)],
        "label": [i % 2 for i in range(count)],
    }


def imdb(folder: Path) -> list[str]:
    return [f"source={write_imdb(folder / 'imdb', train=reviews(60), test=reviews(20))}"]


def cifar10(folder: Path) -> list[str]:
    """Images whose brightness tells their class."""
    rng = np.random.default_rng(0)

    def rows(count: int) -> dict[str, Any]:
        labels = np.arange(count) % 10
        levels = 25 * labels[:, None, None, None] + rng.integers(0, 10, (count, 32, 32, 3))
        return {"img": pngs(levels.astype(np.uint8)), "label": labels}

    return [f"source={write_cifar10(folder / 'cifar10', train=rows(60), test=rows(20))}"]


def aan(folder: Path) -> list[str]:
    """Papers of two kinds; one cites the other if they are alike."""
    kinds = {f"P{i}": ("ab" if i % 2 else "yz") * (20 + i) for i in range(20)}
    pairs = [(int((i + j) % 2 == 0), f"P{i}", f"P{j}") for i in range(20) for j in range(20) if i != j]
    source = write_aan_papers(folder / "aan", kinds, train=pairs[:300], val=pairs[300:340], test=pairs[340:])
    return ["dataset=scisumm", f"source={source}"]


def generated(*fields: str) -> Any:
    return lambda _: list(fields)


# task: its data, the fields of its run, and whether so many steps lower the loss
CASES: dict[str, tuple[Any, tuple[str, ...], bool]] = {
    "listops": (
        generated("task.train=500", "task.val=40", "task.test=40", "task.fresh=40", "task.max_length=32"),
        ("batch.size=32", "trainer.steps=200"),
        True,
    ),
    "text": (imdb, ("batch.size=16", "trainer.steps=60"), True),
    "retrieval": (aan, ("batch.size=16", "trainer.steps=60"), True),
    "image": (cifar10, ("batch.size=4", "trainer.steps=60"), True),
    "pathfinder": (generated(*FEW, "tokens=all"), ("batch.size=4", "trainer.steps=20"), False),
    "path64": (generated(*FEW), ("batch.size=2", "trainer.steps=20"), False),
    "pathx": (generated(*FEW), ("batch.size=1", "trainer.steps=20"), False),
    "path256": (generated(*FEW), ("batch.size=1", "trainer.steps=20"), False),
}


def test_no_task_is_forgotten():
    assert sorted(CASES) == sorted(TASKS.catalogue())


@pytest.mark.parametrize("task", CASES)
def test_from_data_to_score(task, tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    monkeypatch.chdir(tmp_path)
    data, fields, falls = CASES[task]
    chosen = [f"task={task}", "recipe=demo", *data(tmp_path)]

    assert prepare_store(chosen).startswith(f"{task} is ready in")
    assert "every file is as the manifest says" in verify_store(chosen)
    told = dict(describe_store(chosen))
    size = int(told["test"].split(";")[0])
    assert size > 0 and "sha256" in told["test.labels.npy"]
    assert told["task"] == f"{task}@{TASKS.get(task).facts.version}"
    assert show_examples([*chosen, "count=2", "split=test", "out=some.png"])[0].endswith("test are drawn in some.png")
    with Image.open("some.png") as picture:
        assert len(np.unique(np.asarray(picture))) > 2

    steps = fields[1].partition("=")[2]
    result = lra.fit(
        *chosen, "attn=flash", *MODEL, *fields,
        f"trainer.eval_every={steps}", "trainer.log_every=20", "trainer.accelerator=cpu",
    )  # fmt: skip
    assert result["status"] == "finished" and result["task"] == told["task"]
    assert result["test"]["n"] == size and "majority" in result["test"]["baselines"]
    assert ("marker distance" in result["test"]["baselines"]) == task.startswith("path")
    with (Path(result["directory"]) / "metrics.csv").open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert np.isfinite(losses).all() and len(losses) == int(steps) // 20
    if falls:
        assert losses[-1] < 0.8 * losses[0]
    again = score(f"init={result['directory']}")
    assert again["test"]["accuracy"] == result["test"]["accuracy"]


@pytest.mark.parametrize("task", CASES)
def test_every_field_of_a_task_is_shown(task):
    config = configure([f"task={task}", "attn=flash"])
    asked = {key for key, _ in flatten(config.config.to_saved_dict()["task"]) if key != "name"}
    assert asked and {f"task.{key}" for key in asked} <= set(config.origin)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["split=dev"], "split=dev does not exist: choose from train, val, test"),
        (["count=0"], "count=0 is not a number from 1 to 100"),
        (["count=many"], "count=many: write an integer"),
        (["count=²"], "count=²: write an integer"),
        (["out=picture.jpg"], "picture.jpg does not end in .png"),
        (["out=no/such/folder/x.png"], "cannot write no/such/folder/x.png"),
    ],
)
def test_show_refuses(args, message, tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    monkeypatch.chdir(tmp_path)
    chosen = ["task=text", *imdb(tmp_path)]
    prepare_store(chosen)
    with pytest.raises(UsageError, match=message):
        show_examples([*chosen, *args])
    assert not list(tmp_path.glob("*.png"))


def test_texts_are_shown_in_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    monkeypatch.chdir(tmp_path)
    chosen = ["task=listops", "recipe=demo", *CASES["listops"][0](tmp_path)]
    prepare_store(chosen)
    whole, cut = show_examples([*chosen, "split=val"]), show_examples([*chosen, "split=val"], 6)
    captions = [line for line in whole if line.startswith("val ")]
    assert captions == [line for line in cut if line.startswith("val ")] and not list(tmp_path.glob("*.png"))
    for label in range(10):
        assert sum(line.endswith(f": {label}") for line in captions) <= 2
    assert any("more characters" in line for line in cut) and not any("more characters" in line for line in whole)
    assert show_examples([*chosen, "split=val", "count=1"])[:2] == whole[:2]


def test_a_text_says_how_much_of_it_is_cut():
    assert format_text("one\n\ntwo three", 9) == ["one", "", "two three"] == format_text("one\n\ntwo three", None)
    lines = format_text("\n".join(["abcde fghi"] * 5), 6)
    assert lines == ["abcde", "fghi"] * 3 + ["abcde", "… 13 more characters: | less shows all"]


def test_show_shows_what_the_model_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    monkeypatch.chdir(tmp_path)

    def shown(*fields: str) -> bytes:
        show_examples([*fields, "count=1", "out=some.png"])
        return Path("some.png").read_bytes()

    text, path = ["task=text", *imdb(tmp_path)], ["task=pathfinder", *FEW]
    prepare_store(text)
    prepare_store(path)
    assert shown(*text) != shown(*text, "max_length=5") and shown(*path) != shown(*path, "tokens=lit")


def test_the_next_resolution_starts_from_the_last(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    monkeypatch.chdir(tmp_path)
    short = ("attn=flash", "recipe=demo", *FEW, *MODEL, "batch.size=2", "trainer.steps=2", "trainer.eval_every=2",
             "trainer.log_every=1", "trainer.accelerator=cpu")  # fmt: skip
    for positions in ("learned", "rotary"):
        fields = (*short, f"model.positions={positions}")
        first = lra.fit("task=pathfinder", *fields)["directory"]
        assert lra.fit("task=path64", *fields, f"init={first}")["status"] == "finished"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("train=40", "unknown field of task=text 'train': choose from data_seed, max_length, protocol, source$"),
        ("d_model=40", "unknown field of task=text 'd_model': choose from"),
        ("task.max_lenght=40", "unknown field of task=text 'task.max_lenght': did you mean 'max_length'"),
        ("=40", "'=40' is not of the form field=value"),
    ],
)
def test_only_fields_of_the_task_are_suggested_for_data(field, message):
    with pytest.raises(UsageError, match=message):
        prepare_store(["task=text", field])


def test_retrieval_without_data_says_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    with pytest.raises(UsageError, match="then: lra data prepare task=retrieval dataset=lra source=<path>$"):
        prepare_store(["task=retrieval"])


def test_the_two_sets_of_pairs_are_two_stores(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    fields = aan(tmp_path)
    prepare_store(["task=retrieval", *fields])
    with pytest.raises(UsageError, match="dataset=scisumm"):  # the compact set cannot be taken for LRA's
        prepare_store(["task=retrieval", "dataset=lra", fields[1]])
    with pytest.raises(UsageError, match="is not prepared"):
        verify_store(["task=retrieval", "dataset=lra"])
    verify_store(["task=retrieval", "dataset=scisumm"])
    run = configure(["task=retrieval", "attn=flash", "dataset=scisumm", "train_share=0.1"]).config
    assert run.task.protocol == "scisumm, not the pairs of LRA"
    data = TASKS.get("retrieval").Data(run)
    data.setup()
    assert len(data.parts["train"]) == 30 and len(data.parts["test"]) == 40
