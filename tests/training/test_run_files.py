"""What is read back of a run's directory: its configuration and its result, which are whole or none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lra.training.run_files import read_config, read_result

SCORES: dict[str, Any] = {"accuracy": 0.5, "plus_minus": 0.1, "n": 10, "baselines": {"majority": 0.1}}
WHOLE: dict[str, Any] = {
    "status": "finished", "task": "listops@1", "config": {"task": {"name": "listops"}, "attn": {"name": "flash"}},
    "test": SCORES, "environment": {"date": "2026-01-02T03:04:05Z"},
}  # fmt: skip


@pytest.mark.parametrize("name", ["none", "cut", "status", "config", "task", "share", "test", "list", "deep"])
def test_a_result_that_is_not_whole_is_none(tmp_path, name):
    changed: dict[str, Any] = {
        "status": WHOLE | {"status": "running"}, "config": WHOLE | {"config": []}, "task": WHOLE | {"task": None},
        "share": WHOLE | {"test": SCORES | {"accuracy": 1.5}}, "test": WHOLE | {"test": None}, "list": [WHOLE],
    }  # fmt: skip
    text = {"cut": json.dumps(WHOLE)[:-1], "deep": sys.getrecursionlimit() * 100 * "["}.get(name)
    file = tmp_path / "result.json"
    if name != "none":
        file.write_text(text or json.dumps(changed[name]))
    assert read_result(file) is None
    for whole in (WHOLE, {**WHOLE, "status": "oom", "test": None}):
        file.write_text(json.dumps(whole))
        assert read_result(file) == whole


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: &x [1]\nb: *x", "- 1", "a: [", "\0", "a: !!python/name:os.sep"])
def test_a_configuration_that_lra_does_not_write_is_none(tmp_path, text):
    file = tmp_path / "config.yaml"
    assert read_config(file) is None
    file.write_text(text)
    assert read_config(file) is None
    file.write_text("a: {b: 1}")
    assert read_config(file) == {"a": {"b": 1}}


@pytest.mark.parametrize("read", [read_config, read_result])
def test_what_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch, read):
    def denied(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(PermissionError):
        read(tmp_path / "file")
