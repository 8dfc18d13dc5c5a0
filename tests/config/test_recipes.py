"""Recipes and tasks' YAML files that are broken, and chains of runs that never end: one line, and no other one lost."""

from __future__ import annotations

import re
import shutil

import pytest
import yaml

from lra.config import compose as composing
from lra.config import recipes
from lra.config.start_rules import MAX_STAGES
from lra.errors import UsageError
from lra.training.data_verbs import task_data
from lra.training.fit import configure
from lra.training.run_directory import RunDirectory
from tests.command_line import lra, refused

BASE = ("task=listops", "attn=flash", "recipe=mine")
BROKEN = {
    "an alias to itself": b"about: x\ntasks: &a {listops: *a}",
    "nested": b"tasks: " + b"[" * 5000,
    "digits": b"tasks: {listops: {seed: " + b"9" * 5000 + b"}}",
    "hex digits": b"tasks: {listops: {seed: 0x" + b"f" * 5000 + b"}}",
    "a key twice": b"about: x\nabout: y",
    "an about of numbers": b"about: 5",
    "an about of a list": b"about: [1]",
    "sections by numbers": b"5: x\ntasks: {}",
    "UTF-16": "about: x".encode("utf-16"),
    "escape codes": b"about: \x1b[2J",
    "empty": b"",
    "large": b"about: " + b"x" * 300_000,
}


@pytest.fixture(autouse=True)
def configs(tmp_path, monkeypatch):
    """The shipped files, to be added to."""
    shutil.copytree(recipes.CONFIGS_FOLDER, tmp_path / "configs")
    monkeypatch.setattr(recipes, "CONFIGS_FOLDER", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "configs"


def write(configs, start, **more):
    recipe = {"about": "mine", "tasks": {"listops": {}, "text": {}}, "start": start} | more
    (configs / "recipe/mine.yaml").write_text(yaml.safe_dump(recipe))


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_recipe_is_one_line_and_takes_no_other_away(configs, content):
    (configs / "recipe/mine.yaml").write_bytes(content)
    refused(lra("config", "show", *BASE), "recipe/mine.yaml")
    done = lra("ls", "recipes")
    assert done.code == 0 and {"demo", "mine", "xiong2021"} <= {row[0] for row in done.rows}
    assert "\x1b" not in done.out


def test_a_folder_or_a_dead_link_with_the_name_of_a_recipe(configs):
    (configs / "recipe/folder.yaml").mkdir()
    (configs / "recipe/dead.yaml").symlink_to("nowhere")
    assert {"demo", "dead", "folder"} <= {row[0] for row in lra("ls", "recipes").rows}
    refused(lra("config", "show", *BASE[:2], "recipe=dead"), "recipe/dead.yaml can't be read: No such file")


def test_tasks_and_texts_that_yaml_reads_as_something_else_are_listed(configs):
    (configs / "recipe/mine.yaml").write_text("about: 2026-01-02\ntasks: {5: {}, true: {}}")
    rows = {row[0]: row[1:] for row in lra("ls", "recipes").rows}
    assert rows["mine"] == ["5 True", "2026-01-02"]


@pytest.mark.parametrize(
    "start",
    [
        [{"when": {"task": "listops"}, "from": []}],
        [{"when": {"task": "listops"}, "from": ["batch.size=8"]}],
        [{"when": {"task": "listops"}, "from": ["task=text"]}, {"when": {"task": "text"}, "from": ["task=listops"]}],
        [{"when": {}, "from": ["seed=3"]}],
    ],
)
def test_a_recipe_that_starts_from_itself_is_refused(configs, start):
    write(configs, start)
    line = refused(lra("fit", *BASE), "recipe/mine.yaml: by the rules of start, the run of .* starts from itself")
    assert composing.START_MEND in line
    assert configure([*BASE, "init=null"]).start is None
    refused(lra("reproduce", "table3", "tasks=listops", "recipe=mine", "--dry-run"), "starts from itself")


def test_a_chain_that_is_too_long_is_refused(configs):
    steps = [{"when": {"batch.size": n}, "from": [f"batch.size={n + 1}"]} for n in range(1, 400)]
    write(configs, steps)
    with pytest.raises(UsageError, match=f"recipe/mine.yaml: .* has more than {MAX_STAGES} runs after it"):
        configure([*BASE, "batch.size=1"])
    assert configure([*BASE, "batch.size=395"]).start


def test_a_field_of_the_run_before_is_of_that_run_alone(configs):
    write(configs, [{"when": {"pretrain": "none"}, "from": ["pretrain=masked", "trainer.steps=40", "optim.lr=1e-3"]}])
    fields = ["start.trainer.epochs=2", "start.mask=0.3", "start.optim.lr=5e-4"]
    made = configure([*BASE, "batch.size=8", *fields])
    before = configure(made.start or ())
    assert made.config.mask is None and (before.config.mask, before.config.optim.lr) == (0.3, 5e-4)
    assert before.origin["trainer.steps"] == "trainer.epochs" and before.config.batch.size == 8
    directory = RunDirectory(made)  # another stage is another run
    assert all(field in directory.path.name for field in fields)
    assert directory.path != RunDirectory(configure([*BASE, "batch.size=8"])).path
    assert made.config.init != configure([*BASE, "batch.size=8"]).config.init
    for args, said in (
        (["init=null"], "start.mask=0.3 is of a run before this one, and recipe/mine.yaml starts this one from none"),
        (["pretrain=masked"], "start.mask=0.3 is of a run before this one"),
        (["start.pretrian=causal"], "unknown field 'pretrian': did you mean 'pretrain'"),
        (["start.mask=2"], "start.mask= is given twice"),
        (["mask=0.3"], "mask=0.3 says how tokens are hidden"),
        (["start.start.mask=0.3"], "start.mask=0.3 is of a run before this one"),
    ):
        refused(lra("fit", *BASE, "start.mask=0.3", *args), re.escape(said))


@pytest.mark.parametrize(("rule", "what"), [([5], "5, and must be a text"), ([{"a": 1}], "{'a': 1}, and must be")])
def test_what_a_start_changes_is_text(configs, rule, what):
    write(configs, [{"when": {}, "from": rule}])
    with pytest.raises(UsageError, match="recipe/mine.yaml: what a rule of start has in from is"):
        configure(BASE)


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "???", ["${seed}", 0.9], 10**400, "x" * 5000, [[1]]], ids=str)
def test_a_value_that_is_none_names_its_file(configs, value):
    if isinstance(value, int):
        value = float("inf")
    write(configs, [], defaults={"optim": {"betas": value}})
    with pytest.raises(UsageError, match=r"recipe/mine.yaml: optim.betas=") as error:
        configure(BASE)
    assert len(str(error.value)) < 250


def test_a_task_without_its_yaml_needs_a_recipe(configs):
    (configs / "task/listops.yaml").unlink()
    write(configs, [])
    (configs / "recipe/broken.yaml").write_bytes(b"a: [")
    refused(
        lra("config", "show", *BASE[:2]),
        r"'listops' names no default recipe: give recipe=amos2024[|]amos2024-demo[|][^ ]*[|]mine[|][^ ]*[|]xiong2021$",
    )
    assert not {"broken", "paths"} & set(recipes.recipes_of("listops"))
    assert lra("config", "show", *BASE[:2], "recipe=demo").code == 0
    write(configs, [], tasks={"text": {}})
    refused(
        lra("config", "show", *BASE), "no section for task 'listops': .* add listops to the tasks in recipe/mine.yaml"
    )


@pytest.mark.parametrize(("given", "named"), [("demo", "demo"), ("own.yaml", "amos2024")])
def test_the_command_that_prepares_a_task_without_its_yaml_has_a_recipe(configs, given, named):
    write(configs, [])
    (configs / "recipe/mine.yaml").rename("own.yaml")
    data = task_data(["task=listops", "task.fresh=9", f"recipe={given}"])
    command = data.command()
    assert command.startswith("lra data prepare task=listops ") and "recipe=" not in command
    (configs / "task/listops.yaml").unlink()
    assert data.command() == f"{command} recipe={named}"


def test_a_task_that_no_recipe_covers_needs_a_file(configs):
    (configs / "task/listops.yaml").unlink()
    for file in (configs / "recipe").iterdir():
        file.unlink()
    refused(lra("config", "show", *BASE[:2]), "give recipe=<file>.yaml, which has listops among its tasks$")


@pytest.mark.parametrize("content", [b"[" * 5000, b"- recipe", b"recipe: \xff", b"recipe: a\nrecipe: b"])
def test_a_broken_yaml_of_a_task_names_its_file(configs, content):
    (configs / "task/listops.yaml").write_bytes(content)
    refused(lra("config", "show", *BASE[:2]), "^lra: task/listops.yaml")
