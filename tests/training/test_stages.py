"""Recipes that start a run from another one: what that one is given, and that it is trained first, once."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import lra
from lra.config import compose, recipes
from lra.config.override import parse_overrides
from lra.errors import UsageError
from lra.experiments.accuracy import parse_fields
from lra.experiments.grid import cells
from lra.experiments.grid.cells import with_stages
from lra.experiments.grid.grid import read_grid
from lra.experiments.grid.local_launcher import LocalLauncher
from lra.tasks import TASKS
from lra.tasks.base import TaskData
from lra.training.narrator import Narrator
from lra.training.run_directory import claim_directory
from tests.composing import composed
from tests.experiments.runs import made, stub
from tests.training.conftest import arguments

TINY = (
    "recipe=curriculum", "attn=flash", "trainer.accelerator=cpu", "trainer.precision=fp32", "trainer.steps=4",
    "trainer.eval_every=2", "trainer.log_every=1", "batch.size=4", "batch.eval=4", "model.d_model=64",
    "model.layers=1", "task.train=16", "task.val=4", "task.test=4", "task.tokens=lit",
)  # fmt: skip
RUNS = Path("checkpoints/runs/pathfinder/flash")


def starts(*args: str) -> list[tuple[str, ...]]:
    """The arguments of the runs before one, the last of them first."""
    found, last = [], lra.configure(args)
    while last.start:
        found.append(tuple(map(str, last.start)))
        assert last.config.init and last.origin["init"].startswith("recipe/")
        last = composed(last.start)
    assert last.config.init is None
    return found


def levels(*args: str) -> list[str]:
    return [composed(start).config.task.level for start in starts(*args)]


def test_a_recipe_says_where_a_run_starts():
    assert levels("task=pathfinder", *TINY) == ["intermediate", "easy"]
    assert levels("task=pathfinder", *TINY, "task.level=intermediate") == ["easy"]
    dense = [arg for arg in TINY if arg != "task.tokens=lit"]
    chain = [composed(start).config.task for start in starts("task=pathx", *dense)]
    named = [(task.name, task.tokens, task.level) for task in chain]
    assert named == [
        ("pathx", "lit", "hard"), ("pathx", "lit", "intermediate"), ("pathx", "lit", "easy"),
        ("pathfinder", "lit", "hard"), ("pathfinder", "lit", "intermediate"), ("pathfinder", "lit", "easy"),
    ]  # fmt: skip


def test_arguments_are_handed_on_but_for_a_runs_own():
    given = ("task=pathfinder", *TINY, "seed=3", "name=mine", "head=fresh")
    before = lra.configure(lra.configure(given).start or ())
    assert (before.config.seed, before.config.name, before.config.head) == (3, None, None)
    assert before.config.trainer.steps == 4 and before.config.model.d_model == 64
    middle, short = starts("task=listops", "attn=flash", "recipe=curriculum", "trainer.steps=1500")
    assert lra.configure(middle).config.trainer.steps == 1500
    assert lra.configure(short).config.trainer.steps == 6000, "a rule's own arguments come last"


@pytest.mark.parametrize(("task", "steps"), [("path64", 4000), ("pathx", 2000)])
def test_other_attentions_start_from_what_flash_has_learned(task, steps):
    chosen = (f"task={task}", "attn=butterfly", "recipe=curriculum", "task.tokens=lit", "attn.local=2")
    before = composed(starts(*chosen)[0]).config
    assert (before.task.name, before.task.level, before.attn.name) == (task, "hard", "flash")
    assert lra.configure(chosen).config.trainer.steps == steps
    assert lra.configure([*chosen, "attn.deterministic=true"]).start == lra.configure(chosen).start, "its own options"


def test_the_background_comes_by_thirds():
    given = ("task=path256", "attn=butterfly", "recipe=curriculum")
    chain = [composed(start).config for start in starts(*given)][:4]
    assert [(run.attn.name, run.task.background) for run in chain] == [
        ("butterfly", 0.3), ("flash", 0.1), ("flash", 0.03), ("flash", 0.0),
    ]  # fmt: skip
    assert all(run.task.tokens == "lit" for run in chain)
    assert [run.task.protocol for run in chain[2:]] == ["hard, lit tokens and 3% of the others", "hard, lit tokens"]
    flash, other, reformer = (
        starts("task=path256", f"attn={attn}", "recipe=curriculum") for attn in ("flash", "smyrf", "reformer")
    )
    assert other == flash and composed(flash[0]).config.task.background == 0.3, "the same start"
    assert composed(reformer[0]).config.task.background == 0, "of its own, as it shares queries and keys"
    kept = [run.to_saved_dict()["task"].get("background") for run in chain]
    assert kept == [0.3, 0.1, 0.03, None], "older runs are not of another configuration"


def test_a_rule_can_leave_out_what_was_given():
    easy, small = starts("task=pathx", "attn=flash", "recipe=curriculum", "task.tokens=lit")[1:3]
    assert "task.level=easy" in easy and lra.configure(easy).config.positions.scale == "image"
    assert small == starts("task=path64", "attn=flash", "recipe=curriculum", "task.tokens=lit")[0]


def test_only_the_last_run_reads_lras_own_expressions():
    generated = ("task=listops", "attn=flash", "recipe=curriculum")
    imported = (*generated, "task.source=release")
    assert lra.configure(imported).config.task.source == "release"
    assert starts(*imported) == starts(*generated) and len(starts(*imported)) == 2, "the same stages, trained once"
    middle, short = starts(*generated)
    assert starts(*middle, "task.source=release") == [short]


def test_a_rule_has_fields_for_the_run_that_it_applies_to():
    chosen = ("task=path64", "attn=flash", "recipe=curriculum")
    run = lra.configure(chosen)
    assert (run.config.trainer.steps, run.config.positions.scale) == (2000, None)
    assert run.origin["trainer.steps"] == "recipe/curriculum.yaml start"
    before = lra.configure(run.start or ())
    assert (before.config.trainer.steps, before.config.positions.scale) == (8000, "image")
    assert lra.configure([*chosen, "trainer.steps=1500"]).config.trainer.steps == 1500, "what is given counts"
    assert lra.configure([*chosen, "init=other"]).config.trainer.steps == 8000, "no rule applies"


def test_init_given_or_none_ends_the_chain():
    assert lra.configure(["task=pathfinder", *TINY, "init=null"]).start is None
    run = lra.configure(["task=pathfinder", *TINY, "init=other"])
    assert run.start is None and run.config.init == "other"


@pytest.mark.parametrize("recipe", recipes.recipe_names())
def test_every_rule_can_apply(recipe):
    found = recipes.read_recipe(recipe)
    for rule in found.get("start") or ():
        assert {"when", "from"} <= set(rule) <= {"when", "from", "with"}
        task = rule["when"].get("task", "listops")
        fields = dict(compose.flatten(compose.to_dict(TASKS.get(task).Config())))
        # rules for all tokens and for the default number of images come first
        when = {"task.tokens": "lit", "task.train": "1000"} if "tokens" in fields else {}
        named = {each["when"].get("model.positions") for each in found["start"]}
        if named != {None}:  # and those for some positions
            when["model.positions"] = next(it for it in ("learned", "rotary") if it not in named)
        # and those of one attention before the one for all: sdpa has none of its own
        given = [f"{name}={value}" for name, value in ({"task": task, "attn": "sdpa"} | when | rule["when"]).items()]
        run = composed((f"recipe={recipe}", *given))
        dropped = {text for text in rule["from"] if text.endswith("=")}
        assert run.start and set(rule["from"]) - dropped <= set(map(str, run.start))
        assert not any(f"{override.field}=" in dropped for override in run.start)
        ours = {field for field, origin in run.origin.items() if origin.endswith("start")}
        assert ours == {"init", *dict(compose.flatten(rule.get("with") or {}))}
        assert all(name.removeprefix("task.") in fields for name in rule["when"] if name.startswith("task."))


def test_what_comes_before_is_trained_first_and_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = lra.fit("task=pathfinder", *TINY)
    runs = sorted(RUNS.iterdir())
    assert len(runs) == 3 and Path(result["directory"]) in runs
    before = lra.configure(("task=pathfinder", *TINY)).config.init
    assert result["config"]["init"] == before and Path(before) in runs
    assert result["transfer"]["task"] == "pathfinder@2"
    stamps = {run: (run / "result.json").stat().st_mtime_ns for run in runs}
    again = lra.fit("task=pathfinder", *TINY)
    assert again == json.loads((Path(result["directory"]) / "result.json").read_text())
    other = lra.fit("task=pathfinder", *TINY, "optim.lr=1e-3", "name=other", "init=" + str(runs[0]))
    assert other["status"] == "finished"
    assert stamps == {run: (run / "result.json").stat().st_mtime_ns for run in runs}


def test_a_stage_that_another_process_trains_is_to_be_waited_for(tmp_path, monkeypatch):
    """However many runs lie between."""
    monkeypatch.chdir(tmp_path)
    args = ("task=pathfinder", *TINY)
    easy = Path(lra.configure((*args, "task.level=intermediate")).config.init or "")
    held = claim_directory(easy)
    assert held is not None
    with pytest.raises(UsageError) as error:
        lra.fit(*args, "name=mine")
    assert str(error.value) == (
        f"another process works in {easy}, a run before this one: wait for it, then give the same command again; or "
        "start.start.name= trains one of your own"
    )
    composed = lra.configure((*args, "name=mine", "start.start.name=own"))
    own = Path(lra.configure(composed.start or ()).config.init or "")
    assert own.name == "own-s0" and own.parent == easy.parent
    os.close(held)


def test_what_is_said_of_a_stage_is_said_to_be_of_it(tmp_path, monkeypatch):
    """Once, however many runs lie between."""
    monkeypatch.chdir(tmp_path)
    args = ("task=pathfinder", *TINY)
    easy = Path(lra.configure((*args, "task.level=intermediate")).config.init or "")
    easy.mkdir(parents=True)
    (easy / "result.json").write_text("{")
    with pytest.raises(UsageError) as error:
        lra.fit(*args, "name=mine")
    said = str(error.value)
    assert str(easy) in said and said.count("(a run before this one: init=null leaves it out, name= does not") == 1


@pytest.mark.parametrize(
    ("last", "message"), [(False, "holds an unfinished run: add resume=auto"), (True, "has worked")]
)
def test_a_run_that_another_process_began_meanwhile_is_not_begun_anew(small, monkeypatch, last, message):
    """Data may take hours to prepare, as do the runs before it."""
    prepare, run = TaskData.prepare_data, Path("checkpoints/runs/listops/flash/mine-s0")

    def meanwhile(*args, **options):
        prepare(*args, **options)
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump(lra.configure(arguments("name=mine")).config.to_saved_dict()))
        if last:
            (run / "last.ckpt").touch()

    monkeypatch.setattr(TaskData, "prepare_data", meanwhile)
    with pytest.raises(UsageError, match=message):
        small("name=mine", *(["resume=auto"] if last else []))
    assert not (run / "result.json").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [(("task=path64", "attn=cudnn", "task.tokens=lit"), "attn=cudnn"),  # its stages have attn=flash
     (("task=listops", "attn=flash", "task.source=nowhere"), "nowhere")],
)  # fmt: skip
def test_what_is_refused_of_a_run_is_refused_before_its_stages(fields, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        lra.fit(*fields, "recipe=curriculum", "trainer.accelerator=cpu", "trainer.precision=fp32")
    assert not Path("checkpoints").exists()


SELF_TAUGHT = (
    "recipe=amos2024-demo", "trainer.accelerator=cpu", "trainer.steps=4", "trainer.eval_every=2", "batch.size=4",
    "batch.eval=4", "model.d_model=32", "model.layers=1", "task.train=16", "task.val=8", "task.test=8", "task.fresh=8",
)  # fmt: skip


def test_a_recipe_pretrains_before_it_fine_tunes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = lra.fit("task=listops", "attn=flash", *SELF_TAUGHT)
    before, after = result["config"]["init"], result["directory"]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoints/")]
    runs = [f"{before}: 4 steps, then the test", f"{after}: 4 steps, then the test"]
    assert said == [f"{after}: the run that it starts from is trained first", *runs]
    lra.fit("task=listops", "attn=flash", *SELF_TAUGHT, "name=again")
    again = f"{Path(after).with_name('again-s0')}: 4 steps, then the test"
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoints/")] == [again]
    (stage,) = starts("task=listops", "attn=flash", *SELF_TAUGHT)
    first = lra.fit(*stage)  # which prints what was trained, as it is done
    assert "pretrain=masked" in stage and first["pretrain"] == "masked" and "pretrain" not in result
    assert result["transfer"]["fresh"] == ["head"] and first["status"] == result["status"] == "finished"


def test_the_cost_of_the_whole_chain_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Narrator, "PROBE", 1)
    lra.fit("task=listops", "attn=flash", *SELF_TAUGHT, "trainer.log_every=1")
    first, last = (line for line in capsys.readouterr().out.splitlines() if line.startswith("expect "))
    assert "; then another run of 4 steps in all, " in first and "; then" not in last


def test_a_recipe_augments_and_lowers_the_rate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("recipe=miralles2025-demo", *SELF_TAUGHT[1:])
    result = lra.fit("task=listops", "attn=flash", *small)
    config = result["config"]
    assert config["augment"] == {"operands": True} and config["optim"]["schedule"] == "plateau"
    assert result["status"] == "finished" and result["transfer"] is None


def test_a_grid_pretrains_in_a_stage_and_refuses_a_cell_that_pretrains():
    fields = parse_overrides(SELF_TAUGHT[1:])
    cells = with_stages(read_grid("table3").cells(["listops"], ["flash", "standard"], 1, "amos2024-demo", fields))
    assert [cell.composed.config.pretrain for cell in cells] == ["masked", "none"] * 2
    with pytest.raises(UsageError, match="pretrain=masked scores tokens"):
        parse_fields("table3", ["tasks=listops", "recipe=amos2024-demo", "pretrain=masked"])


@pytest.mark.slow
def test_a_grid_runs_stages_first_and_none_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = [arg for arg in TINY if not arg.startswith(("recipe=", "attn=", "task.tokens="))]
    asked = read_grid("table3").cells(["pathfinder-lit"], ["flash"], 1, "curriculum", fields)
    todo = with_stages(asked)
    assert [cell.column for cell in todo] == ["pathfinder-lit stage 1", "pathfinder-lit stage 2", "pathfinder-lit"]
    assert with_stages(todo) == todo, "a stage that is asked for is no other cell"
    order: list[str] = []

    def watch(states):
        order.extend(
            cell.column for cell, state in states.items() if state.status == "done" and cell.column not in order
        )

    states = LocalLauncher(todo, [None, None], watch).work()
    assert {state.status for state in states.values()} == {"done"}
    assert order == [cell.column for cell in todo]


def test_what_comes_before_a_finished_stage_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = read_grid("table3").cells(["pathfinder-lit"], ["flash"], 1, "curriculum")
    first, second, last = with_stages(asked)
    made(second, "finished")
    assert with_stages(asked) == [second, last]
    made(last, "finished")
    assert with_stages(asked) == [last]
    assert with_stages([*asked, first]) == [last, first], "unless it is asked for"


def test_a_run_that_goes_on_needs_no_stage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = read_grid("table3").cells(["pathfinder-lit"], ["flash"], 1, "curriculum")
    first, second, last = with_stages(asked)
    made(last, "finished")
    (last.directory.path / "result.json").unlink()
    assert with_stages(asked) == [first, second, last], "it starts over"
    held = claim_directory(last.directory.path)
    assert held is not None and with_stages(asked) == [last], "another process has started it"
    os.close(held)
    last.directory.last.touch()
    assert with_stages(asked) == [last]
    assert with_stages(asked, begun=lambda cell: False) == [first, second, last]
    made(second, "failed")
    (second.directory.path / "failed.json").touch()  # for the second time: nothing can start from it any more
    todo = [second, last]
    states = LocalLauncher(todo, [None], command=stub(todo, "finish")).work()
    assert [states[cell].status for cell in todo] == ["failed", "done"]


def test_a_run_of_another_process_is_waited_for_whatever_became_of_its_stage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, second, last = with_stages(read_grid("table3").cells(["pathfinder-lit"], ["flash"], 1, "curriculum"))
    made(second, "failed")
    (second.directory.path / "failed.json").touch()
    held = claim_directory(last.directory.path)
    assert held is not None

    def end() -> None:
        made(last, "finished")
        os.close(held)

    threading.Timer(0.3, end).start()
    assert LocalLauncher([second, last], [None]).work()[last].status == "done"


def test_a_stage_that_fails_leaves_the_rest_undone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    todo = with_stages(read_grid("table3").cells(["pathfinder-lit"], ["flash"], 1, "curriculum"))
    states = LocalLauncher(todo, [None], command=[sys.executable, "-c", "raise SystemExit(1)"]).work()
    assert [cells.cell_state(cell).status for cell in todo] == ["open"] * 3 and not states[todo[2]].final


@pytest.mark.slow
def test_two_devices_go_through_the_stages_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = [sys.executable, "-m", "lra", "fit", "task=pathfinder", *TINY, "trainer.devices=2"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(list(RUNS.glob("*/result.json"))) == 3


@pytest.mark.slow
def test_the_stages_of_dao2022_go_through(tmp_path, monkeypatch):
    """One epoch of its 200, of few images."""
    monkeypatch.chdir(tmp_path)
    changed = (
        "recipe=dao2022",
        "attn=linear",
        "batch.size=2",
        "batch.eval=2",
        "task.train=8",
        "task.val=2",
        "task.test=2",
    )
    few = {arg.partition("=")[0]: arg for arg in (*TINY, *changed) if not arg.startswith("task.tokens=")}
    result = lra.fit("task=pathx", *few.values(), "optim.warmup=1")
    first, small = Path("checkpoints/runs/pathx/linear/dao2022-first-s0"), Path("checkpoints/runs/path64/linear")
    assert Path(result["config"]["init"]) == first and result["transfer"]["resized"] is None
    before = json.loads((first / "result.json").read_text())
    assert Path(before["config"]["init"]).parent == small and before["transfer"]["task"] == "path64@2"
    assert before["transfer"]["resized"] == "gridwise, 64x64 pixels to 128x128 pixels"
    assert {run["status"] for run in (result, before)} == {"finished"}
    larger = lra.configure(["task=path256", *few.values(), "optim.warmup=1"])
    assert Path(larger.config.init or "").parent == small and larger.config.positions.resize == "gridwise"
