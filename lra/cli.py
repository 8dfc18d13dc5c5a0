"""The command line from its start to its exit code. The verbs are in `verbs`; each takes `field=value` arguments."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from contextlib import suppress
from typing import Any, NoReturn

import typer
from rich.text import Text

from lra import caches, ranks, timeline
from lra.commands import app
from lra.config.sources import explain_own_code
from lra.errors import UsageError, explain_system_error
from lra.streams import guard_streams
from lra.terminal import Terminal, make_visible
from lra.verbs import training  # the help has the verbs in the order of these imports

# isort: split
from lra.verbs import bench, carrying, data, experiments, listing, results

__all__ = ["app", "bench", "carrying", "data", "experiments", "listing", "main", "results", "training"]

EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141  # as shells have it: 128 + SIGINT, 128 + SIGPIPE
ClickUsageError: Any = typer.BadParameter.__base__  # click's UsageError, which Typer brings along or imports


def main() -> None:
    timeline.begin_timeline()
    atexit.register(gc.freeze)  # no object is searched for garbage once more: with PyTorch that takes a second
    with guard_streams() as output:
        try:
            _main()
        except SystemExit as ended:
            output.flush()
            if ended.code in (None, 0) and output.error and sys.argv[1:2] != ["fit"]:  # a run leaves its files
                if isinstance(output.error, BrokenPipeError):
                    sys.exit(EXIT_BROKEN_PIPE)  # the reader has gone, and knows it
                _exit_with(f"standard output can't be written to ({output.error.strerror}): send it elsewhere")
            raise


def _main() -> None:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no word of its caches where HOME can't be written to
    try:
        ranks.check_variables()
        for argument in sys.argv[1:]:
            if not argument.isprintable():
                raise UsageError(f"'{argument}' has a character that is no printable text: leave it out")
        sys.exit(app(prog_name="lra", standalone_mode=False))
    except ClickUsageError as error:
        _exit_misused(error)
    except UsageError as error:
        _exit_with(str(error))
    except (KeyboardInterrupt, typer.Abort):  # which one depends on Typer's version
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if not (said := explain_own_code(error) or explain_system_error(error) or caches.explain_damage(error)):
            raise
        _exit_with(said)
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning ends with 1
            sys.exit(EXIT_INTERRUPTED)
        raise


def _exit_misused(error: Any) -> NoReturn:
    """As Typer does, but in one line."""
    command, text = error.ctx.command_path if error.ctx else "lra", error.format_message()
    if not text:  # nothing was asked for, and the help is printed already
        sys.exit(2)
    _exit_with(f"{text} (see {command} --help)")


def _exit_with(text: str) -> NoReturn:
    with suppress(OSError):  # a full disk may have the standard error, too
        Terminal(stderr=True, soft_wrap=True).print(Text.assemble(("lra:", "red"), f" {make_visible(text)}"))
    sys.exit(2)
