"""Weights in and out: checkpoints that load with `weights_only=True`, safetensors, and what fits a model."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_weights
from safetensors.torch import save

from lra.config.compose import flatten
from lra.data.store import vocabulary_hash
from lra.errors import UsageError, is_disk_failure, system_error
from lra.tasks import TASKS, versioned
from lra.tasks.base import TaskModule
from lra.training import provenance, seen
from lra.training.provenance import digest
from lra.training.run import replacing
from lra.training.saved import whole_record

# fields without which weights mean something else, or have another shape
SHAPE = ("d_model", "layers", "heads", "d_ff", "positions", "axes")
# of a run's checkpoints, those that stand in for a damaged one
OTHERS = {
    "last.ckpt": ("best.ckpt",),
    "best.ckpt": ("model.safetensors", "last.ckpt"),
    "model.safetensors": ("best.ckpt", "last.ckpt"),
}
TABLES, SCALE = "encoder.positions.tables.", "encoder.positions.scale"  # of learned, and of computed positions


def write(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a `.ckpt` beside its place and moves it there when it is whole."""
    with replacing(path) as file:
        torch.save(checkpoint, file)


def verify(path: Path) -> None:
    """UsageError if a `.ckpt` is not as it was written, naming another file of its run that is whole."""
    if what := fault(path):
        raise _unreadable(path, what)


def fault(path: Path) -> str | None:
    """What is wrong with a file, by its checksums: torch.load takes flipped bits for weights without a word."""
    try:
        if path.suffix == ".safetensors":
            _weights_file(path)
            return None
        with zipfile.ZipFile(path) as archive:
            # PyTorch writes neither compressed files nor folders, reads both, and zipfile's test passes over them
            plain = all(each.file_size == each.compress_size and not each.external_attr for each in archive.infolist())
            return None if plain and archive.testzip() is None else "checksum"
    except Exception as error:  # of many kinds, depending on where the damage is
        _raise_of_machine(error, path)
        return type(error).__name__


def _raise_of_machine(error: BaseException, path: Path) -> None:
    """Raises what the operating system says of a file that is there: nothing is damaged."""
    system = system_error(error, path)
    if system and (isinstance(system, PermissionError) or is_disk_failure(system)):
        raise system from None


def _unreadable(path: Path, what: str) -> UsageError:
    last = path.name == "last.ckpt"
    mend = "without it, resume=auto begins anew" if last else "choose another checkpoint"
    for other in map(path.with_name, OTHERS.get(path.name, ())):
        if not fault(other):
            on = f"resume={other} goes on there, " if last else ""  # no run goes on whose best checkpoint is lost
            mend = f"{other} is whole: {on}init={other} takes its weights"
            break
    return UsageError(
        f"{path} can't be read as a checkpoint of lra ({what}): it is damaged or of another program; {mend}"
    )


def read(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Model weights and identity of a run's directory, a `.ckpt` or a `.safetensors` file.

    UsageError if it is damaged or of another program, or has weights that are not finite, which only `fault.pt` may.
    """
    given = path = Path(path)
    if os.path.isdir(path):  # unlike pathlib's, False also where nobody may look and of a name too long
        path = path / "model.safetensors"
    if not os.path.isfile(path):
        for other in (given / name for name in OTHERS["model.safetensors"]):
            if os.path.isfile(other):
                raise UsageError(f"{given} has no model.safetensors, which a run writes at its end: give {other}")
        if os.path.isfile(given / "result.json"):  # merged from an archive
            raise UsageError(
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
    broken = {layers_together(key) for key, value in weights.items() if not value.isfinite().all()}
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
    fields = [config["model"][name] for name in (*SHAPE, "pooling")] + [*stated.values()]
    if not all(isinstance(each, str) for each in names) or not all(isinstance(each, str | int) for each in fields):
        raise TypeError(names, fields)
    if not whole_record(identity.get("provenance")):
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
    if identity.pop("sha256", None) not in (None, digest(weights, json.dumps(identity))):  # None: of an earlier lra
        raise _unreadable(path, "checksum")
    return weights, identity


def _checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    verify(path)
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict):
        raise TypeError(type(checkpoint))
    state = dict(checkpoint["state_dict"])
    weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    return weights, checkpoint["lra"]


def check_vocabulary(task: Any, identity: dict[str, Any], path: str | Path) -> None:
    """UsageError if a checkpoint reads its ids otherwise than a task, whose configuration is given."""
    if identity["vocabulary"] != vocabulary_hash(TASKS.get(task.name).Data.vocabulary):
        other = f"{path} was trained on the vocabulary of {identity['task']}, not of {versioned(task)}"
        raise UsageError(f"{other}: choose a checkpoint of this task")


def check(module: TaskModule, identity: dict[str, Any], path: str | Path) -> None:
    """UsageError if a checkpoint is of another vocabulary, or naming all fields in which it is of another model."""
    check_vocabulary(module.run.task, identity, path)
    there, model = identity["config"]["model"], vars(module.run.model)
    wrong = [f"model.{name} {there[name]} here {model[name]}" for name in SHAPE if there[name] != model[name]]
    a_token_more = there["pooling"] != model["pooling"] and "cls" in (there["pooling"], model["pooling"])
    # where a pretraining begins or ends the head is fresh, and CLS can be
    if a_token_more and pretraining(identity) == module.run.pretrain:
        wrong.append(f"model.pooling {there['pooling']} here {model['pooling']}")
    if wrong:
        raise UsageError(f"{path} does not fit this model: {', '.join(wrong)}; use the model fields of its config.yaml")


def pretraining(identity: dict[str, Any]) -> str:
    """`pretrain` of the run that a checkpoint is of."""
    return identity["config"].get("pretrain", "none")  # said only where it is not


def check_shapes(own: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], path: str | Path) -> None:
    """UsageError naming every tensor that is missing, superfluous or of another shape."""
    wrong = {layers_together(key): "missing" for key in own.keys() - weights.keys() - {SCALE}}
    wrong |= {layers_together(key): "unknown here" for key in weights.keys() - own.keys()}
    wrong |= {
        layers_together(key): f"{list(weights[key].shape)} here {list(own[key].shape)}"
        for key in own.keys() & weights.keys()
        if own[key].shape != weights[key].shape
    }
    if wrong:
        mend = "use the fields of its config.yaml"
        if all(".attention." in name for name in wrong):
            mend = f"{mend}, or another attn=, whose parameters are then fresh"
        what = ", ".join(f"{name} {how}" for name, how in sorted(wrong.items()))
        raise UsageError(f"{path} does not fit this model: {what}; {mend}")


def layers_together(key: str) -> str:
    """A tensor's name for people, the same in every layer."""
    return re.sub(r"blocks\.\d+\.", "blocks.*.", key.removeprefix("encoder."))


def load(module: TaskModule, weights: dict[str, torch.Tensor], identity: dict[str, Any], path: str | Path) -> None:
    """Puts weights into the model that they are of; UsageError naming what does not fit."""
    check(module, identity, path)
    check_shapes(module.model.state_dict(), weights, path)
    module.model.load_state_dict(weights)
    module.seen, module.provenance = seen.seen_before(identity), provenance.of(identity)


def behind(path: Path) -> tuple[int, Path | None, list[dict[str, Any]]]:
    """What a `.ckpt` has behind it: optimisation steps, the best checkpoint so far, which lies beside it, and draws.

    The draws are as `lra.training.draws` writes them; a checkpoint of an older lra states none.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    try:
        states = checkpoint["callbacks"].values()
        scored = (state for state in states if state.get("best_model_score") is not None)
        best = (path.with_name(Path(state["best_model_path"]).name) for state in scored)
        return int(checkpoint["global_step"]), next(best, None), checkpoint.get("draws", [])
    except (LookupError, TypeError, AttributeError, ValueError) as error:  # weights alone, as in fault.pt
        raise UsageError(
            f"{path} has weights, and not what training goes on with ({type(error).__name__}): give another resume=, "
            f"or init={path}"
        ) from None


def save_weights(module: TaskModule, path: Path) -> None:
    """The model alone, as safetensors that carry their identity."""
    weights = {key: value.detach().cpu().contiguous() for key, value in module.model.state_dict().items()}
    identity = module.identity()
    identity["sha256"] = digest(weights, json.dumps(identity))  # safetensors has no checksum of its own
    with replacing(path) as file:  # save_file would make one that only its owner can read
        file.write(save(weights, metadata={"lra": json.dumps(identity)}))
