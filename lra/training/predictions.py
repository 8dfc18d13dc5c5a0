"""Keeps the class that a run predicts for each example of its test sets: `predictions.npz`, for paired tests.

The file holds two arrays for each test set, in the order of the set: `<set>`, the predicted classes, and
`<set>_label`, the true ones. They are uint8, or uint16 where there are more than 256 classes, and are not compressed.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lra.errors import UsageError, first_line
from lra.training.run_directory import replace_file

if TYPE_CHECKING:  # whoever only reads predictions needs no PyTorch
    import pytorch_lightning as pl

    from lra.tasks.base import TaskData, TaskModule

LABEL_SUFFIX = "_label"


class Predictions(NamedTuple):
    """The predicted and the true class of each example of a test set, each uint8 or uint16 `[n]`."""

    predicted: np.ndarray
    label: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """Whether each example is classified correctly, bool `[n]`."""
        return self.predicted == self.label


def gather_predictions(module: TaskModule, data: TaskData, trainer: pl.Trainer) -> dict[str, Predictions]:
    """Returns what all ranks together have predicted for each test set. Every rank must call it after the test.

    Raises:
        RuntimeError: an example was scored by no rank, or more than once.
    """
    import torch

    dtype, gathered = np.uint8 if module.facts.classes <= 256 else np.uint16, {}
    for split in data.test_sets:
        own = module.predicted.pop(split)
        rows, classes = (torch.cat(parts) for parts in zip(*own, strict=True))
        # a class and a count for each example: the sum over ranks has each class once, and says so
        sums = torch.zeros(2, len(data.parts[split]), dtype=torch.int64, device=trainer.strategy.root_device)
        sums[0].index_add_(0, rows, classes)
        sums[1].index_add_(0, rows, torch.ones_like(classes))
        predicted, counts = trainer.strategy.reduce(sums, reduce_op="sum").cpu().numpy()
        if (counts != 1).any():
            raise RuntimeError(f"{split}: {int((counts != 1).sum())} examples were not scored exactly once")
        gathered[split] = Predictions(predicted.astype(dtype), np.asarray(data.parts[split].labels).astype(dtype))
    return gathered


def write_predictions(path: Path, predictions: Mapping[str, Predictions]) -> None:
    """Replaces `predictions.npz` in one step."""
    arrays = {}
    for split, (predicted, label) in predictions.items():
        arrays |= {split: predicted, split + LABEL_SUFFIX: label}
    with replace_file(path) as file:
        np.savez(file, **arrays)


def read_predictions(path: Path) -> dict[str, Predictions]:
    """Returns the predictions by test set; none if there is no such file. UsageError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:  # its reader checks the checksums of what NumPy reads
            if any(each.file_size != each.compress_size for each in archive.infolist()):
                raise ValueError("it is compressed")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        splits = [name for name in arrays if not name.endswith(LABEL_SUFFIX)]
        found = {split: Predictions(arrays.pop(split), arrays.pop(split + LABEL_SUFFIX)) for split in splits}
        if arrays or not found or not all(map(_fit, found.values())):
            raise ValueError("it has other arrays than predictions and labels of test sets")
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"{path} can't be read as predictions ({first_line(error)}): "
            f"lra test init={path.parent} predictions=true makes them anew"
        ) from None
    return found


def _fit(predictions: Predictions) -> bool:
    """Whether both arrays are classes of the same examples."""
    predicted, label = predictions
    return predicted.ndim == 1 and predicted.shape == label.shape and {predicted.dtype, label.dtype} <= _DTYPES


_DTYPES = {np.dtype(np.uint8), np.dtype(np.uint16)}
