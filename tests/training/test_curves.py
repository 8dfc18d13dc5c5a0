"""The curves of a run that goes on: its own rows before the step, and nothing of what cannot be read."""

from __future__ import annotations

import pytest

from lra.errors import UsageError
from lra.training import curves
from lra.training.curves import COLUMNS, Curves

HEADER = ",".join(COLUMNS)


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
    for use in (curves.read, Curves):
        with pytest.raises(UsageError, match=r"metrics.csv can't be read as curves \(.*\): move it away"):
            use(file)
    assert file.read_text() == f"{HEADER}\n{row}\n2,,,,0.5\n"


@pytest.mark.parametrize("end", ["2,,", "\0\0\n", "2,\0\0", "\0\n\0"])
def test_what_a_kill_or_a_power_cut_leaves_of_the_last_row_is_none(tmp_path, end):
    (tmp_path / "metrics.csv").write_text(f"{HEADER}\n1,2.5,0.1,,\n{end}")
    assert [row["step"] for row in curves.read(tmp_path / "metrics.csv")] == ["1"]


def test_an_empty_file_has_no_rows(tmp_path):
    (tmp_path / "metrics.csv").touch()
    assert curves.read(tmp_path / "metrics.csv") == []
