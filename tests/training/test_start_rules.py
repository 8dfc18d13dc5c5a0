"""Rules of `start` and `start.` fields that can't be: what is said of them, and when."""

from pathlib import Path

import pytest
import yaml

import lra
from lra.errors import UsageError
from tests.composing import composed
from tests.training.conftest import arguments

SMALL = (
    "trainer.accelerator=cpu", "trainer.precision=fp32", "trainer.steps=2", "trainer.eval_every=2",
    "trainer.log_every=1", "batch.size=4", "batch.eval=4", "model.d_model=16", "model.heads=2", "model.layers=1",
    "model.d_ff=16", "optim.warmup=0", "task.train=16", "task.val=4", "task.test=4",
)  # fmt: skip
PATHS = ("attn=flash", "recipe=paths", *SMALL)


@pytest.mark.parametrize(
    ("fields", "message"),
    [(("task=pathfinder", *PATHS, "tokens=lit", "start.data_seed=0", "start.train=64"),
      "validation would be of the examples that .* was trained on"),
     (("task=path64", *PATHS, "positions.scale=image"), "positions.scale=image changes nothing"),
     (("task=path64", *PATHS, "model.positions=learned", "positions.resize=bilinear"), "nothing is resized"),
     (("task=listops", "attn=flash", "recipe=amos2024-demo", "head=kept"), "has no head to keep"),
     (("task=listops", "attn=flash", "recipe=amos2024-demo", "start.model.d_model=32"), "model.d_model 32 here 64"),
     (("task=listops", "attn=flash", "recipe=amos2024-demo", "start.recipe=demo"), "positions learned here rotary"),
     (("task=listops", "attn=linformer", "recipe=amos2024-demo", "start.attn.k=16"), "attention.projections.0 .64, 16"),
     (("task=listops", "attn=s4d", "recipe=amos2024-demo", "start.pretrain=causal"), "attention.output ")],
)  # fmt: skip
def test_what_a_run_can_not_start_from_is_said_before_that_is_trained(fields, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        lra.fit(*fields)
    assert not Path("checkpoints").exists()


def recipe(folder: Path, **rule: object) -> str:
    """A recipe file with one rule for the hard level."""
    hard = {"when": {"task": "pathfinder", "task.level": "hard"}, "from": ["level=easy"]}
    text = {
        "about": "a test", "start": [hard | rule],
        "tasks": {"pathfinder": {"model": {"axes": 2}}},
    }  # fmt: skip
    (folder / "mine.yaml").write_text(yaml.safe_dump(text))
    return f"recipe={folder / 'mine.yaml'}"


def test_fields_of_a_task_need_no_task_before_their_names(tmp_path):
    mine = recipe(tmp_path, **{"from": ["level=", "tokens=lit"]}, when={"task": "pathfinder", "task.level": "easy"})
    given = ("task=pathfinder", "attn=flash", "recipe=paths")
    before = composed(lra.configure((*given, "start.tokens=all", "start.start.level=intermediate")).start or ())
    assert before.config.task.tokens == "all"
    assert composed(before.start or ()).config.task.level == "intermediate"
    stage = lra.configure(("task=pathfinder", "attn=flash", mine, "tokens=all", "level=easy")).start or ()
    assert "task.tokens=lit" in map(str, stage) and not any("level" in str(each) for each in stage)


@pytest.mark.parametrize(
    ("rule", "message"),
    [({"from": ["task.lvel="]}, "from of a rule of start: task.lvel= drops a field that this run does not have"),
     ({"from": ["level=easy", "task.level=easy"]}, "from of a rule of start: task.level= is given twice"),
     ({"from": ["level=easy", "resume=auto"]}, "a run before this one always goes on, leave it out"),
     ({"with": {"init": "other"}}, "with of a rule of start: init is what it starts from, leave it out"),
     ({"with": {"recipe": "other"}}, "with of a rule of start: recipe is")],
)  # fmt: skip
def test_a_rule_that_would_do_nothing_is_refused(rule, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        lra.configure(("task=pathfinder", "attn=flash", recipe(tmp_path, **rule)))


def test_a_stage_always_goes_on():
    with pytest.raises(UsageError, match="^start.resume=: a run before this one always goes on, leave it out"):
        lra.configure(("task=pathfinder", "attn=flash", "recipe=paths", "start.resume=auto"))


def test_a_rule_knows_a_recipe_by_the_name_of_its_file(tmp_path):
    mine = recipe(tmp_path, when={"task": "pathfinder", "task.level": "hard", "recipe": "mine"})
    assert lra.configure(("task=pathfinder", "attn=flash", mine)).start
    other = recipe(tmp_path, when={"task": "pathfinder", "task.level": "hard", "recipe": "paths"})
    assert lra.configure(("task=pathfinder", "attn=flash", other)).start is None


@pytest.mark.parametrize("fields", [("train=80000",), ("tokens=lit",)])
def test_paths_has_the_same_stages_for_other_images_of_the_task(fields):
    plain = lra.configure(("task=pathfinder", "attn=flash", "recipe=paths"))
    other = lra.configure(("task=pathfinder", "attn=flash", "recipe=paths", *fields))
    assert (other.config.init, other.config.trainer.steps) == (plain.config.init, plain.config.trainer.steps)


def test_paths_starts_mixers_learned_positions_and_lras_own_images(tmp_path):
    s4d = lra.configure(("task=path64", "attn=s4d", "recipe=paths", "task.tokens=lit"))
    assert s4d.start and s4d.config.positions.scale is None
    learned = lra.configure(("task=path64", "attn=flash", "recipe=paths", "task.tokens=lit", "model.positions=learned"))
    assert learned.start and learned.config.positions.resize is None
    imported = lra.configure(("task=pathfinder", "attn=flash", "recipe=paths", f"task.source={tmp_path}"))
    assert composed(imported.start or ()).config.task.source == "generate"


def test_weights_of_a_recipe_that_is_not_here_need_one(small, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump({"about": "a test", "tasks": {"listops": {}}, "attns": {}}))
    fields = [each for each in arguments("name=first", "task.min_length=8") if not each.startswith("recipe=")]
    result = lra.fit(*fields, f"recipe={mine}")
    mine.unlink()
    with pytest.raises(UsageError, match="was trained by recipe mine, and none of that name can be read here: give r"):
        lra.configure([*fields, f"init={result['directory']}"])


def test_a_checkpoint_is_offered_for_what_it_can_do(small):
    small("name=mine")
    with pytest.raises(UsageError, match=r"choose another name=, with init=.*last.ckpt to start from it"):
        small("name=mine", "optim.lr=0.5")
    with pytest.raises(UsageError, match=r"choose another name=, with resume=.*last.ckpt to go on from it"):
        small("name=mine", "trainer.steps=8")
