"""metrics.csv and TensorBoard's file: the same rows, whole at every moment, written by the thread that trains."""

from __future__ import annotations

import csv
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import masked_crc32c

from lra.errors import UsageError
from lra.training import curves, tensorboard
from lra.training.curves import CURVE_COLUMNS, Curves, read_curves
from tests.training.test_fit import interrupt_at

HEADER = ",".join(CURVE_COLUMNS)


def logged(folder: Path) -> dict[tuple[int, str], float]:
    """All values in TensorBoard's files, by step and tag; each must be there once, and every record be sound."""
    found: dict[tuple[int, str], float] = {}
    for file in folder.glob(tensorboard.EVENT_FILES):
        content, place = file.read_bytes(), 0
        while place < len(content):
            size = int.from_bytes(content[place : place + 8], "little")
            body = content[place + 12 : place + 12 + size]
            checks = content[place + 8 : place + 12], content[place + 12 + size : place + 16 + size]
            assert [int.from_bytes(check, "little") for check in checks] == [
                masked_crc32c(content[place : place + 8]), masked_crc32c(body)
            ]  # fmt: skip
            event = Event.FromString(body)
            for value in event.summary.value:
                assert (event.step, value.tag) not in found
                found[event.step, value.tag] = value.simple_value
            place += 16 + size
    return found


def rows(path: Path) -> dict[tuple[int, str], Any]:
    return {
        (int(row["step"]), tag): pytest.approx(float(value))
        for row in read_curves(path)
        for tag, value in row.items()
        if tag != "step" and value
    }


def test_both_files_have_each_row_at_once_and_no_thread_writes_them(tmp_path):
    curves, before = Curves(tmp_path / "metrics.csv"), threading.active_count()
    for step in range(1, 40):
        curves.log_metrics({"train/loss": 1 / step, "lr": 0.5, "unknown": 3.0}, step)
        assert len(logged(tmp_path / "tensorboard")) == 2 * step and len(read_curves(curves.path)) == step
    assert threading.active_count() == before
    assert logged(tmp_path / "tensorboard") == rows(curves.path)


def test_a_session_keeps_what_lies_before_it_with_its_times_and_drops_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    first = Curves(tmp_path / "metrics.csv")
    for step in (1, 2, 3):
        first.log_metrics({"train/loss": float(step)}, step)
    folder = tmp_path / "tensorboard"
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-3])  # half a record, as a full disk leaves it
    with first.path.open("a") as half:
        half.write("4,0.")
    monkeypatch.setattr("time.time", lambda: 500.0)  # the clock was set back
    Curves(tmp_path / "metrics.csv").log_metrics({"train/loss": 7.0}, 3)
    assert logged(folder) == {(1, "train/loss"): 1.0, (2, "train/loss"): 2.0, (3, "train/loss"): 7.0}
    assert rows(first.path) == logged(folder)
    assert tensorboard.read_times(folder) == {1: 1000.0, 2: 1000.0, 3: 500.0}


def test_what_a_thread_of_an_older_lra_lost_is_there_again(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train/loss,lr,val/loss,val/accuracy\n1,3.0,0.1,,\n2,,,2.0,0.5\n")
    Curves(tmp_path / "metrics.csv").log_metrics({"train/loss": 1.0}, 3)
    assert len(logged(tmp_path / "tensorboard")) == 5


def test_a_killed_run_goes_on_with_the_curves_of_an_unbroken_one(small, monkeypatch):
    whole = Path(small("name=whole")["directory"])
    with monkeypatch.context() as patch:
        interrupt_at(10, patch)
        with pytest.raises(RuntimeError):
            small("name=cut")
    cut = Path(small("name=cut", "resume=auto")["directory"])
    assert (cut / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert logged(cut / "tensorboard") == logged(whole / "tensorboard") == rows(cut / "metrics.csv")
    assert len([*(cut / "tensorboard").iterdir()]) == 1


NUMBERS = ("ENOSPC", "EFBIG", "EROFS", "ENOTCONN", "ENOENT", "EUCLEAN")  # more of them in tests/test_errors.py


@pytest.mark.parametrize(("file", "number"), [*(("metrics.csv", number) for number in NUMBERS), ("events", "ENOSPC")])
def test_a_row_that_can_not_be_written_is_one_line_and_the_run_goes_on_later(small, monkeypatch, file, number):
    genuine = Path.open

    def opened(path: Path, mode: str = "r", *rest, **named):
        if "a" in mode and file in path.name and path.stat().st_size > 150:
            raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))
        return genuine(path, mode, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(UsageError, match=rf"/{file}.* can't be used \(.*\): .*resume=auto goes on") as caught:
            small("name=run")
    assert "\n" not in str(caught.value)
    done = Path(small("name=run", "resume=auto")["directory"])
    steps = [int(row["step"]) for row in csv.DictReader((done / "metrics.csv").open())]
    assert steps == [2, 4, 4, 6, 8, 8, 10, 12, 12]


def test_a_clock_that_is_set_back_by_weeks_stops_nothing(small, monkeypatch):
    now = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr("time.time", lambda: float(next(now, 0)))
    result = small("name=run")
    assert result["status"] == "finished" and 0 < result["wall_seconds"] < 1000


def test_rows_that_are_done_again_and_columns_of_others_are_left_out(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text(f"gpu,{HEADER}\n80%,1,2.5,0.1,,\n70%,2,,,1.0,0.25\n60%,3,2.0,0.1,,\n50%,4,2")
    Curves(file).log_metrics({"train/loss": 9.0, "elsewhere": 1.0}, 3)
    assert file.read_text().splitlines() == [HEADER, "1,2.5,0.1,,", "2,,,1.0,0.25", "3,9.0,,,"]


def test_columns_in_another_order_stay_their_own(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("val/accuracy,step\n0.5,1\n")
    Curves(file).log_metrics({"val/loss": 9.0}, 2)
    assert file.read_text().splitlines() == [HEADER, "1,,,,0.5", "2,,,9.0,"]


@pytest.mark.parametrize(
    "row", ["x,,,,", "1.5,,,,", "-1,,,,", "１,,,,", "1,,,,nan", "1,,,,high", "1,1_0x,,,", "1,1,1,1,1,1"]
)
def test_a_row_without_a_step_and_numbers_is_refused(tmp_path, row):
    file = tmp_path / "metrics.csv"
    file.write_text(f"{HEADER}\n{row}\n2,,,,0.5\n")
    for use in (curves.read_curves, Curves):
        with pytest.raises(UsageError, match=r"metrics.csv can't be read as curves \(.*\): move it away"):
            use(file)
    assert file.read_text() == f"{HEADER}\n{row}\n2,,,,0.5\n"


@pytest.mark.parametrize("end", ["2,,", "\0\0\n", "2,\0\0", "\0\n\0"])
def test_what_a_kill_or_a_power_cut_leaves_of_the_last_row_is_none(tmp_path, end):
    (tmp_path / "metrics.csv").write_text(f"{HEADER}\n1,2.5,0.1,,\n{end}")
    assert [row["step"] for row in curves.read_curves(tmp_path / "metrics.csv")] == ["1"]


def test_an_empty_file_has_no_rows(tmp_path):
    (tmp_path / "metrics.csv").touch()
    assert curves.read_curves(tmp_path / "metrics.csv") == []
