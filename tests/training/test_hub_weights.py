"""`init=hf://…`: what is downloaded, kept and read again, and what is refused. Uploads are in test_push.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lra.errors import UsageError
from lra.training import checkpoints, hub_weights
from lra.training.hub_weights import HubAddress, fetch_weights, parse_address
from tests.hub_server import HubServer, Model, hub_server

NAME = "someone/weights"
ADDRESS = f"hf://{NAME}"
FILES = ("config.yaml", "model.safetensors", "result.json")


@pytest.fixture
def server(tmp_path, monkeypatch) -> HubServer:
    return hub_server(tmp_path / "cache", monkeypatch)


@pytest.fixture
def model(server, finished) -> Model:
    """A run's files as `lra results push` puts them there."""
    server.models[NAME] = Model()
    server.models[NAME].commit({name: (finished / name).read_bytes() for name in FILES})
    return server.models[NAME]


def again() -> None:
    """As a new process begins."""
    fetch_weights.cache_clear()


def refused(address: str = ADDRESS) -> str:
    again()
    with pytest.raises(UsageError) as error:
        checkpoints.read_checkpoint(address)
    assert "\n" not in str(error.value) and address in str(error.value)
    return str(error.value)


def forbid_network(monkeypatch) -> None:
    again()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_revision_is_downloaded_once_and_read_from_the_cache_without_a_network(
    server, model, monkeypatch, capsys, tmp_path
):
    first = model.branches["main"]
    old = {name: model.commits[first][name] for name in FILES}
    model.commit(old | {"result.json": b"{}"}, "next/try")
    folder = fetch_weights(ADDRESS)
    assert folder.name == first and {path.name for path in folder.iterdir()} == set(FILES)
    asked = len(server.asked)
    assert fetch_weights(ADDRESS) == folder and len(server.asked) == asked, "once in a process"
    other = fetch_weights(f"{ADDRESS}@next/try")
    assert other.name == model.branches["next/try"] != first
    assert hub_weights.pinned_address(f"{ADDRESS}@next/try") == f"{ADDRESS}@{other.name}"
    forbid_network(monkeypatch)
    asked = len(server.asked)
    for address, found in ((ADDRESS, folder), (f"{ADDRESS}@next/try", other), (f"{ADDRESS}@{first}", folder)):
        assert fetch_weights(address) == found
        assert ("in the Hub's cache is used" in capsys.readouterr().out) == (address[-40:] != first)
    assert len(server.asked) == asked
    assert "HF_HUB_OFFLINE is set; no copy is in the Hub's cache" in refused(f"{ADDRESS}@another")


def test_a_hub_that_does_not_answer_is_replaced_by_the_cache(model, monkeypatch, capsys):
    weights, _ = checkpoints.read_checkpoint(ADDRESS)
    again()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert checkpoints.read_checkpoint(ADDRESS)[0].keys() == weights.keys()
    told = capsys.readouterr().out
    assert told.startswith("note: ") and "does not answer" in told and "in the Hub's cache is used" in told
    said = refused("hf://someone/other")
    assert "does not answer" in said and "no copy is in the Hub's cache" in said


def test_what_the_hub_does_not_give_is_one_line(server, model, monkeypatch):
    assert "has no such model for everybody (HTTP 401): mend the name, or log in" in refused("hf://someone/none")
    assert "it has no revision v9: name a branch, a tag or a commit" in refused(f"{ADDRESS}@v9")
    model.gated = True
    assert "its owner gives access on request: ask on its page there, then log in" in refused()
    monkeypatch.setenv("HF_TOKEN", server.token)
    again()
    assert fetch_weights(ADDRESS).name == model.branches["main"]
    model.private, model.gated = True, False
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token (HTTP 401): log in again" in refused()


class Trap:
    """Makes a file if it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


def test_a_pickle_is_never_read(server, here):
    server.models[NAME] = Model()
    server.models[NAME].commit({"config.yaml": b"task: {}\nattn: {}\n", "pytorch_model.bin": pickle.dumps(Trap())})
    assert "has no model.safetensors; pytorch_model.bin may be a pickle, which is never read" in refused()
    server.models[NAME].commit({"model.safetensors": pickle.dumps(Trap())})
    assert "model.safetensors can't be read as a checkpoint of lra" in refused()
    assert not Path("unpickled").exists()
    assert not any(name.endswith(".bin") for name in server.asked)


def test_other_contents_are_refused_before_their_weights_are_downloaded(server):
    server.models[NAME] = Model()
    server.models[NAME].commit({"config.json": b"{}", "model.safetensors": b"much"})
    assert "has no config.yaml: name a model that lra results push has made" in refused()
    server.models[NAME].commit({"config.yaml": b"learning_rate: 1\n"})
    assert "its config.yaml is no configuration of a run: name another model" in refused()
    assert not any(name.endswith("model.safetensors") for name in server.asked)


def test_a_damaged_file_is_named_with_its_mend(model):
    content = bytearray(model.commits[model.branches["main"]]["model.safetensors"])
    folder = fetch_weights(ADDRESS)
    (folder / "model.safetensors").resolve().write_bytes(content[: len(content) // 2])  # a disk that was full
    said = refused()
    assert "can't be read as a checkpoint of lra" in said
    assert f"if the copy here is damaged, remove {folder.parents[1]}, and it is downloaded again" in said
    content[-3] ^= 1
    model.commit({"model.safetensors": bytes(content)})
    assert "(checksum)" in refused()


@pytest.mark.parametrize(
    "text", ["hf://", "hf://name", "hf://a/b/c", "hf://a/b@", "hf://a b/c", "hf://../b", "hf:///b"]
)
def test_an_address_of_another_form_is_refused(text):
    with pytest.raises(UsageError, match="is no address of the Hub: write hf://<owner>/<name> or …@<revision>"):
        parse_address(text)


def test_an_address_has_a_revision():
    assert parse_address(ADDRESS) == HubAddress(NAME, "main")
    assert parse_address(f"{ADDRESS}@refs/pr/1") == HubAddress(NAME, "refs/pr/1")
