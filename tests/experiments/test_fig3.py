"""`lra reproduce fig3` on the CPU: four settings, resumed, merged and judged. Times are not looked at."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lra import environment
from lra.bench import plots, timing
from lra.bench.records import AttentionMeasurement, read_measurements
from lra.cli import app
from lra.errors import UsageError
from lra.experiments import fig3, find_experiment, list_experiments
from lra.experiments.fig3 import SETTINGS, compare_with_claim, fastest_table, find_races, paper_tables
from tests.drawings import lines, words

TINY = ["lengths=32,64", "batch=2", "heads=2", "head_dim=16", "attns=flash,standard,linformer"]


@pytest.fixture(scope="module", autouse=True)
def committed():
    """Whatever the tree of these tests is, what they measure is of a clean commit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "current_commit", lambda: "0123456789ab")
        yield


@pytest.fixture(autouse=True)
def no_figures(quick, monkeypatch):
    monkeypatch.setattr(plots, "make_figures", lambda records: {})  # a second each time: the whole run has drawn them


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run: its folder, report and the lines of its progress."""
    folder, lines = tmp_path_factory.mktemp("fig3"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(timing, "BUDGET_MS", 1.0)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        report = fig3.reproduce([*TINY, f"out={folder}"], lines.append)
        torch.set_num_threads(threads)
    return folder, report, lines


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of the whole run's."""
    return shutil.copytree(finished[0], tmp_path / "copy")


def again(folder, *more: str) -> list[str]:
    """What the same command measures."""
    lines: list[str] = []
    fig3.reproduce([*TINY, f"out={folder}", *more], lines.append)
    return [line.partition(" bf16")[0] for line in lines]


def read(path) -> Any:
    return json.loads(path.read_text())


def test_every_setting_is_measured_once_and_merged(finished):
    folder, report, lines = finished
    assert len(lines) == 4 * 2 * 3 and not report.wrong
    merged = read(folder / "fig3.json")
    assert len(merged["cells"]) == 3 * len(lines) and merged["environment"]["versions"]["torch"]
    assert merged["cells"] == [record for name in SETTINGS for record in read(folder / f"{name}.json")["cells"]]
    assert merged["options"]["lengths"] == [32, 64] and "settings" not in merged["options"]
    settings = {(r["dropout"], r["ragged"]) for r in merged["cells"]}
    assert settings == {(0.1, "mask"), (0.0, "mask"), (0.1, "false"), (0.0, "false")}
    assert {r["status"] for r in merged["cells"]} == {"ok"}
    titles = [title for title, _, _ in report.tables]
    passes = ("forward", "backward", "both")
    assert titles[:-1] == [f"Table {9 + i}, {passes[i % 3]}: ms" for i in range(12)]  # no memory on a CPU
    assert "written" in report.lines[-1]


def test_a_figure_has_a_line_for_each_attention(finished):
    files = sorted(finished[0].glob("*.svg"))
    assert len(files) == 12 and files[0].name == "runtime-backward-bf16-d16-p0-mask.svg"
    for file in files:
        drawn = lines(file.read_text())
        assert {name: len(line.points) for name, line in drawn.items()} == {"flash": 2, "standard": 2, "linformer": 2}


def test_many_lines_look_different_and_have_their_names():
    names = [f"attention {i}" for i in range(30)]
    points = {name: [(128.0, i + 1.0), (256.0, 2.0 * i + 1)] for i, name in enumerate(names)}
    drawing = plots.size_chart("many", "ms", points, {name: i for i, name in enumerate(names)})
    assert len({line.style for line in lines(drawing).values()}) == 30
    assert [word for word in words(drawing) if word in names] == names[::-1]  # from the slowest down, as the lines end


def test_the_same_command_measures_what_is_lacking(folder):
    assert again(folder) == []
    part = read(folder / "mask.json")
    part["cells"] = part["cells"][:9]  # it was stopped after the third cell
    (folder / "mask.json").write_text(json.dumps(part))
    (folder / "plain.json").unlink()
    (folder / "fig3.json").unlink()
    assert again(folder, "settings=mask") == ["mask: flash", "mask: standard", "mask: linformer"]
    assert read(folder / "mask.json")["cells"][:9] == part["cells"] and not (folder / "fig3.json").exists()
    report = fig3.reproduce([*TINY, f"out={folder}", "settings=mask"])
    assert report.lines[-1] == "not merged, as not complete: plain"
    assert len(again(folder, "settings=plain")) == 6
    assert len(read(folder / "fig3.json")["cells"]) == 72


def test_what_failed_is_measured_again(folder):
    part = read(folder / "mask.json")
    for record in part["cells"][:3]:
        record |= {"status": "failed", "ms": None}
    (folder / "mask.json").write_text(json.dumps(part))
    assert again(folder, "settings=mask") == ["mask: flash"]
    measured = read(folder / "mask.json")["cells"]
    assert len(measured) == len(part["cells"]) and {record["status"] for record in measured} == {"ok"}


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({}, ["lengths=128"], r"dropout-mask.json was measured with other options \(lengths: \[32, 64\] -> \[128\]\)"),
        ({"gpu": "another"}, [], r"mask.json was measured in another environment \(gpu: another -> "),
        ({"versions": {"torch": "1"}}, [], r"mask.json was measured in another environment \(.*versions.torch: 1 -> "),
    ],
)
def test_other_options_or_another_environment_are_refused(folder, change, more, message):
    part = read(folder / "mask.json")
    part["environment"] |= change
    (folder / "mask.json").write_text(json.dumps(part))
    args = [arg for arg in TINY if not more or not arg.startswith("lengths")]
    with pytest.raises(UsageError, match=message):
        fig3.reproduce([*args, *more, f"out={folder}"])


def test_a_new_date_and_commit_are_no_other_environment_but_are_stated(folder):
    part = read(folder / "mask.json")
    begun = {"date": "yesterday", "command": "lra", "commit": "0"}
    part["environment"] |= begun | {"gpus": 9}
    part["cells"] = part["cells"][:-3]
    (folder / "mask.json").write_text(json.dumps(part))
    assert again(folder) == ["mask: linformer"]
    found = read(folder / "mask.json")
    assert found["environment"] == part["environment"] and found["cells"][:-3] == part["cells"]
    made = [record.made or {} for record in read_measurements(folder / "mask.json", AttentionMeasurement).cells]
    assert made[:-3] == [begun] * (len(made) - 3)
    assert all(each["commit"] == environment.current_commit() and each["date"] > "2026" for each in made[-3:])
    whole = read(folder / "fig3.json")
    merged = read_measurements(folder / "fig3.json", AttentionMeasurement).cells
    masked = [record.made for record in merged if (record.ragged, record.dropout) == ("mask", 0.0)]
    assert masked == made and whole["environment"] == read(folder / "plain.json")["environment"]
    assert again(folder) == []


def test_bad_input_is_one_line(folder):
    (folder / "mask.json").write_text("{")
    with pytest.raises(UsageError, match=r"mask.json is not a measurement of lra reproduce fig3: remove it"):
        fig3.reproduce([*TINY, f"out={folder}"])
    with pytest.raises(UsageError, match="settings=: unknown setting 'masks': did you mean 'mask'"):
        fig3.reproduce(["settings=masks"])
    with pytest.raises(UsageError, match="unknown attention 'flahs'"):
        fig3.reproduce(["attns=flahs"])
    with pytest.raises(UsageError, match="mask.json can't be a folder"):
        fig3.reproduce([*TINY, f"out={folder / 'mask.json'}"])
    with pytest.raises(UsageError, match="unknown experiment 'fig33': did you mean 'fig3'"):
        find_experiment("fig33")


def record(attention: str, ms: float | None, n: int = 128, **changes: Any) -> AttentionMeasurement:
    made = AttentionMeasurement(
        attention=attention, options="", ragged="mask", pass_name="both", length=n, head_dim=64, dtype="bf16",
        dropout=0.1, batch=1, heads=1, tokens=n, squares=n * n, ms=ms, status="OOM" if ms is None else "ok",
    )  # fmt: skip
    return replace(made, **changes)


def test_the_verdict_says_who_wins_and_by_how_much():
    records = [
        record("butterfly", 2.0), record("flash", 1.0), record("linear", 4.0),
        record("butterfly", 2.0, 256), record("flash", 3.0, 256),
        record("butterfly", 2.0, 512), record("flash", 2.0, 512),
        record("butterfly", None, 1024), record("flash", 3.0, 1024),
        record("butterfly", 1.0, dropout=0.0, ragged="false"), record("standard", None, dropout=0.0, ragged="false"),
    ]  # fmt: skip
    assert compare_with_claim(records) == (
        "paper: block-sparse FlashAttention is faster than all other methods at every N; here butterfly is the fastest "
        "in 1 of 3 (setting, pass, N); flash in 2, N = 128 to 512, by a factor of 2.00 at most; not decided in 2, "
        "where butterfly or every other has no time"
    )
    assert find_races(records)["dropout-mask", "both", 256] == ("butterfly", 1.5, "flash")
    title, header, rows = fastest_table(records)
    assert title.startswith("fastest attention") and header == ["pass", "N", "dropout-mask", "plain"]
    assert [row[1:] for row in rows] == [
        ["128", "flash 2.00 (butterfly)", "butterfly"],
        ["256", "butterfly 1.50 (flash)", ""],
        ["512", "flash 1.00 (butterfly)", ""],
        ["1024", "no time of butterfly", ""],
    ]


def test_the_memory_is_table_21(finished):
    parts = [read_measurements(finished[0] / f"{name}.json", AttentionMeasurement) for name in SETTINGS]
    records = [replace(record, memory_mb=7.0) for part in parts for record in part.cells]
    title, header, rows = list(paper_tables(records))[-1]
    assert title == "Table 21, peak memory of both, MB" and header[5:] == ["flash", "standard", "linformer"]
    assert [row[2:4] + row[5:] for row in rows] == [["0.0", n, "7", "7", "7"] for n in ("32", "64")]


def test_the_command_lists_runs_and_refuses(folder):
    listed = CliRunner().invoke(app, ["reproduce"])
    assert listed.exit_code == 0 and all(name in listed.output for name in list_experiments())
    done = CliRunner().invoke(app, ["reproduce", "fig3", *TINY, f"out={folder}"])
    assert done.exit_code == 0, done.output
    assert "Table 11, both: ms" in done.output and "paper: block-sparse FlashAttention" in done.output
    assert isinstance(CliRunner().invoke(app, ["reproduce", "fig4"]).exception, UsageError)


def test_two_commands_do_not_measure_for_one_file(folder):
    for name in ("mask", "plain"):
        (folder / f"{name}.json").unlink()
    said: list[str] = []

    def meanwhile(line: str) -> None:
        said.append(line)
        for settings in ("mask", "mask,plain", "plain,mask") if len(said) == 1 else ():
            with pytest.raises(UsageError, match=r"another process measures for .*/mask\.json: wait for it$"):
                again(folder, f"settings={settings}")
        assert not (folder / "plain.json").exists()

    fig3.reproduce([*TINY, f"out={folder}", "settings=mask"], meanwhile)
    assert len(said) == 6 and len(read(folder / "mask.json")["cells"]) == 18
    assert len(again(folder)) == 6 and not list(folder.glob(".*")), "of plain, which nobody holds any more"


def test_what_another_process_has_just_completed_is_not_measured_again(folder, monkeypatch):
    whole = (folder / "mask.json").read_text()
    (folder / "mask.json").unlink()
    monkeypatch.setattr(fig3, "lock_output", lambda path: nullcontext(path.write_text(whole)))
    assert again(folder) == []


@pytest.mark.parametrize("given", ["lengths=128,128", "attns=flash,flash", "settings=mask,mask"])
def test_nothing_is_measured_twice(given, tmp_path):
    with pytest.raises(UsageError, match=f"{given} names one twice"):
        fig3.reproduce([given, f"out={tmp_path}"])
