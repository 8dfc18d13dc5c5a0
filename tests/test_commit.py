"""What a result says that it was made with: the commit of the checkout, whether it was changed, and the command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lra import environment


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A repository with one commit, which `environment` takes for its own."""
    for folder in ("lra", "docs", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.py").write_text("1\n")
    (tmp_path / "benchmarks/run.py").write_text("1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a", "commit", "--quiet", "--message=one")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "lra" / "environment.py"))
    return tmp_path


def git(folder: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_result_names_the_commit_that_made_it(checkout):
    sha = git(checkout, "rev-parse", "HEAD")
    assert environment.commit() == sha[:12] and environment.describe()["commit"] == sha[:12]


@pytest.mark.parametrize("file", ["lra/file.py", "lra/new.py", "benchmarks/run.py"])
def test_a_plus_says_that_what_computes_was_changed(checkout, file):
    sha = git(checkout, "rev-parse", "--short=12", "HEAD")
    (checkout / file).write_text("2\n")
    assert environment.commit() == f"{sha}+"
    git(checkout, "add", ".")
    assert environment.commit() == f"{sha}+"


def test_what_does_not_compute_may_be_changed(checkout):
    sha = git(checkout, "rev-parse", "--short=12", "HEAD")
    for file in ("docs/file.py", "benchmarks/results/new.json", "new.txt"):
        (checkout / file).write_text("2\n")
    assert environment.commit() == sha


def test_outside_a_checkout_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "lra" / "environment.py"))
    assert environment.commit() is None
    (tmp_path / ".git").write_text("gitdir: nowhere")  # git fails
    assert environment.commit() is None


def test_the_command_line_has_no_path_of_this_machine(monkeypatch):
    root = Path(environment.__file__).parent.parent
    for program, name in (("/usr/bin/lra", "lra"), (f"{root}/lra/__main__.py", "lra"),
                          (f"{root}/benchmarks/runs.py", "python benchmarks/runs.py"),
                          ("/there/mine.py", "python mine.py")):  # fmt: skip
        monkeypatch.setattr("sys.argv", [program, "fit", "init=/there/best.ckpt", "/here/x", "lr=1/2"])
        assert environment.command() == f"{name} fit init=best.ckpt x lr=1/2"
