"""Every run below a folder has a row, in whatever state its files are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lra.training.run_directory import claim_directory
from tests.command_line import Done, lra, refused

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "runs"
REAL = json.loads((RESULTS / "listops/linear/xiong2021-s0/result.json").read_text())
HEADER = ["run", "task", "attn", "changes", "state", "val", "test", "date"]


def put(run: str, result: Any = None, session: Any = None, **files: str) -> Path:
    """A run's directory, of the given result or of a session that has not ended."""
    path = Path("checkpoints/runs") / run
    path.mkdir(parents=True)
    config = REAL["config"] if result is None else result["config"]
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    if result is not None:
        (path / "result.json").write_text(json.dumps(result))
    if session is not None:
        (path / "env.json").write_text(json.dumps([session]))
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


def rows(done: Done) -> list[list[str]]:
    assert done.code == 0 and not done.err, done.err
    return done.rows


def test_a_finished_run_shows_what_it_changes_and_what_it_reached(here):
    overrides = ["seed=3", "batch.micro=4", "task.max_length=500", "optim.lr=0.001", "name=null"]
    made = REAL | {"overrides": overrides, "val": {"accuracy": 0.3712}, "environment": {"date": "2026-01-02T03:04:05Z"}}
    made |= {"test": REAL["test"] | {"accuracy": 0.36}}
    put("listops/linear/demo+task.max_length=500,optim.lr=0.001-s3", made)
    put("listops/linear/demo+task.max_length=500,optim.lr=0.00~1f2e3d4c-s3", made)
    put("listops/linear/mine+1-s3", made | {"config": REAL["config"] | {"name": "mine+1"}})
    rest = ["listops", "linear", "max_length=500 optim.lr=0.001", "finished", "37.1%", "36.0%", "2026-01-02"]
    names = ["demo+…-s3", "demo+…~1f2e3d4c-s3", "mine+1-s3"]
    assert sorted(rows(lra("ls", "runs"))) == [[name, *rest] for name in names]


def test_each_state_is_shown(here):
    ended = REAL | {"overrides": []}
    del ended["val"]
    put("listops/linear/a-s0", ended | {"status": "oom", "error": "too large"})
    put(
        "listops/linear/b-s0",
        ended | {"status": "failed", "error": "ValueError('no')\nmore", "test": {"accuracy": "?"}},
    )
    session = {"date": "2026-02-03T00:00:00Z", "overrides": ["optim.lr=1e-3"]}
    put("listops/linear/c-s0", session=session, metrics_csv="step,train/loss\n10,2.3\n20,2.1\n3")
    held = claim_directory(put("listops/linear/demo+optim.lr=1e-3-s0"))
    try:
        found = {row[0]: row[3:] for row in rows(lra("ls", "runs"))}
    finally:
        assert held is not None
        os.close(held)
    assert found["a-s0"][1] == "out of memory" and found["b-s0"][1] == "failed: ValueError('no')"
    assert found["c-s0"] == ["optim.lr=1e-3", "unfinished at step 20", "", "", "2026-02-03"]
    assert found["demo+optim.lr=1e-3-s0"] == ["", "running at step 0", "", "", ""]


BROKEN = {
    "result.json": ("{", "can't be read: result.json is not whole: "),
    "config.yaml": ("[", "can't be read: config.yaml is damaged"),
    "env.json": ("3", "can't be read: .*env.json is damaged"),
    "metrics.csv": ("a,b\n1,2\n", "can't be read: metrics.csv is damaged: it has no column step"),
}


@pytest.mark.parametrize("file", BROKEN)
def test_a_broken_run_has_a_row_with_the_reason(file, here):
    text, reason = BROKEN[file]
    (put("listops/linear/whole-s0", REAL).parent / "broken-s0").mkdir()
    path = put("listops/linear/bad-s0", session={})
    (path / file).write_text(text)
    found = {row[0]: row[1:] for row in rows(lra("ls", "runs"))}
    assert found["whole-s0"][3] == "finished" and found.keys() == {"whole-s0", "bad-s0"}
    state = found["bad-s0"]
    assert state[:2] == ["listops", "linear"] and all(part in state[3] for part in reason.split(".*"))


def test_runs_of_a_task_and_an_attention_are_chosen():
    found = rows(lra("ls", "runs", f"runs={RESULTS}", "task=listops", "attn=linear"))
    assert found and all(row[1:3] == ["listops", "linear"] for row in found)
    refused(lra("ls", "runs", f"runs={RESULTS}", "task=listop"), "unknown task 'listop': did you mean 'listops'")
    refused(lra("ls", "runs", f"runs={RESULTS}", "attn=flahs"), "unknown attn 'flahs': did you mean 'flash'")


def test_runs_are_sorted_by_score_or_date(here):
    scores = {"a": (0.3, 0.09, "01-02"), "b": (0.1, 0.4, "03-04"), "c": (0.1, 0.2, "02-03")}
    for name, (val, test, day) in scores.items():
        made = REAL | {"val": {"accuracy": val}, "test": REAL["test"] | {"accuracy": test}}
        put(f"listops/linear/{name}-s0", made | {"environment": {"date": f"2026-{day}T03:04:05Z"}})
    put("listops/linear/aa-s0")
    for sort, order in {"path": ("a", "aa", "b", "c"), "val": "abc", "test": "bca", "date": "bca"}.items():
        assert [row[0] for row in rows(lra("ls", "runs", f"sort={sort}"))][: len(order)] == [f"{n}-s0" for n in order]
    assert rows(lra("ls", "runs", "sort=test"))[-1][0] == "aa-s0"
    refused(lra("ls", "runs", "sort=size"), "sort=size")


def test_all_committed_runs_have_a_row_and_fit_100_columns():
    done = lra("ls", "runs", f"runs={RESULTS}", width=100)
    assert max(map(len, done.out.splitlines())) == 100 and "can't be read" not in done.out
    assert len(rows(lra("ls", "runs", f"runs={RESULTS}"))) == len([*RESULTS.rglob("result.json")])


def test_a_folder_without_runs_is_refused(here):
    refused(
        lra("ls", "runs"), "checkpoints/runs is not a folder with runs: lra fit makes one here, or name another one by"
    )
    (here / "empty").mkdir()
    refused(lra("ls", "runs", "runs=empty"), "empty has no runs: lra fit makes one")
