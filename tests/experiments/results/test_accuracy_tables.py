"""What a report makes of several seeds: intervals, and what is bold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lra.experiments.grid import grid
from lra.experiments.results import report, significance
from lra.terminal import Bold
from tests.command_line import lra
from tests.experiments.results.test_ledger import put, result
from tests.experiments.results.test_report import ALL, cells, table


def put_scores(folder: Path, scores: Mapping[str, Sequence[float]]) -> None:
    """Results on ListOps: the accuracies of the seeds of each attention."""
    for attn, seeds in scores.items():
        for cell, accuracy in zip(cells(["listops"], [attn], len(seeds)), seeds, strict=True):
            one = result(cell, accuracy)
            one["test"]["plus_minus"] = 0.0172
            put(folder / f"{attn}-{cell.seed}.json", one)


def test_an_interval_over_seeds_needs_three(tmp_path):
    put_scores(tmp_path, {"flash": (0.35, 0.36, 0.38), "standard": (0.37, 0.38)})
    made = report.make_report("table3", [f"results={tmp_path}", "attns=standard,flash"])
    (title,) = (title for title, _, _ in made.tables if title.startswith("95%"))
    assert title == f"95% interval of the mean test accuracy over seeds, % ({significance.INTERVAL_METHOD})"
    assert table(made, "95%") == {"flash": {"listops": "35.0 to 38.0", **dict.fromkeys([*ALL[1:], "average"], "")}}


def bold(made: report.Report, title: str, column: str = "listops") -> set[str]:
    """The attentions whose figure is bold."""
    return {attn for attn, row in table(made, title).items() if isinstance(row[column], Bold)}


def test_the_best_is_bold_and_what_its_seeds_cannot_tell_from_it(tmp_path):
    scores = {
        "standard": (0.36, 0.37, 0.38), "flash": (0.33, 0.34, 0.375), "linear": (0.30, 0.31, 0.32),
        "smyrf": (0.353,), "performer": (0.352,),
    }  # fmt: skip
    put_scores(tmp_path, scores)
    asked = [f"results={tmp_path}", "tasks=listops", "seeds=3"]
    made = report.make_report("table3", [*asked, f"attns={','.join(scores)}"])
    assert bold(made, "test accuracy") == {"standard", "flash", "smyrf"}
    assert any(note.startswith("bold: a column's best mean, and each mean whose 95%") for note in made.notes)
    alone = report.make_report("table3", [*asked, "attns=flash"])
    assert not bold(alone, "test accuracy") and not any(note.startswith("bold") for note in alone.notes)


def test_no_empty_table_or_row_of_hardware_is_drawn(tmp_path):
    for cell in cells(["listops"], ["flash", "megatron"]):
        one = result(cell, steps_per_second=None, peak_gpu_bytes=None if cell.attn == "flash" else 10**9)
        put(tmp_path / f"{cell.attn}.json", one)
    made = report.make_report("table3", [f"results={tmp_path}", "tasks=listops", "attns=flash,megatron", "seeds=1"])
    assert list(table(made, "peak memory")) == ["megatron"]
    assert not any(title.startswith(("95%", "steps per second")) for title, _, _ in made.tables)
    assert all(any(any(row[1:]) for row in rows) for _, _, rows in made.tables)


def test_published_models_stand_below_with_league_and_source(tmp_path):
    scores = {"listops": 0.6, "text-lra": 0.9, "image": 0.84}
    for cell in grid.read_grid("sota").cells(list(scores), ["flash"], 1):
        put(tmp_path / f"{cell.column}.json", result(cell, scores[cell.column]))
    few = "tasks=listops,text,text-lra,image,image-open"  # so that columns are columns
    made = report.make_report("sota", [f"results={tmp_path}", few, "attns=flash,linear"])
    shown = table(made, "test accuracy")
    assert shown["flash"]["mean-lra"] == "78.0" and shown["flash"]["mean"] == shown["linear"]["mean-lra"] == ""
    mega = {"listops": "63.14", "text": "", "text-lra": "90.43", "image": "90.44", "mean": "", "mean-lra": "81.34"}
    assert shown["MEGA"] | mega == shown["MEGA"] and shown["MEGA"]["published"].startswith("strict: Ma et al. 2022")
    assert [shown["league"][name] for name in ("image", "image-open")] == ["strict", "open"]
    assert lra("report", "sota", "attns=flash", f"results={tmp_path / 'none'}").code == 2
    (tmp_path / "none").mkdir()  # published models are shown where nothing ran
    empty = report.make_report("sota", [f"results={tmp_path / 'none'}", few, "attns=flash"])
    assert not any(table(empty, "test accuracy")["flash"].values()) and len(empty.tables) == 1


def test_time_to_accuracy_counts_the_stages(tmp_path):
    seeds = grid.read_grid("sota").cells(["text"], ["flash"], 3)
    for cell, shared, seconds in zip(seeds, (1, 1, 4), (60, 90, 50), strict=True):
        (stage,) = cell.stages
        before = {"ended": f"stage {cell.seed}", "ancestors": [], "commit": "5577a9a5dedc"}
        put(tmp_path / f"{cell.seed}-stage.json", result(stage, wall_seconds=60.0, provenance=before))
        chain = before | {"ended": f"run {cell.seed}", "ancestors": [before]}
        own = result(cell, wall_seconds=float(seconds), provenance=chain, runs_per_device=shared)
        put(tmp_path / f"{cell.seed}.json", own)
    asked = [f"results={tmp_path}", "attns=flash", "tasks=text"]
    title = "GPU-minutes to these accuracies on NVIDIA H200"
    assert table(report.make_report("sota", asked), title) == {"flash": {"text": "2.5"}}
    for seed in (0, 1):
        (tmp_path / f"{seed}-stage.json").unlink()  # what is not known of a stage is not known of the chain
    assert table(report.make_report("sota", asked), title) == {"flash": {"text": "≤ 1.8"}}
