"""Records where weights come from: the weights at the start and end of a run, and the runs before it.

The record of a run has plain values:

- `run`: its directory.
- `began`: the digest of the weights before its first step.
- `ended`: the digest of the scored weights, which are those of `model.safetensors`.
- `commit`: the commits of all sessions that trained; `UNKNOWN_COMMIT` stands for one that is not known.
- `own_code`: the digests of code outside lra, as all sessions imported it, by file or package. Without such code it
  is absent.
- `ancestors`: the records of the runs before, oldest first. The `ended` of an ancestor is the digest of the weights
  that the next run took.

An ancestor that came from the Hub also has a `source`: its address there, with the commit.

A value is None if an older lra did not state it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lra import environment
from lra.config.sources import own_code
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from lra.tasks.base import TaskModule
from lra.training.hub_weights import fetch_weights, is_hub_address, pinned_address
from lra.training.run_files import UNKNOWN_COMMIT, ProvenanceRecord, as_mapping, read_result


def weights_digest(weights: Mapping[str, torch.Tensor], said: str = "") -> str:
    """SHA-256 of a model's tensors, as 64 hex digits. It covers the name, dtype, shape and bytes of each, by name.

    Args:
        said: text that is hashed before the tensors. Default: none.
    """
    found = hashlib.sha256(said.encode())
    for name, value in sorted(weights.items()):
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def read_provenance(identity: Mapping[str, Any]) -> ProvenanceRecord:
    """Returns the record in a checkpoint. An older checkpoint names only the run before it."""
    if stated := identity.get("provenance"):
        return copy.deepcopy(stated)
    init = identity["config"].get("init")
    return {"ancestors": [_ancestor(str(init))] if init else []}


def inherit_provenance(
    weights: Mapping[str, torch.Tensor], identity: Mapping[str, Any], path: str | Path
) -> ProvenanceRecord:
    """Returns the record of a model that takes these weights and has not begun its own run."""
    parent, hub = read_provenance(identity), is_hub_address(path)
    place = fetch_weights(str(path)) if hub else Path(path)
    run, commit = parent.get("run") or str(path), parent.get("commit") or _commit_beside(place, identity)
    last = _ancestor(run, parent.get("began"), weights_digest(weights), commit)
    if own := parent.get("own_code"):
        last["own_code"] = own
    if hub:
        last["source"] = pinned_address(str(path))
    return {"ancestors": [*parent["ancestors"], last]}


def begin_provenance(module: TaskModule, run: Path, resumed: bool) -> None:
    """Records that a session of a run begins with the module's weights."""
    before = module.provenance
    commit = environment.current_commit() or UNKNOWN_COMMIT
    parts = ATTENTIONS.get(module.run.attn.name), TASKS.get(module.run.task.name)
    own = own_code(*(part.__module__ for part in parts))
    if resumed:
        began, commit = before.get("began"), _join_once(before.get("commit") or UNKNOWN_COMMIT, commit)
        stated = before.get("own_code", {})
        own = stated | {name: _join_once(stated.get(name, digest), digest) for name, digest in own.items()}
    else:
        began = weights_digest(module.model.state_dict())
    before.update(run=str(run), began=began, ended=None, commit=commit, ancestors=before.get("ancestors", []))
    if own:
        before["own_code"] = own


def end_provenance(module: TaskModule) -> None:
    """Records that the run ends with the module's weights."""
    module.provenance["ended"] = weights_digest(module.model.state_dict())


def _join_once(stated: str, now: str) -> str:
    """Returns what earlier sessions stated, separated by commas, and what this one states, each once."""
    return ", ".join(dict.fromkeys([*stated.split(", "), now]))


def _ancestor(
    run: str, began: str | None = None, ended: str | None = None, commit: str | None = None
) -> ProvenanceRecord:
    return {"run": run, "began": began, "ended": ended, "commit": commit}


def _commit_beside(path: Path, identity: Mapping[str, Any]) -> str | None:
    """Returns the commit of the result beside the weights, if its configuration is the same."""
    result = read_result((path if path.is_dir() else path.parent) / "result.json")
    if result is None or result["config"] != identity["config"]:
        return None
    return as_mapping(result["environment"]).get("commit")
