"""That a command is refused in one line, and changes nothing."""

from __future__ import annotations

from pathlib import Path

from tests.command_line import Done, lra
from tests.faults import corpus_runs

PLACE = f"checkpoints/runs/{corpus_runs.RUN}"


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Every entry below a folder; locks of a store are no content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else "no file"
        for path in sorted(folder.rglob("*"))
        if path.suffix != ".lock" and not (path.is_dir() and path.name == "data")
    }


def refuses(around: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """One line with these words, exit code 2, and nothing around is new or gone."""
    before = snapshot(around)
    check(lra(*arguments), words)
    assert snapshot(around) == before


def check(done: Done, words: tuple[str, ...]) -> None:
    assert done.code == 2, done
    assert done.err.startswith("lra: ") and done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err, done.err
