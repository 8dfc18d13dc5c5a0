"""The data verbs: a task's store, without a model."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lra.config.options import split_options
from lra.config.override import Override, parse_overrides
from lra.config.registry import describe_unknown
from lra.config.schema import RunConfig
from lra.data import picture
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.training.fit import configure

if TYPE_CHECKING:
    from lra.tasks.base import TaskData

IMAGE_COUNT, TEXT_COUNT = 8, 2  # examples of a label
TEXT_LINES = 8  # of an example in the terminal


@dataclass(frozen=True)
class PrepareOptions:
    force: bool = False  # replaces a store that is there


@dataclass(frozen=True)
class ShowOptions:
    split: str = "train"
    count: int | None = None  # of each label; null: 8 images, or 2 texts in the terminal
    # a PNG file; by default images go to one that is named after task and split, and texts to the terminal
    out: str | None = None

    def __post_init__(self) -> None:
        if self.count is not None and not 1 <= self.count <= 100:
            raise UsageError(f"count={self.count} is not a number from 1 to 100")


def task_data(args: Iterable[str | Override]) -> TaskData:
    """The data module of `task=… [recipe=…] [task fields]`; fields of anything but the task are refused."""
    foreign = {field.name for field in dataclasses.fields(RunConfig)} - {"task", "recipe"}
    given = {override.field: override for override in parse_overrides(args)}
    for field, override in given.items():
        if field.partition(".")[0] in foreign:
            raise UsageError(f"{override} has no meaning for data: give task=, recipe= and fields of the task")
    if task := given.get("task"):  # composing would suggest fields that have no meaning here
        own = {field.name for field in dataclasses.fields(TASKS.get_declared(task.text).Config)}
        for name in given:
            if name not in ("task", "recipe") and name.removeprefix("task.") not in own:
                raise UsageError(describe_unknown(f"field of {task}", name, own))
    some = 10**6  # trainer.epochs of a recipe mean nothing here, and the data may not be there yet
    run = configure([*given.values(), "attn=standard"], count=lambda _: some).config
    return TASKS.get(run.task.name).Data(run)


def parse_prepare(args: Iterable[str]) -> tuple[PrepareOptions, TaskData]:
    """What `lra data prepare` is to do, and the data of which task."""
    options, fields = split_options(PrepareOptions, args)
    return options, task_data(fields)


def parse_show(args: Iterable[str]) -> tuple[ShowOptions, TaskData]:
    """What `lra data show` is to show, and the data of which task."""
    options, fields = split_options(ShowOptions, args)
    return options, task_data(fields)


def prepare_store(args: Sequence[str]) -> str:
    """Prepares the store."""
    options, data = parse_prepare(args)
    data.prepare_data(force=options.force)
    notes = "".join(f"\nnote: {text}" for text in data.open().manifest["notes"])
    return f"{data.config.name} is ready in {data.content().path}{notes}"


def verify_store(args: Sequence[str]) -> str:
    """Reads every byte; UsageError naming the first file that differs from the manifest."""
    store = task_data(args).open()
    store.verify()
    return f"{store.path}: every file is as the manifest says"


def describe_store(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What the manifest says, as rows of a table."""
    store = task_data(args).open()
    m = store.manifest
    yield "folder", str(store.path)
    yield "task", f"{m['task']}@{m['version']}"
    yield "source", f"{m['source']}, by {m['generator']}" + ("" if m["seed"] is None else f", seed {m['seed']}")
    yield "parameters", ", ".join(f"{name}={value}" for name, value in m["params"].items())
    made_with = ", ".join(f"{name} {m['versions'].get(name)}" for name in ("lra", "numpy", "pillow"))
    yield "prepared", f"{m['date']}, with {made_with}"
    words = m["vocabulary"] if len(m["vocabulary"]) <= 20 else [*m["vocabulary"][:3], "...", m["vocabulary"][-1]]
    yield "vocabulary", f"{len(m['vocabulary'])} ids: {' '.join(words)}; sha256 {m['vocabulary_hash']}"
    for name, part in {**m["splits"], **({"documents": m["documents"]} if "documents" in m else {})}.items():
        yield name, "; ".join(_describe(part))
    for rule, accuracy in m["baselines"].items():
        yield f"baseline {rule}", ", ".join(f"{split} {100 * share:.2f}%" for split, share in accuracy.items())
    yield from (("note", text) for text in m["notes"])
    for name, file in m["files"].items():
        yield name, f"{file['bytes']:,} bytes; sha256 {file['sha256']}"


def _describe(part: Mapping[str, Any]) -> Iterator[str]:
    """Size, lengths and balance of a split."""
    yield f"{part['count']:,}"
    if "length" in part:
        yield "length {min:,} to {max:,}, mean {mean:,.1f}".format(**part["length"])
    if "labels" in part:
        yield "labels " + ", ".join(
            f"{label}: {100 * n / max(1, part['count']):.2f}%" for label, n in part["labels"].items()
        )


def show_examples(args: Sequence[str], width: int | None = None) -> list[str]:
    """Shows the first examples of each label of a split. Returns lines to print.

    Images, and with `out=` texts too, are drawn into a PNG file. Other texts are in the lines.

    Args:
        width: letters of a line in the terminal. A text is then cut to `TEXT_LINES` lines. Default: it is not cut.
    """
    options, data = parse_show(args)
    data.setup()
    if options.split not in data.parts:
        raise UsageError(f"split={options.split} does not exist: choose from {', '.join(data.parts)}")
    split = data.parts[options.split]
    labels = np.unique(split.labels)
    texts = isinstance(data.depict(split[0]), str)
    count = options.count or (TEXT_COUNT if texts and options.out is None else IMAGE_COUNT)
    rows = np.concatenate([np.flatnonzero(split.labels == label)[:count] for label in labels])
    names = data.label_names or range(int(labels.max()) + 1)
    captions = [f"{options.split} {row}: {names[int(split.labels[row])]}" for row in rows]
    examples: list[Any] = [data.depict(split[int(row)]) for row in rows]
    if texts and options.out is None:
        pairs = zip(captions, examples, strict=True)
        return [line for caption, text in pairs for line in (caption, *format_text(text, width), "")]
    drawn = picture.text_page(examples, captions) if texts else picture.image_grid(examples, captions)
    path = Path(options.out or f"{data.config.name}-{options.split}.png")
    picture.save_png(drawn, path)
    return [f"{len(rows)} examples of {options.split} are drawn in {path}"]


def format_text(text: str, width: int | None) -> list[str]:
    """The lines of a text, wrapped at `width` letters and cut to `TEXT_LINES`; the last one says how much is cut."""
    if width is None:
        return text.splitlines()
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width, tabsize=4) or [""]]
    if len(lines) <= TEXT_LINES:
        return lines
    rest = sum(map(len, lines[TEXT_LINES - 1 :]))
    return [*lines[: TEXT_LINES - 1], f"… {rest:,} more characters: | less shows all"]
