"""Components are found by name and listed without being imported."""

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from lra.config.registry import Registry
from lra.errors import UsageError

SOURCE = '''"""Solids."""
from dataclasses import dataclass
from shapes import SHAPES


@SHAPES.register("cube", sides=6, requires=({requires}))
class Cube:
    """A cube, for tests.

    More of it.
    """
    @dataclass(frozen=True)
    class Config:
        edge: int = 1
'''


@dataclass(frozen=True)
class Facts:
    sides: int
    solid: bool = True


@pytest.fixture
def registry(tmp_path, monkeypatch):
    package = tmp_path / "shapes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cube.py").write_text(SOURCE.format(requires=""))
    (package / "ghost.py").write_text(SOURCE.format(requires='"no_such_package",').replace("cube", "ghost"))
    (package / "tools.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    shapes: Any = importlib.import_module("shapes")
    shapes.SHAPES = Registry("shape", "shapes", Facts)
    yield shapes.SHAPES
    for name in [name for name in sys.modules if name.split(".")[0] == "shapes"]:
        del sys.modules[name]


def test_the_catalogue_reads_declarations_without_importing(registry):
    entry = registry.catalogue()["cube"]
    assert (entry.summary, entry.facts, entry.missing) == ("A cube, for tests.", {"sides": 6}, ())
    assert "shapes.cube" not in sys.modules


def test_get_imports_and_attaches_facts_and_name(registry):
    cube = registry.get("cube")
    assert cube.facts == Facts(6) and cube.Config().name == "cube"


def test_a_missing_package_is_named(registry):
    assert registry.catalogue()["ghost"].missing == ("no_such_package",)
    with pytest.raises(UsageError, match="pip install no_such_package"):
        registry.get("ghost")


def test_an_unknown_name_suggests_the_nearest(registry):
    with pytest.raises(UsageError, match="unknown shape 'cub': did you mean 'cube'"):
        registry.get("cub")
    with pytest.raises(UsageError, match="choose from cube, ghost"):
        registry.get("sphere")


def test_a_name_can_be_registered_once(registry):
    cube = registry.get("cube")
    with pytest.raises(ValueError, match="twice"):
        registry.register("cube", sides=6)(cube)
