"""What shows that an option does something: other values from a field's type, and what is seen of a run."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import itertools
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lra
from lra.batch import Batch
from lra.config.model import ModelConfig
from lra.config.schema import RunConfig
from lra.config.trainer import BatchConfig
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from lra.tasks.base import TaskModule
from lra.tasks.batches import Collation, Rank
from lra.training.step import Step

# what a result repeats of its configuration, or reads from a clock or the machine; `attention` names options
STATED = (
    "attn", "attention", "config", "directory", "environment", "overrides", "recipe", "seed", "wall_seconds",
    "steps_per_second", "first_step_seconds", "validation_seconds", "task", "train_seconds", "provenance",
)  # fmt: skip
Group = Sequence[Any]  # values of which one at least has to have an effect


@dataclasses.dataclass(frozen=True)
class Refused:
    """Ended by an error: of the user's, or the baseline's own."""

    why: str
    more: Any = None


class Work(TorchDispatchMode):
    """Counts the operators that run by shapes, dtypes and plain arguments: what is computed, not its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        self.done[" ".join([str(func), *(_brief(leaf) for leaf in leaves)])] += 1
        return func(*args, **(kwargs or {}))


def _brief(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str | torch.dtype) else type(leaf).__name__


def digest(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, str]:
    """Shape and hash of each: equal if and only if they are bitwise."""
    there = {name: x.detach().cpu().contiguous() for name, x in tensors.items() if x is not None}
    content = {name: x.reshape(-1).view(torch.uint8).numpy().tobytes() for name, x in there.items()}
    return {name: f"{list(x.shape)} {hashlib.sha256(content[name]).hexdigest()}" for name, x in there.items()}


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every field of a configuration and of those in it: dotted name, type and value."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hints[field.name], value


def alternatives(hint: Any, value: Any) -> list[Group]:
    """Other values of a type, null left out, all choices each by itself; one that is not known fails the test."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (option for option in arguments if option is not type(None))
        return alternatives(inner, value)
    if origin is Literal or hint is bool:
        return [[choice] for choice in (arguments or (True, False)) if choice != value]
    if origin is tuple and arguments[-1] is not ...:
        pairs = zip(range(len(arguments)), arguments, strict=True)
        return [
            [(*value[:i], other, *value[i + 1 :]) for group in alternatives(one, value[i]) for other in group]
            for i, one in pairs
        ]
    if origin is tuple:
        first = value[0] if value else None
        others = [other for group in alternatives(arguments[0], first) for other in group]
        return [[*((other,) for other in others), *([value[:1]] if value and len(value) > 1 else [])]]
    if hint is int:
        return [[1, 2, 4] if value is None else _numbers(value, value + 1, value // 2, 1)]
    if hint is float:
        return [[0.25, 0.5, 1.0] if value is None else _numbers(value, value / 2, value + 1, value / 1e3, 0.5)]
    if hint in (str, Path):
        return [[hint("elsewhere")]]
    pytest.fail(f"no other value is known of the type {hint}: teach tests/config/effects.py one")


def _numbers(value: Any, *others: Any) -> list[Any]:
    return [other for other in dict.fromkeys((2 * value, *others)) if other != value]


def idle(base: Any, act: Callable[[Any], Any], groups: Sequence[Group], same: Sequence[Any] = ()) -> str:
    """What is wrong with a field: that values of it have no effect; empty if there is nothing.

    Args:
        base: what is seen with the baseline's value.
        act: what is seen with another value, or how it is refused.
        groups: see `alternatives`; values of different groups must not do the same, either.
        same: values that do what the baseline's does, knowingly.
    """
    before = [base]
    for group in groups:
        nothing, refused = [], False
        for value in group:
            seen = act(value)
            if value in same:
                if seen != base:
                    return f"{value!r} is said to do the same, and does not"
                break
            if seen == base or (seen in before and not isinstance(seen, Refused)):
                nothing.append(value)
            elif isinstance(seen, Refused) and not isinstance(base, Refused):
                refused = True  # perhaps another value is taken, and has to have an effect then
            else:
                before.append(seen)
                break
        else:
            if nothing or not refused:
                return f"{', '.join(map(repr, nothing or group))} changes nothing"
    return ""


def text(value: Any) -> str:
    """As it is written on the command line of `lra fit`."""
    if isinstance(value, tuple | list):
        return f"[{','.join(map(text, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def merged(*args: str) -> list[str]:
    """Arguments of which later ones replace earlier ones."""
    return list({arg.partition("=")[0]: arg for arg in args}.values())


def refusing(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except UsageError as error:
        return Refused(str(error))


@contextmanager
def watched() -> Iterator[Work]:
    """What the steps of training and evaluation compute; not what is built before, which may be kept from before."""
    work = Work()

    def within(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with work:
                return method(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("training_step", "validation_step", "test_step"):
            patch.setattr(TaskModule, name, within(getattr(TaskModule, name)))
        yield work


def fitted(*args: str) -> Any:
    """What `lra fit` does with these arguments, in a run of its own: computes, logs, scores and writes.

    Not its configuration, and of its directory only what is not made of the overrides and the seed.
    """
    with watched() as work:
        try:
            result = lra.fit(*args)
        except UsageError as error:
            return Refused(str(error))
        except Exception as error:
            return Refused(type(error).__name__, work.done)
    path = Path(result["directory"])
    with (path / "metrics.csv").open(newline="") as file:
        curves = list(csv.reader(file))
    return {
        "result": {name: value for name, value in result.items() if name not in STATED},
        "curves": curves,
        "weights": digest(torch.load(path / "last.ckpt", weights_only=True)["state_dict"]),
        "files": sorted(file.name for file in path.iterdir()),
        "name": path.name.removesuffix(f"-s{result['seed']}").partition("+")[0],
        "work": work.done,
    }


def scored(*args: str) -> Any:
    """What `lra test` does with these arguments: computes and scores. Not what it says of the weights' origin."""
    with watched() as work:
        result = refusing(lambda: lra.test(*args))
    return result if isinstance(result, Refused) else {"scores": result | {"transfer": None}, "work": work.done}


def ragged(max_length: int, padded: bool, seed: int) -> Batch:
    """Two sequences without tokens, one shorter than `max_length`."""
    length = torch.tensor([max_length, max_length - 3], dtype=torch.int32)
    start = torch.arange(2) * max_length if padded else length.cumsum(0) - length
    total = 2 * max_length if padded else int(length.sum())
    return Batch(
        torch.zeros(total, dtype=torch.int32), start.int(), length, max_length, torch.zeros(2, dtype=torch.int64),
        torch.arange(2, dtype=torch.int32), seed=torch.tensor(seed),
    )  # fmt: skip


def served(task: str, fields: dict[str, Any]) -> Any:
    """The batches that a task serves, the shapes of its model, what its head makes, and what its baselines reach."""
    cls = TASKS.get(task)
    try:
        model, batch = ModelConfig(d_model=4, heads=1, layers=1, d_ff=4, attn_dropout=0.0), BatchConfig(size=2, eval=3)
        config = RunConfig(cls.Config(**fields), ATTENTIONS.get("linear").Config(), model=model, batch=batch)
        with torch.device("meta"):
            module = cls(config, Step(config))
        data = cls.Data(config, Collation(Rank(0, 1, torch.device("cpu")), module.model.encoder.prefix))
        data.prepare_data()
    except UsageError as error:
        return Refused(str(error))
    data.setup()
    train = (batch.to("cpu") for batch in data.train_dataloader().step(0))
    batches = itertools.chain(train, data.val_dataloader(), *data.test_dataloader())
    rows = [digest({k: v for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}) for batch in batches]
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    torch.manual_seed(0)
    scores = cls.head(module)(torch.randn(2, 4))
    return rows, shapes, digest({"scores": scores}), {name: data.baselines(name) for name in data.test_sets}
