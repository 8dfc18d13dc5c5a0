"""Passes over the training set in place of steps: how many steps they are, and that runs are those of these steps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import lra
from lra.config import recipes
from lra.errors import UsageError
from lra.experiments.grid.stages import list_stages
from lra.tasks.base import TaskData
from lra.training.data_verbs import prepare_store, task_data
from lra.training.fit import configure
from tests.fixtures import write_imdb
from tests.tasks.test_data import TEST, TRAIN
from tests.training.conftest import SMALL
from tests.training.test_faults import same, state
from tests.training.test_fit import interrupt_at
from tests.training.test_ranks import alone

LENGTHS = ("trainer.steps", "trainer.eval_every", "trainer.log_every")
PLAIN = [arg for arg in SMALL if not arg.startswith(LENGTHS)]  # of 100 examples in batches of 8
LISTOPS = ("task=listops", "attn=flash")


def arguments(*args: str) -> list[str]:
    return list({arg.partition("=")[0]: arg for arg in (*PLAIN, *args)}.values())


def lengths(*args: str) -> tuple[int, int, int]:
    found = configure(args).config.trainer
    return found.steps, found.eval_every, found.log_every


@pytest.fixture
def unprepared(monkeypatch):
    """Data may neither be prepared nor read."""
    monkeypatch.setattr(TaskData, "prepare_data", lambda *_, **__: pytest.fail("prepared"))
    monkeypatch.setattr(TaskData, "open", lambda *_: pytest.fail("read"))


@pytest.fixture
def text(here, monkeypatch) -> tuple[str, ...]:
    """The fields of a small run on Text, of 36 training examples in batches of 4. The data are not prepared."""
    monkeypatch.setenv("LRA_DATA", str(here / "data"))
    source = write_imdb(here / "imdb", train=TRAIN, test=TEST)
    kept = [arg for arg in PLAIN if not arg.startswith(("task", "batch"))]
    return (*kept, "task=text", f"task.source={source}", "task.max_length=32", "batch.size=4")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """`recipe(content)` writes the recipe `mine`."""
    folder = tmp_path / "configs"
    shutil.copytree(recipes.CONFIGS_FOLDER, folder)
    monkeypatch.setattr(recipes, "CONFIGS_FOLDER", folder)

    def write(**content: Any) -> str:
        (folder / "recipe/mine.yaml").write_text(yaml.safe_dump({"about": "", "source": "", **content}))
        return "recipe=mine"

    return write


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        (["trainer.epochs=1"], 3000),  # 96,000 examples in batches of 32
        (["trainer.epochs=0.5"], 1500),
        (["trainer.epochs=2.5", "task.train=1000", "batch.size=25"], 100),
        (["trainer.epochs=1.1", "task.train=100", "batch.size=10"], 11),  # 1.1 * 100 is more than 110 in binary
        (["trainer.epochs=0.001", "task.train=10"], 1),
        (["task=pathfinder", "recipe=xiong2021", "trainer.epochs=1", "task.train=1024", "batch.size=128"], 8),
    ],
)
def test_steps_of_a_generated_task_are_known_without_its_data(unprepared, fields, steps):
    given = {arg.partition("=")[0]: arg for arg in (*LISTOPS, *fields)}
    config = configure([*given.values()]).config
    assert config.trainer.steps == steps
    assert steps % config.trainer.eval_every == config.trainer.eval_every % config.trainer.log_every == 0
    saved = config.to_saved_dict()["trainer"]
    assert saved["steps"] == steps and saved["epochs"] == config.trainer.epochs


def test_the_origin_says_that_epochs_were_given(unprepared):
    composed = configure(arguments("trainer.epochs=1"))
    assert (composed.config.trainer.steps, composed.config.trainer.eval_every) == (13, 13), "12.5 batches"
    assert composed.origin["trainer.steps"] == "trainer.epochs" and composed.origin["trainer.epochs"] == "command line"
    assert composed.origin["trainer.eval_every"].endswith("made to divide trainer.steps")


def test_steps_that_nothing_divides_are_a_few_more(unprepared):
    """787 is a prime number, and nothing near 250 and 50 divides the four after it."""
    few = (*LISTOPS, "recipe=demo", "batch.size=1", "task.train=787", "trainer.epochs=1")
    assert lengths(*few) == (792, 198, 33)
    assert lengths(*few, "trainer.eval_every=100", "trainer.log_every=50") == (800, 100, 50)
    with pytest.raises(UsageError, match="trainer.eval_every=500 must divide trainer.steps=787"):
        configure([*few, "trainer.eval_every=500"])  # 1,000 would be many more


def test_the_later_layer_says_how_long(recipe, unprepared):
    mine = recipe(
        defaults={"trainer": {"epochs": 2, "eval_every": 10, "log_every": 5}, "batch": {"size": 10}},
        tasks={"listops": {"task": {"train": 100}}, "pathfinder": {"trainer": {"steps": 50}}},
        attns={"flash": {"pathfinder": {"trainer": {"epochs": 1}}}},
    )
    assert lengths("task=listops", "attn=flash", mine) == (20, 10, 5)
    assert lengths("task=listops", "attn=flash", mine, "trainer.epochs=3") == (30, 10, 5)
    steps = configure(["task=listops", "attn=flash", mine, "trainer.steps=40"]).config.trainer
    assert (steps.steps, steps.epochs) == (40, None)
    assert lengths("task=pathfinder", "attn=standard", mine) == (50, 10, 5)
    assert lengths("task=pathfinder", "attn=flash", mine, "task.train=1000") == (100, 10, 5)
    both = recipe(tasks={"listops": {"trainer": {"epochs": 2, "steps": 50}}})
    with pytest.raises(UsageError, match="recipe/mine.yaml listops: trainer.steps= and trainer.epochs= both say"):
        configure(["task=listops", "attn=flash", both])


def test_a_stage_has_epochs_of_its_own(recipe, unprepared):
    mine = recipe(
        start=[{"when": {"pretrain": "none"}, "from": ["pretrain=masked", "trainer.epochs=4"]}],
        defaults={"trainer": {"steps": 50, "eval_every": 10, "log_every": 5}, "batch": {"size": 10}},
        tasks={"listops": {"task": {"train": 100}}},
    )
    for given, steps in (((), 50), (("trainer.steps=20",), 20), (("trainer.epochs=1",), 10)):
        run = configure([*LISTOPS, mine, *given])
        assert run.config.trainer.steps == steps and configure(run.start or ()).config.trainer.steps == 40
    assert [row[3] for row in list_stages([*LISTOPS, mine])[2]] == ["40", "50"]
    rule = {"when": {"pretrain": "none"}, "from": ["pretrain=masked", "trainer.steps=30"]}
    mine = recipe(
        start=[rule | {"with": {"trainer": {"epochs": 2}}}],
        defaults={"trainer": {"steps": 50, "eval_every": 10, "log_every": 5}, "batch": {"size": 10}},
        tasks={"listops": {"task": {"train": 100}}},
    )
    run = configure([*LISTOPS, mine, "trainer.epochs=3"])
    assert run.config.trainer.steps == 30 and configure(run.start or ()).config.trainer.steps == 30
    assert lengths(*LISTOPS, mine) == (20, 10, 5) and lengths(*LISTOPS, mine, "trainer.steps=60") == (60, 10, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["trainer.epochs=1", "trainer.steps=12"], "command line: trainer.steps= and trainer.epochs= both say"),
        (["trainer.epochs=0"], "trainer.epochs=0.0 must be positive"),
        (["trainer.epochs=inf"], "trainer.epochs=inf: write a finite number"),
        (["trainer.epochs=1e12"], "trainer.steps=.* is too large"),
    ],
)
def test_what_can_not_be_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        configure(arguments(*fields))


def test_a_run_of_epochs_is_the_run_of_its_steps_and_resumes_with_the_same_arguments(here, monkeypatch):
    epochs, shared = "trainer.epochs=1.28", ("trainer.eval_every=4", "trainer.log_every=2", "optim.lr=0.01")
    steps = lra.fit(*arguments("trainer.steps=16", "name=steps", *shared))
    whole = lra.fit(*arguments(epochs, "name=whole", *shared))
    assert whole["steps"] == 16 and whole["config"]["trainer"]["epochs"] == 1.28
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(9, patch)
        lra.fit(*arguments(epochs, "name=parts", *shared))
    parts = lra.fit(*arguments(epochs, "name=parts", *shared, "resume=auto"))
    ends = [state(Path(each["directory"], "last.ckpt")) for each in (steps, whole, parts)]
    assert same(ends[0], ends[1]) and same(ends[1], ends[2])
    assert lra.fit(*arguments(epochs, "name=whole", *shared)) == whole
    longer = lra.fit(*arguments("trainer.epochs=1.6", "name=longer", *shared, f"resume={whole['directory']}/last.ckpt"))
    assert longer["steps"] == 20


def test_imported_data_are_counted(text):
    with pytest.raises(UsageError, match="text is not prepared: .*; run: lra data prepare task=text task.source="):
        configure([*text, "trainer.epochs=2"])
    with pytest.raises(UsageError, match="text is not prepared"):
        list_stages([*text, "trainer.epochs=2"])
    result = lra.fit(*text, "trainer.epochs=2")  # which prepares them
    assert result["steps"] == 18 and lengths(*text, "trainer.epochs=2")[0] == 18
    assert [row[3] for row in list_stages([*text, "trainer.epochs=2"])[2]] == ["18"]
    assert lengths(*text, "task.protocol=lra", "trainer.epochs=2")[0] == 20, "nothing is held out"
    assert lengths(*text, "train_share=0.25", "trainer.epochs=4")[0] == 9
    loaded = torch.load(Path(result["directory"], "last.ckpt"), weights_only=True)
    assert loaded["global_step"] == 18 and lra.load(result["directory"]).run.trainer.epochs == 2


def test_data_are_prepared_for_a_recipe_of_epochs(text, recipe):
    mine = recipe(tasks={"text": {"trainer": {"epochs": 2}, "batch": {"size": 4}}})
    fields = ["task=text", mine, text[-3]]
    assert "is ready" in prepare_store(fields)
    assert len(task_data(fields).open().split("train")) == 40
    assert lengths("task=text", "attn=flash", mine, text[-3])[0] == 18


def test_the_data_of_a_chain_of_runs_are_prepared(text, recipe):
    mine = recipe(
        start=[{"when": {"pretrain": "none"}, "from": ["pretrain=masked", "trainer.epochs=2"]}],
        tasks={"text": {"trainer": {"epochs": 1}}},
    )
    fields = [mine, *(field for field in text if not field.startswith("recipe"))]
    result = lra.fit(*fields, "model.layers=1", "model.heads=2")
    before = json.loads(Path(result["config"]["init"], "result.json").read_text())
    assert (before["steps"], result["steps"]) == (18, 9)


@pytest.mark.slow
def test_two_processes_count_alike(text, here):
    command = [sys.executable, "-m", "lra", "fit", *text, "trainer.epochs=1", "trainer.devices=2", "name=two"]
    run = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=240, env=alone())
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    result = json.loads((here / "checkpoints/runs/text/flash/two-s0/result.json").read_text())
    assert (result["world_size"], result["steps"]) == (2, 9)


def test_a_run_of_steps_says_nothing_of_epochs():
    assert "epochs" not in configure(arguments("trainer.steps=12")).config.to_saved_dict()["trainer"]


def test_a_test_has_no_epochs(here):
    with pytest.raises(UsageError, match="trainer.epochs=3: used only in training"):
        lra.test("init=some", "trainer.epochs=3")
