"""Completion of `task=`, `attn=` and `recipe=` in a shell; `lra --install-completion` switches it on."""

from __future__ import annotations

from collections.abc import Iterable

import typer


def selector_names() -> dict[str, Iterable[str]]:
    """The names that each selector may have."""
    from lra.config.recipes import recipe_names
    from lra.models.attention import ATTENTIONS
    from lra.tasks import TASKS

    return {"task": TASKS.catalogue(), "attn": ATTENTIONS.catalogue(), "recipe": recipe_names()}


def complete_fields(ctx: typer.Context, incomplete: str) -> list[str]:
    """What the word before the cursor may become, for Typer.

    Bash takes `task=pa` for three words and completes the last one, so it is given names alone. Typer removes a `=`
    before the cursor. Other shells complete the whole word.

    A selector without a name is completed together with its names: a shell then writes `task=` and leaves out the
    space that it puts after a finished word.
    """
    before = [word for word in ctx.params.get("fields") or () if word != "="]
    if before and before[-1] in selector_names():
        return [name for name in selector_names()[before[-1]] if name.startswith(incomplete)]
    words = (f"{selector}={name}" for selector, names in selector_names().items() for name in names)
    return [word for word in words if word.startswith(incomplete)]
