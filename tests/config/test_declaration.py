"""The configurations of components are made from their sources, and are those that an import finds."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from lra.config.declaration import declare_component
from lra.config.fields import describe_fields
from lra.config.registry import CatalogueEntry, Registry
from lra.config.sources import find_source
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from tests.command_line import ROOT

OWN = [
    pytest.param(registry, entry, id=entry.name)
    for registry in (TASKS, ATTENTIONS)
    for entry in registry.builtins().values()
]
SOURCE = """import math
import nowhere
from os import path, missing

LIMIT = 2

class Base(nowhere.Module):
    class Config:
        inherited: int = 1

class Solid(Base):
    recipe_section = {"all": {"model": {"layers": 2}}}
    drawn = nowhere.draw()

    class Config:
        edge: float = math.sqrt(9)

        def name(self, value: nowhere.Type) -> nowhere.Type:
            return path.basename(value)

class Heir(Base):
    pass

class Limited(Base):
    class Config:
        edge: int = LIMIT
"""

DUMPS = """
import copy, dataclasses, pickle, sys
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
made = [registry.get_declared(name).Config() for registry in (ATTENTIONS, TASKS) for name in registry.builtins()]
assert copy.deepcopy(made) == made
pickle.dump((made, [*map(dataclasses.asdict, made)]), open(sys.argv[1], "wb"))
"""
LOADS = """
import dataclasses, pickle, sys
made, values = pickle.load(open(sys.argv[1], "rb"))
assert [*map(dataclasses.asdict, made)] == values and all(config.name for config in made)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(("registry", "entry"), OWN)
def test_a_config_from_its_source_is_the_one_that_an_import_finds(registry: Registry, entry: CatalogueEntry):
    cls, file = registry.get_declared(entry.name), find_source(entry.module)
    assert file is not None
    alone = declare_component(file, entry.module, entry.class_name)
    assert alone is not None, "it needs a Config of its own, as another's is found by an import"
    module = __import__(entry.module, fromlist=[entry.class_name])
    assert vars(module)[entry.class_name].Config is registry.get_declared(entry.name).Config, "one for each process"
    assert getattr(alone, "recipe_section", {}) == getattr(cls, "recipe_section", {})
    assert typing.get_type_hints(alone.Config) == typing.get_type_hints(cls.Config)
    assert dataclasses.asdict(alone.Config()) == dataclasses.asdict(cls.Config())
    assert [*describe_fields(alone.Config())] == [*describe_fields(cls.Config())]


def test_no_config_of_lras_own_imports_torch():
    program = (
        "import sys; from lra.models.attention import ATTENTIONS; from lra.tasks import TASKS\n"
        "for registry in (ATTENTIONS, TASKS):\n"
        "    for name in registry.builtins():\n"
        "        registry.get_declared(name).Config()\n"
        "        assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_another_process_unpickles_every_config_without_torch(tmp_path: Path):
    for program in (DUMPS, LOADS):
        command = [sys.executable, "-c", program, str(tmp_path / "configs")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_config_runs_with_its_imports_alone(tmp_path: Path):
    file = tmp_path / "solid.py"
    file.write_text(SOURCE)
    solid = declare_component(file, "solid", "Solid")
    assert solid is not None and solid.__mro__[1:] == (object,)
    assert (solid.Config.edge, solid.Config().name("a/b"), solid.Config.__qualname__) == (3.0, "b", "Solid.Config")
    assert solid.recipe_section == {"all": {"model": {"layers": 2}}} and not hasattr(solid, "drawn")
    there = {name for name in vars(sys.modules[solid.__module__]) if not name.startswith("__")}
    assert there == {"math", "path", "Solid"}


@pytest.mark.parametrize("name", ["Heir", "Limited"])
def test_a_config_that_needs_its_module_is_left_to_an_import(tmp_path: Path, name: str):
    file = tmp_path / "solid.py"
    file.write_text(SOURCE)
    assert declare_component(file, "solid", name) is None
