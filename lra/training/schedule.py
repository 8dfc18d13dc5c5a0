"""The learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import replace

from lra.config.optim import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int, factor: float = 1.0) -> float:
    """Learning rate of update number `step` (from 0) of `steps`.

    Linear warmup to the peak, then constant, or linear or cosine decay that reaches 0 with the last update.
    `rsqrt` is Tay et al.'s: lr * min(1, step / warmup) / sqrt(max(step, warmup)).
    `plateau` is constant but for `factor`, which `lra.training.plateau` lowers after the warmup.
    A cooldown replaces the last updates of a schedule: from its last rate before them, the rate falls linearly to the
    share `cooldown_to` of it (Zhai et al. 2022, "Scaling Vision Transformers").
    """
    done = step + 1
    if config.cooldown and done > (before := steps - config.cooldown):
        peak = learning_rate(replace(config, cooldown=0, cooldown_to=0.0), max(before, 1) - 1, steps, factor)
        return peak * (config.cooldown_to + (1 - config.cooldown_to) * (steps - done) / config.cooldown)
    if config.schedule == "rsqrt":
        warmup = max(config.warmup, 1)
        return config.lr * min(1.0, done / warmup) / math.sqrt(max(done, warmup))
    if done <= config.warmup:
        return config.lr * done / config.warmup
    if config.schedule in ("constant", "plateau"):
        return config.lr * factor
    left = (steps - done) / max(steps - config.warmup, 1)
    return config.lr * (left if config.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))
