"""What is compiled is cached, and never used for other sources than it was made from."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lra

DRAW = """
from lra.data.listops import generate_expressions
print(generate_expressions(2, seed=0, min_length=3, max_length=9)[0])
"""


@pytest.mark.slow  # compiles three times
def test_a_changed_helper_in_another_file_is_compiled_anew(tmp_path):
    shutil.copytree(Path(lra.__file__).parent, tmp_path / "lra", ignore=shutil.ignore_patterns("__pycache__"))
    helpers = tmp_path / "lra" / "data" / "numba_rng.py"

    def drawn() -> bytes:
        changes = {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-c", DRAW]
        return subprocess.run(command, env=os.environ | changes, cwd=tmp_path, capture_output=True, check=True).stdout

    first = drawn()
    cached = list(tmp_path.rglob("expressions.draw*.nbi"))
    assert len(cached) == 1 and drawn() == first
    assert list(tmp_path.rglob("expressions.draw*.nbi")) == cached
    helpers.write_text(helpers.read_text().replace("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB"))
    assert drawn() != first
