"""The links and headings of a Markdown page: for the site, and for the test that no link is dead."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token


def links(text: str) -> list[str]:
    """The targets of a page's links and images that lie in this repository, as they stand there."""
    found = (str(each.attrs.get("href") or each.attrs.get("src") or "") for each in _inline(_parse(text)))
    return [target for target in found if target and not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The fragments by which links reach a page's headings, as GitHub makes them."""
    tokens, counts, found = _parse(text), Counter[str](), set()
    for heading, content in itertools.pairwise(tokens):
        if heading.type == "heading_open":
            words = "".join(part.content for part in content.children or () if part.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
            counts[slug] += 1
    return found


def _parse(text: str) -> list[Token]:
    return MarkdownIt().enable("table").parse(text)


def _inline(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _inline(token.children or [])
