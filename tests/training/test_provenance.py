"""A run names the weights that it began with and ended with, and every run before it."""

import json
from pathlib import Path

import pytest
import torch

import lra
from lra import environment
from lra.errors import UsageError
from lra.training import assembly, checkpoints, provenance, transfer
from lra.training.run_files import UNKNOWN_COMMIT, describe_ancestry, has_clean_commits, missing_fields, stated_code

from .conftest import arguments

FIELDS = ("run", "began", "ended", "commit")  # of an ancestor
FEW = ("trainer.steps=4", "trainer.eval_every=2")


@pytest.fixture
def at(monkeypatch):
    """`at("abc")` makes that the commit of the checkout."""
    return lambda commit: monkeypatch.setattr(environment, "current_commit", lambda: commit)


def untrained(*args: str):
    return assembly.build_modules(lra.configure(arguments(*FEW, *args)).config)[1]


def started(path):
    """A module that took weights."""
    module = untrained(f"init={path}")
    transfer.transfer_weights(module, *checkpoints.read_checkpoint(path), path)
    return module


def save(folder: Path, weights, identity) -> Path:
    path = folder / "x.ckpt"
    torch.save({"state_dict": {f"model.{k}": v for k, v in weights.items()}, "lra": identity}, path)
    return path


def stated(result) -> dict:
    return json.loads((Path(result["directory"]) / "result.json").read_text())["provenance"]


def test_a_chain_of_runs_is_named_from_the_first_weights_to_the_last(small, at):
    at("0" * 12)
    first = stated(one := small(*FEW, "name=first"))
    at("1" * 12 + "+")
    second = stated(two := small(*FEW, "name=second", f"init={one['directory']}"))
    assert first["ancestors"] == [] and first["run"] == one["directory"]
    assert first["began"] == provenance.weights_digest(untrained("name=first").model.state_dict())
    assert second["began"] == first["ended"] and len({first["began"], first["ended"], second["ended"]}) == 3
    assert second["ancestors"] == [{name: first[name] for name in FIELDS}]
    for run, record in ((one, first), (two, second)):
        weights, identity = checkpoints.read_checkpoint(run["directory"])
        assert record["ended"] == provenance.weights_digest(weights) and identity["provenance"] == record
        assert lra.load(run["directory"]).provenance == record
    third = started(two["directory"])
    assert third.provenance["ancestors"] == [{name: each[name] for name in FIELDS} for each in (first, second)]


def test_a_resumed_run_keeps_what_it_began_with_and_names_every_commit(small, at, finished, monkeypatch):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    at("a" * 12)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(checkpoints, "save_weights", stop)
        small(*FEW, "name=run", f"init={finished}")
    failed = stated({"directory": "checkpoints/runs/listops/flash/run-s0"})
    assert failed["commit"] == "a" * 12 and failed["ancestors"][0]["ended"] == failed["began"]
    at("b" * 12)
    last = "checkpoints/runs/listops/flash/run-s0/last.ckpt"
    whole = stated(small("trainer.steps=6", "trainer.eval_every=2", "name=on", f"init={finished}", f"resume={last}"))
    assert whole["began"] == failed["began"] and whole["ancestors"] == failed["ancestors"]
    assert whole["run"].endswith("on-s0") and whole["commit"] == f"{'a' * 12}, {'b' * 12}"


def test_a_session_of_an_unknown_commit_is_not_passed_over(at):
    module = untrained()
    for commit, resumed in (("a" * 12, False), (None, True), ("a" * 12, True), ("b" * 12, True)):
        at(commit)
        provenance.begin_provenance(module, Path("here"), resumed)
    assert module.provenance["commit"] == f"{'a' * 12}, {UNKNOWN_COMMIT}, {'b' * 12}"


def test_a_session_of_other_own_code_is_not_passed_over(monkeypatch):
    module = untrained()
    for digests, resumed in (({}, False), ({"own.py": "1"}, True), ({"own.py": "2"}, True), ({"own.py": "1"}, True)):
        monkeypatch.setattr(provenance, "own_code", lambda *_, found=digests: found)
        provenance.begin_provenance(module, Path("here"), resumed)
    assert module.provenance["own_code"] == {"own.py": "1, 2"}
    assert stated_code({"provenance": module.provenance}) == [("own.py", "1"), ("own.py", "2")]


def test_what_an_older_lra_did_not_state_is_not_made_up(finished, at, tmp_path):
    weights, identity = checkpoints.read_checkpoint(finished)
    result = json.loads((finished / "result.json").read_text())
    del identity["provenance"], result["provenance"]
    assert not missing_fields(result) and describe_ancestry(result) == ""
    (tmp_path / "result.json").write_text(json.dumps(result))
    unknown = dict.fromkeys(FIELDS[1:])
    own = {"run": f"{tmp_path}/x.ckpt", "ended": provenance.weights_digest(weights)}
    commit = result["environment"]["commit"]  # the result beside the weights is of them
    assert started(save(tmp_path, weights, identity)).provenance == {"ancestors": [unknown | own | {"commit": commit}]}
    identity["config"] |= {"init": "there"}  # and now it is not
    module = started(save(tmp_path, weights, identity))
    assert module.provenance == {"ancestors": [{"run": "there"} | unknown, unknown | own]}
    module.take_weights(module.model.state_dict(), {}, provenance.read_provenance(identity))
    at("a" * 12)
    provenance.begin_provenance(module, Path("here"), resumed=True)
    assert module.provenance["began"] is None and module.provenance["commit"] == f"{UNKNOWN_COMMIT}, {'a' * 12}"


def test_a_result_is_clean_if_all_that_led_to_it_is():
    record = {"run": "two", "ended": "f" * 64, "commit": "a" * 12, "ancestors": [{"run": "one", "commit": "b" * 12}]}
    result = {"environment": {"commit": "a" * 12}, "provenance": record}
    assert (
        has_clean_commits(result)
        and describe_ancestry(result)
        == f"one {UNKNOWN_COMMIT} (commit {'b' * 12}) > two {'f' * 12} (commit {'a' * 12})"
    )
    assert has_clean_commits(result | {"provenance": {}}) and has_clean_commits({"environment": {"commit": "a" * 12}})
    for commit in (None, "", UNKNOWN_COMMIT, "a" * 12 + "+", f"{'b' * 12}, {'c' * 12}+"):
        assert not has_clean_commits(result | {"environment": {"commit": commit}})
        assert not has_clean_commits(result | {"provenance": record | {"commit": commit}})
        assert not has_clean_commits(
            result | {"provenance": record | {"ancestors": [{"run": "one", "commit": commit}]}}
        )


@pytest.mark.parametrize("broken", [
    5, {"run": "x"}, {"run": "x", "ancestors": [5]}, {"run": "x", "ancestors": [], "began": 5},
    {"run": 5, "ancestors": []}, {"ancestors": [{"run": "x", "commit": []}]},
    {"run": "x", "ancestors": [], "own_code": []}, {"run": "x", "ancestors": [], "own_code": {"own.py": 5}},
])  # fmt: skip
def test_what_is_no_record_is_refused(finished, tmp_path, broken):
    result = json.loads((finished / "result.json").read_text())
    assert missing_fields(result | {"provenance": broken}) == "a whole provenance"
    weights, identity = checkpoints.read_checkpoint(finished)
    with pytest.raises(UsageError, match="can't be read as a checkpoint of lra"):
        checkpoints.read_checkpoint(save(tmp_path, weights, identity | {"provenance": broken}))
