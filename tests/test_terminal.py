"""Nothing that is printed moves a terminal's cursor, colours it or turns its text around."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from lra.terminal import Terminal, make_visible

EVIL = "a\x1b[2Jb\x07c\x9bd\u202ee\rf"
SEEN = r"a\x1b[2Jb\x07c\x9bd\u202ee\rf"


def printed(*what):
    text = io.StringIO()
    Terminal(file=text, width=1000, force_terminal=True, color_system="truecolor").print(*what)
    return text.getvalue()


def test_what_a_terminal_obeys_is_visible():
    assert make_visible(EVIL) == SEEN and make_visible("± 3 × 2, 日本 [red]") == "± 3 × 2, 日本 [red]"
    assert make_visible("a\nb") == r"a\nb" and make_visible("a\nb", kept="\n") == "a\nb"


@pytest.mark.parametrize("what", ["line", "cell", "header", "title", "caption"])
def test_wherever_it_is_printed(what):
    table = Table(EVIL if what == "header" else "x" * 60, title=EVIL if what == "title" else None)
    table.caption = EVIL if what == "caption" else None
    table.add_row(EVIL if what == "cell" else "y")
    out = printed(EVIL if what == "line" else table)
    assert SEEN in out
    assert not {"\x07", "\x9b", "\u202e", "\r"} & {*out} and "\x1b[2J" not in out


def test_brackets_and_lines_stay():
    assert printed("[red]x[/red]", "a\nb") == "[red]x[/red] a\nb\n"
