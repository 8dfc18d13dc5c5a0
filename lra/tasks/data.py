"""The base class of a task's data: how its store is prepared, checked, split and batched."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch

from lra.config import recipes
from lra.config.compose import flatten, to_dict
from lra.config.schema import RunConfig
from lra.data import order, resident
from lra.data.split import Examples, Split
from lra.data.store import Store, StoreContent, prepare_store, vocabulary_hash
from lra.data.writer import StoreWriter
from lra.errors import UsageError
from lra.tasks import TASKS, task_version
from lra.tasks.batches import Collation, EvalBatches, TrainBatches
from lra.timeline import inner_phase

# every task's Config has these fields; the values are examples for a generated task
REQUIRED_FIELDS = {"source": 'str = "generate"', "max_length": "int = 1024"}
# every task's Data has these
REQUIRED_PARTS = ("vocabulary", "generator", "params", "build")


class TaskData(pl.LightningDataModule):
    """Prepares a task's store once per machine and serves its splits. A task defines the methods up to `depict`.

    Args:
        collation: says how batches are made. Without it the data can only be prepared and shown.
    """

    vocabulary: ClassVar[Sequence[str]]
    generator: ClassVar[str]  # name and version of the code that writes the tokens; a store of another one is refused
    test_sets: ClassVar[tuple[str, ...]] = ("test",)
    label_names: ClassVar[Sequence[str]] = ()  # names of the classes, if they have any

    def __init__(self, run: RunConfig, collation: Collation | None = None):
        super().__init__()
        self.run, self.config, self.collation = run, run.task, collation
        fields = [f"`{name}: {form}`" for name, form in REQUIRED_FIELDS.items() if not hasattr(run.task, name)]
        cls = type(self)
        parts = [name for name in REQUIRED_PARTS if getattr(cls, name, None) is getattr(TaskData, name, None)]
        for lacking, place, owner in ((fields, "its Config", type(run.task)), (parts, cls.__name__, cls)):
            if lacking:
                what = f"add {' and '.join(lacking)} to {place} in {owner.__module__.replace('.', '/')}.py"
                raise UsageError(f"task '{run.task.name}' lacks what every task has: {what}")
        self.resident: dict[str, Examples] | None = None  # splits on the GPU; None until that is decided

    def params(self) -> dict[str, Any]:
        """Returns what the tokens depend on beside the task's version. It names the store."""
        raise NotImplementedError

    def source(self) -> str:
        """Says where the tokens come from: `generated`, a Hub id, or the path of an import."""
        given, default = self.config.source, type(self.config)().source
        if given in (None, "generate"):
            return "generated" if given else "nowhere"
        path, on_the_hub = Path(os.path.expanduser(given)), default not in (None, "generate")
        return given if on_the_hub and not os.path.isdir(path) else str(path.resolve())

    def seed(self) -> int | None:
        """Returns the seed of the random content of the store, if it has any."""
        return None

    def build(self, writer: StoreWriter) -> None:
        """Writes every split."""
        raise NotImplementedError

    def splits(self, store: Store) -> dict[str, Examples]:
        """Returns `train`, `val` and the test sets by the protocol."""
        return {name: store.split(name) for name in store.splits}

    def hold_out(self, train: Split) -> dict[str, Examples]:
        """Splits `train` into `val`, a seeded tenth, and `train`, the rest. For data without a validation split."""
        kept, held_out = order.hold_out(getattr(self.config, "data_seed", 0), len(train), 0.1)
        return {"train": train.subset(kept), "val": train.subset(held_out)}

    def stated_examples(self) -> int | None:
        """Returns the number of training examples if the task's fields say it, as of a generated task, else None."""
        return None

    def baselines(self, name: str) -> dict[str, float]:
        """Returns the accuracy of trivial predictors on a test set: train's majority class, and those in the store."""
        majority = self.accuracy_of(lambda split: np.zeros(len(split), np.int64), name)
        stored = self.store.manifest["baselines"].items()
        return {"majority": majority} | {rule: accuracy[name] for rule, accuracy in stored if name in accuracy}

    def depict(self, example: Any) -> np.ndarray | str:
        """Shows an example to people, as a uint8 image `[H, W]` or as text."""
        raise NotImplementedError

    def accuracy_of(self, feature: Callable[[Any], np.ndarray], name: str) -> float:
        """Returns the test accuracy of the rule that predicts a feature's commonest label in train.

        Args:
            feature: maps a split to one integer for each example.
            name: the test set.
        """
        train, test = self.splits(self.store)["train"], self.parts[name]  # all of train, also with train_share=
        seen, asked = feature(train), feature(test)
        counts = np.zeros((int(max(seen.max(), asked.max())) + 1, int(train.labels.max()) + 1))
        np.add.at(counts, (seen, np.asarray(train.labels, np.int64)), 1)
        return float((counts.argmax(1)[asked] == np.asarray(test.labels)).mean())

    def content(self) -> StoreContent:
        """Describes the content of the store and its origin."""
        origin = (self.source(), self.vocabulary, self.generator, self.seed())
        return StoreContent(self.config.name, task_version(self.config), self.params(), *origin)

    def prepare_data(self, force: bool = False) -> None:
        """Builds the store unless it exists. UsageError as in `open`."""
        how: dict[str, Any] = {"force": force, "command": self.command(), "check": self._check_splits}
        self._checked(prepare_store(self.content(), self.build, **how))

    def check_ranks(self, count: int) -> None:
        """Raises a UsageError if a scored split has fewer examples than there are ranks (`count`)."""
        parts = self.splits(self.open())
        for name in ("val", *self.test_sets):
            if (size := len(parts[name])) < count:
                raise UsageError(f"{name} has {size} examples for {count} devices: set trainer.devices={size} or less")

    def open(self) -> Store:
        """Returns the prepared store. UsageError if it is missing, damaged, or of another source or code."""
        return self._checked(Store.open(self.content().path, self.command()))

    def differences(self) -> list[str]:
        """Lists how the prepared data differs from the task's data. A store of an older lra lists nothing."""
        store = self.open()
        return [f"{store.path.name}: {text}" for text in store.manifest.get("differences", ())]

    def _checked(self, store: Store) -> Store:
        asked, found = self.content(), store.manifest
        other = None
        if self.config.source != type(self.config)().source and found["source"] != asked.source:
            other = f"from {found['source']}, not from {asked.source}"
        elif found["generator"] != asked.generator:
            other = f"by '{found['generator']}', not by '{asked.generator}'"
        elif found["vocabulary_hash"] != vocabulary_hash(asked.vocabulary):
            other = "with another vocabulary"
        if other:
            raise UsageError(f"{asked.task} was prepared {other}; run: {store.command} force=true")
        return store

    def _check_splits(self, store: Store) -> None:
        """Raises a UsageError if there is no split that a run needs, or a label in it that is no class."""
        parts, task = self.splits(store), f"task '{self.config.name}'"
        most = TASKS.get_declared(self.config.name).facts.classes - 1
        for name in ("train", "val", *self.test_sets):
            if name not in parts:
                raise UsageError(f"{task} has no split '{name}': write it in build, or return it from splits")
            low, high = parts[name].labels.min(initial=0), parts[name].labels.max(initial=0)
            if low < 0 or high > most:
                mend = "write others in build, or register the task with more classes"
                raise UsageError(f"{task}: {name} has labels {low} to {high}, outside 0 to {most}: {mend}")

    def command(self) -> str:
        """Returns the command that prepares this store, with the fields that differ from the task's defaults.

        For a task without a default recipe it names the run's, or another one where that is a file.
        """
        name = self.config.name
        ours, default = (dict(flatten(to_dict(config))) for config in (self.config, type(self.config)()))
        changed = [f"task.{field}={value}" for field, value in ours.items() if value != default[field]]
        if not recipes.read_task(name).get("recipe"):
            covering = sorted(recipes.recipes_of(name), key=lambda recipe: recipe != self.run.recipe)  # the run's first
            changed += [f"recipe={recipe}" for recipe in covering[:1]]
        return shlex.join(["lra", "data", "prepare", f"task={name}", *changed])

    def setup(self, stage: str | None = None) -> None:
        if not hasattr(self, "parts"):  # only once, as the store may be prepared anew during a run
            with inner_phase("opening data"):
                self.store = self.open()
                self.parts = self.splits(self.store)
                if self.run.train_share < 1:
                    train, seed = self.parts["train"], self.run.seed
                    self.parts["train"] = train.subset(order.share_rows(seed, len(train), self.run.train_share))
        if self.collation is not None and self.resident is None:  # only once, as a test after training uses the same
            with inner_phase("uploading data"):
                self.resident = self._upload(self.test_sets if stage == "test" else ("train", "val", *self.test_sets))

    def _upload(self, names: Sequence[str]) -> dict[str, Examples]:
        """Puts splits on the GPU if there is one and all of them fit into the share of its memory for data."""
        assert self.collation is not None
        device, options = self.collation.rank.device, self.collate_options()
        options.pop("layout")  # the layout makes no difference here
        limit = resident.MEMORY_SHARE * resident.device_memory(device)
        return (
            resident.upload_splits({name: self.parts[name] for name in names}, device, limit, **options)
            if limit
            else {}
        )

    @property
    def place(self) -> str:
        """Says where the tokens are, for people. Known after `setup`."""
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
        """Returns the options of `Split.collate`."""
        prefix = self.collation and self.collation.prefix
        return {"layout": self.run.batch.layout, "max_length": self.config.max_length, "prefix": prefix}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # the step sends training batches, and evaluation batches are there
