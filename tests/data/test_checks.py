"""What is imported and is not the data set: refused, or noted and told again by what runs on it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lra.data import cifar10, imdb, listops
from lra.errors import UsageError
from lra.training.data_verbs import describe_store, prepare_store, task_data
from tests.fixtures import pngs, write_aan_pairs, write_cifar10, write_imdb, write_pathfinder


def reviews(name: str, count: int) -> dict[str, Any]:
    return {"text": [f"{name} {row}" for row in range(count)], "label": [row % 2 for row in range(count)]}


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


@pytest.fixture
def mirror(tmp_path):
    """`mirror(train=…, test=…)`: the fields of a mirror with these splits."""

    def make(**splits: dict[str, Any]) -> list[str]:
        return ["task=text", f"source={write_imdb(tmp_path / 'imdb', **splits)}"]

    return make


def said(fields: list[str]) -> list[str]:
    """The notes of a store, which `data prepare` and `data info` tell alike; those that a run tells are marked `!`."""
    text = prepare_store(fields)
    notes = [text for name, text in describe_store(fields) if name == "note"]
    assert text.split("\nnote: ")[1:] == notes
    data = task_data(fields)
    told = [note.removeprefix(f"{data.content().path.name}: ") for note in data.differences()]
    assert set(told) <= set(notes)
    return [f"!{note}" if note in told else note for note in notes]


def refused(message: str, fields: list[str]) -> None:
    with pytest.raises(UsageError, match=message) as error:
        prepare_store(fields)
    assert "\n" not in str(error.value) and not task_data(fields).content().path.exists()


COUNTS = ["!train has 20 rows, where 25,000 are published", "!test has 20 rows, where 25,000 are published"]


def test_a_part_is_told_from_the_whole(mirror):
    assert said(mirror(train=reviews("a", 20), test=reviews("b", 20))) == COUNTS


def test_a_whole_has_no_note_that_runs_repeat(mirror, monkeypatch):
    monkeypatch.setattr("lra.data.imdb.PUBLISHED", 200)
    first = mirror(train=reviews("a", 200), test=joined(reviews("b", 199), reviews("a", 1)))
    assert said(first) == ["1 of 200 rows of test are in train, too"], "as some of IMDB's"


def test_splits_that_are_the_same_are_refused_in_any_order(mirror):
    rows = reviews("a", 20)
    refused("imdb: test has the same rows as train", mirror(train=rows, test={k: v[::-1] for k, v in rows.items()}))


def test_rows_that_two_splits_share_are_counted(mirror):
    made = mirror(train=reviews("a", 20), test=joined(reviews("a", 19), reviews("b", 1)))
    assert said(made) == [*COUNTS, "!19 of 20 rows of test are in train, too"]


def test_a_split_within_another_is_told(mirror):
    assert "!10 of 10 rows of test are in train, too" in said(mirror(train=reviews("a", 20), test=reviews("a", 10)))


def test_one_label_alone_and_empty_reviews_are_told(mirror):
    train = reviews("a", 20) | {"label": [0] * 20}
    test = joined(reviews("b", 19), {"text": [""], "label": [1]})
    assert said(mirror(train=train, test=test)) == [
        *COUNTS,
        "!all 20 rows of train have the label 0",
        "!1 of 20 sequences of test are empty",
    ]


def test_images(tmp_path):
    rng = np.random.default_rng(0)
    first, other = (pngs(rng.integers(0, 256, (20, 32, 32, 3), np.uint8)) for _ in range(2))
    labels = {"label": [*range(10)] * 2}
    mirror = write_cifar10(tmp_path / "a", train=labels | {"img": first}, test=labels | {"img": other})
    fields = ["task=image", f"source={mirror}"]
    counts = [("train", "50,000"), ("test", "10,000")]
    assert said(fields) == [f"!{split} has 20 rows, where {count} are published" for split, count in counts]
    same = write_cifar10(tmp_path / "b", train=labels | {"img": first}, test=labels | {"img": first})
    with pytest.raises(UsageError, match="b: test has the same rows as train"):
        prepare_store(["task=image", f"source={same}", "force=true"])
    assert said(fields), "what was there is there still"


def test_pairs(tmp_path):
    texts = {f"p{i}": f"paper {i}" for i in range(30)}
    pairs = [(i % 2, f"p{i}", f"p{(7 * i + 1) % 30}") for i in range(30)]

    def fields(name: str, **splits: Any) -> list[str]:
        return ["task=retrieval", f"source={write_aan_pairs(tmp_path / name, texts, **splits)}"]

    notes = said(fields("part", train=pairs[:20], val=pairs[15:25], test=pairs[25:]))
    assert "!5 of 10 rows of val are in train, too" in notes and len(notes) == 4
    same = [*fields("same", train=pairs[:20], val=pairs[20:], test=pairs[20:]), "force=true"]
    assert "!10 of 10 rows of test are in val, too" in prepare_store(same).replace("note: ", "!"), (
        "who validates on test may"
    )
    learned = [*fields("learned", train=pairs[:20], val=pairs[:20], test=pairs[20:]), "force=true"]
    with pytest.raises(UsageError, match="learned: val has the same rows as train"):
        prepare_store(learned)


def test_pathfinder(tmp_path):
    folder, rng = tmp_path / "pathfinder32" / "curv_baseline", np.random.default_rng(0)
    images = np.where(rng.random((20, 32, 32)) > 0.8, 255, 0).astype(np.uint8)
    images[10:] = images[0]
    write_pathfinder(folder, images, [0] * 20, 6, each=10)
    notes = said(["task=pathfinder", "recipe=xiong2021", "level=easy", f"source={tmp_path}"])
    assert "!pathfinder32/curv_baseline/metadata has 20 rows, where 200,000 are published" in notes
    assert any(re.fullmatch(r"!\d of 2 rows of (val|test) are in train, too", note) for note in notes)


def expressions(folder: Path, **splits: list[str]) -> list[str]:
    """Fields of LRA's files with these lines, each an expression and its target."""
    folder.mkdir(exist_ok=True)
    for name, lines in splits.items():
        (folder / f"basic_{name}.tsv").write_text("\n".join(["Source\tTarget", *lines]) + "\n")
    limits = "task.fresh=400", "task.min_length=4", "task.max_length=60"
    return ["task=listops", "recipe=xiong2021", f"source={folder}", *limits]


def lines(seed: int, count: int, low: int = 4, high: int = 60) -> list[str]:
    sequences, labels = listops.generate_expressions(count, seed=seed, min_length=low, max_length=high)
    return [f"{listops.decode(tokens)}\t{label}" for tokens, label in zip(sequences, labels, strict=True)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("] ] ]\t1", "'] ] ]' is not one whole expression"),
        ("[MAX 2 9\t9", r"'\[MAX 2 9' is not one whole expression"),
        ("[MAX 2 9 ] ]\t9", r"'\[MAX 2 9 ] ]' is not"),
        ("[MAX 2 9 ] 3\t9", "'[^']*' is not one whole"),
        ("[MAX ]\t9", "'[^']*' is not one whole"),
        ("[MAX [MIN ] 2 ]\t2", "'[^']*' is not one whole"),
        ("2 9\t9", "'2 9' is not one whole"),
        ("[SM 1 2 3 4 5 6 7 8 9\t5", r"'\[SM 1 2 3 4 5 6 7 …' is not"),
        ("[MAX 2 9 ]\t2", "Target is 2, and the value of the expression 9"),
        ("[MED 1 2 ]\t2", "Target is 2, and the value of the expression 1"),
        ("[SM 9 9 ]\t1", "Target is 1, and the value of the expression 8"),
        ("( ( ( [MIN 2 ) 9 ) ] )\t9", "Target is 9, and the value of the expression 2"),
    ],
)
def test_what_is_no_expression_or_has_another_value_is_refused_by_its_line(tmp_path, line, message):
    few = lines(0, 3)
    fields = expressions(tmp_path / "l", train=lines(1, 3), val=lines(2, 3), test=[*few, line, *few])
    refused(f"^{tmp_path}/l/basic_test.tsv:5: {message}.*; get the file again$", fields)


def test_the_values_of_expressions_are_those_of_the_generator():
    sequences, values = listops.generate_expressions(300, seed=5, min_length=1, max_length=200)
    assert listops.evaluate_expressions(sequences) == values.tolist() and listops.evaluate_expressions([]) == []
    assert listops.evaluate_expressions([listops.tokenize("[SM [MED 4 9 2 ] [MIN 7 ] 8 ]")]) == [9]
    assert listops.evaluate_expressions([listops.tokenize("7"), np.empty(0, np.uint8)]) == [7, -1]


@pytest.mark.parametrize(
    ("low", "high", "count", "least", "most"),
    [(21, 23, 5, 30, 60), (70, 90, 3, 95, 100), (4, 8, 200, 4, 60)],  # shorter, longer, and a part of what fresh has
)
def test_test_and_fresh_of_different_laws_are_told(tmp_path, low, high, count, least, most):
    fields = expressions(tmp_path / "l", train=lines(1, 20), val=lines(2, 20), test=lines(3, count, low, high))
    fields = [*fields[:-2], f"task.min_length={least}", f"task.max_length={most}"]
    [note] = [note for note in said(fields) if "laws" in note]
    sizes = r"test has \d+ to \d+, on average \d+ tokens, fresh \d+ to \d+, on average \d+;"
    assert re.fullmatch(rf"!test and fresh are of different laws: {sizes} task.min_length=\d+ and .*", note)


@pytest.mark.slow
@pytest.mark.realdata
def test_real_data_has_no_note_that_runs_repeat():
    """Of what is real: IMDB's test reviews in train. No image and no pair of papers is in two splits."""
    folder = Path(os.environ["LRA_TEST_DATA"])
    assert said(["task=text", f"source={folder / imdb.HUB}"]) == ["123 of 25,000 rows of test are in train, too"]
    assert said(["task=image", f"source={folder / cifar10.HUB}"]) == []
    assert said(["task=retrieval", "dataset=scisumm", f"source={folder / 'aan'}"]) == []


@pytest.mark.parametrize("count", [1, 3, 20, 200])
def test_of_one_law_no_note_says_so(tmp_path, count):
    fields = expressions(tmp_path / "l", train=lines(1, 20), val=lines(2, 20), test=lines(3, count))
    assert not [note for note in said(fields) if "laws" in note]
