"""Every field of a run, except those that the chosen task and attention declare themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from lra.config.compose import to_dict
from lra.errors import UsageError

# fields of tasks that older runs lack, and what they did
LATER_FIELDS = {"task.background": 0.0, "task.difference": "signed", "task.version": 1}


def check_at_least(limit: int, section: str, config: Any, *names: str) -> None:
    """UsageError for the first of a configuration's fields that is below `limit`; null is not."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < limit:
            raise UsageError(f"{section}.{name}={value} must be at least {limit}")


def check_at_most(limit: int, section: str, config: Any, *names: str) -> None:
    """UsageError for the first of a configuration's fields that is above `limit`, far beyond what anybody trains.

    A number with some digits too many would end in a traceback, or with all memory taken. Null is not above it, each
    of a list is looked at, and the section of a verb's own options is empty.
    """
    for name in names:
        given = getattr(config, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and value > limit:
                raise UsageError(f"{section and section + '.'}{name}={value} is too large: use at most {limit}")


def check_dropout_rate(name: str, dropout: float) -> None:
    """UsageError for dropout that is none or all, in the steps of 1/256 that it has."""
    dropped = round(256 * dropout)
    if dropped == 256 or (dropout and not dropped):
        mend = "use at most 0.998" if dropped else "use 0, or at least 0.002"
        raise UsageError(f"{name}={dropout} is {dropped // 256} in steps of 1/256: {mend}")


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer encoder. Its attention is `attn=`, its input and classes come from the task."""

    d_model: int = 64
    heads: int = 2
    layers: int = 2
    d_ff: int = 128  # hidden width of the feed-forward and of the classifier
    dropout: float = 0.1  # between layers, in steps of 1/256
    attn_dropout: float = 0.1  # on attention probabilities, likewise
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    axes: Literal[1, 2] = 1  # 2: row and column of an image apart
    pooling: Literal["mean", "max", "cls"] = "mean"
    embedding_std: float = 0.02  # of the initial token and learned position embeddings

    def __post_init__(self) -> None:
        check_at_least(1, "model", self, "d_model", "heads", "layers", "d_ff")
        check_at_most(1 << 14, "model", self, "d_model")  # GPT-3 has 12,288
        check_at_most(1 << 16, "model", self, "d_ff")
        check_at_most(1 << 10, "model", self, "layers")
        if self.d_model % self.heads:
            raise UsageError(f"model.d_model={self.d_model} is not a multiple of model.heads={self.heads}")
        if self.positions == "rotary" and self.head_dim % (2 * self.axes):
            raise UsageError(
                f"rotary positions need a head dimension divisible by {2 * self.axes}, not {self.head_dim}"
            )
        if self.positions == "sinusoidal" and self.d_model % (2 * self.axes):
            raise UsageError(
                f"sinusoidal positions need model.d_model divisible by {2 * self.axes}, not {self.d_model}"
            )
        for name in ("dropout", "attn_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"model.{name}={getattr(self, name)} must be at least 0 and below 1")
            check_dropout_rate(f"model.{name}", getattr(self, name))
        if not 0 <= self.embedding_std < math.inf:
            raise UsageError(f"model.embedding_std={self.embedding_std} must be finite and at least 0")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


OptimizerName = Literal["adamw", "adam", "adamax", "nadam", "radam", "rmsprop", "sgd"]
# options that not every optimiser has, and which have them
OPTIM_OPTIONS = {
    "betas": ("adamw", "adam", "adamax", "nadam", "radam"),
    "eps": ("adamw", "adam", "adamax", "nadam", "radam", "rmsprop"),
    "momentum": ("rmsprop", "sgd"),
}


@dataclass(frozen=True)
class OptimConfig:
    """One of PyTorch's optimisers, with a warmed-up learning rate.

    Its options mean what PyTorch's documentation says. An option that it does not have is null.
    """

    name: OptimizerName = "adamw"
    lr: float = 1e-4  # the peak; for `rsqrt` the peak is lr / sqrt(warmup), as in Tay et al.
    betas: tuple[float, float] | None = (0.9, 0.999)  # not of rmsprop and sgd; null is the default, here and below
    eps: float | None = 1e-8  # not of sgd
    momentum: float | None = 0.0  # of rmsprop and sgd
    weight_decay: float = 0.0  # of adamw times the learning rate; to the others a part of the gradient
    decay: Literal["all", "matrices"] = "all"  # what decays; matrices: no bias, norm, embedding or table of positions
    clip: float | None = None  # largest norm of the whole gradient
    schedule: Literal["constant", "linear", "cosine", "rsqrt"] = "linear"  # after the warmup, to 0 at the last step
    warmup: int = 0  # steps of linear increase

    def options(self) -> dict[str, Any]:
        """What PyTorch's optimiser of this name is given."""
        named = {name: getattr(self, name) for name, having in OPTIM_OPTIONS.items() if self.name in having}
        return {"lr": self.lr, "weight_decay": self.weight_decay} | named

    def __post_init__(self) -> None:
        foreign = []
        for name, having in OPTIM_OPTIONS.items():
            value, default = getattr(self, name), getattr(OptimConfig, name)
            value = list(value) if isinstance(value, tuple) else value
            if value is None or value == (list(default) if isinstance(default, tuple) else default):
                object.__setattr__(self, name, default if self.name in having else None)
            elif self.name not in having:
                foreign.append((name, value))
        if foreign:
            given = ", ".join(f"optim.{name}={value}" for name, value in foreign)
            mend = " ".join(f"optim.{name}=null" for name, _ in foreign)
            raise UsageError(f"{given}: optim.name={self.name} does not have that; set {mend}")
        if self.decay != "all" and not self.weight_decay:
            raise UsageError(f"optim.decay={self.decay}, but nothing decays: set optim.weight_decay")
        if not 0 <= (self.momentum or 0) < 1:
            raise UsageError(f"optim.momentum={self.momentum} must be at least 0 and below 1")
        for name in ("lr", "eps", "weight_decay", "clip"):
            if not math.isfinite(value := getattr(self, name) or 0):
                raise UsageError(f"optim.{name}={value} must be a finite number")
        for name in ("lr", "eps"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise UsageError(f"optim.{name}={value} must be positive")
        check_at_least(0, "optim", self, "weight_decay", "warmup")
        if self.clip is not None and self.clip <= 0:
            raise UsageError(f"optim.clip={self.clip} must be positive, or null for no clipping")
        if not all(0 <= beta < 1 for beta in self.betas or ()):
            raise UsageError(f"optim.betas={list(self.betas or ())} must be at least 0 and below 1")
        check_at_most(10**9, "optim", self, "warmup")


@dataclass(frozen=True)
class BatchConfig:
    """Examples per optimisation step, and their layout. An example is a sequence, for Retrieval a pair of them."""

    size: int = 32  # over all devices
    micro: int | None = None  # examples a device holds at once; the rest of its share is accumulated
    eval: int = 64  # examples per evaluation batch and device
    layout: Literal["packed", "padded"] = "packed"

    def divide(self, devices: int) -> tuple[int, int]:
        """(examples of one device, examples it holds at once), of every step."""
        share = self.size // devices
        return share, min(self.micro or share, share)

    def __post_init__(self) -> None:
        check_at_least(1, "batch", self, "size", "micro", "eval")
        check_at_most(1 << 20, "batch", self, "size", "eval")  # more than any of the data sets has
        if self.micro is not None and self.micro > self.size:
            raise UsageError(f"batch.micro={self.micro} is larger than batch.size={self.size}")


@dataclass(frozen=True)
class TrainerConfig:
    """How long, how often and on what."""

    steps: int = 1000  # optimisation steps
    eval_every: int = 100  # steps between validations, of which each writes last.ckpt; divides steps
    log_every: int = 50  # steps averaged into one training loss; divides eval_every
    precision: Literal["fp32", "bf16"] = "fp32"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 1  # per node; under torchrun its number counts where this one is left out
    on_nan: Literal["stop", "skip"] = "stop"  # a loss or gradient that is not finite ends the run, or just its update

    @property
    def stride(self) -> int:
        """Steps that are one batch to Lightning, whose loop around a batch takes as long as a small model's step."""
        return max(count for count in range(1, 11) if self.log_every % count == 0)

    def __post_init__(self) -> None:
        check_at_least(1, "trainer", self, "steps", "eval_every", "log_every", "devices")
        check_at_most(10**9, "trainer", self, "steps")  # weeks, at a millisecond a step
        check_at_most(1 << 7, "trainer", self, "devices")  # each is a process, and a node has fewer
        if self.eval_every % self.log_every:
            raise UsageError(
                f"trainer.log_every={self.log_every} must divide trainer.eval_every={self.eval_every}: "
                f"set trainer.log_every={math.gcd(self.log_every, self.eval_every)}"
            )
        if self.eval_every > self.steps:
            raise UsageError(
                f"trainer.eval_every={self.eval_every} is larger than trainer.steps={self.steps}: no validation"
            )
        if rest := self.steps % self.eval_every:
            raise UsageError(
                f"trainer.eval_every={self.eval_every} must divide trainer.steps={self.steps}: the weights that are "
                f"scored are chosen by validation, and the last {rest} steps would have none"
            )


@dataclass(frozen=True)
class PositionsConfig:
    """How positions come from `init=` to a task of another size."""

    # learned: resized so; null: bilinear between images, and sequences of another length are refused
    resize: Literal["gridwise", "bilinear", "bicubic"] | None = None
    # sinusoidal and rotary: what keeps its coordinates, a pixel's distance (also null) or the image's extent
    scale: Literal["pixel", "image"] | None = None


@dataclass(frozen=True)
class RunConfig:
    """One training run. `task` and `attn` are the configurations that the selected components declare."""

    later_fields: ClassVar[Mapping[str, Any]] = LATER_FIELDS
    # (multiple, divisor): the first field must be a multiple of the second
    multiples: ClassVar[Sequence[tuple[str, str]]] = (
        ("trainer.steps", "trainer.eval_every"), ("trainer.eval_every", "trainer.log_every")
    )  # fmt: skip

    task: Any
    attn: Any
    recipe: str = ""
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = 0
    pretrain: Literal["none", "masked"] = "none"  # masked: hidden tokens are to be found, no label is used
    mask: float | None = None  # share of tokens that are hidden; null: the task's own
    engine: Literal["auto", "captured", "eager"] = "auto"  # auto: compiled and in CUDA graphs where that can be
    init: str | None = None  # start from another run's weights: its directory, .ckpt or .safetensors
    head: Literal["kept", "fresh"] | None = None  # the classifier of init=; null: kept if its shapes agree, else fresh
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    name: str | None = None  # names the run's directory instead of its recipe and overrides
    resume: str = "false"  # false, true (an error if there is nothing), auto, or the path of a checkpoint
    draws: Literal["same", "changed"] = "same"  # changed: resume also where lra has other draws than the checkpoint

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UsageError(f"seed={self.seed} is negative: choose seed=0 or more")
        if self.seed >= 1 << 64:
            raise UsageError(f"seed={self.seed} is too large: use at most {(1 << 64) - 1}")
        if self.pretrain == "none" and self.mask is not None:
            raise UsageError(f"mask={self.mask} is the share of tokens that pretrain=masked hides: add that")
        if self.mask is not None and not 0 < self.mask < 1:
            raise UsageError(f"mask={self.mask} must be above 0 and below 1")
        if self.pretrain != "none" and self.head is not None:
            raise UsageError(f"head={self.head}: pretrain={self.pretrain} trains no classifier, leave it out")
        if self.init is None:
            for name, value in (("head", self.head), *(("positions." + k, v) for k, v in vars(self.positions).items())):
                if value is not None:
                    raise UsageError(f"{name}={value} says what is done with another run's weights: it needs init=")
        learned = self.model.positions == "learned"
        if learned and self.positions.scale is not None:
            raise UsageError(
                "positions.scale is for sinusoidal and rotary positions: learned ones have positions.resize="
            )
        if not learned and self.positions.resize is not None:
            raise UsageError(
                f"positions.resize: {self.model.positions} positions are computed anew, nothing is resized; "
                "see positions.scale="
            )
        if self.name is not None and (Path(self.name).name != self.name or self.name.startswith(".")):
            raise UsageError(f"name={self.name} is not the name of a folder: leave out slashes, and a dot at its start")
        if len((self.name or "").encode()) > 200:
            raise UsageError(f"name={self.name} is too long for a folder: use at most 200 bytes")

    def to_saved_dict(self) -> dict[str, Any]:
        """The plain form that runs and checkpoints keep.

        It leaves out `resume` and `draws`, which only say how a run was called. It leaves out what changes nothing:
        `on_nan` at its default, `pretrain` and `mask` of a run without pretraining, fields at the value that runs
        before them had (`LATER_FIELDS`, and `optim` of AdamW), and options that the optimiser does not have.
        """
        kept = {key: value for key, value in to_dict(self).items() if key not in ("resume", "draws")}
        if self.trainer.on_nan == "stop":
            del kept["trainer"]["on_nan"]
        if self.pretrain == "none":
            del kept["pretrain"], kept["mask"]
        later = {"name": "adamw", "decay": "all"}
        options = {name: self.optim.name in having for name, having in OPTIM_OPTIONS.items()}
        kept["optim"] = {
            key: value for key, value in kept["optim"].items() if options.get(key, (key, value) not in later.items())
        }
        task = kept["task"].items()
        kept["task"] = {key: value for key, value in task if (f"task.{key}", value) not in LATER_FIELDS.items()}
        return kept
