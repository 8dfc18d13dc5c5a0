"""Pathfinder at four resolutions: are the two marked ends those of one dashed path?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lra.data.cifar10 import PIXELS
from lra.data.pathfinder import generate, released
from lra.data.split import shared_places
from lra.data.writer import StoreWriter
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.tasks.options import LEAST_LIT, PathfinderConfig


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
