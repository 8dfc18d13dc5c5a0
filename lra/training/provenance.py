"""Where weights come from: which ones a run began with and ended with, and which runs were before it.

A run has a record of plain values. `run` is its directory. `began` is the digest of the weights before its first step,
and `ended` that of the weights that were scored, which are those of `model.safetensors`. `commit` names the commit of
every session that trained. `ancestors` are the records of the runs before, the first one first: the `ended` of an
ancestor is the digest of the weights that the next run took. What an older lra did not state is None, and a commit that
is not known is `UNKNOWN`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lra import environment
from lra.tasks.base import TaskModule
from lra.training.saved import UNKNOWN, Record, mapping, read_result


def digest(weights: Mapping[str, torch.Tensor], said: str = "") -> str:
    """SHA-256 of a model's tensors, 64 hex digits: of each one, by name, its name, dtype, shape and bytes.

    Args:
        said: text that is hashed before the tensors; the digest of weights alone has none.
    """
    found = hashlib.sha256(said.encode())
    for name, value in sorted(weights.items()):
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def of(identity: Mapping[str, Any]) -> Record:
    """The record in a checkpoint; of an older one, no more than the name of the run before it."""
    if stated := identity.get("provenance"):
        return copy.deepcopy(stated)
    init = identity["config"].get("init")
    return {"ancestors": [_ancestor(str(init))] if init else []}


def descended(weights: Mapping[str, torch.Tensor], identity: Mapping[str, Any], path: str | Path) -> Record:
    """The record of a model that takes these weights, before it begins a run."""
    parent = of(identity)
    run, commit = parent.get("run") or str(path), parent.get("commit") or _commit_beside(Path(path), identity)
    return {"ancestors": [*parent["ancestors"], _ancestor(run, parent.get("began"), digest(weights), commit)]}


def begin(module: TaskModule, run: Path, resumed: bool) -> None:
    """States that a session of a run begins with the weights that the module has."""
    before = module.provenance
    commit = environment.current_commit() or UNKNOWN
    if resumed:
        stated = (before.get("commit") or UNKNOWN).split(", ")
        began, commit = before.get("began"), ", ".join(dict.fromkeys([*stated, commit]))
    else:
        began = digest(module.model.state_dict())
    ancestors = before.get("ancestors", [])
    module.provenance = {"run": str(run), "began": began, "ended": None, "commit": commit, "ancestors": ancestors}


def end(module: TaskModule, record: Record) -> None:
    """States that the run of a record ends with the weights that the module has."""
    module.provenance = record | {"ended": digest(module.model.state_dict())}


def _ancestor(run: str, began: str | None = None, ended: str | None = None, commit: str | None = None) -> Record:
    return {"run": run, "began": began, "ended": ended, "commit": commit}


def _commit_beside(path: Path, identity: Mapping[str, Any]) -> str | None:
    """What the result in the folder of weights states, if it is of the same configuration."""
    result = read_result((path if path.is_dir() else path.parent) / "result.json")
    if result is None or result["config"] != identity["config"]:
        return None
    return mapping(result["environment"]).get("commit")
