"""Pathfinder at four resolutions: are the two marked ends those of one dashed path?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from lra.config.checks import check_at_least, check_at_most
from lra.data.cifar10 import PIXELS
from lra.data.pathfinder import generate, released
from lra.data.split import shared_places
from lra.data.writer import StoreWriter
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.tasks.options import MOST_EXAMPLES, check_data_seed, check_generated_only

LEAST_LIT = 8  # the least id of a pixel that tokens=lit keeps


class PathfinderData(TaskData):
    """Images generated as LRA's were, or the official ones. Pixels are ids 0 to 255, and none of them is padding."""

    vocabulary = PIXELS
    label_names = ("apart", "connected")

    def params(self) -> dict[str, Any]:
        c = self.config
        if c.source == "generate":
            return {"level": c.level, "seed": c.data_seed, "train": c.train, "val": c.val, "test": c.test}
        return {"level": c.level, "folder": self.source()}

    @property
    def generator(self) -> str:
        c = self.config
        return generate.GENERATORS[c.version] if c.source == "generate" else released.GENERATOR

    def seed(self) -> int | None:
        return self.config.data_seed if self.config.source == "generate" else None

    def stated_examples(self) -> int | None:
        return self.config.train if self.config.source == "generate" else None

    def build(self, writer: StoreWriter) -> None:
        c = self.config
        which = {"resolution": c.resolution, "level": c.level}
        if c.source == "generate":
            counts = {"train": c.train, "val": c.val, "test": c.test}
            generate.build_pathfinder(writer, **which, **counts, seed=c.data_seed, version=c.version)
        else:
            released.build_released_pathfinder(writer, c.source, **which)

    def depict(self, example: np.ndarray) -> np.ndarray:
        c = self.config
        if c.tokens == "lit":
            example = np.where((example >= LEAST_LIT) | shared_places(len(example), c.background), example, 0)
        return example.reshape(c.resolution, c.resolution)

    def collate_options(self) -> dict[str, Any]:
        return super().collate_options() | self.config.kept


@dataclass(frozen=True)
class PathfinderConfig:
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


class Pathfinder(TaskModule):
    """What the resolutions share: everything but the number of pixels."""

    Data = PathfinderData

    @classmethod
    def grid(cls, config: Any) -> tuple[int, int]:
        return config.resolution, config.resolution


@TASKS.register(
    "pathfinder",
    version=2,
    classes=2,
    length=1024,
    mask=0.5,
    paper="Linsley et al. 2018, arXiv 1805.08315; Tay et al. 2020, arXiv 2011.04006",
)
class Pathfinder32(Pathfinder):
    """Pathfinder: are two marked ends those of one dashed path, 32 x 32 pixels."""

    @dataclass(frozen=True)
    class Config(PathfinderConfig):
        resolution: ClassVar[int] = 32


@TASKS.register(
    "path64",
    version=2,
    classes=2,
    length=4096,
    mask=0.5,
    paper="Tay et al. 2020, arXiv 2011.04006; Dao et al. 2022, section 4.2",
)
class Path64(Pathfinder):
    """Path-64: Pathfinder in 64 x 64 pixels."""

    @dataclass(frozen=True)
    class Config(PathfinderConfig):
        resolution: ClassVar[int] = 64


@TASKS.register("pathx", version=2, classes=2, length=16384, mask=0.5, paper="Tay et al. 2020, arXiv 2011.04006")
class PathX(Pathfinder):
    """Path-X: Pathfinder in 128 x 128 pixels."""

    @dataclass(frozen=True)
    class Config(PathfinderConfig):
        resolution: ClassVar[int] = 128


@TASKS.register(
    "path256", version=2, classes=2, length=65536, mask=0.5, paper="Dao et al. 2022, arXiv 2205.14135, section 4.2"
)
class Path256(Pathfinder):
    """Path-256: Pathfinder in 256 x 256 pixels."""

    @dataclass(frozen=True)
    class Config(PathfinderConfig):
        resolution: ClassVar[int] = 256
