"""Runs, stores and weights of pathfinder@1 stay what they were, beside those of pathfinder@2."""

from pathlib import Path

import pytest

import lra
from lra.errors import UsageError
from lra.tasks import TASKS, task_version, versioned_name
from lra.training.data_verbs import task_data
from lra.training.fit import configure
from lra.training.run_directory import RunDirectory, read_config
from tests.training.test_transfer import FEW, MODEL, STEPS

RUN = ("task=pathfinder", "attn=flash", *MODEL, *FEW, *STEPS)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The directory of a finished run of pathfinder@1, below a folder of its own."""
    folder = tmp_path_factory.mktemp("old")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder / lra.fit(*RUN, "task.version=1", "name=run")["directory"]


def test_a_run_of_version_1_is_as_it_was(old):
    config = read_config(old / "config.yaml") or {}
    assert "version" not in config["task"] and config["task"]["name"] == "pathfinder"
    module = lra.load(old)
    assert module.identity()["task"] == "pathfinder@1" and module.run.task.version == 1
    new, before = (configure([*RUN, *more]) for more in ((), ("task.version=1",)))
    assert RunDirectory(new).path == RunDirectory(before).path, "where it lies does not tell"
    assert RunDirectory(new).config["task"]["version"] == 2


def test_it_is_scored_on_its_own_test_set_and_on_the_other_where_asked(old, monkeypatch):
    monkeypatch.chdir(old.parents[4])
    own, other = lra.test(f"init={old}"), lra.test(f"init={old}", "task.version=2")
    assert own["data"]["store"].startswith("pathfinder@1-") and other["data"]["store"].startswith("pathfinder@2-")
    assert own["data"]["store"].partition("-")[2] == other["data"]["store"].partition("-")[2]
    result = lra.fit(*RUN, f"init={old}", "name=further")
    assert result["task"] == "pathfinder@2" and result["transfer"]["task"] == "pathfinder@1"


def test_it_is_gone_on_with_where_the_version_is_given(old, monkeypatch):
    monkeypatch.chdir(old.parents[4])
    run = old.relative_to(Path.cwd())
    mend = ": give task.version=1 to go on with it, "
    with pytest.raises(UsageError, match=f"^{run} holds a run of pathfinder@1, and the task .*@2{mend}move"):
        lra.fit(*RUN, "name=run", "resume=auto")
    assert lra.fit(*RUN, "name=run", "task.version=1")["task"] == "pathfinder@1"
    more = [*(field for field in RUN if not field.startswith("trainer.steps")), "trainer.steps=6", "name=more"]
    with pytest.raises(UsageError, match=f"last.ckpt is of pathfinder@1, and the task is now pathfinder@2{mend}begin"):
        lra.fit(*more, f"resume={run / 'last.ckpt'}")
    lra.fit(*RUN, "name=new")
    with pytest.raises(UsageError, match="a run of pathfinder@2, and pathfinder@1 is asked for: give task.version=2 "):
        lra.fit(*RUN, "name=new", "task.version=1")
    result = lra.fit(*more, f"resume={run / 'last.ckpt'}", "task.version=1")
    assert result["steps"] == 6 and result["task"] == "pathfinder@1"


def test_stages_have_the_version_of_their_run():
    for fields, version in ((), 2), (("task.version=1",), 1):
        composed = configure(["task=path64", "attn=flash", "recipe=curriculum", "task.tokens=lit", *fields])
        assert composed.start is not None
        assert configure(composed.start).config.task.version == version
        assert composed.config.init == "checkpoints/runs/pathfinder/flash/curriculum+task.tokens=lit-s0"


def test_what_is_imported_has_not_changed(tmp_path):
    fields = ["task=pathx", "recipe=xiong2021", f"task.source={tmp_path}"]
    for version in ((), ("task.version=1",), ("task.version=2",)):
        content = task_data([*fields, *version]).content()
        assert content.path.name.startswith("pathx@1-") and content.generator == "lra.data.pathfinder.released@1"
    generated = task_data(["task=pathx"]).content()
    assert generated.path.name.startswith("pathx@2-") and generated.generator == "lra.data.pathfinder@2"


def test_a_version_is_of_a_configuration():
    config = TASKS.get("path256").Config
    assert [versioned_name(config(version=number)) for number in (1, 2)] == ["path256@1", "path256@2"]
    assert task_version(config()) == TASKS.get("path256").facts.version == 2
    assert versioned_name(TASKS.get("listops").Config()) == "listops@1"
    with pytest.raises(UsageError, match="task.version=3: write 1 or 2"):
        configure(["task=path256", "attn=flash", "task.version=3"])
