"""The fields of every run. The chosen task and attention declare their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from lra.config.compose import to_dict
from lra.errors import UsageError

# fields of runs and of tasks that older runs lack, and the values by which those runs computed
LATER_RUN_FIELDS = {"mask_random": 0.0, "mask_span": 1, "mask_loss": "hidden", "denoise": 0.0}
LATER_FIELDS = {"task.background": 0.0, "task.difference": "signed", "task.version": 1}


def check_at_least(limit: int, section: str, config: Any, *names: str) -> None:
    """Raises a UsageError for the first field of a configuration that is below `limit`. Null passes."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < limit:
            raise UsageError(f"{section}.{name}={value} must be at least {limit}")


def check_at_most(limit: int, section: str, config: Any, *names: str) -> None:
    """Raises a UsageError for the first field of a configuration that is above `limit`, or has an item above it.

    The limit is far beyond what anybody trains: a number with too many digits would end in a traceback, or take all
    memory. Null passes. `section` is empty for the options of a verb.
    """
    for name in names:
        given = getattr(config, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and value > limit:
                raise UsageError(f"{section and section + '.'}{name}={value} is too large: use at most {limit}")


def check_dropout_rate(name: str, dropout: float) -> None:
    """Raises a UsageError if a dropout rate, rounded to 1/256, drops everything, or nothing although it is not 0."""
    dropped = round(256 * dropout)
    if dropped == 256 or (dropout and not dropped):
        mend = "use at most 0.998" if dropped else "use 0, or at least 0.002"
        raise UsageError(f"{name}={dropout} is {dropped // 256} in steps of 1/256: {mend}")


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer encoder. Its attention is `attn=`, its input and classes come from the task."""

    d_model: int = 64  # width: features of each token, a multiple of model.heads
    heads: int = 2  # attention heads of a layer
    layers: int = 2  # Transformer blocks
    d_ff: int = 128  # hidden width of the feed-forward layers, and of the classifier if it has two layers
    dropout: float = 0.1  # share that is dropped between layers, in steps of 1/256
    attn_dropout: float = 0.1  # share of the attention weights that is dropped, in steps of 1/256
    # learned or sinusoidal vectors, added to the tokens; rotary: queries and keys are rotated
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    rotary_base: float = 10000.0  # base of the frequencies of rotary positions; a larger one turns more slowly
    axes: Literal[1, 2] = 1  # 1: a place in the sequence; 2: row and column of an image
    # what the classifier sees: the mean or maximum over tokens, or an added first token
    pooling: Literal["mean", "max", "cls"] = "mean"
    classifier: Literal["two_layers", "linear"] = "two_layers"  # between the pooled sequence and the class scores
    embedding_std: float = 0.02  # standard deviation of the initial token and learned position embeddings

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
        if not 1 < self.rotary_base < math.inf:
            raise UsageError(f"model.rotary_base={self.rotary_base} must be finite and above 1")
        if self.positions != "rotary" and self.rotary_base != ModelConfig.rotary_base:
            raise UsageError(
                f"model.rotary_base={self.rotary_base}: model.positions={self.positions} does not rotate; "
                "set model.positions=rotary, or leave it out"
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

    @property
    def d_hidden(self) -> int | None:
        """Hidden width of the classifier; None if it has one layer."""
        return self.d_ff if self.classifier == "two_layers" else None


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

    Options mean what PyTorch's documentation says. An option is null if the optimiser does not have it.
    """

    name: OptimizerName = "adamw"  # PyTorch's optimiser
    lr: float = 1e-4  # largest learning rate; schedule=rsqrt, of Tay et al., divides it by sqrt(warmup)
    # decay of the two running averages; null: the default; not of rmsprop and sgd
    betas: tuple[float, float] | None = (0.9, 0.999)
    eps: float | None = 1e-8  # added to the divisor of an update; null: the default; not of sgd
    momentum: float | None = 0.0  # weight of earlier gradients; of rmsprop and sgd; null: the default
    # of adamw: taken from the weights, times the learning rate; of the others: added to the gradient
    weight_decay: float = 0.0
    # which weights decay; matrices: no bias, norm, embedding or table of positions
    decay: Literal["all", "matrices"] = "all"
    clip: float | None = None  # largest norm of the whole gradient; null: no clipping
    # learning rate after the warmup; linear and cosine end at 0
    schedule: Literal["constant", "linear", "cosine", "rsqrt"] = "linear"
    warmup: int = 0  # steps in which the learning rate rises linearly
    cooldown: int = 0  # last steps, in which the learning rate falls linearly; of schedule=constant and rsqrt
    cooldown_to: float = 0.0  # share of the learning rate that the last step of the cooldown still has
    label_smoothing: float = 0.0  # share of each label that is spread over all classes; of the training loss alone

    def options(self) -> dict[str, Any]:
        """The arguments of PyTorch's optimiser of this name."""
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
        check_at_least(0, "optim", self, "cooldown")
        check_at_most(10**9, "optim", self, "warmup", "cooldown")
        if self.cooldown and self.schedule in ("linear", "cosine"):
            raise UsageError(
                f"optim.cooldown={self.cooldown}: optim.schedule={self.schedule} falls to 0 by itself; "
                "set optim.schedule=constant, or optim.cooldown=0"
            )
        for name in ("cooldown_to", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"optim.{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.cooldown_to and not self.cooldown:
            raise UsageError(f"optim.cooldown_to={self.cooldown_to}, but there is no cooldown: set optim.cooldown")


@dataclass(frozen=True)
class BatchConfig:
    """Examples per optimisation step, and their layout. An example is a sequence, for Retrieval a pair of them."""

    size: int = 32  # examples of an optimisation step, over all devices
    micro: int | None = None  # examples that a device holds at once: fewer take less memory; null: its whole share
    eval: int = 64  # examples of an evaluation batch on each device
    # packed: no gaps between sequences; padded: all as long as the longest
    layout: Literal["packed", "padded"] = "packed"

    def divide(self, devices: int) -> tuple[int, int]:
        """(examples of one device in a step, examples that it holds at once)."""
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
    eval_every: int = 100  # steps between validations, each of which writes last.ckpt; divides trainer.steps
    log_every: int = 50  # steps whose mean training loss is logged; divides trainer.eval_every
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: computed under autocast, with weights in fp32
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"  # where to compute; auto: on a GPU if there is one
    devices: int = 1  # GPUs or CPU processes of each node; where this is left out, torchrun says how many
    on_nan: Literal["stop", "skip"] = "stop"  # when a loss or gradient is not finite, stop the run or skip the update
    # average of the weights that is scored and kept; ema: exponential; tail: the mean over the last steps
    average: Literal["none", "ema", "tail"] = "none"
    average_decay: float = 0.999  # of ema: what the share of a step's weights is multiplied by in each later step
    average_share: float = 0.25  # of tail: share of the steps, at the end, whose weights are averaged

    @property
    def stride(self) -> int:
        """Steps that Lightning sees as one batch: its own work around a batch takes as long as a small model's step."""
        return max(count for count in range(1, 11) if self.log_every % count == 0)

    def __post_init__(self) -> None:
        check_at_least(1, "trainer", self, "steps", "eval_every", "log_every", "devices")
        check_at_most(10**9, "trainer", self, "steps")  # weeks, at a millisecond a step
        check_at_most(1 << 7, "trainer", self, "devices")  # each is a process, and a node has fewer
        if not 0 < self.average_decay < 1:
            raise UsageError(f"trainer.average_decay={self.average_decay} must be above 0 and below 1")
        if not 0 < self.average_share <= 1:
            raise UsageError(f"trainer.average_share={self.average_share} must be above 0 and at most 1")
        for name, average in (("average_decay", "ema"), ("average_share", "tail")):
            if self.average != average and getattr(self, name) != getattr(TrainerConfig, name):
                raise UsageError(
                    f"trainer.{name}={getattr(self, name)} needs trainer.average={average}: set that, or leave it out"
                )
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

    # learned positions of another size; null: bilinear for images, an error for other sequences
    resize: Literal["gridwise", "bilinear", "bicubic"] | None = None
    # sinusoidal and rotary positions of another size keep a pixel's distance (also null) or the image's extent
    scale: Literal["pixel", "image"] | None = None


MASK_FIELDS = ("mask", "mask_random", "mask_span", "mask_loss")  # of a run: how tokens are hidden


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
    recipe: str = ""  # hyperparameters; where this is left out, the task's own recipe
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = 0  # of the weights, the data order and dropout
    # masked: find hidden tokens, without labels; none: train the classifier
    pretrain: Literal["none", "masked"] = "none"
    mask: float | None = None  # share of tokens that pretrain=masked or denoise= hides; null: the task's own
    mask_random: float = 0.0  # share of hidden tokens that a random token replaces, instead of MASK
    mask_span: int = 1  # places in a row that are hidden together
    mask_loss: Literal["hidden", "all"] = "hidden"  # tokens that the loss counts; pretraining scores hidden ones
    denoise: float = 0.0  # weight of restoring hidden tokens beside the labels, from the same corrupted input; 0: off
    # captured: compiled and in CUDA graphs; eager: neither; auto: captured where it can be
    engine: Literal["auto", "captured", "eager"] = "auto"
    init: str | None = None  # weights to start from: a run's folder, a .ckpt or a .safetensors file
    head: Literal["kept", "fresh"] | None = None  # classifier of init=; null: kept if its shapes agree, else fresh
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    name: str | None = None  # name of the run's folder, instead of recipe and given fields
    resume: str = (
        "false"  # go on with a run: false, true (it must be there), auto (if it is there), or a checkpoint's path
    )
    # changed: resume even if this lra draws other random numbers than the checkpoint
    draws: Literal["same", "changed"] = "same"

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UsageError(f"seed={self.seed} is negative: choose seed=0 or more")
        if self.seed >= 1 << 64:
            raise UsageError(f"seed={self.seed} is too large: use at most {(1 << 64) - 1}")
        if self.optim.cooldown and (most := self.trainer.steps - self.optim.warmup) < self.optim.cooldown:
            raise UsageError(
                f"optim.cooldown={self.optim.cooldown} and optim.warmup={self.optim.warmup} are more than "
                f"trainer.steps={self.trainer.steps}: "
                + (f"set optim.cooldown={most} or less" if most > 0 else "set a smaller optim.warmup")
            )
        if self.pretrain != "none" and self.optim.label_smoothing:
            raise UsageError(
                f"optim.label_smoothing={self.optim.label_smoothing}: pretrain={self.pretrain} trains without labels, "
                "set optim.label_smoothing=0"
            )
        for name in MASK_FIELDS:
            if (value := getattr(self, name)) != getattr(RunConfig, name) and not self.hides:
                raise UsageError(f"{name}={value} says how tokens are hidden: add pretrain=masked or denoise=1")
        if self.mask is not None and not 2**-16 <= self.mask < 1:
            raise UsageError(f"mask={self.mask} must be at least 2e-5 and below 1")
        if not 0 <= self.denoise < math.inf:
            raise UsageError(f"denoise={self.denoise} must be finite and at least 0")
        if self.denoise and self.pretrain != "none":
            raise UsageError(f"denoise={self.denoise} is beside labels, pretrain={self.pretrain} has none: choose one")
        if self.mask_random and not 2**-16 <= self.mask_random <= 1:
            raise UsageError(f"mask_random={self.mask_random} must be 0, or at least 2e-5 and at most 1")
        if not 1 <= self.mask_span <= 1 << 20:  # as long as the longest sequence of any task
            raise UsageError(f"mask_span={self.mask_span} must be at least 1 and at most {1 << 20}")
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

    @property
    def hides(self) -> bool:
        """Whether training hides tokens: the model has a MASK token and a decoder."""
        return self.pretrain == "masked" or self.denoise > 0

    def to_saved_dict(self) -> dict[str, Any]:
        """The plain form that runs and checkpoints keep.

        It leaves out `resume` and `draws`, which only say how a run was called. It leaves out what changes nothing:
        `on_nan`, `average` with its options, `rotary_base` and `classifier` at their defaults; `pretrain` and `mask` of
        a run that hides no tokens; fields at the value that runs before them had (`LATER_RUN_FIELDS`, `LATER_FIELDS`,
        and `optim` of AdamW); and options that the optimiser does not have.
        """
        kept = {key: value for key, value in to_dict(self).items() if key not in ("resume", "draws")}
        for name in ("on_nan", "average", "average_decay", "average_share"):
            if kept["trainer"][name] == getattr(TrainerConfig, name):
                del kept["trainer"][name]
        for name in ("rotary_base", "classifier"):
            if kept["model"][name] == getattr(ModelConfig, name):
                del kept["model"][name]
        if self.pretrain == "none":
            del kept["pretrain"]
        if not self.hides:
            del kept["mask"]
        kept = {key: value for key, value in kept.items() if (key, value) not in LATER_RUN_FIELDS.items()}
        later = {"name": "adamw", "decay": "all", "cooldown": 0, "cooldown_to": 0.0, "label_smoothing": 0.0}
        options = {name: self.optim.name in having for name, having in OPTIM_OPTIONS.items()}
        kept["optim"] = {
            key: value for key, value in kept["optim"].items() if options.get(key, (key, value) not in later.items())
        }
        task = kept["task"].items()
        kept["task"] = {key: value for key, value in task if (f"task.{key}", value) not in LATER_FIELDS.items()}
        return kept
