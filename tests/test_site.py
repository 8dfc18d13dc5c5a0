"""Every page of the documents can be reached and leads to no dead link, in the repository and on the site."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.pages import site
from benchmarks.pages.links import anchors, links

ROOT = Path(__file__).parent.parent
PAGES = sorted({
    *ROOT.glob("*.md"),
    *(page for name in ("docs", "benchmarks", "checkpoints") for page in (ROOT / name).rglob("*.md")),
} - {*(ROOT / "checkpoints" / "runs").rglob("*.md")})  # fmt: skip


def path_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def nav() -> list[str]:
    """The pages in the site's navigation, from the repository's top."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)

    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(part)

    return list(pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_no_link_is_dead(page):
    for link in links(page.read_text(encoding="utf-8")):
        file, _, anchor = urllib.parse.unquote(link).partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{path_of(page)} links to {link}"
        assert target.resolve().is_relative_to(ROOT), f"{path_of(page)} links to {link}, which others do not have"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path_of(page)} links to {link}"


def test_every_page_of_docs_is_in_the_navigation():
    found = nav()
    assert len(found) == len({*found})
    assert {path_of(page) for page in (ROOT / "docs").glob("*.md")} <= {*found}
    assert not [page for page in found if not (ROOT / page).is_file()]


def test_every_documented_name_can_be_imported():
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert {"lra.fit", "lra.kernels.flash_attention", "lra.batch.Batch"} <= {*names}
    for name in names:
        module, _, own = name.rpartition(".")
        assert getattr(importlib.import_module(module), own).__doc__, name


def test_headings_are_reached_as_on_github():
    text = "# A `b` *c*: d, e-f_g (h)?\n\n## N² / 2\n\n## Same\n\n## Same\n\n```sh\n# no heading\n```\n"
    assert anchors(text) == {"a-b-c-d-e-f_g-h", "n²--2", "same", "same-1"}


def test_links_are_those_of_text():
    text = "[a](b.md#c) ![d](<e f.png>) [g](https://h.i) `[j](k)` [l][m]\n\n| [n](o) |\n| --- |\n\n[m]: p.md\n"
    assert links(text) == ["b.md#c", "e%20f.png", "p.md", "o"]


def test_what_a_page_leads_to_is_published(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "ROOT", tmp_path)
    for name, text in {
        "README.md": "[a](docs/a.md#b) [c](c) [d](d/) [gone](gone.md) [top](#top) [web](https://x.y/z)",
        "docs/a.md": "[e](../e.json) [back](../README.md) [d](../d/README.md)",
        "c/f/g.py": "", "c/.hidden": "", "d/README.md": "", "e.json": "{}", "other.md": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    published = dict(site.published(["README.md", "docs/a.md"]))
    listing = published.pop("c/README.md")
    assert listing == "# c\n\n- [f/g.py](<f/g.py>)\n"
    assert published == dict.fromkeys(("README.md", "docs/a.md", "d/README.md", "e.json", "c/f/g.py"))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    for name in ("material", "mkdocstrings"):
        pytest.importorskip(name, reason="make site installs what builds the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in nav():
        assert (tmp_path / page.replace("README.md", "index.html").replace(".md", ".html")).is_file(), page
    for page in tmp_path.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="?([^" >]+)', page.read_text(encoding="utf-8")):
            file = urllib.parse.unquote(re.split("[?#]", link)[0])
            if file and not re.match("[a-z]+:", file) and page.name != "404.html":
                target = page.parent / file
                assert target.is_file() or (target / "index.html").is_file(), f"{page.relative_to(tmp_path)}: {link}"
    assert "block_sparse_attention" in (tmp_path / "docs" / "api.html").read_text(encoding="utf-8")
