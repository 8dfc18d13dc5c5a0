"""The code keeps the form that docs/architecture.md states."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("folder", ["lra", "benchmarks", "tests"])
def test_a_file_can_be_read_in_one_sitting(folder):
    """Kernels are longer, as nothing but a kernel can be called from one."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        most = 600 if (ROOT / "lra" / "kernels") in file.parents else 400
        lines = len(file.read_text(encoding="utf-8").splitlines())
        assert lines <= most, f"{file} has {lines} lines: split it by subject"
