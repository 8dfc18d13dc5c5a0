"""`lra report`: the table of results beside the paper's, the same numbers in every format."""

from __future__ import annotations

import base64
import csv
import dataclasses
import re
import shutil
import statistics
import subprocess
from html import unescape
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from lra import printing
from lra.cli import app
from lra.errors import UsageError
from lra.experiments.grid import grid
from lra.experiments.grid.grid import Cell
from lra.experiments.results import html, report
from lra.terminal import Bold
from tests.drawings import lines, words
from tests.experiments.results.test_ledger import RESULTS, dated, put, result

TABLE = grid.read_grid("table3")
ALL = [name for name, column in TABLE.columns.items() if not column.apart]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CURVES = "step,train/loss,lr,val/loss,val/accuracy\n50,2.0,1e-4,,\n250,,,2.1,0.2\n500,,,2.0,0.35\n"


def cells(tasks: Any, attns: Any, seeds: int = 1, recipe: str | None = None) -> list[Cell]:
    return TABLE.cells(tasks, attns, seeds, recipe)


def table(made: report.Report, title: str) -> dict[str, dict[str, str]]:
    """attention -> column -> cell, of the table whose title begins so."""
    [(_, header, rows)] = [table for table in made.tables if table[0].startswith(title)]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def broken(made: dict[str, Any], status: str) -> dict[str, Any]:
    kept = {key: value for key, value in made.items() if key not in ("test", "fresh", "val")}
    return kept | {"status": status}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results of two attentions on ListOps: three seeds, one seed and what went wrong."""
    folder = tmp_path_factory.mktemp("results")
    flash = cells(["listops"], ["flash"], 5)
    for cell, accuracy in zip(flash[:3], (0.35, 0.36, 0.38), strict=True):
        put(folder / f"flash-{cell.seed}" / "result.json", result(cell, accuracy, steps_per_second=300.0))
        (folder / f"flash-{cell.seed}" / "metrics.csv").write_text(CURVES)
    put(folder / "flash-3" / "result.json", broken(result(flash[3]), "oom"))
    put(folder / "flash-4" / "result.json", broken(result(flash[4]), "failed"))
    [standard] = cells(["listops"], ["standard"])
    put(folder / "standard.json", result(standard, 0.37, steps_per_second=100.0, peak_gpu_bytes=5_000_000_000))
    return folder


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "out"
    return report.make_report("table3", [f"results={folder}", "attns=standard,flash", f"out={out}"]), out


def test_accuracy_is_mean_and_deviation_of_the_seeds_found(made):
    shown = table(made[0], "test accuracy")
    deviation = statistics.stdev([35, 36, 38])
    assert shown["flash"]["listops"] == f"36.3 ± {deviation:.1f}" and shown["standard"]["listops"] == "37.0"
    seeds = table(made[0], "seeds: how many finished")
    assert seeds["flash"]["listops"] == "3, 1 failed, 1 OOM" and seeds["standard"]["listops"] == "1"
    assert set(shown["flash"]) == {*ALL, "average"} and not any(shown["flash"][name] for name in [*ALL[1:], "average"])
    assert shown["strongest baseline"]["listops"] == "35.6 root operator"


def test_the_papers_figure_stands_beside(made):
    shown = table(made[0], "difference to FlashAttention")
    assert shown["flash"]["listops"] == "-1.3 (37.6)" and shown["standard"]["listops"] == "+1.0 (36.0)"
    assert shown["flash"]["text"] == "(63.9)" and shown["flash"]["average"] == "(59.8)"


def test_the_fresh_test_set_has_its_own_table(made):
    shown = table(made[0], "accuracy on the fresh test set")
    assert list(shown["flash"]) == ["listops"] and shown["flash"]["listops"] == "18.3 ± 0.0"
    assert shown["strongest baseline"]["listops"] == "36.0 root operator"


def test_speed_and_memory(made):
    shown = table(made[0], "steps per second on NVIDIA H200")
    assert shown["flash"]["listops"] == "300.0 (3.00×)" and shown["flash"]["speedup"] == "3.00 (1)"
    assert shown["flash"]["paper"] == "2.4" and shown["standard"]["paper"] == ""
    assert table(made[0], "peak memory")["standard"]["listops"] == "5.00"


def test_of_a_run_beside_others_no_speed_is_known(tmp_path):
    for cell, speed, shared in zip(cells(["listops"], ["flash"], 2), (300.0, 100.0), (1, 2), strict=True):
        put(tmp_path / f"{cell.seed}.json", result(cell, steps_per_second=speed, runs_per_device=shared))
    out = tmp_path / "out"
    made = report.make_report(
        "table3", [f"results={tmp_path}", "tasks=listops", "attns=flash", "seeds=2", f"out={out}"]
    )
    assert table(made, "steps per second")["flash"]["listops"] == "300.0"
    first, second = csv.DictReader((out / "table3.csv").read_text().splitlines())
    assert (first["steps_per_second"], first["train_seconds"][:4]) == ("300.0", "19.7")
    assert (second["steps_per_second"], second["train_seconds"], second["status"]) == ("", "", "finished")


def test_several_gpus_are_other_hardware(tmp_path):
    for cell, speed, count in zip(cells(["listops"], ["flash"], 2), (100.0, 300.0), (None, 4), strict=True):
        put(tmp_path / f"{cell.seed}.json", result(cell, steps_per_second=speed, world_size=count))
    made = report.make_report("table3", [f"results={tmp_path}", "tasks=listops", "attns=flash", "seeds=2"])
    assert [row.hardware for row in made.rows] == ["NVIDIA H200", "4 × NVIDIA H200"]
    assert table(made, "steps per second on NVIDIA H200")["flash"]["listops"] == "100.0"
    assert table(made, "steps per second on 4 × NVIDIA H200")["flash"]["listops"] == "300.0"


def test_columns_that_are_apart_enter_no_speedup(tmp_path):
    for number, cell in enumerate(cells(["listops", "pathfinder-lit"], ["standard", "flash"])):
        speed = {"standard": 10.0, "flash": 20.0 if cell.column == "listops" else 80.0}[cell.attn]
        put(tmp_path / f"{number}.json", result(cell, steps_per_second=speed))
    made = report.make_report("table3", [f"results={tmp_path}", "tasks=listops,pathfinder-lit", "attns=standard,flash"])
    shown = table(made, "steps per second")["flash"]
    assert shown["pathfinder-lit"] == "80.0 (8.00×)" and shown["speedup"] == "2.00 (1)"


def test_the_peak_of_memory_is_that_of_the_seed_that_had_most(tmp_path):
    for cell, peak in zip(cells(["listops"], ["flash"], 3), (2, 5, 3), strict=True):
        put(tmp_path / f"{cell.seed}.json", result(cell, peak_gpu_bytes=peak * 10**9))
    made = report.make_report("table3", [f"results={tmp_path}", "tasks=listops", "attns=flash"])
    assert table(made, "peak memory")["flash"]["listops"] == "5.00"


def test_the_papers_average_needs_its_figure_of_each_column(tmp_path, monkeypatch):
    poor = dataclasses.replace(TABLE, paper={"flash": {"listops": 37.6, "average": 59.8}})
    monkeypatch.setattr(grid, "read_grid", lambda name: poor)
    made = report.make_report("table3", [f"results={tmp_path}", "tasks=listops,text", "attns=flash"])
    assert table(made, "difference")["flash"] == {"listops": "(37.6)", "text": "", "average": ""}


def test_an_average_needs_all_columns_and_speedup_those_that_both_have(tmp_path):
    for place, cell in enumerate(cells(ALL, ["standard", "flash"])):
        speed = {"standard": 10.0, "flash": 20.0 if cell.column == "image" else 40.0}[cell.attn]
        gpu = "NVIDIA A100" if (cell.attn, cell.column) == ("flash", "text") else "NVIDIA H200"
        one = result(cell, 0.30 + place // 2 / 100, steps_per_second=speed)
        put(tmp_path / f"{place}.json", one | {"environment": one["environment"] | {"gpu": gpu}})
    made = report.make_report("table3", [f"results={tmp_path}", "attns=standard,flash"])
    assert table(made, "test accuracy")["flash"]["average"] == "32.0"
    assert table(made, "difference")["flash"]["average"] == "-27.8 (59.8)"
    assert table(made, "steps per second on NVIDIA H200")["flash"]["speedup"] == f"{(40**3 * 20) ** 0.25 / 10:.2f} (4)"
    one = report.make_report("table3", [f"results={tmp_path}", "attns=standard,flash", "tasks=listops"])
    assert table(one, "steps per second on NVIDIA H200")["flash"]["speedup"] == "4.00 (1)"
    some = report.make_report(
        "table3", [f"results={tmp_path}", "attns=standard,flash", "tasks=listops,text,image,pathfinder"]
    )
    assert table(some, "test accuracy")["flash"]["average"] == "32.0"
    assert table(some, "difference")["flash"]["average"] == "-22.4 (54.4)", "the paper's over the same columns"
    elsewhere = table(made, "steps per second on NVIDIA A100")["flash"]
    assert elsewhere["text"] == "40.0" and elsewhere["speedup"] == ""
    (tmp_path / "1.json").unlink()
    made = report.make_report("table3", [f"results={tmp_path}", "attns=standard,flash"])
    averages = {attn: row["average"] for attn, row in table(made, "test accuracy").items()}
    assert averages == {"standard": "32.0", "flash": "", "strongest baseline": "", "league": "strict"}


def test_an_attention_that_is_not_the_papers_has_a_row_without_its_figures(tmp_path):
    for cell in cells(["listops"], ["flash", "megatron"]):
        put(tmp_path / f"{cell.attn}.json", result(cell, 0.4))
    made = report.make_report("table3", [f"results={tmp_path}", "attns=flash,megatron", "tasks=listops", "seeds=1"])
    assert table(made, "test accuracy")["megatron"] == {"listops": "40.0"}
    difference = table(made, "difference")
    assert difference["flash"] == {"listops": "+2.4 (37.6)"} and difference["megatron"] == {"listops": ""}
    made = report.make_report("table3", [f"results={tmp_path}", "attns=megatron", "tasks=listops", "seeds=1"])
    assert not any(title.startswith("difference") for title, _, _ in made.tables), "there is nothing to compare with"


def test_an_average_is_over_the_seeds_that_all_columns_have(tmp_path):
    for cell in cells(["listops", "text"], ["flash"], 3):
        if (cell.column, cell.seed) != ("text", 2):
            put(tmp_path / f"{cell.column}-{cell.seed}.json", result(cell, 0.3 + cell.seed / 10))
    made = report.make_report("table3", [f"results={tmp_path}", "attns=flash", "tasks=listops,text", "seeds=3"])
    assert table(made, "test accuracy")["flash"] == {
        "listops": "40.0 ± 10.0", "text": "35.0 ± 7.1", "average": "35.0"
    }  # fmt: skip
    (tmp_path / "text-0.json").unlink()
    (tmp_path / "listops-1.json").unlink()
    made = report.make_report("table3", [f"results={tmp_path}", "attns=flash", "tasks=listops,text", "seeds=3"])
    assert table(made, "test accuracy")["flash"]["average"] == ""


@pytest.mark.parametrize("task", ["pathfinder", "retrieval"])
@pytest.mark.parametrize(("accuracy", "status"), [(0.505, "stuck"), (0.495, "stuck"), (0.52, "finished")])
def test_what_ends_at_chance_is_stuck_and_counts(tmp_path, task, accuracy, status):
    [cell] = cells([task], ["flash"])
    test = {"accuracy": accuracy, "plus_minus": 0.0069, "loss": 0.7, "n": 20000}
    put(tmp_path / "a.json", result(cell) | {"test": test | {"baselines": {"majority": 0.5, "marker distance": 0.54}}})
    made = report.make_report("table3", [f"results={tmp_path}", f"tasks={task}", "attns=flash", "seeds=1"])
    assert [row.status for row in made.rows] == [status]
    shown = table(made, "test accuracy")
    assert shown["flash"][task] == f"{100 * accuracy:.1f}"
    assert table(made, "seeds")["flash"][task] == ("1, 1 stuck" if status == "stuck" else "1")
    assert shown["strongest baseline"][task] == "54.0 marker distance"


def test_no_results_leave_all_empty(tmp_path):
    made = report.make_report("table3", [f"results={tmp_path}", f"out={tmp_path / 'out'}"])
    assert len(made.rows) == 9 * 5 * 5 and not any(row.status for row in made.rows)
    assert made.notes[:2] == ["recipe: xiong2021", "0 of 225 runs finished"]
    assert [title.partition(" ")[0] for title, _, _ in made.tables] == ["difference"], "the paper's figures"
    assert "listops: no results" in (tmp_path / "out" / "table3.html").read_text()


def test_committed_results_under_another_recipe():
    made = report.make_report(
        "table3", [f"results={RESULTS}", "recipe=rotary", "seeds=3", "attns=standard,flash,butterfly"]
    )
    assert re.fullmatch(r"\d+\.\d ± \d\.\d†", table(made, "test accuracy")["flash"]["image"])
    assert "recipe rotary has no text, retrieval: left empty" in made.notes
    assert any(note.startswith("image: speeds of different engines are compared") for note in made.notes)


def test_the_csv_has_a_row_for_each_cell_and_seed(made, folder):
    rows = list(csv.DictReader((made[1] / "table3.csv").read_text().splitlines()))
    assert len(rows) == 2 * 5 * 5
    row = next(row for row in rows if (row["column"], row["attention"], row["seed"]) == ("listops", "flash", "1"))
    expected = {
        "column": "listops", "attention": "flash", "seed": 1, "league": "strict", "status": "finished",
        "accuracy": 36, "bound": 1.7,
        "sequences": 2000, "paper": 37.6, "difference": -1.6, "baseline": "root operator", "baseline_accuracy": 35.65,
        "majority": 16.6, "fresh": 18.336, "fresh_bound": 0.34, "fresh_baseline": "root operator",
        "fresh_baseline_accuracy": 36.04, "validation": 17.7, "steps": 5000, "train_seconds": 19.7,
        "steps_per_second": 300, "chain_minutes": 61 / 60, "chain_alone": "True", "memory_gb": 0.444581,
        "hardware": "NVIDIA H200", "engine": "captured", "micro": "",
        "commit": "5577a9a5dedc", "clean": "True", "chain": "", "date": "2026-11-21T11:36:40Z",
        "result": str(folder / "flash-1" / "result.json"),
        "command": "lra fit task=listops attn=flash recipe=xiong2021 seed=1",
    }  # fmt: skip
    found = {name: value if isinstance(expected[name], str) else float(value) for name, value in row.items()}
    assert found == {
        name: value if isinstance(value, str) else pytest.approx(value, rel=1e-5) for name, value in expected.items()
    }
    empty = next(row for row in rows if row["column"] == "text")
    assert not any(empty[name] for name in ("status", "accuracy", "steps_per_second", "memory_gb", "baseline"))


def test_every_format_shows_the_same_cells(made):
    shown, out = made
    texts = {ending: (out / f"table3.{ending}").read_text() for ending in ("md", "tex", "html")}
    assert sorted(path.name for path in out.iterdir()) == [f"table3.{end}" for end in ("csv", "html", "md", "tex")]
    page = unescape(texts["html"])
    for title, header, rows in shown.tables:
        assert f"**{title}**" in texts["md"] and f"% {title}" in texts["tex"] and title in page
        for row in [header, *rows]:
            bold = [isinstance(cell, Bold) for cell in row]
            starred, braced = (
                [f"{begin}{cell}{end}" if it else cell for cell, it in zip(row, bold, strict=True)]
                for begin, end in (("**", "**"), (r"\textbf{", "}"))
            )
            assert f"| {' | '.join(starred)} |" in texts["md"]
            escaped = " & ".join(braced).replace("±", r"$\pm$").replace("×", r"$\times$").replace("%", r"\%")
            assert escaped + r" \\" in texts["tex"]
            assert all(f"<b>{cell}</b>" in page if it else cell in page for cell, it in zip(row, bold, strict=True))
    assert texts["tex"].count(r"\toprule") == texts["tex"].count(r"\bottomrule") == len(shown.tables)
    assert r"\hline" not in texts["tex"]


def pictures(page: str) -> list[str]:
    """The SVG of each image, whose data is in the page."""
    images = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="[^"]*">', page)
    assert len(images) == page.count("<img")
    return [base64.b64decode(image).decode() for image in images]


def test_the_page_needs_nothing_else(made):
    page = (made[1] / "table3.html").read_text()
    assert not re.search(r"<script|<link|@import|url\(|https?:", page) and page.count("src=") == page.count("<img")
    assert "no curves beside" in page and "lra fit task=listops attn=flash recipe=xiong2021 seed=4  # failed" in page


def test_plots_are_curves_by_seed_and_accuracy_by_speed_and_memory(made):
    drawn = [picture for picture in pictures((made[1] / "table3.html").read_text()) if "listops" in words(picture)]
    curves, speed, memory = ({name: line.points for name, line in lines(each).items()} for each in drawn)
    assert set(curves) == {"flash-0", "flash-1", "flash-2"} and {len(points) for points in curves.values()} == {2}
    assert set(speed) == set(memory) == {"flash-0", "standard-0"}
    assert speed["standard-0"][0][0] < speed["flash-0"][0][0] and memory["flash-0"][0][0] < memory["standard-0"][0][0]
    assert all(line.dots == 1 for picture in drawn for line in lines(picture).values())
    assert "steps per second" in words(drawn[1]) and {"100", "200"} <= set(words(drawn[1]))


def test_a_speed_that_was_measured_alone_is_drawn_in_place_of_the_runs(made):
    report, slow = made[0], {("NVIDIA H200", "listops", "flash"): 1.0}
    page = html.report_page(TABLE, *report._replace(alone=slow))
    speed = next(lines(picture) for picture in pictures(page) if "steps per second" in words(picture))
    assert speed["flash-0"].points[0][0] < speed["standard-0"].points[0][0]


def test_what_no_clean_commit_made_is_marked_in_every_table_and_format(tmp_path):
    chosen = cells(["listops"], ["standard", "flash"], 2)
    for cell in chosen:
        put(tmp_path / f"{cell.attn}-{cell.seed}.json", result(cell, steps_per_second=10.0))
    one = result(chosen[3])
    record = {"run": "there", "ended": "f" * 64, "commit": "a" * 12, "ancestors": [{"run": "before", "commit": None}]}
    put(tmp_path / "flash-1.json", one | {"provenance": record})
    out = tmp_path / "out"
    made = report.make_report(
        "table3", [f"results={tmp_path}", "tasks=listops", "attns=standard,flash", "seeds=2", f"out={out}"]
    )
    for title, _, rows in (each for each in made.tables if not each[0].startswith("seeds")):
        assert title.endswith("(† made by changed code, or no commit is stated)"), title
        assert [row[0] for row in rows if any("†" in text for text in row)] == ["flash"], rows
    texts = {ending: (out / f"table3.{ending}").read_text() for ending in ("md", "tex", "html")}
    assert "†" in texts["md"] and "†" in texts["html"] and r"\dag{}" in texts["tex"]
    (row,) = [row for row in csv.DictReader((out / "table3.csv").read_text().splitlines()) if row["clean"] == "False"]
    assert (row["attention"], row["seed"]) == ("flash", "1")
    assert row["chain"] == f"before unknown (commit unknown) > there {'f' * 12} (commit {'a' * 12})"


def test_runs_with_fields_of_their_own_are_reported_under_them(tmp_path):
    [shorter] = TABLE.cells(["listops"], ["flash"], 1, None, ["trainer.steps=2500"])
    put(tmp_path / "a.json", dated(result(shorter, 0.31), 1))
    asked = [f"results={tmp_path}", "tasks=listops", "attns=flash", "seeds=1"]
    assert not any(title.startswith("test accuracy") for title, _, _ in report.make_report("table3", asked).tables)
    made = report.make_report("table3", [*asked, "trainer.steps=2500"])
    assert table(made, "test accuracy")["flash"]["listops"] == "31.0"
    assert made.notes[0] == "recipe: xiong2021 trainer.steps=2500"


def test_a_resumed_runs_memory_is_not_known(tmp_path):
    [cell] = cells(["listops"], ["flash"])
    put(tmp_path / "a.json", dated(result(cell, resumed=True), 1))
    made = report.make_report("table3", [f"results={tmp_path}", "tasks=listops", "attns=flash", "seeds=1"])
    assert made.rows[0].memory_gb is None and not any(title.startswith("peak") for title, _, _ in made.tables)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["results=none"], "results=none is not a folder"),
        (["tasks=listopz"], "unknown task 'listopz': did you mean 'listops'"),
        (["attns=flahs"], "unknown attention 'flahs': did you mean 'flash'"),
        (["tasks=listops,listops"], "names one twice"),
        (["seeds=0"], "use at least 1"),
        (["seeds=1000000"], "seeds=1000000: it is how many there are, at most 1000"),
        (["recipe=rotari"], "unknown recipe"),
        (["recipe=rotary", "tasks=text"], "recipe 'rotary' has no text: it covers image"),
        (["colour=red"], "unknown field"),
        (["seed=3"], "seed=3 can't be one for every cell: give seeds="),
    ],
)
def test_bad_input_is_one_line(args, message):
    with pytest.raises(UsageError, match=message):
        report.make_report("table3", args)


def test_an_unknown_table_and_a_file_as_folder(tmp_path, folder):
    with pytest.raises(UsageError, match="unknown table 'table4'"):
        report.make_report("table4", [])
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file can't be written to"):
        report.make_report("table3", [f"results={folder}", "tasks=listops", "attns=flash", f"out={tmp_path / 'file'}"])


def test_the_command(folder, monkeypatch):
    monkeypatch.setattr(printing.console, "width", 1000)  # whatever the terminal of the tests is
    listed = CliRunner().invoke(app, ["report"])
    assert listed.exit_code == 0 and "table3" in listed.output
    done = CliRunner().invoke(app, ["report", "table3", f"results={folder}", "tasks=listops", "attns=flash"])
    assert done.exit_code == 0, done.output
    assert "36.3 ± 1.5" in done.output and "3, 1 failed, 1 OOM" in done.output and "-1.3 (37.6)" in done.output


@pytest.mark.slow
def test_a_browser_shows_the_page(made, tmp_path):
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} on PATH")
    page, picture = (made[1] / "table3.html").resolve(), tmp_path / "page.png"
    call = [browser, "--headless", "--disable-gpu", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}"]
    counting = "<script>onload = () => document.title = [...document.images].map(image => image.naturalWidth)</script>"
    (tmp_path / "counted.html").write_text(page.read_text() + counting)
    dumped = subprocess.run(
        [*call, "--dump-dom", (tmp_path / "counted.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    assert dumped.returncode == 0, dumped.stderr
    assert "36.3 ± 1.5" in unescape(dumped.stdout)
    widths = re.findall(r"<title>(.*)</title>", dumped.stdout)[0].split(",")
    assert len(widths) == page.read_text().count("<img") and all(int(width) > 50 for width in widths)
    shot = [*call, f"--screenshot={picture}", "--window-size=1280,2000", page.as_uri()]
    assert subprocess.run(shot, capture_output=True, timeout=120).returncode == 0
    with Image.open(picture) as image:
        assert image.width == 1280 and len(image.convert("RGB").getcolors(1 << 24) or []) > 20
