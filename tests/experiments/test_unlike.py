"""What is unlike others in a grid: results in portions of their own, speeds of another configuration, refused cells."""

from __future__ import annotations

from lra.experiments import speed
from lra.experiments.grid import local_launcher
from lra.experiments.grid.local_launcher import LocalLauncher
from lra.experiments.results import report
from tests.experiments.results.test_ledger import put, result
from tests.experiments.results.test_report import cells, table
from tests.experiments.runs import cells as todo_cells
from tests.experiments.runs import started, stub


def test_batches_in_portions_are_named_and_in_the_command(tmp_path):
    for attn, micro in (("flash", None), ("standard", 2)):
        [cell] = cells(["listops"], [attn])
        made = result(cell)
        made["config"]["batch"]["micro"] = micro
        put(tmp_path / f"{attn}.json", made)
    found = report.make_report("table3", [f"results={tmp_path}", "tasks=listops", "attns=flash,standard", "seeds=1"])
    said = (
        "listops: memory and speed of batches in different portions are compared (batch.micro=2: standard s0; whole: "
    )
    assert f"{said}flash s0)" in found.notes
    assert {row.attention: "batch.micro=2" in row.command for row in found.rows} == {"flash": False, "standard": True}


def test_seeds_of_different_code_are_named_and_marked(tmp_path):
    """Also where a run before them had other code. Of an older lra's it is not known."""
    stated = [{"own_code": {"mine.py": "1" * 12}}, {"own_code": {"mine.py": "1" * 12, "other.py": "3" * 12}}, {}]
    made = [result(cell) for cell in cells(["listops"], ["flash"], 3)]
    for seed, own in enumerate(stated):
        made[seed]["provenance"] = {"run": "run", "commit": "a" * 12, "ancestors": []} | own
        put(tmp_path / f"{seed}.json", made[seed])
    [standard] = cells(["listops"], ["standard"])
    other = put(tmp_path / "standard.json", result(standard) | {"provenance": made[0]["provenance"]})
    asked = [f"results={tmp_path}", "tasks=listops", "attns=flash,standard", "seeds=3"]
    found = report.make_report("table3", asked)
    assert not any("different code" in note for note in found.notes)
    assert table(found, "test accuracy")["flash"]["listops"] == "36.0 ± 0.0"
    before = {"run": "pretraining", "commit": "a" * 12, "own_code": {"mine.py": "2" * 12}}
    put(tmp_path / "1.json", made[1] | {"provenance": made[1]["provenance"] | {"ancestors": [before]}})
    found = report.make_report("table3", asked)
    parts = f"{'1' * 12}: s0, s1; {'2' * 12}: s1"
    assert f"listops flash: seeds of different code are pooled (mine.py {parts})" in found.notes
    shown = table(found, "test accuracy")
    assert (shown["flash"]["listops"], shown["standard"]["listops"]) == ("36.0 ± 0.0†", "36.0")
    assert {(row.attention, row.seed): row.clean for row in found.rows if row.status} == {
        ("flash", 0): False, ("flash", 1): False, ("flash", 2): True, ("standard", 0): True
    }  # fmt: skip
    title = next(title for title, _, _ in found.tables if title.startswith("test accuracy"))
    assert title.endswith("(† made by changed code, or no commit is stated, or runs differ in code or data)")
    put(other.with_name("1.json"), made[1] | {"status": "failed"})  # what is not shown differs from nothing
    assert not any("different code" in note for note in report.make_report("table3", asked).notes)


def test_runs_on_different_copies_of_the_data_are_named_and_marked(tmp_path):
    """Also if only a run before them had another copy. Of an older lra's it is not known."""
    copy = {"source": "imdb", "store": "text@1-1"}
    one, other = (copy | {"digest": digit * 12} for digit in "12")
    made = {f"{cell.attn} {cell.seed}": result(cell) for cell in cells(["text"], ["flash", "standard"], 2)}
    made["flash 2"] = result(cells(["text"], ["flash"], 3)[2])
    asked = [f"results={tmp_path}", "tasks=text", "attns=flash,standard", "seeds=3"]

    def reported(**data):
        """What is noted on data, and the cells, if seeds were trained on these."""
        for name, each in made.items():
            put(tmp_path / f"{name}.json", each | {"data": data.get(name.replace(" ", "_"), one)})
        found = report.make_report("table3", asked)
        shown = table(found, "test accuracy")
        marks = {row.attention: row.clean for row in found.rows if row.seed == 2}
        assert marks["flash"] is not False  # it never states its data
        return [note for note in found.notes if "data" in note], shown["flash"]["text"], shown["standard"]["text"]

    assert reported(flash_2=copy) == ([], "36.0 ± 0.0", "36.0 ± 0.0")
    assert reported(flash_2=copy, flash_1=copy | {"store": "text@1-2", "digest": "2" * 12})[0] == []
    note = f"text: runs on different data are compared (text@1-1 {'1' * 12}: flash s0, standard s0, standard s1; "
    found = reported(flash_2=copy, flash_1=other)
    assert found == ([f"{note}{'2' * 12}: flash s1)"], "36.0 ± 0.0†", "36.0 ± 0.0†")
    record = {"run": "run", "commit": "a" * 12, "ancestors": [{"run": "before", "commit": "a" * 12, "ended": "e"}]}
    made["flash 1"] |= {"provenance": record}
    before = made["flash 1"] | {"data": other, "provenance": record | {"ended": "e", "ancestors": []}}
    put(tmp_path / "before.json", before | {"config": before["config"] | {"pretrain": "masked"}})
    found = reported(flash_2=copy)
    assert found == (
        [f"{note.replace('s0, st', 's0, flash s1, st', 1)}{'2' * 12}: flash s1)"],
        "36.0 ± 0.0†",
        "36.0 ± 0.0†",
    )


def test_data_that_differ_from_the_tasks_are_named(tmp_path):
    for cell in cells(["retrieval"], ["flash"], 2):
        part = {"source": "aan", "store": "retrieval@1-1", "differences": ["train has 120 rows"]}
        put(tmp_path / f"{cell.seed}.json", result(cell, data=part))
    asked = [f"results={tmp_path}", "tasks=retrieval", "attns=flash", "seeds=2"]
    assert "retrieval: train has 120 rows" in report.make_report("table3", asked).notes


def test_speeds_of_another_configuration_are_not_drawn_against_accuracy(tmp_path, monkeypatch):
    [cell] = cells(["listops"], ["flash"])
    put(tmp_path / "runs" / "a.json", result(cell, steps_per_second=100.0))
    records = [
        {
            "column": "listops", "attention": "flash", "way": way, "loop": "fit", "status": "ok", "reason": "",
            "engine": "captured", "ms": 1.0, "rows": 64.0, "memory_mb": 9.5, "steps_per_second": 7.0,
        }
        for way in speed.WAYS
    ]  # fmt: skip
    for fields, drawn in (([], [7.0]), (["model.layers=12"], [])):
        measured = {
            "environment": {"gpu": "NVIDIA H200", "date": "2026-01-01T00:00:00Z", "commit": "abc"},
            "options": {"recipe": "xiong2021", "fields": fields}, "cells": records,
        }  # fmt: skip
        file = put(tmp_path / "speed.json", measured)
        args = [f"results={tmp_path / 'runs'}", f"speed={file}", "tasks=listops", "attns=flash", "seeds=1"]
        assert list(report.make_report("table3", args).alone.values()) == drawn


def test_a_cell_that_is_refused_leaves_the_others_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_launcher, "TICK_S", 0.02)
    todo, said = todo_cells(3), []
    local = LocalLauncher(todo, [None], say=said.append, command=stub(todo, "finish"))
    path = todo[1].directory.path  # where another command meanwhile begins another run
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("seed: 7\n")
    states = local.work()
    assert [states[cell].status for cell in todo] == ["done", "refused", "done"]
    assert str(path) not in started() and len(started()) == 2
    assert [line.startswith(f"{todo[1]}: refused, {path} holds a run with another") for line in said] == [True]
