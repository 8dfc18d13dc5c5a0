"""Curves of runs as one figure."""

from __future__ import annotations

import re
from pathlib import Path

from tests.command_line import lra, refused
from tests.drawings import lines, words
from tests.experiments.results.test_compare import run


def test_seeds_of_a_setting_share_a_colour_and_settings_are_named_by_what_differs(here):
    for attn in ("flash", "linear"):
        for seed in (0, 1):
            run(attn, seed)
    done = lra("plot", "checkpoints/runs/listops/flash/demo", "checkpoints/runs/listops/linear/demo", "out=a.svg")
    assert done.code == 0 and done.out == "curves of 4 runs: a.svg\n"
    drawn = Path("a.svg").read_text()
    assert {"validation accuracy, %", "training loss", "flash", "linear"} <= set(words(drawn))
    assert words(drawn).count("flash") == 1
    found = {name: re.findall(r"stroke: (#\w+)", line.style)[0] for name, line in lines(drawn).items()}
    assert found.keys() == {"flash-0", "flash-1", "linear-0", "linear-1"}
    assert found["flash-0"] == found["flash-1"] != found["linear-0"] == found["linear-1"]
    assert lra("plot", "checkpoints/runs/listops/flash/demo-s1", "out=b.pdf").out == "curves of 1 run: b.pdf\n"
    assert Path("b.pdf").read_bytes().startswith(b"%PDF")


def test_a_run_is_drawn_once_and_one_that_still_trains_is_drawn_too(here):
    path = run("flash", 0)
    (path / "result.json").rename(path / "config.yaml")
    assert lra("plot", str(path), str(path), "out=a.svg").out == "curves of 1 run: a.svg\n"


def test_bad_input_is_one_line_and_nothing_is_written(here):
    path = run("flash", 0)
    refused(lra("plot", str(path)), "out=: name a file for the curves that ends in .svg or .pdf")
    refused(lra("plot", "out=a.svg"), "lra plot needs runs")
    refused(lra("plot", "there", "out=a.svg"), "there is no run: name its directory")
    refused(lra("plot", str(path), "out=no/where/a.svg"), "there is no folder no/where, make it or name another file")
    Path("b.svg").mkdir()
    refused(lra("plot", str(path), "out=b.svg"), r"out=b.svg can't be written \(Is a directory\): name another file")
    (path / "metrics.csv").write_text("step,train/loss\n")
    refused(lra("plot", str(path), "out=a.svg"), "no run has a validation accuracy in its metrics.csv")
    (path / "metrics.csv").unlink()
    refused(lra("plot", str(path), "out=a.svg"), "metrics.csv is missing: the run has no curves")
    assert not Path("a.svg").exists()
