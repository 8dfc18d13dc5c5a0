"""Components are found by name and listed without being imported, those of other packages too."""

import importlib
import re
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from lra.config.registry import Registry
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS

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
    shapes.SHAPES = Registry("shape", "shapes", Facts, entry_points="shapes.more")
    yield shapes.SHAPES
    for name in [name for name in sys.modules if name.split(".")[0] in ("shapes", "solids")]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install("dist", "name = module", module="source")` puts an installed package on the path."""

    def add(dist: str, *points: str, **modules: str) -> None:
        folder = tmp_path / dist
        info = folder / f"{dist}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[shapes.more]", *points, ""]))
        for module, source in modules.items():
            file = folder / f"{module.replace('.', '/')}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(source)
        monkeypatch.syspath_prepend(folder)

    return add


def source(name: str) -> str:
    """A module that registers `name`."""
    return SOURCE.format(requires="").replace("cube", name)


def test_the_catalogue_reads_declarations_without_importing(registry):
    entry = registry.catalogue()["cube"]
    assert (entry.summary, entry.facts, entry.missing) == ("A cube, for tests.", {"sides": 6}, ())
    assert "shapes.cube" not in sys.modules


def test_get_imports_and_attaches_facts_and_name(registry):
    cube = registry.get("cube")
    assert cube.facts == Facts(6) and cube.Config().name == "cube"


def test_a_configuration_is_read_without_an_import_and_stays_the_classs_own(registry):
    declared = registry.get_declared("cube")
    assert "shapes.cube" not in sys.modules and declared.facts == Facts(6) and declared.Config(2).name == "cube"
    cube = registry.get("cube")
    assert cube is not declared and cube.Config is declared.Config and registry.get_declared("cube") is cube


def test_an_inherited_configuration_is_imported(registry, tmp_path):
    head, _, body = source("slab").partition("@SHAPES")
    register, _, rest = body.partition("    @dataclass")
    parent = f"class Base:\n    @dataclass{rest}\n\n@SHAPES"
    (tmp_path / "shapes" / "slab.py").write_text(head + parent + register.replace("class Cube:", "class Slab(Base):"))
    slab = registry.get_declared("slab")
    assert slab is registry.get("slab") and slab.Config().edge == 1 and slab.Config.name == "slab"


def test_a_name_may_be_given_by_its_keyword(registry, tmp_path):
    (tmp_path / "shapes" / "slab.py").write_text(source("slab").replace('register("', 'register(name="'))
    assert registry.catalogue()["slab"].facts == {"sides": 6} and registry.get("slab").Config().edge == 1


def test_an_unfit_configuration_is_refused_by_its_line(registry, tmp_path):
    (tmp_path / "shapes" / "slab.py").write_text(source("slab").replace("    @dataclass(frozen=True)\n", ""))
    with pytest.raises(UsageError, match=r"slab.py:6: the Config of Cube is no dataclass: write @dataclass"):
        registry.get_declared("slab")


def test_a_missing_package_is_named(registry):
    assert registry.catalogue()["ghost"].missing == ("no_such_package",)
    with pytest.raises(UsageError, match="pip install no_such_package"):
        registry.get("ghost")


def test_a_configuration_can_be_read_without_a_missing_package(registry):
    assert registry.get_declared("ghost").Config().name == "ghost"


def test_a_missing_package_is_named_after_its_module_was_imported_too(registry):
    importlib.import_module(registry.catalogue()["ghost"].module)
    with pytest.raises(UsageError, match="pip install no_such_package"):
        registry.get("ghost")


def test_an_unknown_name_suggests_the_nearest(registry):
    with pytest.raises(UsageError, match="unknown shape 'cub': did you mean 'cube'"):
        registry.get("cub")
    with pytest.raises(UsageError, match="choose from cube, ghost"):
        registry.get("sphere")


def test_a_name_can_be_registered_once(registry):
    twin = type("Cube", (registry.get("cube"),), {"__module__": "elsewhere"})
    with pytest.raises(UsageError, match=r"registered twice, by shapes.cube.Cube and elsewhere.Cube: rename one"):
        registry.register("cube", sides=6)(twin)
    with pytest.raises(UsageError, match=r"shape 'ghost' of elsewhere has the name of another shape: rename it"):
        registry.register("ghost", sides=6)(twin)


def test_another_package_adds_a_component(registry, install):
    install("a-solid", "prism = solids.prism", **{"solids.__init__": "", "solids.prism": source("prism")})
    entry = registry.catalogue()["prism"]
    assert (entry.summary, entry.facts, entry.missing) == ("A prism, for tests.", {"sides": 6}, ())
    assert "solids" not in sys.modules and "prism" not in registry.builtins()
    with pytest.raises(UsageError, match="did you mean 'prism'"):
        registry.get("prisma")
    assert registry.get("prism") is registry.get("prism") and registry.get("prism").facts == Facts(6)


def test_a_listed_module_is_not_imported_nor_its_parents(registry, install):
    install("a", "prism = solids.prism", **{"solids.__init__": "1 / 0", "solids.prism": source("prism")})
    assert not registry.catalogue()["prism"].missing


LACKS = {
    "prism = nowhere": "the module nowhere that one names",
    "prism = solids.nowhere": "the module solids.nowhere that one names",
    "prism = solids:Cube": "the module solids:Cube that one names",
    "prism = ": "a declaration that can be read in  of one",
    "prism = solids": "a class registered as 'prism' in solids of one, which registers cone",
    "prism = empty": "a class registered as 'prism' in empty of one$",
    "prism = wrong": "a declaration that can be read in wrong of one .*unexpected keyword argument 'corners'",
    "prism = broken": "a declaration that can be read in broken of one .*line 1",
    "cube = cubes": "a name of its own, as lra and one have a 'cube'",
    "cone = solids": "a name of its own, as one and two have a 'cone'",
}


@pytest.mark.parametrize("point", LACKS)
def test_a_bad_entry_point_is_listed_with_the_reason_and_refused(registry, install, point):
    wrong = source("prism").replace("sides", "corners")
    install("one", point, solids=source("cone"), empty="", wrong=wrong, broken="class", cubes=source("cube"))
    install("two", "cone = cones", cones=source("cone"))
    name = point.partition(" ")[0]
    entry = registry.catalogue()[name]
    (lacks,) = entry.missing
    assert re.match(LACKS[point], lacks) and registry.facts_of(entry).solid
    with pytest.raises(UsageError, match=f"shape '{name}' lacks {LACKS[point].rstrip('$')}.*: rename, mend or remove"):
        registry.get(name)
    assert not registry.catalogue()["cube" if name != "cube" else "cone"].missing


BAD = {
    "class": "a declaration that can be read in shapes/mine.py (invalid syntax (mine.py, line 1))",
    source("mine").replace("sides=6", "sides=SIX"):
        "a declaration that can be read in shapes/mine.py (SIX on line 6 is no literal)",
    source("mine").replace("sides", "corners"):
        "a declaration that can be read in shapes/mine.py (Facts.__init__() got an unexpected keyword argument",
    source("mine").replace("sides=6", 'sides="six"'):
        "a declaration that can be read in shapes/mine.py (sides='six': write a whole number)",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD, ids=["syntax", "literal", "fact", "form"])
def test_a_file_that_cannot_be_read_is_named_and_takes_no_other_component_away(registry, tmp_path, text):
    (tmp_path / "shapes/mine.py").write_text(text)
    entries = registry.catalogue()
    assert list(entries) == ["cube", "ghost", "mine"] and not entries["cube"].missing
    assert registry.facts_of(entries["mine"]).solid and entries["mine"].lacks.startswith(BAD[text])
    assert registry.get("cube").facts == Facts(6)
    with pytest.raises(UsageError, match=f"shape 'mine' lacks {re.escape(BAD[text])}.*: rename, mend or remove"):
        registry.get("mine")
    (tmp_path / "shapes/mine.py").write_text("# mended\n" + source("mine"))
    assert registry.get("mine").facts == Facts(6)


@pytest.mark.parametrize("own", [ATTENTIONS, TASKS], ids=lambda registry: registry.kind)
def test_what_is_here_is_declared_well(own):
    """Other tests leave out what is not to be had."""
    assert not [(entry.name, entry.lacks) for entry in own.builtins().values() if entry.lacks]


@pytest.mark.parametrize("imported", [False, True])
def test_a_copied_file_whose_name_was_not_changed_names_both_files(registry, tmp_path, imported):
    if imported:
        importlib.import_module("shapes.cube")
    (tmp_path / "shapes/z_mine.py").write_text(source("cube"))
    both = "a name of its own, as shapes/cube.py and shapes/z_mine.py have a 'cube'"
    assert registry.catalogue()["cube"].missing == (both,)
    with pytest.raises(UsageError, match=f"shape 'cube' lacks {both}: rename, mend or remove what declares it"):
        registry.get("cube")


def test_an_imported_component_is_no_longer_to_be_had_once_its_name_is_taken(registry, install):
    importlib.import_module("shapes.cube")
    install("one", "cube = cubes", cubes=source("cube"))
    with pytest.raises(UsageError, match="a name of its own"):
        registry.get("cube")
