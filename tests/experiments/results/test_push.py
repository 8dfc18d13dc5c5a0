"""A run to the Hub and back: by the real client, to a stand-in for the Hub. What may not go is refused."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

import lra
from benchmarks.pages import measured
from lra.errors import UsageError
from lra.experiments.results.card import hub_card
from lra.experiments.results.push import push_run, results_before
from lra.training import checkpoints
from lra.training.assembly import build_modules
from lra.training.fit import configure
from lra.training.leakage import restore_task
from lra.training.transfer import transfer_weights
from tests import command_line
from tests.hub_server import HubServer, Model, hub_server
from tests.training.conftest import arguments

REPO = "someone/listops-flash"
FILES = {"model.safetensors", "config.yaml", "result.json", "metrics.csv", "env.json", "README.md"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder / lra.fit(*arguments("name=done"))["directory"]


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of a finished run, seen from the folder that it was trained in."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained, Path(*trained.parts[-6:])))


@pytest.fixture
def server(tmp_path, monkeypatch) -> HubServer:
    return hub_server(tmp_path / "cache", monkeypatch)


@pytest.fixture
def known(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", server.token)


def change_result(run: Path, **changed) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | changed))


def test_the_card_says_the_league_where_the_runs_before_are_known(tmp_path, monkeypatch):
    result = json.loads((measured.RUNS / "text/flash/amos2024-s0/result.json").read_text())
    monkeypatch.chdir(tmp_path)
    assert results_before(result) is None
    assert "| league | not known, as results of runs before it are not here |" in hub_card(result, REPO, "mit", None)
    (stage,) = result["provenance"]["ancestors"]
    known = measured.RUNS / Path(stage["run"]).relative_to("checkpoints/runs") / "result.json"
    Path(stage["run"]).mkdir(parents=True)
    there = Path(shutil.copy(known, stage["run"]))
    before = results_before(result)
    assert before and "| league | strict |" in hub_card(result, REPO, "mit", before)
    other = before[0]["config"] | {"model": before[0]["config"]["model"] | {"axes": 2}}
    assert "| league | open: two axes" in hub_card(result, REPO, "mit", [{**before[0], "config": other}])
    shown = hub_card(before[0], REPO, "mit", [])
    assert "| objective | `pretrain=masked`: accuracies are of hidden tokens |" in shown and "league" not in shown
    there.write_text(known.read_text().replace(stage["ended"], "0" * 64))  # weights of another run in that folder
    assert results_before(result) is None


@pytest.mark.usefixtures("known")
def test_what_was_pushed_scores_and_trains_like_the_run_itself(server, run):
    *listed, last = push_run(str(run), [f"repo={REPO}", "private=true"])
    model, (commit,) = server.models[REPO], [server.models[REPO].branches["main"]]
    assert model.private and set(model.commits[commit]) == FILES | {".gitattributes"}
    assert {line.split()[0] for line in listed[1:]} == FILES and last == f"use it with init=hf://{REPO}@{commit}"
    for name in FILES - {"README.md"}:
        assert model.commits[commit][name] == (run / name).read_bytes()
    here, there = (lra.test(f"init={init}", "trainer.accelerator=cpu") for init in (run, f"hf://{REPO}"))
    assert {**there, "checkpoint": ""} == {**here, "checkpoint": ""}
    first = lra.fit(*arguments("name=local", f"init={run}"))
    again = lra.fit(*arguments("name=remote", f"init=hf://{REPO}"))
    assert again["test"] == first["test"] and again["config"]["init"] == f"hf://{REPO}"
    (ancestor,), (local,) = again["provenance"]["ancestors"], first["provenance"]["ancestors"]
    assert ancestor == local | {"source": f"hf://{REPO}@{commit}"} and ancestor["ended"]
    weights, loaded = checkpoints.read_checkpoint(run)[0], lra.load(f"hf://{REPO}@{commit}").model.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in weights.items())
    # the card of the run that started there names its model
    card = push_run("checkpoints/runs/listops/flash/remote-s0", ["repo=someone/next"])
    text = server.models["someone/next"].commits[server.models["someone/next"].branches["main"]]["README.md"].decode()
    assert ModelCard(text).data.to_dict()["base_model"] == REPO and card


@pytest.mark.usefixtures("known")
def test_the_card_has_the_head_that_the_hub_reads(server, run):
    push_run(str(run), [f"repo={REPO}", "license=mit"])
    text = server.models[REPO].commits[server.models[REPO].branches["main"]]["README.md"].decode()
    data: Any = ModelCard(text).data  # whose fields its YAML makes
    result = json.loads((run / "result.json").read_text())
    assert (data.license, data.library_name, data.metrics) == ("mit", "lra", ["accuracy"])
    assert data.tags == ["long-range-arena", "listops", "attention-flash"]
    assert data.get("base_model") is None and data.get("datasets") is None, "ListOps is generated"
    scores = {score.dataset_split: score.metric_value for score in data.eval_results}
    assert scores == {name: round(result[name]["accuracy"], 6) for name in ("test", "fresh")}
    assert {score.task_type for score in data.eval_results} == {"text-classification"}
    shown = text.partition("# listops-flash")[2]
    assert f"lra test init=hf://{REPO} " in shown and "lra fit task=listops attn=flash recipe=demo" in shown
    assert f"{100 * result['test']['accuracy']:.2f} ± " in shown
    (line,) = [line for line in shown.splitlines() if line.endswith("# starts from it")]
    _, module = build_modules(configure(shlex.split(line, comments=True)[2:]).config)
    address = f"hf://{REPO}"
    assert not transfer_weights(module, *checkpoints.read_checkpoint(address), address).fresh


def test_the_card_of_the_small_set_of_pairs_says_so():
    fields = "task.dataset=scisumm,trainer.eval_every=300,trainer.steps=3000"
    result = json.loads((measured.RUNS / f"retrieval/flash/curriculum+{fields}-s0/result.json").read_text())
    result["protocol"] = restore_task(result["config"]["task"]).protocol
    text = hub_card(result, REPO, "mit", [])
    part = result["data"] | {"differences": ["train has 120 rows, where 147,086 are published"]}
    assert "| the data differ | train has 120 rows, where 147,086" in hub_card(result | {"data": part}, REPO, "mit", [])
    assert text.count("(scisumm, not the pairs of LRA)") == 2, "the head for the Hub, and the first sentence"


@pytest.mark.usefixtures("known")
def test_a_branch_is_made_and_a_second_push_adds_a_commit(server, run):
    push_run(str(run), [f"repo={REPO}"])
    main = server.models[REPO].branches["main"]
    change_result(run, status="finished", notes="changed")
    push_run(str(run), [f"repo={REPO}", "revision=later"])
    branches = server.models[REPO].branches
    assert branches["main"] == main and branches["later"] != main
    assert b"changed" in server.models[REPO].commits[branches["later"]]["result.json"]


def test_a_dry_run_lists_what_goes_out_and_asks_nobody(server, run):
    done = command_line.lra("results", "push", str(run), f"repo={REPO}", "private=true", "--dry-run")
    assert done.code == 0 and not server.asked
    first, *listed = done.out.splitlines()
    assert first == f"nothing is uploaded; without --dry-run, to {REPO}, branch main, private if it is new:"
    assert {line.split()[0] for line in listed} == FILES


def test_released_weights_go_without_curves(server):
    folder = command_line.ROOT / "checkpoints" / "pathx"
    _, *listed = push_run(str(folder), ["repo=someone/pathx"], dry_run=True)
    assert {line.split()[0] for line in listed} == FILES - {"metrics.csv", "env.json"}


def test_a_run_that_is_not_whole_is_not_uploaded(server, run):
    result = json.loads((run / "result.json").read_text())

    def refused(message: str, path: Path = run) -> None:
        with pytest.raises(UsageError, match=message) as error:
            push_run(str(path), [f"repo={REPO}"])
        assert "\n" not in str(error.value) and not server.asked

    change_result(run, status="failed")
    refused("holds no finished run: name a directory whose result.json says finished")
    change_result(run, status="finished", config=result["config"] | {"seed": 1})
    refused("config.yaml and result.json of .* different runs: seed: 0 -> 1")
    change_result(run, config=result["config"], provenance=result["provenance"] | {"ended": "0" * 64})
    refused("has other weights than result.json scored")
    change_result(run, provenance=result["provenance"])
    (run / "model.safetensors").unlink()
    refused("has no model.safetensors")
    refused("holds no finished run", run / "nowhere")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "needs repo=<owner>/<name>"),
        (["repo=name"], "repo=name is no name on the Hub: write <owner>/<name>"),
        (["repo=a/b", "license=my own"], "license=my own: use letters"),
        (["repo=a/b", "revision="], "is not of the form field=value"),
        (["repo=a/b", "private=maybe"], "private=maybe: write true or false"),
        (["repo=a/b", "public=true"], "unknown field 'public'"),
    ],
)
def test_wrong_fields_are_refused(server, run, fields, message):
    with pytest.raises(UsageError, match=message):
        push_run(str(run), fields)
    assert not server.asked


def test_who_may_not_write_is_told_how_to(server, run, monkeypatch):
    with pytest.raises(UsageError, match="lets only known users write: log in with hf auth login"):
        push_run(str(run), [f"repo={REPO}"])
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(UsageError, match="does not accept the token"):
        push_run(str(run), [f"repo={REPO}"])
    monkeypatch.setenv("HF_TOKEN", server.token)
    server.models[REPO] = Model()
    public = server.models[REPO].commit({})
    with pytest.raises(UsageError, match="is there already and public: name another repo=, or leave out private=true"):
        push_run(str(run), [f"repo={REPO}", "private=true"])
    assert server.models[REPO].branches == {"main": public}
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match="does not answer"):
        push_run(str(run), [f"repo={REPO}"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set: unset it to upload"):
        push_run(str(run), [f"repo={REPO}"])
