"""The fields of the optimiser and its schedule, `optim.*`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from lra.config.checks import check_at_least, check_at_most
from lra.errors import UsageError

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
    # learning rate after the warmup; linear and cosine end at 0; plateau falls where validation gets no better
    schedule: Literal["constant", "linear", "cosine", "rsqrt", "plateau"] = "linear"
    plateau_factor: float = 0.2  # of schedule=plateau: what the learning rate is multiplied by
    plateau_patience: int = 3  # of schedule=plateau: so many validations without a better one change nothing yet
    warmup: int = 0  # steps in which the learning rate rises linearly
    cooldown: int = 0  # last steps, in which the learning rate falls linearly; not of schedule=linear and cosine
    cooldown_to: float = 0.0  # share of the learning rate that the last step of the cooldown still has
    label_smoothing: float = 0.0  # share of each label that is spread over all classes; of the training loss alone

    def options(self) -> dict[str, Any]:
        """The arguments of PyTorch's optimiser of this name."""
        named = {name: getattr(self, name) for name, having in OPTIM_OPTIONS.items() if self.name in having}
        return {"lr": self.lr, "weight_decay": self.weight_decay} | named

    @property
    def steadier(self) -> str:
        """Names the fields that keep weights from diverging, and are not set so already."""
        return "lower optim.lr" + ("" if self.clip is not None and self.clip <= 1 else ", or set optim.clip=1")

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
        check_at_least(0, "optim", self, "cooldown", "plateau_patience")
        check_at_most(10**9, "optim", self, "warmup", "cooldown", "plateau_patience")
        if not 0 < self.plateau_factor < 1:
            raise UsageError(f"optim.plateau_factor={self.plateau_factor} must be above 0 and below 1")
        for name in ("plateau_factor", "plateau_patience"):
            if self.schedule != "plateau" and (value := getattr(self, name)) != getattr(OptimConfig, name):
                raise UsageError(f"optim.{name}={value} needs optim.schedule=plateau: set that, or leave it out")
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
