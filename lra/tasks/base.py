"""The base class of a task: its LightningModule on ragged batches. That of its data is `lra.tasks.data`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from lra.batch import IGNORED_LABEL, Batch
from lra.config.schema import RunConfig
from lra.data.collated import CollatedBatch
from lra.data.split import Split
from lra.data.store import vocabulary_hash
from lra.errors import UsageError, refuse_diverged
from lra.models.heads import classifier
from lra.models.transformer import Encoder, Transformer
from lra.tasks import TaskFacts, versioned_name
from lra.tasks.data import TaskData as TaskData


class OptimisationStep(Protocol):
    """The part of `lra.training` that trains and scores a module."""

    logged: float | None  # the loss that was logged last

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer: ...

    def captures(self, module: nn.Module, device: torch.device) -> bool: ...

    def loop(self, module: TaskModule, steps: Iterator[list[CollatedBatch]]) -> None: ...

    def evaluate(self, module: TaskModule, batch: Batch) -> Tensor: ...


class TaskModule(pl.LightningModule):
    """A classifier of sequences. A task is a subclass with its registered facts, its `Config` and its `Data`.

    Args:
        run: the configuration of the run.
        step: trains and scores this module; `lra.training` passes it in.
    """

    name: ClassVar[str]
    facts: ClassVar[TaskFacts]
    Config: ClassVar[type]
    Data: ClassVar[type[TaskData]]

    def __init__(self, run: RunConfig, step: OptimisationStep):
        super().__init__()
        self.automatic_optimization = False
        self.run, self.step = run, step
        self.model: Any = self.network()
        self.scored: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # scores and labels of each batch
        # rows and predicted classes of each batch of the test sets, if the run keeps them: `lra.training.predictions`
        self.predicted: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.seen: dict[str, int | str] = {}  # on what earlier runs trained these weights: `lra.training.leakage`
        self.provenance: dict[str, Any] = {}  # which runs these weights come from: `lra.training.provenance`
        splits, classes = ("val", *self.Data.test_sets), self.facts.classes
        self.accuracy = nn.ModuleDict({name: MulticlassAccuracy(classes, average="micro") for name in splits})
        self.mean_loss = nn.ModuleDict({name: MeanMetric(nan_strategy="disable") for name in splits})

    @classmethod
    def grid(cls, config: Any) -> tuple[int, int] | None:
        """Returns height and width of the image if the tokens are pixels. `config`: the task's configuration."""
        return None

    def network(self) -> nn.Module:
        """Returns the model. It has an `encoder`, and checkpoints hold its weights."""
        return Transformer(self.encoder(), self.head())

    def encoder(self) -> Encoder:
        run, vocabulary = self.run, len(self.Data.vocabulary)
        lengths: dict[str, Any] = {"max_length": run.task.max_length, "grid": self.grid(run.task)}
        return Encoder(run.model, run.attn, vocabulary=vocabulary, masked=run.hides, causal=run.causal, **lengths)

    def head(self) -> nn.Module:
        return classifier(self.run.model.d_model, self.run.model.d_hidden, self.facts.classes)

    def make_batch(self, sequences: Sequence[Any]) -> Batch:
        """Returns a packed batch of token ids for `forward`, as evaluation makes it from a store.

        Each sequence gets the CLS token of `model.pooling=cls`, is cut at `task.max_length`, and loses what
        `task.tokens=lit` leaves out. An image is its pixels, row by row. Of Retrieval two in a row are one example.

        Args:
            sequences: int `[length]` each, arrays, tensors or lists.

        Raises:
            UsageError: there is no sequence, or one is no sequence of the vocabulary's ids.
        """
        ids, size = [np.asarray(sequence) for sequence in sequences], len(self.Data.vocabulary)
        for place, each in enumerate(ids):
            if each.ndim != 1 or each.dtype.kind not in "iu" or not np.all((each >= 0) & (each < size)):
                raise UsageError(f"sequence {place} must be integers from 0 to {size - 1} in one dimension")
        if not ids:
            raise UsageError("there is no sequence to make a batch of")
        offsets = np.cumsum([0, *map(len, ids)])
        options = self.Data(self.run).collate_options() | {"layout": "packed", "prefix": self.model.encoder.prefix}
        split = Split.from_offsets(np.concatenate(ids).astype(np.uint16), offsets)
        return split.collate(range(len(ids)), **options).to(self.device)

    def forward(self, batch: Batch) -> Tensor:
        """Class scores, fp32 `[B, classes]`. `make_batch` makes a batch of token ids."""
        return self.model(batch).float()

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy, summed over the batch without its filling.

        Labels are smoothed by `optim.label_smoothing` (Szegedy et al. 2016, arXiv 1512.00567, section 7).
        """
        smoothing = self.run.optim.label_smoothing
        return F.cross_entropy(self(batch), batch.label, reduction="sum", label_smoothing=smoothing)

    def training_step(self, steps: Iterator[list[CollatedBatch]], _: int) -> None:
        self.step.loop(self, steps)

    def configure_optimizers(self) -> Any:
        return self.step.optimizer(self)

    def evaluate(self, batch: Batch) -> Tensor:
        """Applies `forward` to a batch, compiled if `step` has compiled it."""
        return self.step.evaluate(self, batch)

    def validation_step(self, batch: Batch, _: int) -> None:
        self._keep("val", batch)

    def test_step(self, batch: Batch, _: int, dataloader_idx: int = 0) -> None:
        split = self.Data.test_sets[dataloader_idx]
        scores = self._keep(split, batch)
        if self.run.predictions:
            counted = batch.label != IGNORED_LABEL  # without a batch's filling
            each = batch.size // len(batch.label)  # sequences of an example
            self.predicted[split].append((batch.index[::each][counted].long() // each, scores[counted].argmax(1)))

    def _keep(self, split: str, batch: Batch) -> Tensor:
        """Keeps scores and labels for `_score`, and returns the scores.

        It copies the labels, because they are a view of the whole batch.
        """
        scores = self.evaluate(batch)
        self.scored[split].append((scores, batch.label.clone()))
        return scores

    def on_validation_epoch_end(self) -> None:
        self._score("val")

    def on_test_epoch_end(self) -> None:
        for split in self.Data.test_sets:
            self._score(split)

    def _score(self, split: str) -> None:
        """Computes the metrics of all batches at once. One batch at a time would take as long as a small model."""
        accuracy, loss = cast(Metric, self.accuracy[split]), cast(Metric, self.mean_loss[split])
        scores, labels = (torch.cat(parts) for parts in zip(*self.scored.pop(split), strict=True))
        scores, labels = scores[labels != IGNORED_LABEL], labels[labels != IGNORED_LABEL]
        accuracy.update(scores, labels)
        loss.update(F.cross_entropy(scores, labels, reduction="none"))
        refuse_diverged(float(loss.compute()), split, self.run.optim.steadier)
        for name, metric in (("accuracy", accuracy), ("loss", loss)):
            self.log(f"{split}/{name}", metric, logger=False, on_step=False, on_epoch=True)

    def reference(self, data: TaskData, split: str) -> tuple[int, dict[str, float]]:
        """Returns the number of predictions in a test set and the accuracy of the baselines."""
        return len(data.parts[split]), data.baselines(split)

    def take_weights(self, weights: dict[str, Tensor], seen: dict[str, int | str], provenance: dict[str, Any]) -> None:
        """Replaces the model's weights.

        Args:
            weights: the state dict of `model`.
            seen: the sets on which these weights were trained, as `lra.training.leakage` names them.
            provenance: the runs from which they come, as `lra.training.provenance` records them.
        """
        self.model.load_state_dict(weights)
        self.seen, self.provenance = seen, provenance

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lra"] = self.identity()

    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint states of itself, in plain values that `torch.load(weights_only=True)` reads."""
        return {
            "task": versioned_name(self.run.task),
            "vocabulary": vocabulary_hash(self.Data.vocabulary),
            "config": self.run.to_saved_dict(),
            "seen": self.seen,
            "provenance": self.provenance,
        }
