"""Makes a function the command of a program here: `python -m benchmarks.…`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lra.errors import UsageError


def command(main: Callable[[Sequence[str]], int | None]) -> Callable[..., int]:
    """Lets `main` take the process's arguments, unless others are given, and return an exit code.

    None means 0. A UsageError prints one line on stderr, and the exit code is 2.
    """
    file = Path(main.__code__.co_filename)
    name = file.parent.name if file.stem in ("study", "__main__") else file.stem

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(sys.argv[1:] if arguments is None else arguments) or 0
        except UsageError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2

    return run
