"""docs/tutorial.md does what it says, as a page and as a notebook, in a copy of the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pages import tutorial

ROOT = Path(__file__).parent.parent
PAGE = tutorial.SOURCE.read_text(encoding="utf-8")
FULL, TINY = "steps: 1500, eval_every: 250, log_every: 50", "steps: 20, eval_every: 10, log_every: 10"
PARSE = """
import json, sys
from lra.cli import app
from lra.commands import parse_command
for command in json.loads(sys.argv[1]):
    parse_command(app, command)
"""


@pytest.fixture
def clone(tmp_path):
    """A copy of the checkout."""
    for name in ("lra", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def environment(clone, monkeypatch):
    """The variables of a process that finds the copy's `lra`, no GPU, and make's tools where they are."""
    binaries = clone / "bin"
    binaries.mkdir()
    for name, command in (("lra", '-m lra "$@"'), ("python3", '"$@"')):
        (binaries / name).write_text(f"#!/bin/sh\nexec {sys.executable} {command}\n")
        (binaries / name).chmod(0o755)
    for name in [name for name in os.environ if name.startswith("PYTEST")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    changes = {"PYTHONPATH": str(clone), "LRA_DATA": str(clone / "data"), "VENV": "", "CUDA_VISIBLE_DEVICES": ""}
    for name, value in (changes | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("environment")
def test_its_commands_parse(clone):
    commands = []
    for cell in json.loads(tutorial.notebook(PAGE))["cells"]:
        first, *lines = "".join(cell["source"]).splitlines()
        if file := re.fullmatch("%%writefile (.+)", first):
            (clone / file[1]).write_text("\n".join(lines))
        commands += [line.split()[1:] for line in lines if first.startswith("%%sh") and line.startswith("lra ")]
    assert {command[0] for command in commands} >= {"ls", "check", "bench", "fit", "reproduce", "report", "test"}
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps(commands)], cwd=clone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_the_notebook_runs(clone):
    """With few steps: what it reaches is nobody's business here."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    recipe = clone / "lra" / "configs" / "recipe" / "demo.yaml"
    text = recipe.read_text()
    assert FULL in text
    recipe.write_text(text.replace(FULL, TINY))
    notebook = nbformat.read(clone / "docs" / "tutorial.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(clone / "docs")}})
    client.execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ()))
    assert "13 passed, 3 not asked" in printed and re.search(r"steep +validation \d", printed)
    report = (clone / "report" / "table3.md").read_text()
    assert re.search(r"\| nearby \| \S+ ± \S+ \|", report) and "| nearby | 2 |" in report, "a mean of two seeds"
    assert (clone / "curves.png").exists()


def test_each_block_becomes_a_cell():
    page = (
        'Text.\n\n```python title="a/b.py"\nx = 1\n```\n\n## More\n\n```sh\nlra ls\n```\n```python\ny = 2\n```\nEnd.\n'
    )
    cells = json.loads(tutorial.notebook(page))["cells"][1:]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in cells] == [
        ("markdown", "Text."), ("code", "%%writefile a/b.py\nx = 1"), ("markdown", "## More"),
        ("code", "%%sh -e\nlra ls"), ("code", "y = 2"), ("markdown", "End."),
    ]  # fmt: skip
