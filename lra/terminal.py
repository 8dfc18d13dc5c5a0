"""Printing. No character that is printed controls the terminal, wherever the text comes from."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text


class Bold(str):
    """The text of a table's cell that is printed in bold."""


def make_visible(text: str, kept: str = "") -> str:
    r"""A text in which all characters can be seen. Others, except those in `kept`, are written as `\x1b`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in kept else ascii(letter)[1:-1] for letter in text)


class Terminal(Console):
    """A console that makes every text visible, as it may come from a file of others."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every text passes here, also cells and titles of tables."""
        return super().render_str(make_visible(text, kept="\n"), **options)
