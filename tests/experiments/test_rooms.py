"""The rooms of lra.experiments: results read what the grid says, and neither knows the experiments above them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lra import experiments

ROOT = Path(experiments.__file__).parent
ALLOWED = {"grid": {"grid", "reproduction"}, "results": {"grid", "results", "reproduction", "speed"}}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_what_lies_below_it(room):
    for file in (ROOT / room).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lra.experiments"):
                parts = str(node.module).split(".")
                names = {parts[2]} if len(parts) > 2 else {alias.name for alias in node.names}
                assert names <= ALLOWED[room], f"{file} imports {names}"
