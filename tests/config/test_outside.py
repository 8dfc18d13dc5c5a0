"""Recipes and tables that lra does not ship: a file named by its path, and one of another installed package."""

from __future__ import annotations

import sys

import pytest
import yaml

from lra.config import recipes
from lra.config.override import parse_overrides
from lra.errors import UsageError
from lra.experiments.grid.grid import read_grid
from lra.models.attention import ATTENTIONS
from lra.training.fit import configure
from lra.training.run_directory import RunDirectory
from tests.command_line import lra as command
from tests.command_line import refused

RECIPE = {
    "about": "mine",
    "tasks": {"listops": {
        "model": {"d_model": 32, "heads": 2}, "trainer": {"steps": 40, "eval_every": 20, "log_every": 10}
    }},
    "start": [{"when": {"pretrain": "none"}, "from": ["pretrain=masked"]}],
}  # fmt: skip
TABLE = {"recipe": "own.yaml", "attns": ["flash"], "columns": {"listops": {"fields": ["task=listops"]}}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a recipe and a table, and a package `outside` that has the same by entry points."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "board.yaml").write_text(yaml.safe_dump(TABLE))
    package = tmp_path / "site" / "outside"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('a list imports nothing')")
    (package / "theirs.yaml").write_text(yaml.safe_dump(RECIPE))
    (package / "league.yaml").write_text(yaml.safe_dump(TABLE | {"recipe": "theirs"}))
    info = tmp_path / "site" / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    points = ["[lra.recipes]", "theirs = outside", "curriculum = outside", "[lra.tables]", "league = outside", ""]
    (info / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    recipes._installed_modules.cache_clear()
    yield tmp_path
    recipes._installed_modules.cache_clear()


def test_a_recipe_is_a_file_and_runs_go_by_its_stem(folder):
    composed = configure(["task=listops", "attn=flash", "recipe=own.yaml"])
    assert composed.config.recipe == "own" and composed.config.model.d_model == 32
    assert RunDirectory(composed).path.name == "own-s0"
    assert composed.start is not None and "recipe=own.yaml" in map(str, composed.start)
    assert composed.config.init == "checkpoints/runs/listops/flash/own+pretrain=masked-s0"
    assert composed.origin["model.d_model"] == "own.yaml listops"


def test_a_table_is_a_file_and_names_the_file_of_its_recipe(folder):
    table = read_grid("board.yaml")
    (cell,) = table.cells()
    assert table.name == "board" and cell.composed.config.recipe == "own" and len(cell.stages) == 1
    planned = command("reproduce", "board.yaml", "--dry-run")
    assert planned.code == 0 and "2 remain to be run" in planned.out
    (folder / "results").mkdir()
    done = command("report", "board.yaml", "results=results", "out=out")
    assert done.code == 0 and (folder / "out" / "board.csv").exists()


def test_a_package_brings_a_recipe_and_a_table(folder):
    assert "theirs" in recipes.recipe_names() and "league" in recipes.config_names("table")
    assert configure(["task=listops", "attn=flash", "recipe=theirs"]).config.recipe == "theirs"
    (cell,) = read_grid("league").cells()
    assert cell.args == parse_overrides(["task=listops", "attn=flash", "recipe=theirs", "seed=0"])
    assert "theirs" in command("ls", "recipes").out and "league" in command("reproduce").out


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("none.yaml", "recipe 'none.yaml' is not there: name a YAML file, or one of amos2024, "),
        ("demo.yaml", "recipe demo.yaml goes by the name 'demo', which another recipe has: rename the file"),
        ("theirz", "unknown recipe 'theirz': did you mean 'theirs'"),
        ("curriculum", "recipe 'curriculum' needs a name of its own, as lra and outside have one"),
        ("broken.yaml", "broken.yaml can't be read: "),
        ("empty.yaml", "empty.yaml has no fields: it is a mapping of names to values"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_one_line(folder, recipe, message):
    (folder / "demo.yaml").write_text(yaml.safe_dump(RECIPE))
    (folder / "broken.yaml").write_bytes(b"a: [")
    (folder / "empty.yaml").touch()
    with pytest.raises(UsageError) as caught:
        configure(["task=listops", "attn=flash", f"recipe={recipe}"])
    assert str(caught.value).startswith(message)


def test_a_table_of_a_missing_recipe_or_file_is_one_line(folder):
    (folder / "board.yaml").write_text(yaml.safe_dump(TABLE | {"recipe": "gone.yaml"}))
    refused(command("reproduce", "board.yaml", "--dry-run"), "board.yaml: recipe 'gone.yaml' is not there")
    refused(command("report", "elsewhere.yaml"), "table 'elsewhere.yaml' is not there")


def test_an_attention_brings_what_recipes_do_not_say_of_it(folder, monkeypatch):
    """What it can't have it does not get, its own section comes next, and the recipe's and the user's fields win."""
    base = ["task=listops", "attn=linear", "recipe=xiong2021"]
    plain = configure(base)
    assert plain.config.model.attn_dropout == 0 and plain.origin["model.attn_dropout"] == "attn=linear"
    shared = {"model": {"d_ff": 96}, "optim": {"lr": 0.5}}
    section = {"all": shared, "listops": {"model": {"d_ff": 48}}, "text": {"seed": 7}}
    monkeypatch.setattr(ATTENTIONS.get("linear"), "recipe_section", section)
    brought = configure([*base, "optim.lr=0.25"]).config
    assert (brought.model.d_ff, brought.optim.lr, brought.seed) == (48, 0.25, 0)
    own = {"tasks": {"listops": {}}, "attns": {"linear": {"all": {"model": {"d_ff": 24}}}}}
    (folder / "own.yaml").write_text(yaml.safe_dump(own))
    assert configure([*base[:2], "recipe=own.yaml"]).config.model.d_ff == 24
