"""ListOps: the law of the generator, checked by an evaluator written from the grammar."""

import hashlib
import io
import os
import statistics
import subprocess
import sys
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from lra.data import listops
from lra.data.expressions import CLOSE, MAX, MED, MIN, SM, draw_expressions
from lra.data.store import StoreContent, prepare_store
from lra.errors import UsageError
from tests.fixtures import pack, write_listops

COUNT = 5_000
REFERENCE = 120_000  # expressions behind the reference statistics


@pytest.fixture(scope="module")
def sample():
    return listops.generate_expressions(COUNT, seed=0)


FUNCTIONS = {"[MIN": min, "[MAX": max, "[MED": lambda v: int(statistics.median(v)), "[SM": lambda v: sum(v) % 10}


class Root(NamedTuple):
    """What the law says something about."""

    value: int
    operator: str
    arity: int
    depth: int  # of operators


def read(tokens, depth=1):
    """Evaluate the expression that ends a reversed list of tokens, and take it from the list."""
    token = tokens.pop()
    if token.isdigit():
        return Root(int(token), token, 0, 0)
    values, deepest = [], 0
    while (following := tokens[-1]) != "]":
        if following.isdigit():
            values.append(int(tokens.pop()))
        else:
            child = read(tokens, depth + 1)
            values.append(child.value)
            deepest = max(deepest, child.depth)
    tokens.pop()
    assert 2 <= len(values) <= 10 and depth < 10
    return Root(FUNCTIONS[token](values), token, len(values), deepest + 1)


def parse(ids):
    tokens = listops.decode(ids).split()[::-1]
    root = read(tokens)
    assert not tokens  # nothing after the root closes
    return root


@pytest.fixture(scope="module")
def trees(sample):
    return [parse(ids) for ids in sample[0]]


def near(share, reference, count=COUNT, rounding=0.0005):
    """Within four standard errors of the difference of two samples, and the reference's own rounding."""
    share, reference = np.asarray(share), np.asarray(reference)
    error = np.sqrt(reference * (1 - reference) * (1 / count + 1 / REFERENCE))
    return bool((np.abs(share - reference) <= 4 * error + rounding).all())


def test_labels_are_the_values(sample, trees):
    assert [tree.value for tree in trees] == sample[1].tolist()


def test_length_distribution(sample):
    lengths = np.array([len(ids) for ids in sample[0]])
    assert lengths.min() >= 501 and lengths.max() <= 1999
    pooled = np.sqrt(1 / COUNT + 1 / REFERENCE)
    assert abs(lengths.mean() - 1035) < 4 * 393 * pooled + 0.5
    kurtosis = ((lengths - lengths.mean()) ** 4).mean() / lengths.var() ** 2
    assert abs(lengths.std() - 393) < 4 * 393 * np.sqrt((kurtosis - 1) / 4) * pooled + 0.5
    for share, quantile in zip((0.05, 0.25, 0.5, 0.75, 0.95), (537, 703, 953, 1307, 1798), strict=True):
        assert near((lengths <= quantile).mean(), share, rounding=0.002)


def test_label_and_root_distribution(sample, trees):
    labels = sample[1]
    assert near(np.bincount(labels) / COUNT, [0.169, 0.091, 0.077, 0.084, 0.090, 0.085, 0.077, 0.072, 0.088, 0.169])
    roots = np.array([tree.operator for tree in trees])
    law = {
        "[MIN": [0.567, 0.219, 0.102, 0.055, 0.028, 0.014, 0.008, 0.004, 0.002, 0.001],
        "[MAX": [0.001, 0.002, 0.004, 0.008, 0.014, 0.028, 0.055, 0.106, 0.214, 0.565],
        "[MED": [0.010, 0.044, 0.102, 0.170, 0.215, 0.198, 0.142, 0.079, 0.033, 0.007],
        "[SM": [0.1] * 10,
    }
    for operator, expected in law.items():
        here = labels[roots == operator]
        assert near(len(here) / COUNT, 0.25)
        assert near(np.bincount(here, minlength=10) / len(here), expected, len(here), rounding=0.001)
    arities = np.bincount([tree.arity for tree in trees], minlength=11)[2:] / COUNT
    assert near(arities, [0.044, 0.064, 0.083, 0.101, 0.117, 0.132, 0.143, 0.155, 0.161])
    guess = {"[MIN": 0, "[MAX": 9, "[MED": 4, "[SM": 0}
    assert near(np.mean([guess[root] == label for root, label in zip(roots, labels, strict=True)]), 0.363)


def test_depth_and_operators(sample, trees):
    assert all(tree.depth == 9 for tree in trees)
    operators = np.array([np.isin(ids, (MAX, MED, MIN, SM)).sum() for ids in sample[0]])
    assert abs(operators.mean() - 147) < 4 * operators.std() * np.sqrt(1 / COUNT + 1 / REFERENCE) + 0.5
    assert all((ids == CLOSE).sum() == count for ids, count in zip(sample[0], operators, strict=True))


def test_expressions_differ(sample):
    assert len({ids.tobytes() for ids in sample[0]}) == COUNT


def test_independent_of_chunks_and_workers(sample, monkeypatch):
    law = (501, 1999, 10, 10)
    whole, lengths, values = draw_expressions(3, 0, 60, *law)
    for first, count in ((0, 1), (17, 20), (59, 1)):
        tokens, some, part = draw_expressions(3, first, count, *law)
        same = slice(first, first + count)
        assert np.array_equal(some, lengths[same]) and np.array_equal(part, values[same])
        assert all(np.array_equal(a[:n], b[:n]) for a, b, n in zip(tokens, whole[same], some, strict=True))
    monkeypatch.setattr(listops, "CHUNK", 7)
    for workers in (1, 3):
        sequences, labels = listops.generate_expressions(200, seed=0, workers=workers)
        assert np.array_equal(labels, sample[1][:200])
        assert all(np.array_equal(a, b) for a, b in zip(sequences, sample[0], strict=False))


def test_golden_expressions(sample):
    """They must never change within listops@1: results are compared across machines and years."""
    assert " ".join(listops.VOCABULARY) == "0 1 2 3 4 5 6 7 8 9 [MAX [MED [MIN [SM ]"
    assert sample[1][:8].tolist() == GOLDEN[0]
    assert hashlib.sha256(b"".join(sample[0][:1000])).hexdigest()[:16] == GOLDEN[1]


GOLDEN = ([3, 0, 3, 6, 0, 6, 9, 9], "9f1fce02977646df")


@pytest.mark.slow
def test_ids_do_not_depend_on_the_hash_seed():
    code = "from lra.data import listops; print(listops.VOCABULARY, listops.generate_expressions(5, seed=1))"

    def output(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout

    assert output("1") == output("2") and b"[MAX" in output("3")


def test_duplicates_and_excluded_expressions_are_skipped():
    generate = partial(listops.generate_expressions, min_length=1, max_length=1)
    sequences, labels = generate(10, seed=0)
    assert sorted(ids[0] for ids in sequences) == list(range(10)) and sorted(labels) == list(range(10))
    others, _ = generate(4, seed=5, exclude=listops.fingerprints(sequences[:6]))
    assert sorted(int(ids[0]) for ids in others) == sorted(int(ids[0]) for ids in sequences[6:])
    with pytest.raises(UsageError, match="fewer than 11 expressions"):
        generate(11, seed=0)


@pytest.mark.parametrize(
    "limits",
    [{"max_depth": 1}, {"min_length": 2, "max_length": 3}, {"min_length": 9, "max_length": 5}, {"max_args": 1}],
)
def test_impossible_limits(limits):
    with pytest.raises(UsageError, match="limits"):
        listops.generate_expressions(1, seed=0, **limits)


def test_shallow_law():
    sequences, labels = listops.generate_expressions(500, seed=2, min_length=3, max_length=40, max_depth=3, max_args=3)
    for ids, label in zip(sequences, labels, strict=True):
        tree = parse(ids)
        assert tree.value == label and tree.depth <= 2 and tree.arity <= 3


def content(**params):
    return StoreContent("listops", 1, params, "generated", listops.VOCABULARY, listops.GENERATOR, 0)


def test_build_makes_disjoint_splits(sample):
    counts = {"train": 60, "val": 20, "test": 20, "fresh": 50}
    store = prepare_store(content(), lambda w: listops.build_listops(w, **counts))
    splits = [store.split(name) for name in counts]
    assert [len(split) for split in splits] == list(counts.values())
    every = [bytes(split[i]) for split in splits for i in range(len(split))]
    assert len(set(every)) == 150
    assert every[:100] == [ids.tobytes() for ids in sample[0][:100]]
    assert splits[3].labels.tolist() == [parse(splits[3][i]).value for i in range(50)]


@pytest.fixture
def official(tmp_path, sample):
    parts = {"train": slice(0, 10), "val": slice(10, 20), "test": slice(20, 30)}
    return write_listops(
        tmp_path / "listops-1000", **{k: (sample[0][part], sample[1][part]) for k, part in parts.items()}
    )


def test_official_files(official, sample):
    text = (official / "basic_train.tsv").read_text().splitlines()[1].split("\t")[0]
    assert len(text.split()) == 3 * len(sample[0][0]) - 2  # the layout of the release
    store = prepare_store(content(), lambda w: listops.build_released_listops(w, official, fresh=20))
    assert store.splits == ("train", "val", "test", "fresh")
    got = [store.split(name)[i] for name in ("train", "val", "test") for i in range(10)]
    assert all(np.array_equal(a, b) for a, b in zip(got, sample[0], strict=False))
    assert store.split("test").labels.tolist() == sample[1][20:30].tolist()


def test_other_counts_than_published_are_noted(official, monkeypatch):
    def notes():
        build = partial(listops.build_released_listops, source=official, fresh=2)
        return prepare_store(content(), build, force=True).manifest["notes"]

    published = {"train": "96,000", "val": "2,000", "test": "2,000"}
    said = [f"basic_{split}.tsv has 10 rows, where {count} are published" for split, count in published.items()]
    assert notes() == said
    monkeypatch.setattr(listops, "PUBLISHED", {"train": 10, "val": 10, "test": 9})
    assert notes() == ["basic_test.tsv has 10 rows, where 9 are published"]


def test_fresh_expressions_are_no_others(tmp_path):
    """Of the same seed, whether the other splits are imported or generated."""
    limits: dict[str, Any] = {"min_length": 4, "max_length": 4}  # 400 expressions, so they repeat
    sequences, labels = listops.generate_expressions(30, seed=0, **limits)
    parts = {"train": slice(10), "val": slice(10, 20), "test": slice(20, 30)}
    rows = {split: (sequences[part], labels[part]) for split, part in parts.items()}
    folder = write_listops(tmp_path / "listops-1000", **rows)
    imported = partial(listops.build_released_listops, source=folder, fresh=200, **limits)
    generated = partial(listops.build_listops, train=10, val=10, test=10, fresh=200, **limits)
    fresh = []
    for build in (imported, generated):
        part = prepare_store(content(), build, force=True).split("fresh")
        fresh.append([bytes(part[i]) for i in range(200)])
    assert fresh[0] == fresh[1] and not set(fresh[0]) & {bytes(ids) for ids in sequences}


def test_tokenize_and_decode():
    ids = listops.tokenize("( ( ( [MAX 2 ) 9 ) ] )")
    assert ids.dtype == np.uint8 and ids.tolist() == [MAX, 2, 9, CLOSE] and listops.decode(ids) == "[MAX 2 9 ]"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", ":1: the first line must name"),
        (b"[MAX 2 9 ]\t9\n", ":1: the first line must name"),
        (b"Source\tAnswer\n[MAX 2 9 ]\t9\n", ":1: the first line must name"),
        (b"Source\tTarget\r\n", ": no line after the header"),
        (b"Source\tTarget\n[MAX 2 9 ]\t9\n[MAX 2 9 ]\n", ":3: 1 columns instead of 2"),
        (b"Source\tTarget\n[AVG 2 9 ]\t9\n", r":2: unknown ListOps token '\[AVG'"),
        (b"Source\tTarget\n[MAX 12 9 ]\t9\n", ":2: unknown ListOps token '12'"),
        (b"Source\tTarget\n[MAX \xff 9 ]\t9\n", ":2: unknown ListOps token"),
        (b"Source\tTarget\n[MAX 2 9 ]\t10\n", ":2: Target is '10', not 0 to 9"),
        (b"Source\tTarget\n[MAX 2 9 ]\t\n", ":2: Target is '', not 0 to 9"),
        (b"Source\tTarget\n[MAX 1 1 1 1 1 1 1 1 1 ]\t1\n", ":2: 11 tokens, not 1 to 10"),
        (b"Source\tTarget\n\t1\n", ":2: 0 tokens"),
    ],
)
def test_bad_files_are_named_with_their_line(data, message):
    with pytest.raises(UsageError, match=f"^basic_val.tsv{message}") as caught:
        listops.read_tsv(io.BytesIO(data), "basic_val.tsv", max_length=10)
    assert "\n" not in str(caught.value)


def test_official_files_in_an_archive(official, sample, tmp_path):
    outer, nothing = tmp_path / "lra_release", ([], [])
    write_listops(outer / "listops-1000", train=nothing, val=nothing, test=nothing)
    (outer / "lra_release").mkdir()
    official.rename(outer / "lra_release" / "listops-1000")
    for source in (outer, pack(outer, tmp_path / "lra_release.gz")):
        store = prepare_store(
            content(), lambda w, source=source: listops.build_released_listops(w, source, fresh=2), force=True
        )
        val = store.split("val")
        assert all(np.array_equal(val[i], ids) for i, ids in enumerate(sample[0][10:20]))


def test_files_are_named_with_their_place(official, tmp_path):
    with (official / "basic_val.tsv").open("a") as file:
        file.write("[AVG 2 9 ]\t9\n")
    for source in (tmp_path, pack(official, tmp_path / "lra_release.gz")):
        with pytest.raises(UsageError, match=f"^{source}/listops-1000/basic_val.tsv:12: unknown ListOps token"):
            prepare_store(content(), lambda w, source=source: listops.build_released_listops(w, source, fresh=2))


def test_folder_without_the_files(official):
    (official / "basic_val.tsv").unlink()
    with pytest.raises(UsageError, match=r"listops-1000 has no basic_val.tsv: get it again"):
        prepare_store(content(), lambda w: listops.build_released_listops(w, official, fresh=2))
