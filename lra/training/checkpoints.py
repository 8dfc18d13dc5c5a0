"""Weights in and out: checkpoints that load with `weights_only=True`, safetensors, and starting from another run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from lra.errors import UsageError
from lra.tasks.base import TaskModule


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there: Lightning copies where /tmp is another file system."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        aside = path.with_name(f".{path.name}.partial")
        with aside.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def read(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Model weights and identity of a run's directory, a `.ckpt` or a `.safetensors` file."""
    path = Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise UsageError(f"no checkpoint at {path}: give a finished run's directory, a .ckpt or a .safetensors file")
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
                return weights, json.loads(file.metadata()["lra"])
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        weights = {k.removeprefix("model."): v for k, v in checkpoint["state_dict"].items() if k.startswith("model.")}
        return weights, checkpoint["lra"]
    except (SafetensorError, RuntimeError, KeyError, TypeError, ValueError, EOFError, OSError) as error:
        raise UsageError(
            f"{path} can't be read as a checkpoint of lra ({type(error).__name__}): it is damaged or of another program"
        ) from error
    except Exception as error:  # torch.load raises pickle's errors for anything that is not plain weights
        raise UsageError(f"{path} holds more than plain weights and was not loaded ({type(error).__name__})") from error


def check_vocabulary(path: str | Path, identity: dict[str, Any], module: TaskModule) -> None:
    """Refuses weights whose token ids mean something else."""
    here = module.identity()
    if identity["vocabulary"] != here["vocabulary"]:
        raise UsageError(
            f"{path} was trained on the vocabulary of {identity['task']}, not of {here['task']}: "
            "choose a checkpoint of this task"
        )


def initialise(module: TaskModule, path: str | Path) -> list[str]:
    """Starts from another run's weights of the same shapes; returns the names transferred."""
    weights, identity = read(path)
    load(module, weights, identity, path)
    return sorted(weights)


def load(module: TaskModule, weights: dict[str, torch.Tensor], identity: dict[str, Any], path: str | Path) -> None:
    """Puts weights into a model of the same vocabulary and shapes; UsageError naming what does not fit."""
    check_vocabulary(path, identity, module)
    own = module.model.state_dict()
    wrong = sorted(own.keys() ^ weights.keys()) + [
        f"{key} {list(weights[key].shape)} here {list(own[key].shape)}"
        for key in sorted(own.keys() & weights.keys())
        if own[key].shape != weights[key].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        mend = "use the model fields of its config.yaml"
        if all(key.startswith("encoder.positions.") for key in wrong):
            mend = "its positions are learned for another length; train it with model.positions=rotary or sinusoidal"
        raise UsageError(f"{path} does not fit this model: {', '.join(wrong[:3])}{more}; {mend}")
    module.model.load_state_dict(weights)


def steps_done(path: str | Path) -> int:
    """How many optimisation steps a `.ckpt` has behind it."""
    return torch.load(path, map_location="cpu", weights_only=True)["global_step"]


def save_weights(module: TaskModule, path: Path) -> None:
    """The model alone, as safetensors that carry their identity."""
    weights = {key: value.detach().cpu().contiguous() for key, value in module.model.state_dict().items()}
    aside = path.with_name(f".{path.name}")
    # save_file would make a file that only its owner can read
    aside.write_bytes(save(weights, metadata={"lra": json.dumps(module.identity())}))
    aside.replace(path)
