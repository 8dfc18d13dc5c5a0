"""Releases a run's weights in checkpoints/, with a model card that is made of its result.json.

    python -m benchmarks.release <run directory> <name>

A finished run is copied to checkpoints/<name>. `make docs` then lists it in checkpoints/README.md.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import command
from benchmarks.pages import measured
from benchmarks.pages.cards import RELEASES, card, digest, grey_levels, known
from lra.errors import UsageError
from lra.experiments.results.push import finished_run
from lra.training.run_directory import RUNS_FOLDER

FILES = ("config.yaml", "model.safetensors", "result.json")


def release(run: Path, name: str, releases: Path = RELEASES, results: Path = measured.RUNS) -> Path:
    """Copies a finished run's files to a folder of this name, and returns the folder. It appears complete or not at
    all.

    UsageError, and nothing is written, if the run is not finished, if its files belong to several runs, if one of the
    runs that it starts from is not known, or if the folder exists.
    """
    target = releases / name
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) or name == RUNS_FOLDER.name:
        raise UsageError(f"'{name}' can't be the name of a release: use small letters, digits, '.', '_' and '-'")
    if target.exists():
        raise UsageError(f"{target} is there already: remove it first, or choose another name")
    result = finished_run(run)
    text = card(name, result, known(releases, results), grey_levels().get(digest(run)))
    aside = releases / f".{name}.{os.getpid()}"
    aside.mkdir(parents=True)
    try:
        for file in FILES:
            shutil.copyfile(run / file, aside / file)
        (aside / "README.md").write_text(text, encoding="utf-8")
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


@command
def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 2 or any(argument.startswith("-") for argument in arguments):
        raise UsageError("give <run directory> <name>")
    release(Path(arguments[0]), arguments[1])
    print(f"{RELEASES.name}/{arguments[1]} is released: make docs lists it")


if __name__ == "__main__":
    sys.exit(main())
