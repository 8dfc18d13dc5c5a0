"""Verbs that carry compiled code to other machines."""

from __future__ import annotations

from typing import Annotated

import typer

from lra.commands import caches_app, verb
from lra.imports import uncollected_imports
from lra.printing import console


@verb(caches_app, "pack", "lra.compile_caches:PackOptions")
def caches_pack(
    fields: Annotated[list[str] | None, typer.Argument(metavar="out=<file>.tar.xz")] = None,
) -> None:
    """Put what is compiled for this machine's GPU and versions into an archive."""
    with uncollected_imports():
        from lra.compile_caches import pack_caches

    for line in pack_caches(fields or ()):
        console.print(line)


@verb(caches_app, "merge")
def caches_merge(file: Annotated[str, typer.Argument(metavar="<file>.tar.xz")]) -> None:
    """Add the compiled code of an archive to what is here; whole files stay. Runs execute it: merge only your own."""
    with uncollected_imports():
        from lra.compile_caches import merge_caches

    for line in merge_caches(file):
        console.print(line)
