"""The fields of every run. The chosen task and attention declare their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from lra.config.augment import AugmentConfig
from lra.config.compose import to_dict
from lra.config.model import ModelConfig
from lra.config.optim import OPTIM_OPTIONS, OptimConfig
from lra.config.trainer import BatchConfig, TrainerConfig
from lra.errors import UsageError

# fields of runs and of tasks that older runs lack, and the values by which those runs computed
LATER_RUN_FIELDS = {
    "mask_random": 0.0, "mask_span": 1, "mask_patch": 1, "mask_loss": "hidden", "pixel_loss": "cross_entropy",
    "denoise": 0.0, "train_share": 1.0,
}  # fmt: skip
LATER_FIELDS = {"task.background": 0.0, "task.difference": "signed", "task.version": 1}
# fields of sections that older runs lack; those computed by the defaults
LATER_SECTION_FIELDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "model": (ModelConfig, (
        "layer_drop", "qk_norm", "rotary_base", "rotary_share", "rotary_bands", "pixels", "causal", "classifier",
        "norm", "post_norm",
    )),
    "optim": (OptimConfig, (
        "name", "decay", "cooldown", "cooldown_to", "label_smoothing", "plateau_factor", "plateau_patience",
    )),
    "trainer": (TrainerConfig, ("on_nan", "average", "average_decay", "average_share", "patience", "epochs")),
}  # fmt: skip


@dataclass(frozen=True)
class PositionsConfig:
    """How positions come from `init=` to a task of another size."""

    # learned positions of another size; null: bilinear for images, an error for other sequences
    resize: Literal["gridwise", "bilinear", "bicubic"] | None = None
    # sinusoidal and rotary positions of another size keep a pixel's distance (also null) or the image's extent
    scale: Literal["pixel", "image"] | None = None


LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow", "trackio"]
# fields that say how a run is called or watched, and not what it computes
UNSAVED_FIELDS = ("resume", "draws", "predictions", "logger", "trainer.log_grad_norm")
MASK_FIELDS = ("mask", "mask_random", "mask_span", "mask_patch", "mask_loss")  # of a run: how tokens are hidden


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
    # share of the training examples that are used; seed= chooses them, and a larger share contains a smaller one
    train_share: float = 1.0
    # masked: find hidden tokens, without labels; causal: find each next token; none: train the classifier
    pretrain: Literal["none", "masked", "causal"] = "none"
    mask: float | None = None  # share of tokens that pretrain=masked or denoise= hides; null: the task's own
    mask_random: float = 0.0  # share of hidden tokens that a random token replaces, instead of MASK
    mask_span: int = 1  # places in a row that are hidden together
    mask_patch: int = 1  # side of the squares of pixels that are hidden together
    mask_loss: Literal["hidden", "all"] = "hidden"  # tokens that the loss counts; pretraining scores hidden ones
    # loss of pixels to restore; l1: the distance of their grey values, from -1 to 1, where model.pixels=numbers
    pixel_loss: Literal["cross_entropy", "l1"] = "cross_entropy"
    denoise: float = 0.0  # weight of restoring hidden tokens beside the labels, from the same corrupted input; 0: off
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    # captured: compiled and in CUDA graphs; eager: neither; auto: captured where it can be
    engine: Literal["auto", "captured", "eager"] = "auto"
    init: str | None = (
        None  # weights to start from: a run's folder, a .ckpt, a .safetensors or hf://owner/name[@revision]
    )
    head: Literal["kept", "fresh"] | None = None  # classifier of init=; null: kept if its shapes agree, else fresh
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    name: str | None = None  # name of the run's folder, instead of recipe and given fields
    resume: str = (
        "false"  # go on with a run: false, true (it must be there), auto (if it is there), or a checkpoint's path
    )
    predictions: bool = False  # keep the class that is predicted for each test example, in predictions.npz
    # changed: resume even if this lra draws other random numbers than the checkpoint
    draws: Literal["same", "changed"] = "same"
    # where curves go: csv is metrics.csv and always there; wandb, mlflow and trackio are packages to install
    logger: tuple[LoggerName, ...] = ("csv", "tensorboard")

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
        if not 0 < self.train_share <= 1:
            raise UsageError(f"train_share={self.train_share} must be above 0 and at most 1")
        self._check_patience()
        self._check_logger()
        if self.pretrain != "none" and self.optim.label_smoothing:
            raise UsageError(
                f"optim.label_smoothing={self.optim.label_smoothing}: pretrain={self.pretrain} trains without labels, "
                "set optim.label_smoothing=0"
            )
        for name in MASK_FIELDS:
            if (value := getattr(self, name)) != getattr(RunConfig, name) and not self.hides:
                none = f"pretrain={self.pretrain} hides none, leave it out"
                mend = none if self.pretrain == "causal" else "add pretrain=masked or denoise=1"
                raise UsageError(f"{name}={value} says how tokens are hidden: {mend}")
        if self.pixel_loss != "cross_entropy":
            if self.model.pixels == "ids":
                raise UsageError(f"pixel_loss={self.pixel_loss} is of numbers, not of ids: set model.pixels=numbers")
            if not self.hides:
                raise UsageError(
                    f"pixel_loss={self.pixel_loss}, but nothing is hidden: add pretrain=masked or denoise=1"
                )
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
        if not 1 <= self.mask_patch <= 1 << 10:
            raise UsageError(f"mask_patch={self.mask_patch} must be at least 1 and at most {1 << 10}")
        if self.mask_span > 1 and self.mask_patch > 1:
            raise UsageError(
                f"mask_span={self.mask_span} hides rows and mask_patch={self.mask_patch} squares: choose one"
            )
        if self.pretrain != "none" and self.head is not None:
            raise UsageError(f"head={self.head}: pretrain={self.pretrain} trains no classifier, leave it out")
        if self.pretrain != "none" and self.predictions:
            raise UsageError(
                f"predictions=true: pretrain={self.pretrain} predicts no class of an example, leave it out"
            )
        if self.init is None:
            for name, value in (("head", self.head), *(("positions." + k, v) for k, v in vars(self.positions).items())):
                if value is not None:
                    raise UsageError(f"{name}={value} says what is done with another run's weights: it needs init=")
        if self.model.positions == "none":
            for name, value in vars(self.positions).items():
                if value is not None:
                    raise UsageError(f"positions.{name}={value}: model.positions=none has none, leave it out")
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

    def _check_patience(self) -> None:
        """Raises a UsageError if training may end early, and the learning rate is planned for all steps."""
        patience, optim = self.trainer.patience, self.optim
        if patience is None:
            return
        planned = f"optim.cooldown={optim.cooldown}" if optim.cooldown else ""
        if optim.schedule in ("linear", "cosine"):
            planned = f"optim.schedule={optim.schedule}"
        if planned:
            mend = "optim.cooldown=0" if optim.cooldown else "optim.schedule=constant, rsqrt or plateau"
            raise UsageError(
                f"trainer.patience={patience}: {planned} falls until the last step, which is not known before; "
                f"set {mend}, or trainer.patience=null"
            )
        if optim.schedule == "plateau" and patience < (least := optim.plateau_patience + 2):
            raise UsageError(
                f"trainer.patience={patience} ends training before optim.plateau_patience={optim.plateau_patience} "
                f"lowers the learning rate: set trainer.patience={least} or more, or a smaller optim.plateau_patience"
            )

    def _check_logger(self) -> None:
        """Raises a UsageError if a logger is named twice, or metrics.csv would be missing."""
        given = ",".join(self.logger)
        if len({*self.logger}) < len(self.logger):
            raise UsageError(f"logger={given} names one twice")
        if "csv" not in self.logger:
            raise UsageError(f"logger={given} leaves out metrics.csv, which resumed runs read: set logger=csv,{given}")

    @property
    def hides(self) -> bool:
        """Whether training hides tokens: the model has a MASK token and a decoder."""
        return self.pretrain == "masked" or self.denoise > 0

    @property
    def causal(self) -> bool:
        """Whether the encoder is causal: the model, or while it learns to find next tokens."""
        return self.model.causal or self.pretrain == "causal"

    def to_saved_dict(self) -> dict[str, Any]:
        """The plain form that runs and checkpoints keep.

        It leaves out `UNSAVED_FIELDS`, which only say how a run was called. It leaves out what changes nothing:
        fields that came later, at the value that runs before them had (`LATER_RUN_FIELDS`, `LATER_FIELDS`,
        `LATER_SECTION_FIELDS`, and all of `augment`); `pretrain` of a run with labels; `mask` of a run that hides no
        tokens; and options that the optimiser does not have.
        """
        kept = {key: value for key, value in to_dict(self).items() if key not in UNSAVED_FIELDS}
        kept["trainer"] = {key: v for key, v in kept["trainer"].items() if f"trainer.{key}" not in UNSAVED_FIELDS}
        for section, (schema, names) in LATER_SECTION_FIELDS.items():
            for name in names:
                if kept[section][name] == getattr(schema, name):
                    del kept[section][name]
        for name, having in OPTIM_OPTIONS.items():
            if self.optim.name not in having:
                del kept["optim"][name]
        kept["augment"] = self.augment.changes()
        if not kept["augment"]:
            del kept["augment"]
        if self.pretrain == "none":
            del kept["pretrain"]
        if not self.hides:
            del kept["mask"]
        kept = {key: value for key, value in kept.items() if (key, value) not in LATER_RUN_FIELDS.items()}
        task = kept["task"].items()
        kept["task"] = {key: value for key, value in task if (f"task.{key}", value) not in LATER_FIELDS.items()}
        return kept
