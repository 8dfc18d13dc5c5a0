"""CIFAR-10 in grey, pixel by pixel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lra.data import cifar10
from lra.data.split import Examples
from lra.data.store import Store
from lra.data.writer import StoreWriter
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.tasks.options import check_data_seed


class ImageData(TaskData):
    """CIFAR-10's images in grey; a seeded tenth of train is held out for validation."""

    vocabulary, generator = cifar10.PIXELS, cifar10.GENERATOR
    label_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def params(self) -> dict[str, Any]:
        return {"dataset": cifar10.HUB}  # not the source: any mirror of the data set holds the same images

    def build(self, writer: StoreWriter) -> None:
        cifar10.build_cifar10(writer, self.config.source)

    def splits(self, store: Store) -> dict[str, Examples]:
        return {**self.hold_out(store.split("train")), "test": store.split("test")}

    def depict(self, example: np.ndarray) -> np.ndarray:
        return example.reshape(self.config.resolution, self.config.resolution)


@TASKS.register(
    "image", version=1, classes=10, length=1024, mask=0.5, paper="Krizhevsky 2009; Tay et al. 2020, arXiv 2011.04006"
)
class Image(TaskModule):
    """Image: the class of a CIFAR-10 picture from its 1,024 grey pixels."""

    @dataclass(frozen=True)
    class Config:
        source: str = cifar10.HUB  # Hub data set, or a folder with a mirror of it
        data_seed: int = 0  # chooses the tenth of train that is held out for validation
        resolution: ClassVar[int] = cifar10.SIDE
        max_length: ClassVar[int] = cifar10.SIDE**2

        def __post_init__(self) -> None:
            check_data_seed(self)

        @property
        def protocol(self) -> str:
            return "heldout"

    Data = ImageData

    @classmethod
    def grid(cls, config: Any) -> tuple[int, int]:
        return config.resolution, config.resolution
