"""Reads and writes checkpoints and safetensors, and checks that weights fit a model."""

from __future__ import annotations

import json
import os
import re
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_weights
from safetensors.torch import save

from lra.config.compose import flatten
from lra.config.model import ModelConfig
from lra.data.store import vocabulary_hash
from lra.errors import UsageError, is_disk_failure, system_error
from lra.files import replace_file
from lra.tasks import TASKS, versioned_name
from lra.tasks.base import TaskModule
from lra.training import leakage, provenance
from lra.training.hub_weights import fetch_weights, is_hub_address
from lra.training.provenance import weights_digest
from lra.training.run_files import is_provenance, read_result

# fields that change the meaning or the shape of weights
SHAPE_FIELDS = ("d_model", "layers", "heads", "d_ff", "positions", "axes")
# the checkpoints of a run that can replace a damaged one
STAND_INS = {
    "last.ckpt": ("best.ckpt",),
    "best.ckpt": ("model.safetensors", "last.ckpt"),
    "model.safetensors": ("best.ckpt", "last.ckpt"),
}
POSITION_TABLES, POSITION_SCALE = "encoder.positions.tables.", "encoder.positions.scale"  # learned; computed


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a `.ckpt` in one step: a reader sees the old file or the new one."""
    with replace_file(path) as file:
        torch.save(checkpoint, file)


def verify_checkpoint(path: Path) -> None:
    """Raises a UsageError if a `.ckpt` is damaged. The message names another file of the run that is whole."""
    if what := find_damage(path):
        raise _unreadable(path, what)


def find_damage(path: Path) -> str | None:
    """Checks the checksums of a file, as torch.load does not. Returns what is wrong, or None."""
    try:
        if path.suffix == ".safetensors":
            _weights_file(path)
            return None
        with zipfile.ZipFile(path) as archive:
            # PyTorch reads compressed files and folders but never writes them, and zipfile does not test them
            plain = all(each.file_size == each.compress_size and not each.external_attr for each in archive.infolist())
            return None if plain and archive.testzip() is None else "checksum"
    except Exception as error:  # the kind depends on where the damage is
        _raise_of_machine(error, path)
        return type(error).__name__


def _raise_of_machine(error: BaseException, path: Path) -> None:
    """Raises an error of the operating system again: then the file is not damaged."""
    system = system_error(error, path)
    if system and (isinstance(system, PermissionError) or is_disk_failure(system)):
        raise system from None


def _unreadable(path: Path, what: str) -> UsageError:
    last = path.name == "last.ckpt"
    mend = "without it, resume=auto begins anew" if last else "choose another checkpoint"
    for other in map(path.with_name, STAND_INS.get(path.name, ())):
        if not find_damage(other):
            on = f"resume={other} goes on there, " if last else ""  # a run whose best checkpoint is lost can't resume
            mend = f"{other} is whole: {on}init={other} takes its weights"
            break
    return UsageError(
        f"{path} can't be read as a checkpoint of lra ({what}): it is damaged or of another program; {mend}"
    )


def read_checkpoint(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the model weights and the identity in a run's directory, a `.ckpt`, a `.safetensors` or at `hf://…`.

    Raises:
        UsageError: the file is damaged, or of another program, or has weights that are not finite. Only `fault.pt` may
            have such weights. Or the Hub's weights can't be had.
    """
    if is_hub_address(path):
        folder = fetch_weights(str(path))
        try:
            return read_checkpoint(folder)
        except UsageError as error:
            copy = f"if the copy here is damaged, remove {folder.parents[1]}, and it is downloaded again"
            raise UsageError(f"{path}: {error}; {copy}") from None
    given = path = Path(path)
    if os.path.isdir(path):  # unlike pathlib's, False also where nobody may look and of a name too long
        path = path / "model.safetensors"
    if not os.path.isfile(path):
        for other in (given / name for name in STAND_INS["model.safetensors"]):
            if os.path.isfile(other):
                raise UsageError(f"{given} has no model.safetensors, which a run writes at its end: give {other}")
        if os.path.isfile(given / "result.json"):
            if (ended := read_result(given / "result.json")) and ended["status"] != "finished":
                error = textwrap.shorten(str(ended.get("error")), 300, placeholder=" …")
                raise UsageError(
                    f"{given} has no weights, its run failed ({error}): mend that and train again, "
                    "or choose another checkpoint"
                )
            raise UsageError(  # merged from an archive
                f"{given} has a result and no weights: merge an archive packed with checkpoints=weights, "
                "or remove the directory, and it is trained again"
            )
        raise UsageError(f"no checkpoint at {given}: give a finished run's directory, a .ckpt or a .safetensors file")
    try:
        weights, identity = (_weights_file if path.suffix == ".safetensors" else _checkpoint)(path)
        _expect(weights, identity)
    except UsageError:
        raise
    except (SafetensorError, RuntimeError, LookupError, TypeError, ValueError, EOFError, OSError) as error:
        _raise_of_machine(error, path)
        raise _unreadable(path, type(error).__name__) from error
    except Exception as error:  # torch.load raises pickle's errors for anything that is not plain weights
        raise UsageError(f"{path} holds more than plain weights and was not loaded ({type(error).__name__})") from error
    broken = {layerless_name(key) for key, value in weights.items() if not value.isfinite().all()}
    if broken and path.suffix != ".pt":  # fault.pt is there to find that
        names = ", ".join(sorted(broken))
        raise UsageError(f"{path} has weights that are NaN or infinite ({names}): choose another checkpoint")
    return weights, identity


def _expect(weights: dict[str, torch.Tensor], identity: dict[str, Any]) -> None:
    """LookupError or TypeError if these are not what lra writes: whoever reads them relies on it."""
    config = identity["config"]
    names = [identity["task"], identity["vocabulary"], config["recipe"]]
    names += [config["task"]["name"], config["attn"]["name"]]
    stated = dict(identity.get("seen", {}))
    names += [*stated]
    fields = [config["model"][name] for name in (*SHAPE_FIELDS, "pooling")] + [*stated.values()]
    if not all(isinstance(each, str) for each in names) or not all(isinstance(each, str | int) for each in fields):
        raise TypeError(names, fields)
    if not is_provenance(identity.get("provenance")):
        raise TypeError(identity["provenance"])
    # to OmegaConf these are an interpolation, of environment variables too, and a missing value
    if live := [name for name, value in flatten(config) if "${" in str(value) or value == "???"]:
        raise TypeError(live)
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_complex():
            raise TypeError(name)


def _weights_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    data = path.read_bytes()  # safetensors would map it, which not every file system can
    weights = load_weights(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    identity = dict(json.loads(header["__metadata__"]["lra"]))
    stated = identity.pop("sha256", None)  # an older lra states none
    if stated not in (None, weights_digest(weights, json.dumps(identity))):
        raise _unreadable(path, "checksum")
    return weights, identity


def _checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    verify_checkpoint(path)
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict):
        raise TypeError(type(checkpoint))
    state = dict(checkpoint["state_dict"])
    weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    return weights, checkpoint["lra"]


def check_vocabulary(task: Any, identity: dict[str, Any], path: str | Path) -> None:
    """Raises a UsageError if a checkpoint has another vocabulary than the task of a configuration."""
    if identity["vocabulary"] != vocabulary_hash(TASKS.get(task.name).Data.vocabulary):
        other = f"{path} was trained on the vocabulary of {identity['task']}, not of {versioned_name(task)}"
        raise UsageError(f"{other}: choose a checkpoint of this task")


def check_model(module: TaskModule, identity: dict[str, Any], path: str | Path) -> None:
    """Raises a UsageError if a checkpoint has another vocabulary or model. The message names all fields that differ."""
    check_vocabulary(module.run.task, identity, path)
    later = ("pixels", "norm", "post_norm")  # an older checkpoint lacks them
    there = {name: getattr(ModelConfig, name) for name in later} | identity["config"]["model"]
    names, model = (*SHAPE_FIELDS, *later), vars(module.run.model)
    wrong = [f"model.{name} {there[name]} here {model[name]}" for name in names if there[name] != model[name]]
    a_token_more = there["pooling"] != model["pooling"] and "cls" in (there["pooling"], model["pooling"])
    # between pretraining and training the head is fresh, and CLS may be fresh too
    if a_token_more and pretraining_of(identity) == module.run.pretrain:
        wrong.append(f"model.pooling {there['pooling']} here {model['pooling']}")
    if wrong:
        raise UsageError(f"{path} does not fit this model: {', '.join(wrong)}; use the model fields of its config.yaml")


def pretraining_of(identity: dict[str, Any]) -> str:
    """Returns the `pretrain` of a checkpoint's run."""
    return identity["config"].get("pretrain", "none")  # a configuration states it only if it is not none


def hides_tokens(identity: dict[str, Any]) -> bool:
    """Returns whether a checkpoint's run hides tokens, as `RunConfig.hides`."""
    return pretraining_of(identity) == "masked" or identity["config"].get("denoise", 0.0) > 0


def is_causal(identity: dict[str, Any]) -> bool:
    """Returns whether the encoder of a checkpoint's run was causal, as `RunConfig.causal`."""
    return pretraining_of(identity) == "causal" or identity["config"]["model"].get("causal", False)


def check_shapes(own: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], path: str | Path) -> None:
    """Raises a UsageError that names every tensor that is missing, unknown or of another shape."""
    wrong = {layerless_name(key): "missing" for key in own.keys() - weights.keys() - {POSITION_SCALE}}
    wrong |= {layerless_name(key): "unknown here" for key in weights.keys() - own.keys()}
    wrong |= {
        layerless_name(key): f"{list(weights[key].shape)} here {list(own[key].shape)}"
        for key in own.keys() & weights.keys()
        if own[key].shape != weights[key].shape
    }
    if wrong:
        mend = "use the fields of its config.yaml"
        if all(".attention." in name for name in wrong):
            mend = f"{mend}, or another attn=, whose parameters are then fresh"
        what = ", ".join(f"{name} {how}" for name, how in sorted(wrong.items()))
        raise UsageError(f"{path} does not fit this model: {what}; {mend}")


def layerless_name(key: str) -> str:
    """Returns a tensor's name for people, which is the same in every layer."""
    return re.sub(r"blocks\.\d+\.", "blocks.*.", key.removeprefix("encoder."))


def load_into(module: TaskModule, weights: dict[str, torch.Tensor], identity: dict[str, Any], path: str | Path) -> None:
    """Puts weights into their model. UsageError names what does not fit."""
    check_model(module, identity, path)
    check_shapes(module.model.state_dict(), weights, path)
    module.take_weights(weights, leakage.sets_before_run(identity), provenance.read_provenance(identity))


def read_progress(path: Path) -> tuple[int, Path | None, list[dict[str, Any]], int]:
    """Returns the progress of a `.ckpt`: steps, best checkpoint, draws, and validations since the best one.

    The best checkpoint lies beside it. `lra.training.draws` describes the draws of its sessions; an older checkpoint
    has none. Only runs with a `lra.training.plateau` count the validations; the number of others is 0.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    try:
        states = checkpoint["callbacks"].values()
        scored = (state for state in states if state.get("best_model_score") is not None)
        best = (path.with_name(Path(state["best_model_path"]).name) for state in scored)
        waited = int(checkpoint["callbacks"].get("Plateau", {}).get("waited", 0))
        return int(checkpoint["global_step"]), next(best, None), checkpoint.get("draws", []), waited
    except (LookupError, TypeError, AttributeError, ValueError) as error:  # it has only weights, as fault.pt does
        raise UsageError(
            f"{path} has weights, and not what training goes on with ({type(error).__name__}): give another resume=, "
            f"or init={path}"
        ) from None


def save_weights(module: TaskModule, path: Path) -> None:
    """Writes the model as safetensors with its identity."""
    weights = {key: value.detach().cpu().contiguous() for key, value in module.model.state_dict().items()}
    identity = module.identity()
    identity["sha256"] = weights_digest(weights, json.dumps(identity))  # safetensors has no checksum of its own
    with replace_file(path) as file:  # save_file would make one that only its owner can read
        file.write(save(weights, metadata={"lra": json.dumps(identity)}))
