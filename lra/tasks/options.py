"""What options of several tasks share. It needs no PyTorch, so that fields are checked before that is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lra.config.checks import check_at_least, check_at_most
from lra.errors import UsageError

MOST_EXAMPLES = 10**7  # in a generated split: a hundred times those of LRA
MOST_TOKENS = 1 << 20  # in a sequence: 16 times those of Path-256
LEAST_LIT = 8  # the least id of a pixel that tokens=lit keeps


def check_generated_only(config: Any, *fields: str) -> None:
    """Raises a UsageError if one of `fields`, which are of generated data, is set for imported data."""
    default = type(config)
    changed = [field for field in fields if getattr(config, field) != getattr(default, field)]
    if changed and config.source != "generate":
        names = ", ".join(f"task.{field}" for field in changed)
        mend = " ".join(f"task.{field}={getattr(default, field)}" for field in changed)
        raise UsageError(
            f"{names}: only for generated data; set the default, {mend}, or leave out task.source={config.source}"
        )


def check_data_seed(config: Any) -> None:
    """Raises a UsageError if `data_seed` can't be a seed of the generators."""
    if not 0 <= config.data_seed < 1 << 32:
        raise UsageError(f"task.data_seed={config.data_seed} is out of range: choose 0 to {(1 << 32) - 1}")


@dataclass(frozen=True)
class PathfinderConfig:
    """Fields of Pathfinder at every resolution."""

    source: str = "generate"  # generate, or LRA's release: its folder or its archive
    level: Literal["easy", "intermediate", "hard"] = "hard"  # paths of 6, 9 or 14 dashes; LRA's is hard
    tokens: Literal["all", "lit"] = "all"  # lit: only pixels with id 8 or more, with their positions
    background: float = 0.0  # share of the other pixels that tokens=lit keeps
    data_seed: int = 0  # of the generated data
    train: int = 160000  # training examples
    val: int = 20000  # validation examples
    test: int = 20000  # test examples
    # 1: LRA's images, and those of pathfinder@1, whose labels are the same at every level and resolution
    version: Literal[1, 2] = 2
    resolution: ClassVar[int]

    def __post_init__(self) -> None:
        if self.source != "generate":  # what is imported has not changed
            object.__setattr__(self, "version", 1)
        check_at_least(1, "task", self, "train", "val", "test")
        check_at_most(MOST_EXAMPLES, "task", self, "train", "val", "test")
        check_generated_only(self, "train", "val", "test", "data_seed")
        check_data_seed(self)
        if not 0 <= self.background < 1:
            raise UsageError(f"task.background is a share of the pixels, from 0 and below 1, not {self.background}")
        if self.background and self.tokens == "all":
            raise UsageError("task.background needs tokens=lit: tokens=all keeps the whole background")

    @property
    def stream(self) -> str | None:
        """What the images of version 1 are taken from at every resolution and level: each shares its label there."""
        return f"pathfinder@1, data_seed={self.data_seed}" if self.version == 1 else None

    @property
    def max_length(self) -> int:
        return self.resolution**2

    @property
    def kept(self) -> dict[str, Any]:
        """Which pixels are tokens: arguments of `Split.collate`."""
        return {"threshold": LEAST_LIT, "share": self.background} if self.tokens == "lit" else {}

    @property
    def protocol(self) -> str:
        some = f" and {100 * self.background:g}% of the others" if self.background else ""
        return f"{self.level}, {self.tokens} tokens{some}"
