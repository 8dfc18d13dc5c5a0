"""Fit: what the command line and the Python API call to train a run.

Fields are checked, and the first line is printed, before PyTorch is imported, which takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lra import ranks
from lra.config.compose import FROM_COMMAND_LINE, ComposedConfig, ExampleCounter, compose
from lra.config.override import Override, parse_overrides
from lra.config.recipes import read_recipe
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.imports import uncollected_imports
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from lra.timeline import FIRST_PHASE, mark_phase
from lra.training.data_size import count_examples
from lra.training.output import print_lines
from lra.training.run_directory import PREDICTIONS_FILE, RunDirectory

REGISTRIES = {"task": TASKS, "attn": ATTENTIONS}
EARLIER_RUN_NOTE = "(a run before this one: init=null leaves it out, name= does not reach it)"


def configure(
    args: Iterable[str | Override],
    locate: Callable[[tuple[Override, ...]], str] | None = None,
    count: ExampleCounter = count_examples,
) -> ComposedConfig:
    """The configuration of `task=… attn=… [recipe=…] [field=value …]`.

    If the recipe starts a run from another one, `init` is the directory of that run, as `locate` gives it. The default
    recipe is that of the run that `init=` names, if this recipe has the task. Otherwise it is the task's.

    Args:
        locate: returns the directory of the run with these arguments. Default: where `fit` puts it.
        count: returns the number of training examples of a task's configuration, for `trainer.epochs`. The default
            needs the data, unless the task's fields say it.
    """

    def directory(start: tuple[Override, ...]) -> str:
        return str(RunDirectory(configure(start, count=count)).path)

    overrides = parse_overrides(args)
    return compose(RunConfig, REGISTRIES, overrides, locate or directory, _recipe_of_init(overrides), count)


def _recipe_of_init(overrides: Iterable[Override]) -> str | None:
    given = {override.field: override.text for override in overrides}
    if given.get("init") in (None, "null") or "recipe" in given:
        return None
    from lra.training import checkpoints  # here, as it imports PyTorch, and few commands need it

    try:
        recipe = checkpoints.read_checkpoint(given["init"])[1]["config"]["recipe"]
    except UsageError:  # no checkpoint: reading its weights reports that
        return None
    try:
        return recipe if given.get("task") in read_recipe(recipe)["tasks"] else None
    except UsageError:
        raise UsageError(
            f"{given['init']} was trained by recipe {recipe}, and none of that name can be read here: give recipe="
        ) from None


def fit(*args: str) -> dict[str, Any]:
    """Trains, scores the test sets once with the best checkpoint of validation, and returns the result.

    If the recipe starts this run from another one, that run is trained or finished first.

    Args:
        args: what `lra fit` takes: `"task=listops", "attn=flash", "trainer.steps=100"`.

    Returns:
        The content of result.json. A finished run returns it at once. Ranks other than 0 return an empty dict.

    Raises:
        UsageError: for anything that the user can mend, including memory that ran out.
    """
    return _fit(args)


def _fit(args: Iterable[str | Override], later: tuple[int, ...] = ()) -> dict[str, Any]:
    """`fit`. `later`: steps of each run that follows in the same command."""
    mark_phase("configuration")
    count = functools.partial(count_examples, prepare=True)
    composed = configure(args, count=count)
    run: RunConfig = composed.config
    given = composed.origin["trainer.devices"] == FROM_COMMAND_LINE
    first = ranks.detect_launch(run.trainer.devices, given, ranks.started_ranks()).rank == 0
    directory = RunDirectory(composed)
    if first:  # rank 0 opens the directory before the other ranks arrive
        directory.check()
    if directory.finished:
        if first and run.predictions and not directory.predictions.exists():
            mend = f"lra test init={directory.path} predictions=true makes it"
            raise UsageError(f"{directory.path} is finished and has no {PREDICTIONS_FILE}: {mend}")
        return (directory.result() or {}) if first else {}
    start = composed.start if directory.checkpoint() is None else None
    waits = start is not None and not _is_finished(start, count)
    if first:
        what = "the run that it starts from is trained first" if waits else _describe_length(run)
        print_lines(f"{directory.path}: {what}")
    mark_phase(FIRST_PHASE)
    with uncollected_imports():
        from lra.training import session
    session.begin_session()
    if start is not None:
        session.refuse_untrainable(run, directory, _runs_before(start, count))
        with _noted_earlier_run():
            _fit([*map(str, start), "resume=auto"], (run.trainer.steps, *later))
        session.end_earlier_run()
    if first and waits:
        print_lines(f"{directory.path}: {_describe_length(run)}")
    return session.train_run(composed, directory, later)


def _runs_before(start: tuple[Override, ...] | None, count: ExampleCounter) -> list[RunConfig]:
    """The configurations of the runs from which a run starts, the nearest first."""
    found = []
    with _noted_earlier_run():
        while start is not None:
            composed = configure(start, count=count)
            found.append(composed.config)
            start = composed.start
    return found


def _is_finished(start: Iterable[Override], count: ExampleCounter) -> bool:
    """Whether the run from which another one starts is finished."""
    with _noted_earlier_run():
        return RunDirectory(configure(start, count=count)).finished


def _describe_length(run: RunConfig) -> str:
    """Says how long a run is. That training may end early makes its steps a limit."""
    limit = "" if run.trainer.patience is None else "at most "
    return f"{limit}{run.trainer.steps:,} steps, then the test"


@contextmanager
def _noted_earlier_run() -> Iterator[None]:
    """Notes in a UsageError raised inside that it is of a run from which another one starts."""
    try:
        yield
    except UsageError as error:
        if error.of_earlier_run:  # of the one before that one
            raise
        raise UsageError(f"{error} {EARLIER_RUN_NOTE}", of_earlier_run=True) from None
