"""Configurations of recipes with stages, each stage composed once for all that need it."""

from __future__ import annotations

import functools

from lra.config.compose import Composed
from lra.config.override import Override
from lra.training.fit import configure
from lra.training.run_directory import RunDirectory


@functools.cache
def composed(args: tuple[str | Override, ...]) -> Composed:
    """What `configure` makes of these arguments, which composes a chain of stages anew from each of them."""
    return configure(args, lambda start: str(RunDirectory(composed(start)).path))
