"""Two runs, or the seeds of two settings, beside each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lra.experiments.results.compare import compare_runs
from lra.training.predictions import Predictions, write_predictions
from tests.command_line import lra, refused
from tests.experiments.results.test_ledger import cell, put, result

CURVES = "step,train/loss,lr,val/loss,val/accuracy\n50,2.0,1e-4,,\n250,,,2.1,0.2\n500,,,2.0,0.35\n"
LABELS = np.arange(40, dtype=np.uint8) % 10


def run(attn: str, seed: int, accuracy: float = 0.36, wrong: range | None = None, **changes: Any) -> Path:
    """A finished run of table 3's ListOps; `wrong`: the test examples that it does not get right."""
    folder = Path("checkpoints/runs/listops") / attn / f"demo-s{seed}"
    made = result(cell(attn, min(seed, 1)), accuracy, **changes) | {"seed": seed}
    put(folder / "result.json", made)
    (folder / "metrics.csv").write_text(CURVES)
    if wrong is not None:
        predicted = LABELS.copy()
        predicted[wrong] += 1
        write_predictions(folder / "predictions.npz", {"test": Predictions(predicted, LABELS)})
    return folder


def tables(*args: str) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
    """title -> first cells -> the others; and the lines."""
    made = compare_runs(args[0], args[1], args[2:])
    return {title: {row[0]: row[1:] for row in rows} for title, _, rows in made.tables}, made.lines


def test_two_runs_have_their_fields_scores_and_paired_tests_side_by_side(here):
    one = run("flash", 0, 0.36, range(10, 20), parameters=1000, steps_per_second=300.0)
    other = run("linear", 0, 0.38, range(12), parameters=900, steps_per_second=100.0)
    found, lines = tables(str(one), str(other), "out=curves.svg")
    fields = found["what differs"]
    assert fields["attn.name"] == ["flash", "linear"] and fields["attn.impl"] == ["auto", ""]
    scores = found["scores"]
    assert scores["test accuracy, %"] == ["36.0", "38.0", "+2.0"] and scores["parameters"] == ["1000", "900", "-100"]
    assert scores["steps per second"] == ["300.0", "100.0", "-200.0"] and "stuck seeds" not in scores
    (paired,) = (rows for title, rows in found.items() if title.startswith("paired"))
    assert paired["test"] == ["0", "40", "10", "8", "0.81", "0.81"]
    assert lines[:2] == [f"A: {one.with_name('demo')}, seed 0", f"B: {other.with_name('demo')}, seed 0"]
    assert any("no test over seeds: A has 1 and B has 1" in line for line in lines) and Path("curves.svg").exists()


def test_own_code_and_data_that_differ_are_named(here):
    one, other = run("flash", 0), run("flash", 1)
    assert "own code" not in tables(str(one), str(other))[0].get("what differs", {})
    data = {"source": "generated", "store": "listops@1-1", "digest": "2" * 12}
    run("flash", 1, provenance={"run": "run", "ancestors": [], "own_code": {"mine.py": "1" * 12}}, data=data)
    found = tables(str(one), str(other))[0]["what differs"]
    assert found["own code"] == ["none stated", f"mine.py {'1' * 12}"]
    assert found["digest of the data"] == ["unknown", "2" * 12]


def test_groups_of_seeds_are_named_without_their_seed(here):
    for seed, (accuracy, more) in enumerate(((0.166, 0.4), (0.30, 0.41), (0.31, 0.42))):
        run("flash", seed, accuracy, range(20 + seed))
        run("linear", seed, more, range(10 + seed))
    run("flash", 10, 0.32)
    put(run("flash", 11) / "result.json", result(cell("flash", 0)) | {"status": "oom"})
    (run("linear", 12) / "result.json").rename("gone")
    (Path("checkpoints/runs/listops/linear/demo-s12") / "config.yaml").touch()
    found, lines = tables("checkpoints/runs/listops/flash/demo", "checkpoints/runs/listops/linear/demo")
    assert "A: checkpoints/runs/listops/flash/demo, seeds 0, 1, 2, 10, 11" in lines
    assert any("demo-s12 has no result yet" in line for line in lines)
    scores = found["scores: mean ± standard deviation over seeds"]
    assert scores["test accuracy, %"] == ["27.4 ± 7.2", "41.0 ± 1.0", "+13.6"]
    assert scores["finished seeds"] == ["4 of 5", "3 of 3", ""] and scores["stuck seeds"] == ["1 of 4", "0 of 3", ""]
    over = found["accuracy over seeds, and a permutation test of the means"]["test"]
    assert over[1] == "41.0 (40.0 to 42.0)" and over[2].startswith("+13.6 (") and over[3] == "0.029"
    assert any("permutation test of 4 and 3 seeds can't give less than p = 0.029" in line for line in lines)
    (paired,) = (rows for title, rows in compare_titles().items() if title.startswith("paired"))
    assert [row[:3] for row in paired] == [["test", str(seed), "40"] for seed in range(3)] + [["test", "all", "40"]]
    assert paired[0][3:5] == ["0", "10"] and float(paired[0][5]) == pytest.approx(2 / 1024, abs=1e-4)
    assert float(paired[3][6]) < 0.01


def compare_titles() -> dict[str, list[list[str]]]:
    made = compare_runs("checkpoints/runs/listops/flash/demo", "checkpoints/runs/listops/linear/demo")
    return {title: rows for title, _, rows in made.tables}


def test_what_cannot_be_tested_has_its_reason_and_the_mend(here):
    one, other = run("flash", 0, wrong=range(3)), run("linear", 0)
    _, lines = tables(str(one), str(other))
    mend = f"lra test init={other} predictions=true makes it"
    assert f"no paired test of {other}: it has no predictions.npz; {mend}" in lines
    run("linear", 0, wrong=range(3), data={"source": "generated", "store": "listops@1-other"})
    _, lines = tables(str(one), str(other))
    assert "no paired test on test: A and B have other examples there, of other data" in lines
    run("linear", 0, wrong=range(3), task="listops@0")
    _, lines = tables(str(one), str(other))
    assert "nothing is tested: A is of listops@1, and B of listops@0" in lines
    for seed in (0, 1):
        run("linear", seed + 5, wrong=range(3))
    _, lines = tables(str(one), "checkpoints/runs/listops/linear/demo-s5")
    assert not any("no seed is finished in both" in line for line in lines), "one run of each is a pair"
    run("flash", 1, wrong=range(3))
    (here / "checkpoints/runs/listops/linear/demo-s0/result.json").unlink()
    _, lines = tables("checkpoints/runs/listops/flash/demo", "checkpoints/runs/listops/linear/demo")
    assert "no paired test: no seed is finished in both" in lines


def test_accuracies_of_labels_and_of_a_pretraining_are_not_tested(here):
    sides = []
    for attn, changes in (("flash", {"pretrain": "masked"}), ("linear", {})):
        for seed in (0, 1):
            folder = run(attn, seed, wrong=range(3))
            made = result(cell(attn, seed), 0.36 + 0.01 * seed)
            put(folder / "result.json", made | {"seed": seed, "config": made["config"] | changes})
        sides.append(str(folder.with_name("demo")))
    found, lines = tables(*sides)
    assert lines[2:] == ["nothing is tested: A is of pretrain=masked, and B of labels"]
    assert not any("test" in title for title in found)
    for seed in (0, 1):
        put(Path(f"checkpoints/runs/listops/other/demo-s{seed}/result.json"), result(cell("flash", seed)) | {
            "seed": seed, "config": {**result(cell("linear", seed))["config"], "pretrain": "masked"}
        })  # fmt: skip
    found, lines = tables(sides[0], "checkpoints/runs/listops/other/demo")
    assert "no paired test: pretrain=masked predicts no class of an example" in lines
    assert "accuracy over seeds, and a permutation test of the means" in found


def test_bad_input_is_one_line(here):
    one = run("flash", 0)
    refused(lra("compare", str(one), "nowhere/demo"), "nowhere/demo is no run: name its directory, or its directory wi")
    refused(lra("compare", str(one), str(one)), "once more: name another run")
    refused(lra("compare", str(one), str(run("linear", 0)), "out=a.png"), "out=a.png: name a file .* .svg or .pdf")
    (run("linear", 1) / "predictions.npz").write_bytes(b"PK")
    run("flash", 1, wrong=range(3))
    refused(lra("compare", str(one.with_name("demo-s1")), "checkpoints/runs/listops/linear/demo-s1"), "as predictions")
    (one / "result.json").write_text("{")
    refused(lra("compare", str(one), "checkpoints/runs/listops/linear/demo-s1"), "is not a whole result")


def test_the_command_prints_the_tables(here):
    done = lra("compare", str(run("flash", 0, wrong=range(3))), str(run("linear", 0, wrong=range(4))))
    assert done.code == 0 and re.search(r"McNemar's p", done.out) and ["attn.name", "flash", "linear"] in done.rows
