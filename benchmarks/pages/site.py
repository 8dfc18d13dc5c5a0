"""What `make site` publishes, as a hook of mkdocs: the pages at the top and in docs, and every file that they lead to.

A file keeps its path from the repository's top, so that links on the site are those of the repository. README.md of a
folder is the folder's page. A linked folder without one gets a page that lists what is in it.
"""

from __future__ import annotations

import posixpath
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages.links import links

ROOT = Path(__file__).resolve().parents[2]


def on_files(files: Any, config: Any) -> Any:
    """The files of the site: mkdocs calls this with those that it found in docs."""
    from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports] - of the extra `site`

    start = [str(file.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for file in sorted(folder.glob("*.md"))]
    shown = [file for file in files if file.src_dir != config.docs_dir]  # the theme's
    for path, made in published(start):
        if made is None:
            shown.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        else:
            shown.append(File.generated(config, path, content=made))
    return Files(shown)


def published(start: list[str]) -> Iterator[tuple[str, str | None]]:
    """Each path to publish, from the repository's top, and its text where no file has it.

    Args:
        start: paths of the pages with which a reader begins.
    """
    queue, seen = [*start], {*start}
    while queue:
        path, made = queue.pop(0), None
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
            made = None if (ROOT / path).is_file() else _listing((ROOT / path).parent)
        yield path, made
        if not path.endswith(".md"):
            continue
        text = (ROOT / path).read_text(encoding="utf-8") if made is None else made
        for link in links(text):
            file = urllib.parse.unquote(link.partition("#")[0])
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
            target = target.removesuffix("/README.md")  # a folder and its README are one page
            if file and target not in seen and (ROOT / target).exists():
                seen.add(target)
                queue.append(target)


def _listing(folder: Path) -> str:
    """A page that links to every file in a folder and below it."""
    paths = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    shown = [path for path in paths if not any(part.startswith((".", "__pycache__")) for part in path.parts)]
    return f"# {folder.relative_to(ROOT)}\n\n" + "\n".join(f"- [{path}](<{path}>)" for path in shown) + "\n"
