"""Retrieval: pairs of papers, from LRA's own files and from the compact form."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lra
from lra.data import aan
from lra.data.store import StoreContent, prepare_store
from lra.errors import UsageError
from tests.fixtures import pack, write_aan_pairs, write_aan_papers

TEXTS = {"A1": "Fine, he said.", "B2": '"naïve — 映画', "C3": "", "D4": "e" * 20_000, "E5": 'a "quoted" word\r'}
SPLITS = {
    "train": [(1, "A1", "B2"), (0, "B2", "A1"), (0, "C3", "A1"), (1, "A1", "A1")],
    "val": [(0, "B2", "D4")],
    "test": [(1, "E5", "C3"), (0, "A1", "D4")],
}


def store(source, dataset):
    content = StoreContent("retrieval", 1, {"dataset": dataset}, str(source), aan.VOCABULARY, aan.GENERATOR, None)
    return prepare_store(content, lambda writer: aan.build_aan(writer, source, dataset), force=True)


def read(made):
    """Label and two texts of every pair."""
    return {
        name: [
            (int(part.labels[row]), *(tokens.tobytes().decode() for tokens in part[row])) for row in range(len(part))
        ]
        for name, part in ((name, made.pairs(name)) for name in made.splits)
    }


def documents(made):
    stored = made.pairs("train").documents
    return [stored[row].tobytes().decode() for row in range(len(stored))]


def expected(splits=SPLITS, texts=TEXTS):
    return {name: [(label, texts[one], texts[other]) for label, one, other in rows] for name, rows in splits.items()}


@pytest.fixture
def release(tmp_path):
    """LRA's release with a copy of other texts outside."""
    outer = tmp_path / "lra_release"
    write_aan_pairs(outer / "tsv_data", dict.fromkeys(TEXTS, "other"), **SPLITS)
    write_aan_pairs(outer / "lra_release" / "tsv_data", TEXTS, **SPLITS)
    return outer


@pytest.fixture
def compact(tmp_path):
    return write_aan_papers(tmp_path / "aan", TEXTS, **SPLITS)


def test_official_pairs_and_documents_once(release, tmp_path, monkeypatch):
    inner = release / "lra_release" / "tsv_data"
    for source in (inner, release, pack(release, tmp_path / "lra_release.gz")):
        for chunk in (aan.CHUNK, 10, 0):  # bytes per write, which change nothing
            monkeypatch.setattr(aan, "CHUNK", chunk)
            made = store(source, "lra")
            assert made.splits == ("train", "val", "test") and read(made) == expected()
            assert sorted(documents(made)) == sorted(TEXTS.values())


def test_other_counts_than_published_are_noted(release, monkeypatch):
    rows = [("train", 4, "147,086"), ("eval", 1, "18,090"), ("test", 2, "17,437")]
    said = [f"new_aan_pairs.{name}.tsv has {n} rows, where {count} are published" for name, n, count in rows]
    assert store(release, "lra").manifest["notes"] == said
    monkeypatch.setattr(aan, "_PUBLISHED", {name: len(pairs) for name, pairs in SPLITS.items()})
    assert not store(release, "lra").manifest["notes"]


def test_compact_form(compact):
    made = store(compact, "scisumm")
    assert not made.manifest["notes"]
    assert made.splits == ("train", "val", "test") and read(made) == expected()
    assert documents(made) == list(TEXTS.values())


def test_both_forms_hold_the_same_pairs(release, compact):
    assert read(store(release, "lra")) == read(store(compact, "scisumm"))


def test_a_document_is_its_text(tmp_path):
    """Not its id, which says nothing to a model: one text under two ids is stored once, two under one id twice."""
    folder = write_aan_pairs(tmp_path / "tsv_data", TEXTS, **SPLITS)
    (folder / "new_aan_pairs.train.tsv").write_text("1.0\tX\tY\tsame\tsame\n0.0\tX\tX\tsame\tanother\n")
    (folder / "new_aan_pairs.eval.tsv").write_text("1\tZ\tX\tanother\tsame\r\n")
    (folder / "new_aan_pairs.test.tsv").write_text("0\tZ\tX\tsame\tanother")
    made = store(folder, "lra")
    assert read(made) == {
        "train": [(1, "same", "same"), (0, "same", "another")],
        "val": [(1, "another", "same")],
        "test": [(0, "same", "another")],
    }
    assert sorted(documents(made)) == ["another", "same"]
    pairs = {name: [(1, "A", "B")] * count for count, name in enumerate(SPLITS, 1)}
    papers = write_aan_papers(tmp_path / "aan", {"A": "same", "B": "same"}, **pairs)
    assert documents(store(papers, "scisumm")) == ["same"]


def test_bytes_are_kept_as_they_are(tmp_path):
    """A text is bytes: characters that UTF-8 has not, quotes that are never closed, and what ends a line elsewhere."""
    folder = write_aan_pairs(tmp_path / "tsv_data", TEXTS, **SPLITS)
    odd = b"caf\xe9 \x00 \x85 \xe2\x80\xa8 \x0c a \rb"
    (folder / "new_aan_pairs.train.tsv").write_bytes(b"1.0\tA\tB\t" + odd + b'\t"never closed\n0.0\tA\tB\t"x\t' + odd)
    train = store(folder, "lra").pairs("train")
    assert [tokens.tobytes() for row in range(2) for tokens in train[row]] == [odd, b'"never closed', b'"x', odd]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1.0\tA\tB\ttext", ":2: 4 columns instead of 5"),
        ("1.0\tA\tB\ttext\ttext\t", ":2: 6 columns instead of 5"),
        ("", ":2: 1 columns instead of 5"),
        ("2.0\tA\tB\tone\tother", ":2: the label is '2.0', not 0 or 1"),
        ("0.5\tA\tB\tone\tother", ":2: the label is '0.5', not 0 or 1"),
        ("\tA\tB\tone\tother", ":2: the label is '', not 0 or 1"),
        ('"1.0"\tA\tB\tone\tother', """:2: the label is '"1.0"', not 0 or 1"""),
        ("label\tid1\tid2\ttext1\ttext2", ":2: the label is 'label', not 0 or 1"),
    ],
)
def test_official_files_with_another_line(release, line, message):
    path = release / "lra_release" / "tsv_data" / "new_aan_pairs.eval.tsv"
    path.write_text(f"1.0\tA\tB\tone\tother\n{line}\n")
    with pytest.raises(UsageError, match=f"^{path}{message}") as caught:
        store(release, "lra")
    assert "\n" not in str(caught.value)


def test_missing_and_empty_official_files(release):
    path = release / "lra_release" / "tsv_data" / "new_aan_pairs.test.tsv"
    path.write_bytes(b"")
    with pytest.raises(UsageError, match=f"{path}: no pairs; get the file again"):
        store(release, "lra")
    path.unlink()
    with pytest.raises(UsageError, match="tsv_data has no new_aan_pairs.test.tsv: get it again"):
        store(release, "lra")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", ":1: the first line must name"),
        ("1\tA1\tB2\n", ":1: the first line must name"),
        ("label\tid1\n1\tA1\n", ":1: the first line must name"),
        ("label\tid1\tid2\r\n", ": no pairs"),
        ("label\tid1\tid2\n1\tA1\n", ":2: 2 columns instead of 3"),
        ("label\tid1\tid2\n1\tA1\tB2\n3\tA1\tB2\n", ":3: the label is '3', not 0 or 1"),
        ("label\tid1\tid2\n1\tA1\tZ9\n", ":2: papers.parquet has no paper 'Z9'"),
        ("label\tid1\tid2\n1\t\tA1\n", ":2: papers.parquet has no paper ''"),
    ],
)
def test_compact_form_with_other_pairs(compact, lines, message):
    path = compact / "pairs_val.tsv"
    path.write_text(lines)
    with pytest.raises(UsageError, match=f"^{path}{message}") as caught:
        store(compact, "scisumm")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": ["A1"]}, "no column 'text'"),
        ({"text": ["a"]}, "no column 'id'"),
        ({"id": ["A1", None], "text": ["a", "b"]}, "id or text of row 1 is not a string"),
        ({"id": ["A1"], "text": pa.array([None], pa.string())}, "id or text of row 0 is not a string"),
        ({"id": [1], "text": ["a"]}, "id or text of row 0 is not a string"),
        ({"id": ["A1", "B2", "A1"], "text": ["a", "b", "a"]}, "id of row 2, 'A1', occurs twice"),
    ],
)
def test_compact_form_with_other_papers(compact, columns, message):
    pq.write_table(pa.table(columns), compact / "papers.parquet")
    with pytest.raises(UsageError, match=f"papers.parquet.*{message}"):
        store(compact, "scisumm")


def test_unreadable_files_of_the_compact_form(compact):
    (compact / "pairs_test.tsv").unlink()
    with pytest.raises(UsageError, match="pairs_test.tsv: No such file.*name the folder"):
        store(compact, "scisumm")
    whole = (compact / "papers.parquet").read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"id\ttext\n"):
        (compact / "papers.parquet").write_bytes(content)
        with pytest.raises(UsageError, match="papers.parquet is not a readable parquet file") as caught:
            store(compact, "scisumm")
        assert "\n" not in str(caught.value)


def test_the_other_data_set(release, compact, tmp_path):
    with pytest.raises(UsageError, match="aan holds papers.parquet.*choose dataset=scisumm"):
        store(compact, "lra")
    for source in (release / "lra_release" / "tsv_data", pack(release, tmp_path / "lra_release.gz"), tmp_path / "none"):
        with pytest.raises(UsageError, match=f"{source} has no papers.parquet.*choose dataset=lra"):
            store(source, "scisumm")


@pytest.mark.realdata
def test_a_run_on_a_part_of_the_pairs_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    sample = Path(os.environ["LRA_TEST_DATA"]) / "aan" / "lra_format_sample"
    run = ("task=retrieval", "attn=flash", "recipe=demo", f"task.source={sample}", "task.max_length=200")
    made = lra.fit(*run, "trainer.steps=2", "trainer.eval_every=2", "trainer.log_every=1", "batch.size=4")
    assert (made["status"], made["protocol"], made["test"]["n"]) == ("finished", "the pairs of LRA", 40)
    assert any("train.tsv has 120 rows, where 147,086 are published" in text for text in made["data"]["differences"])


@pytest.mark.realdata
def test_real_papers():
    folder = Path(os.environ["LRA_TEST_DATA"]) / "aan"
    made = store(folder, "scisumm")
    parts = {name: made.pairs(name) for name in made.splits}
    assert {name: len(part) for name, part in parts.items()} == {"train": 16_366, "val": 2_046, "test": 2_046}
    papers = pq.read_table(folder / "papers.parquet")
    assert documents(made) == papers["text"].to_pylist() and len(documents(made)) == 1654

    # A sample in the layout of LRA's files: the same pairs, spaces for line ends, at most 10,000 characters
    rows = {" ".join(text.split())[:10_000]: row for row, text in enumerate(papers["text"].to_pylist())}
    small = read(store(folder / "lra_format_sample", "lra"))
    assert {name: len(pairs) for name, pairs in small.items()} == {"train": 120, "val": 40, "test": 40}
    for name, part in parts.items():
        known = {(int(label), *pair) for label, pair in zip(part.labels, part.pairs.tolist(), strict=True)}
        assert {(label, rows[one], rows[other]) for label, one, other in small[name]} <= known
