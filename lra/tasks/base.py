"""What every task shares: the data module over a prepared store, and the LightningModule over a ragged batch."""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from lra.batch import Batch
from lra.config.compose import flatten, to_dict
from lra.config.schema import RunConfig
from lra.data import order, resident
from lra.data.collated import Collated
from lra.data.split import IGNORED, Examples, Split
from lra.data.store import Content, Store, prepare, vocabulary_hash
from lra.data.writer import Writer
from lra.errors import UsageError, refuse_diverged
from lra.models.heads import classifier
from lra.models.transformer import Encoder, Transformer
from lra.tasks import TaskFacts, version_of, versioned
from lra.tasks.batches import Collation, EvalBatches, TrainBatches

MOST_EXAMPLES = 10**7  # of a split that is generated: a hundred times LRA's
MOST_TOKENS = 1 << 20  # of a sequence: 16 times Path-256's


# that the Config of every task has, as a task that is generated may declare them
FIELDS = {"source": 'str = "generate"', "max_length": "int = 1024"}


class TaskData(pl.LightningDataModule):
    """Prepares a task's store once per machine and serves its splits. A task defines the methods up to `depict`.

    Args:
        collation: how batches are made; without it the data can be prepared and looked at.
    """

    vocabulary: ClassVar[Sequence[str]]
    generator: ClassVar[str]  # name and version of what writes the tokens
    test_sets: ClassVar[tuple[str, ...]] = ("test",)
    label_names: ClassVar[Sequence[str]] = ()  # where a class has a name

    def __init__(self, run: RunConfig, collation: Collation | None = None):
        super().__init__()
        self.run, self.config, self.collation = run, run.task, collation
        if lacking := [f"`{name}: {form}`" for name, form in FIELDS.items() if not hasattr(run.task, name)]:
            file = f"{type(run.task).__module__.replace('.', '/')}.py"
            what = f"add {' and '.join(lacking)} to its Config in {file}"
            raise UsageError(f"task '{run.task.name}' lacks what every task has: {what}")
        self.resident: dict[str, Examples] | None = None  # parts on the GPU; None before that is decided

    def params(self) -> dict[str, Any]:
        """What the tokens depend on, apart from the task's version; it names the store."""
        raise NotImplementedError

    def source(self) -> str:
        """Where the tokens come from, for people: `generated`, a Hub id, or the path of what is imported."""
        given, default = self.config.source, type(self.config)().source
        if given in (None, "generate"):
            return "generated" if given else "nowhere"
        path, on_the_hub = Path(os.path.expanduser(given)), default not in (None, "generate")
        return given if on_the_hub and not os.path.isdir(path) else str(path.resolve())

    def seed(self) -> int | None:
        """Seed of what is drawn into the store."""
        return None

    def build(self, writer: Writer) -> None:
        """Writes every split."""
        raise NotImplementedError

    def splits(self, store: Store) -> dict[str, Examples]:
        """`train`, `val` and the test sets, by the protocol."""
        return {name: store.split(name) for name in store.splits}

    def hold_out(self, train: Split) -> dict[str, Examples]:
        """`val`, a seeded tenth of `train`, and the rest as `train`: for a data set without a validation split."""
        kept, held_out = order.split_off(getattr(self.config, "data_seed", 0), len(train), 0.1)
        return {"train": train.subset(kept), "val": train.subset(held_out)}

    def baselines(self, name: str) -> dict[str, float]:
        """Accuracy on a test set of predictors that compute nothing: train's majority class, and the store's own."""
        majority = self.accuracy_of(lambda split: np.zeros(len(split), np.int64), name)
        stored = self.store.manifest["baselines"].items()
        return {"majority": majority} | {rule: accuracy[name] for rule, accuracy in stored if name in accuracy}

    def depict(self, example: Any) -> np.ndarray | str:
        """An example for human eyes: an image uint8 `[H, W]`, or text."""
        raise NotImplementedError

    def accuracy_of(self, feature: Callable[[Any], np.ndarray], name: str) -> float:
        """Accuracy on a test set of the best rule that sees one integer: its value's commonest label in train."""
        train, test = self.parts["train"], self.parts[name]
        seen, asked = feature(train), feature(test)
        counts = np.zeros((int(max(seen.max(), asked.max())) + 1, int(train.labels.max()) + 1))
        np.add.at(counts, (seen, np.asarray(train.labels, np.int64)), 1)
        return float((counts.argmax(1)[asked] == np.asarray(test.labels)).mean())

    def content(self) -> Content:
        """What the store holds and where it comes from."""
        origin = (self.source(), self.vocabulary, self.generator, self.seed())
        return Content(self.config.name, version_of(self.config), self.params(), *origin)

    def prepare_data(self, force: bool = False) -> None:
        """Builds the store unless it exists; UsageError as from `open`."""
        self._sourced(prepare(self.content(), self.build, force=force, command=self.command()))

    def check_ranks(self, count: int) -> None:
        """UsageError if one of `count` ranks would have nothing of a part that is scored."""
        parts = self.splits(self.open())
        for name in ("val", *self.test_sets):
            if (size := len(parts[name])) < count:
                raise UsageError(f"{name} has {size} examples for {count} devices: set trainer.devices={size} or less")

    def open(self) -> Store:
        """The prepared store; UsageError if it is not there, damaged, or from another source than the one asked for."""
        return self._sourced(Store.open(self.content().path, self.command()))

    def differences(self) -> list[str]:
        """In what the prepared data is not what the task's data should be; a store of an older lra does not say."""
        store = self.open()
        return [f"{store.path.name}: {text}" for text in store.manifest.get("differences", ())]

    def _sourced(self, store: Store) -> Store:
        task, found, asked = self.content().task, store.manifest["source"], self.content().source
        if self.config.source != type(self.config)().source and found != asked:
            raise UsageError(f"{task} was prepared from {found}, not from {asked}; run: {self.command()} force=true")
        return store

    def command(self) -> str:
        """What prepares this store: the task, and the fields in which it differs from the task's defaults."""
        ours, default = (dict(flatten(to_dict(config))) for config in (self.config, type(self.config)()))
        changed = [f"task.{field}={value}" for field, value in ours.items() if value != default[field]]
        return shlex.join(["lra", "data", "prepare", f"task={self.config.name}", *changed])

    def setup(self, stage: str | None = None) -> None:
        if not hasattr(self, "parts"):  # once: while this runs, the store may be prepared anew
            self.store = self.open()
            self.parts = self.splits(self.store)
        if self.collation is not None and self.resident is None:  # once: testing after training uses the same
            self.resident = self._upload(self.test_sets if stage == "test" else ("train", "val", *self.test_sets))

    def _upload(self, names: Sequence[str]) -> dict[str, Examples]:
        """These parts on the GPU, if there is one and all of them fit the share of its memory that is theirs."""
        assert self.collation is not None
        device, options = self.collation.rank.device, self.collate_options()
        options.pop("layout")  # makes no difference
        limit = resident.SHARE * resident.memory(device)
        return resident.upload({name: self.parts[name] for name in names}, device, limit, **options) if limit else {}

    @property
    def place(self) -> str:
        """Where the tokens of training and evaluation are, for people; known after `setup`."""
        return "data on the GPU" if self.resident else "data on the host"

    def _part(self, name: str) -> Examples:
        return (self.parts | (self.resident or {}))[name]

    def train_dataloader(self) -> TrainBatches:
        how = self.collation
        assert how is not None
        return TrainBatches(self._part("train"), self.run, how.rank, self.collate_options(), how.step, how.few_shapes)

    def val_dataloader(self) -> EvalBatches:
        return self._eval("val")

    def test_dataloader(self) -> list[EvalBatches]:
        return [self._eval(name) for name in self.test_sets]

    def _eval(self, name: str) -> EvalBatches:
        how = self.collation
        assert how is not None
        return EvalBatches(self._part(name), self.run.batch.eval, how.rank, self.collate_options(), how.few_shapes)

    def collate_options(self) -> dict[str, Any]:
        """How `Split.collate` makes a batch."""
        prefix = self.collation and self.collation.prefix
        return {"layout": self.run.batch.layout, "max_length": self.config.max_length, "prefix": prefix}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # of training the step sends them, of evaluation they are there


def only_generated(config: Any, *fields: str) -> None:
    """UsageError if one of `fields`, which say what is drawn, is set although the data is imported."""
    default = type(config)
    changed = [field for field in fields if getattr(config, field) != getattr(default, field)]
    if changed and config.source != "generate":
        names = ", ".join(f"task.{field}" for field in changed)
        mend = " ".join(f"task.{field}={getattr(default, field)}" for field in changed)
        raise UsageError(
            f"{names}: only for generated data; set the default, {mend}, or leave out task.source={config.source}"
        )


def check_data_seed(config: Any) -> None:
    """UsageError if `data_seed` cannot be a seed of the generators."""
    if not 0 <= config.data_seed < 1 << 32:
        raise UsageError(f"task.data_seed={config.data_seed} is out of range: choose 0 to {(1 << 32) - 1}")


class OptimisationStep(Protocol):
    """What `lra.training` hands in: the loop that trains a module, and how it is scored."""

    logged: float | None  # the loss, as it was logged last

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer: ...

    def captures(self, module: nn.Module, device: torch.device) -> bool: ...

    def loop(self, module: TaskModule, steps: Iterator[list[Collated]]) -> None: ...

    def evaluate(self, module: TaskModule, batch: Batch) -> Tensor: ...


class TaskModule(pl.LightningModule):
    """A classifier of sequences. `step` is the optimisation step of `lra.training`, handed in from above.

    A task is a subclass with its registered facts, its `Config` and its `Data`.
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
        self.seen: dict[str, int | str] = {}  # on what earlier runs trained these weights: `lra.training.seen`
        self.provenance: dict[str, Any] = {}  # which runs these weights come from: `lra.training.provenance`
        splits, classes = ("val", *self.Data.test_sets), self.facts.classes
        self.accuracy = nn.ModuleDict({name: MulticlassAccuracy(classes, average="micro") for name in splits})
        self.mean_loss = nn.ModuleDict({name: MeanMetric(nan_strategy="disable") for name in splits})

    @classmethod
    def grid(cls, config: Any) -> tuple[int, int] | None:
        """Height and width where the tokens are pixels, of the task's configuration."""
        return None

    def network(self) -> nn.Module:
        """With an `encoder`; checkpoints are of this."""
        return Transformer(self.encoder(), self.head())

    def encoder(self, masked: bool = False) -> Encoder:
        run, vocabulary = self.run, len(self.Data.vocabulary)
        lengths: dict[str, Any] = {"max_length": run.task.max_length, "grid": self.grid(run.task)}
        return Encoder(run.model, run.attn, vocabulary=vocabulary, masked=masked, **lengths)

    def head(self) -> nn.Module:
        return classifier(self.run.model.d_model, self.run.model.d_ff, self.facts.classes)

    def forward(self, batch: Batch) -> Tensor:
        """Class scores, fp32 `[B, classes]`."""
        return self.model(batch).float()

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy summed over the batch, without what fills it up."""
        return F.cross_entropy(self(batch), batch.label, reduction="sum")

    def training_step(self, steps: Iterator[list[Collated]], _: int) -> None:
        self.step.loop(self, steps)

    def configure_optimizers(self) -> Any:
        return self.step.optimizer(self)

    def evaluate(self, batch: Batch) -> Tensor:
        """What `forward` makes of a batch, faster where `step` has it compiled."""
        return self.step.evaluate(self, batch)

    def validation_step(self, batch: Batch, _: int) -> None:
        self._keep("val", batch)

    def test_step(self, batch: Batch, _: int, dataloader_idx: int = 0) -> None:
        self._keep(self.Data.test_sets[dataloader_idx], batch)

    def _keep(self, split: str, batch: Batch) -> None:
        """Scores and labels for `_score`; the label is copied, as it is a part of all that was sent of the batch."""
        self.scored[split].append((self.evaluate(batch), batch.label.clone()))

    def on_validation_epoch_end(self) -> None:
        self._score("val")

    def on_test_epoch_end(self) -> None:
        for split in self.Data.test_sets:
            self._score(split)

    def _score(self, split: str) -> None:
        """The metrics of all batches at once: of each alone they would take as long as a small model."""
        accuracy, loss = cast(Metric, self.accuracy[split]), cast(Metric, self.mean_loss[split])
        scores, labels = (torch.cat(parts) for parts in zip(*self.scored.pop(split), strict=True))
        scores, labels = scores[labels != IGNORED], labels[labels != IGNORED]
        accuracy.update(scores, labels)
        loss.update(F.cross_entropy(scores, labels, reduction="none"))
        refuse_diverged(float(loss.compute()), split)
        for name, metric in (("accuracy", accuracy), ("loss", loss)):
            self.log(f"{split}/{name}", metric, logger=False, on_step=False, on_epoch=True)

    def reference(self, data: TaskData, split: str) -> tuple[int, dict[str, float]]:
        """How many predictions a test set's accuracy is of, and what the baselines reach there."""
        return len(data.parts[split]), data.baselines(split)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lra"] = self.identity()

    def identity(self) -> dict[str, Any]:
        """What a checkpoint says of itself, in plain values, so that `torch.load(weights_only=True)` reads it."""
        return {
            "task": versioned(self.run.task),
            "vocabulary": vocabulary_hash(self.Data.vocabulary),
            "config": self.run.to_saved_dict(),
            "seen": self.seen,
            "provenance": self.provenance,
        }
