"""What a figure of lra.bench.plots shows, read from its SVG."""

from __future__ import annotations

import re
from typing import NamedTuple
from xml.etree import ElementTree

ITS_OWN = re.compile(r"[\w.]+_\d+")  # what matplotlib calls parts that nobody named


class Line(NamedTuple):
    points: list[tuple[float, float]]  # down from the top left
    dots: int
    style: str


def lines(svg: str) -> dict[str, Line]:
    """By name."""
    found = {}
    for group in ElementTree.fromstring(svg).findall(".//{*}g"):
        path, name = group.find("{*}path"), group.get("id", "")
        if path is not None and name and not ITS_OWN.fullmatch(name):
            points = [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]
            marker = "".join(each.get("d", "") for each in group.findall("{*}defs/{*}path"))
            found[name] = Line(points, len(group.findall("{*}g/{*}use")), f"{path.get('style')} {marker}")
    return found


def words(svg: str) -> list[str]:
    """All text, from the top down."""
    texts = ElementTree.fromstring(svg).findall(".//{*}text")
    return [text.text or "" for text in sorted(texts, key=lambda text: float(text.get("y", 0)))]
