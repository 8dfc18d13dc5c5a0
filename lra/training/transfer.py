"""Starts a model from the weights of another run, which may have another resolution, attention, head or pretraining.

`init=` of `fit` and `test` is this one function. Configurations are compared first, and all differences are named at
once. Learned tables of positions are resized, two axes each by itself, the place of a CLS token apart. Computed
positions have a buffer `scale`: `positions.scale=image` multiplies it over all transfers. Another attention's tensors
are left behind, even if they have the same name. A head, decoder, MASK token, hidden channel or norms of queries and
keys that only one of the two models has are left behind or made fresh. A resumed run does not transfer again, so what
was done is kept in checkpoints and goes into result.json. All ranks read the same file, and what is fresh comes from
the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lra.config.fields import format_value
from lra.config.model import ModelConfig
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.models.positions import resize_table
from lra.tasks import TASKS
from lra.tasks.base import TaskModule
from lra.training import checkpoints, leakage, provenance
from lra.training.checkpoints import POSITION_SCALE, POSITION_TABLES

EMBEDDING_KEY, CLS_KEY = "encoder.embedding.weight", "encoder.embedding.cls"  # where pixels are numbers, CLS is apart
HIDDEN_CHANNEL = "hidden channel"  # what stands for MASK there
ImageSize = tuple[int, int]


@dataclass(frozen=True)
class Transfer:
    """What happened to the tensors of a checkpoint. result.json has it as `transfer`."""

    task: str  # on which the weights were trained
    changed: dict[str, list[str]]  # fields that differ and may differ: value there, value here
    same: int  # number of tensors that were taken unchanged
    resized: str | None  # learned positions: the method, and the old and new size
    scale: list[float] | None  # factors of the coordinates of computed positions, over all transfers
    fresh: list[str]  # tensors of this model that are newly initialised
    left: list[str]  # tensors of the checkpoint that this model does not have
    notes: list[str]  # cases in which the scored examples may have been trained on

    def describe(self, path: str | Path) -> str:
        """Describes the transfer in one line."""
        what = [f"init: {self.same} tensors of {path}"]
        if self.resized:
            what.append(f"positions resized, {self.resized}")
        if self.scale and set(self.scale) != {1.0}:
            what.append(f"coordinates times {' and '.join(f'{factor:g}' for factor in self.scale)}")
        for field, values in self.changed.items():
            there, here = map(format_value, values)
            what.append(f"trained with {field}={there}, here {here}")
        what += [f"fresh: {', '.join(self.fresh)}"] if self.fresh else []
        what += [f"left behind: {', '.join(self.left)}"] if self.left else []
        return "; ".join(what) if len(what) > 1 else f"{what[0]}, all of this model's"


class Origin(pl.Callback):
    """Keeps the transfer of `init=` in a run's checkpoints, so that the result of a resumed run has it."""

    def __init__(self, transfer: dict[str, Any] | None = None):
        self.transfer = transfer

    def state_dict(self) -> dict[str, Any]:
        return {"transfer": self.transfer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.transfer = state["transfer"]


def drop_origin(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a saved configuration without the fields of its own transfer."""
    return {key: value for key, value in config.items() if key not in ("init", "head", "positions")}


def transfer_weights(
    module: TaskModule, weights: dict[str, Tensor], identity: dict[str, Any], path: str | Path, *, score: bool = False
) -> Transfer:
    """Starts a module from the weights of a checkpoint, as `head` and `positions` of its configuration say.

    Args:
        path: the file that the weights and identity were read from, for messages.
        score: whether the weights are scored at once. Then none may be fresh.

    Raises:
        UsageError: the weights do not fit this model, or were trained on the examples to score.
    """
    checkpoints.check_model(module, identity, path)
    run, own, there = module.run, module.model.state_dict(), identity["config"]
    trained, seen = leakage.restore_task(there["task"]), leakage.sets_of_checkpoint(identity)
    inherited = provenance.inherit_provenance(weights, identity, path)
    leakage.refuse_leakage(run.task, seen, path, "test" if score else "validation")
    changed = {
        name: [before, here]
        for name, before, here in (
            ("attn", there["attn"]["name"], run.attn.name),
            ("model.pooling", there["model"]["pooling"], run.model.pooling),
            *(
                (f"model.{name}", there["model"].get(name, getattr(ModelConfig, name)), getattr(run.model, name))
                for name in ("rotary_base", "rotary_share", "rotary_bands", "qk_norm")
            ),
            ("model.causal", checkpoints.is_causal(identity), run.causal),
            ("task.difference", *(getattr(task, "difference", None) for task in (trained, run.task))),
            ("pretrain", checkpoints.pretraining_of(identity), run.pretrain),
            ("denoise", there.get("denoise", 0.0), run.denoise),
        )
        if before is not None and here is not None and before != here  # None: the task has no such field
    }
    # another attention may have a tensor of the same name and another meaning
    parts = [".attention."] if "attn" in changed else []
    if len({any(".qkv." in key for key in keys) for keys in (own, weights)}) > 1:  # a mixer has its own projections
        parts += [".qkv.", ".out."]
    if "model.qk_norm" in changed:
        parts += [".q_norm.", ".k_norm."]
    head = _shapes(weights, "head")
    if run.head == "kept" and head != _shapes(own, "head"):
        raise _other_head(path, pretrained=not head)
    if run.head == "fresh" or (run.head is None and head != _shapes(own, "head")):
        parts.append(".head.")
    if _shapes(weights, "decoder") != _shapes(own, "decoder"):
        parts.append(".decoder.")
    fresh, left = ({key for key in keys if any(part in f".{key}" for part in parts)} for keys in (own, weights))
    old, new = _size(trained), _size(run.task)
    prefixed = [pooling == "cls" for pooling in (there["model"]["pooling"], run.model.pooling)]
    # Linformer's projections and Reformer's rotations have the size of the longest sequence, CLS included
    if old != new or prefixed[0] != prefixed[1]:
        both = {key for key in own.keys() & weights.keys() if ".attention." in key}
        other = {key for key in both if weights[key].shape != own[key].shape}
        fresh, left = fresh | other, left | other
    weights = {key: value for key, value in weights.items() if key not in left}
    tokens = _tokens(module, weights, own, identity)
    untrained = [*_names(fresh & dict(module.model.named_parameters()).keys()), *tokens.fresh]
    if score and untrained:
        what = f"{path} has no {' and '.join(untrained)} for this model, and untrained weights can't be scored"
        raise UsageError(f"{what}: train it with lra fit")
    resized = _resize(run, weights, own, old, new)
    if POSITION_SCALE in own:
        scale = weights.get(POSITION_SCALE, torch.ones_like(own[POSITION_SCALE]))
        weights[POSITION_SCALE] = scale * _ratio(run, old, new)
    checkpoints.check_shapes(own, weights | {key: own[key] for key in fresh}, path)
    module.take_weights(own | weights, seen, inherited)
    return Transfer(
        task=identity["task"],
        changed=changed,
        same=sum(not (key in tokens.changed or (resized and key.startswith(POSITION_TABLES))) for key in weights),
        resized=resized,
        scale=weights[POSITION_SCALE].tolist() if POSITION_SCALE in weights else None,
        fresh=[*_names(fresh), *tokens.fresh],
        left=[*(name for name in _names(left) if name not in _names(fresh)), *tokens.left],
        notes=leakage.unknown_overlaps(run.task, seen, path) + leakage.shifted_split(trained, run.task, path),
    )


@dataclass(frozen=True)
class _Tokens:
    """What happened to CLS and MASK, and the tensors that have other rows because of it."""

    fresh: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def _tokens(
    module: TaskModule, weights: dict[str, Tensor], own: dict[str, Tensor], identity: dict[str, Any]
) -> _Tokens:
    """Gives `weights` the CLS and MASK of this model: those of the checkpoint, or fresh ones.

    Their embeddings follow those of the vocabulary, in this order. Where pixels are numbers, the hidden channel is a
    column instead of MASK, and CLS a vector. On one axis learned positions begin with CLS.
    """
    run, size = module.run, len(module.Data.vocabulary)
    numbers = run.model.pixels == "numbers"
    mask = HIDDEN_CHANNEL if numbers else "MASK"
    there, here = (
        [name for name, has in (("CLS", pooling == "cls"), (mask, hides)) if has]
        for pooling, hides in (
            (identity["config"]["model"]["pooling"], checkpoints.hides_tokens(identity)),
            (run.model.pooling, run.hides),
        )
    )
    if there == here:
        return _Tokens()
    fresh, left = tuple(x for x in here if x not in there), tuple(x for x in there if x not in here)
    if numbers:
        changed = _fit_pixels(weights, own, fresh, left)
    else:
        theirs, ours = (
            {name: table[size + place :][:1] for place, name in enumerate(names)}
            for names, table in ((there, weights[EMBEDDING_KEY]), (here, own[EMBEDDING_KEY]))
        )
        extra = (theirs.get(name, ours[name]) for name in here)
        weights[EMBEDDING_KEY] = torch.cat((weights[EMBEDDING_KEY][:size], *extra))
        changed = [EMBEDDING_KEY]
    table = f"{POSITION_TABLES}0"
    if "CLS" in (*fresh, *left) and run.model.axes == 1 and table in own:
        kept = weights[table][int("CLS" in left) :]
        weights[table] = torch.cat((own[table][:1], kept)) if "CLS" in fresh else kept
        changed.append(table)
    return _Tokens(fresh, left, tuple(changed))


def _fit_pixels(
    weights: dict[str, Tensor], own: dict[str, Tensor], fresh: tuple[str, ...], left: tuple[str, ...]
) -> list[str]:
    """Gives `weights` the hidden channel and the CLS of this model's `PixelEmbedding`. Returns what changed."""
    changed = []
    if HIDDEN_CHANNEL in (*fresh, *left):
        weights[EMBEDDING_KEY] = torch.cat((weights[EMBEDDING_KEY][:, :1], own[EMBEDDING_KEY][:, 1:]), 1)
        changed.append(EMBEDDING_KEY)
    if "CLS" in fresh:
        weights[CLS_KEY] = own[CLS_KEY]
        changed.append(CLS_KEY)
    elif "CLS" in left:
        weights.pop(CLS_KEY, None)
    return changed


def _resize(
    run: RunConfig, weights: dict[str, Tensor], own: dict[str, Tensor], old: ImageSize, new: ImageSize
) -> str | None:
    """Resizes the tables of learned positions in `weights` to this model. Describes what it did."""
    if not _resizes(run, old, new):
        return None
    tables, how = sorted(key for key in own if key.startswith(POSITION_TABLES)), run.positions.resize or "bilinear"
    first = int(run.model.axes == 1 and run.model.pooling == "cls")  # the place of the CLS token
    for axis, key in enumerate(tables):
        before, after = (size if run.model.axes == 1 else (1, size[axis]) for size in (old, new))
        table = weights[key].float()
        weights[key] = torch.cat((table[:first], resize_table(table[first:], before, after, how)))
    return f"{how}, {_text(old)} to {_text(new)}"


def _resizes(run: RunConfig, old: ImageSize, new: ImageSize) -> bool:
    """Whether learned positions change their size. UsageError if `positions.resize` does not fit that."""
    asked = run.positions.resize
    if run.model.positions != "learned" or old == new:
        if asked:
            raise UsageError(f"positions.resize={asked}: nothing is resized, both have {_text(new)}; leave it out")
        return False
    if asked is None and 1 in (old[0], new[0]):
        raise UsageError(
            f"learned positions of {_text(old)} for {_text(new)}: positions.resize=bilinear stretches them along the "
            "sequence, task.max_length= keeps the length"
        )
    return True


def _ratio(run: RunConfig, old: ImageSize, new: ImageSize) -> Tensor:
    """Returns the factors of the coordinates of computed positions, one for each axis."""
    if run.positions.scale != "image":
        return torch.ones(run.model.axes)
    if 1 in (old[0], new[0]):
        raise UsageError("positions.scale=image is for images: leave it out")
    if old == new:
        raise UsageError(f"positions.scale=image changes nothing, both have {_text(new)}; leave it out")
    ratio = torch.tensor(old) / torch.tensor(new)
    return ratio if run.model.axes == 2 else ratio.prod(0, keepdim=True)


def _other_head(path: str | Path, pretrained: bool) -> UsageError:
    why = "no head to keep, because a pretraining made it" if pretrained else "another head than this task"
    return UsageError(f"{path} has {why}: leave out head=kept")


def _size(task: Any) -> ImageSize:
    """Returns height and width of a task's images, or 1 and the longest length of its sequences."""
    return TASKS.get(task.name).grid(task) or (1, task.max_length)


def _text(size: ImageSize) -> str:
    return f"{size[1]} tokens" if size[0] == 1 else f"{size[0]}x{size[1]} pixels"


def _shapes(weights: dict[str, Tensor], part: str) -> dict[str, torch.Size]:
    """Returns the shapes of the tensors of the head or the decoder."""
    return {key: value.shape for key, value in weights.items() if key.startswith(f"{part}.")}


def _names(keys: set[str]) -> list[str]:
    """Names tensors for people: once for all layers, and the head and the decoder each as a whole."""
    return sorted(
        {
            part if (part := key.partition(".")[0]) in ("head", "decoder") else checkpoints.layerless_name(key)
            for key in keys
        }
    )
