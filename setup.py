"""The README as a package page shows it. Links into the repository would lead nowhere there: they become its paths."""

import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)\[([^]]*)\]\((?![a-z]+:)([^)]*)\)")


def _named(link: re.Match[str]) -> str:
    """The text of a link, with the path where that says more; of a picture nothing."""
    picture, text, target = link.groups()
    path = target.partition("#")[0]
    return "" if picture else text if path in ("", text) else f"{text} (`{path}`)"


readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(long_description=LINK.sub(_named, readme), long_description_content_type="text/markdown")
