"""Measurements in files: read as they were written, and refused if they are no such records."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lra.bench.attention import attention_tables
from lra.bench.records import AttentionMeasurement, MeasurementFile, StepMeasurement, read_measurements

RECORD = AttentionMeasurement(
    attention="flash", options="", ragged="false", pass_name="both", length=64, head_dim=32, dtype="fp32",
    dropout=0.0, batch=2, heads=2, tokens=128, squares=8192, ms=2.0,
)  # fmt: skip


def test_a_file_is_read_as_it_was_written(tmp_path):
    file, written = tmp_path / "a.json", MeasurementFile({"gpu": None}, {"heads": 2}, [RECORD])
    file.write_text(json.dumps(written.saved()))
    assert read_measurements(file, AttentionMeasurement).saved() == written.saved()


def test_keys_are_in_the_order_of_the_fields():
    keys = list(RECORD.saved())
    assert keys[:6] == ["attention", "options", "ragged", "pass", "N", "d"] and keys[-1] == "reason"
    assert list(StepMeasurement(loop="fit").saved())[:4] == ["loop", "status", "reason", "engine"]


def test_a_key_with_a_default_may_be_lacking():
    made = StepMeasurement(loop="fit", engine="eager", ms=1.0, blocks_ms=[1.0, 2])
    saved = {key: value for key, value in made.saved().items() if key != "steady"}
    assert StepMeasurement.loaded(saved) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1.0}, "a record has other keys than attention, options, ragged, pass, N"),
        ({"N": "64"}, "a record's length is '64'"),
        ({"N": True}, "a record's length is True"),
        ({"N": 64.5}, "a record's length is 64.5"),
        ({"ms": "2"}, "a record's ms is '2'"),
        ({"status": None}, "a record's status is None"),
    ],
)
def test_other_records_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        AttentionMeasurement.loaded(RECORD.saved() | change)
    with pytest.raises(ValueError, match="a record has other keys"):
        AttentionMeasurement.loaded({"attention": "flash"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "it has not all of environment, options, cells"),
        ({"environment": {}, "options": {}}, "it has not all of environment, options, cells"),
        ({"environment": {}, "options": [], "cells": []}, "it has not all of environment, options, cells"),
        ({"environment": {}, "options": {}, "cells": [1]}, "a record has other keys"),
    ],
)
def test_other_files_are_refused(tmp_path, content: Any, message):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_measurements(file, AttentionMeasurement)


BEGUN = {"date": "2026-01-01", "command": "lra", "commit": "0123456789ab"}
LATER = {"date": "2026-01-02", "command": "lra again", "commit": "0123456789ab+"}


def test_a_record_says_in_a_file_what_measured_it_if_that_is_not_what_began_the_file(tmp_path):
    file, records = tmp_path / "a.json", [replace(RECORD, made=made) for made in (BEGUN, LATER, None)]
    file.write_text(json.dumps(MeasurementFile(BEGUN | {"gpu": None}, {}, records).saved()))
    assert [cell.get("made") for cell in json.loads(file.read_text())["cells"]] == [None, LATER, None]
    found = read_measurements(file, AttentionMeasurement)
    assert [record.made for record in found.cells] == [BEGUN, LATER, BEGUN] and found.sessions() == [BEGUN, LATER]
    assert [record.mark for record in found.cells] == ["", "†", ""] and RECORD.mark == ""
    ((_, _, rows),) = attention_tables([found.cells[1], replace(RECORD, length=128)])
    assert [row[3] for row in rows] == ["64†", "128"]
    assert MeasurementFile(BEGUN, {}, []).sessions() == [BEGUN]


@pytest.mark.parametrize("made", [5, None, {}, {"date": 5, "command": "", "commit": ""}, LATER | {"more": "a"}])
def test_a_record_that_states_nonsense_of_what_measured_it_is_refused(tmp_path, made: Any):
    file = tmp_path / "a.json"
    content = {"environment": BEGUN, "options": {}, "cells": [RECORD.saved() | {"made": made}]}
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="a record's made is"):
        read_measurements(file, AttentionMeasurement)


def test_what_must_be_mended_has_failed():
    states = ("ok", "OOM", "unsupported", "failed", "WRONG")
    assert [StepMeasurement(loop="fit", status=status).failed for status in states] == [False] * 3 + [True] * 2
