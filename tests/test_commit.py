"""What a result says that it was made with: the commit of the checkout, whether it was changed, and the command."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lra import environment


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """The commit is looked up once in a process, but here once in a test."""
    environment._checkout.cache_clear()
    yield
    environment._checkout.cache_clear()


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
    assert environment.current_commit() == sha[:12] and environment.describe()["commit"] == sha[:12]


@pytest.mark.parametrize("file", ["lra/file.py", "lra/new.py", "benchmarks/run.py"])
def test_a_plus_says_that_what_computes_was_changed(checkout, file):
    sha = git(checkout, "rev-parse", "--short=12", "HEAD")
    (checkout / file).write_text("2\n")
    assert environment.current_commit() == f"{sha}+"
    git(checkout, "add", ".")
    environment._checkout.cache_clear()
    assert environment.current_commit() == f"{sha}+"


def test_what_does_not_compute_may_be_changed(checkout):
    sha = git(checkout, "rev-parse", "--short=12", "HEAD")
    for file in ("docs/file.py", "benchmarks/results/new.json", "new.txt"):
        (checkout / file).write_text("2\n")
    assert environment.current_commit() == sha


def test_outside_a_checkout_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "lra" / "environment.py"))
    assert environment.current_commit() is None
    (tmp_path / ".git").write_text("gitdir: nowhere")  # git fails
    environment._checkout.cache_clear()
    assert environment.current_commit() is None


def test_the_commit_is_the_one_that_a_process_began_with(checkout):
    begun = environment.current_commit()
    (checkout / "lra/file.py").write_text("2\n")
    assert environment.current_commit() == begun


@pytest.mark.parametrize(("stated", "clean"), [
    ("0123456789ab", True), ("0123456789ab, ba9876543210", True), ("0123456789ab+", False), (None, False), ("", False),
    ("0123456789ab, ba9876543210+", False), ("unknown", False), ("unknown, 0123456789ab", False),
])  # fmt: skip
def test_a_commit_is_clean_if_each_is_known_and_unchanged(stated, clean):
    assert environment.is_clean_commit(stated) == clean


def warned(capsys, monkeypatch) -> str:
    monkeypatch.delenv(environment.WARNED_VARIABLE, raising=False)
    environment._checkout.cache_clear()
    environment.warn_unclean()
    said = capsys.readouterr()
    environment.warn_unclean()
    assert not said.out and said.err.count("\n") <= 1 and capsys.readouterr() == ("", ""), "once"
    return said.err


def test_of_a_clean_commit_nothing_is_said(checkout, capsys, monkeypatch):
    assert warned(capsys, monkeypatch) == ""


def test_a_changed_tree_is_said_once(checkout, capsys, monkeypatch):
    (checkout / "lra/file.py").write_text("2\n")
    sha = git(checkout, "rev-parse", "--short=12", "HEAD")
    assert warned(capsys, monkeypatch) == (
        f"lra: the code differs from commit {sha}: results state {sha}+, and tables mark them; "
        "commit the changes first to name the code\n"
    )


def test_without_a_commit_the_reason_is_said_but_not_of_an_installed_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "lra" / "environment.py"))
    assert warned(capsys, monkeypatch) == "", "it has a version"
    (tmp_path / "pyproject.toml").touch()
    end = ": results state no commit, and tables mark them; use a git clone to name the code\n"
    assert warned(capsys, monkeypatch) == f"lra: {tmp_path} has no .git{end}"
    (tmp_path / ".git").write_text("gitdir: nowhere")
    assert warned(capsys, monkeypatch).startswith("lra: fatal: ")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert warned(capsys, monkeypatch) == f"lra: git can't be run (FileNotFoundError){end}"


def test_a_shallow_clone_whose_files_are_read_only_has_a_commit(checkout, tmp_path_factory, monkeypatch):
    copy = tmp_path_factory.mktemp("clone") / "copy"
    git(checkout, "clone", "--quiet", "--depth=1", f"file://{checkout}", str(copy))
    folders = [copy / ".git", *(path for path in (copy / ".git").rglob("*") if path.is_dir())]
    monkeypatch.setattr(environment, "__file__", str(copy / "lra" / "environment.py"))
    environment._checkout.cache_clear()
    try:
        for folder in folders:
            folder.chmod(0o555)
        assert environment.current_commit() == git(checkout, "rev-parse", "--short=12", "HEAD")
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_the_command_line_has_no_path_of_this_machine(monkeypatch):
    root = Path(environment.__file__).parent.parent
    for program, name in (("/usr/bin/lra", "lra"), (f"{root}/lra/__main__.py", "lra"),
                          (f"{root}/benchmarks/runs.py", "python benchmarks/runs.py"),
                          ("/there/mine.py", "python mine.py")):  # fmt: skip
        monkeypatch.setattr("sys.argv", [program, "fit", "init=/there/best.ckpt", "/here/x", "lr=1/2"])
        assert environment.current_command() == f"{name} fit init=best.ckpt x lr=1/2"
