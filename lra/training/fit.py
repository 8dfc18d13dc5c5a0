"""Fit: what the command line and the Python API call to train a run."""

from __future__ import annotations

import atexit
import functools
import gc
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lra import caches, environment
from lra.config.compose import FROM_COMMAND_LINE, ComposedConfig, ExampleCounter, compose, list_differences
from lra.config.override import Override, parse_overrides
from lra.config.recipes import read_recipe
from lra.config.schema import RunConfig
from lra.errors import UsageError, explain_system_error, is_out_of_memory
from lra.files import replace_file
from lra.kernels.operators import clear_kernels_run
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from lra.tasks.base import TaskModule
from lra.timeline import mark_phase
from lra.training import checkpoints, provenance, result, transfer
from lra.training.assembly import Assembly, assemble
from lra.training.curves import log_row
from lra.training.data_size import count_examples
from lra.training.describe import advise_smaller_batch, describe_run, describe_test_sets, device_kind
from lra.training.draws import UNKNOWN_DRAWS, DrawHistory
from lra.training.hardware import crowding_note, join_launch
from lra.training.lightning import leave_process_group, silence_lightning
from lra.training.output import say
from lra.training.predictions import gather_predictions, write_predictions
from lra.training.preemption import Preemption
from lra.training.remote_loggers import watched
from lra.training.rendezvous import RendezvousError
from lra.training.run_directory import HARDWARE_FIELDS, PREDICTIONS_FILE, RunDirectory

REGISTRIES = {"task": TASKS, "attn": ATTENTIONS}
RESUME_FIELDS = ("name", "trainer.steps", "trainer.epochs", *HARDWARE_FIELDS)  # they may change when a run resumes
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
    try:
        recipe = checkpoints.read_checkpoint(given["init"])[1]["config"]["recipe"]
        return recipe if given.get("task") in read_recipe(recipe)["tasks"] else None
    except UsageError:  # no checkpoint, or its recipe is gone: reading its weights reports that
        return None


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


def _fit(args: Iterable[str], later: tuple[int, ...] = ()) -> dict[str, Any]:
    """`fit`. `later`: steps of each run that follows in the same command."""
    mark_phase("configuration")
    composed = configure(args, count=functools.partial(count_examples, prepare=True))
    run: RunConfig = composed.config
    first = join_launch(run, composed.origin["trainer.devices"] == FROM_COMMAND_LINE).rank == 0
    directory = RunDirectory(composed)
    if first:  # rank 0 opens the directory before the other ranks arrive
        directory.check()
    if directory.finished:
        if first and run.predictions and not directory.predictions.exists():
            mend = f"lra test init={directory.path} predictions=true makes it"
            raise UsageError(f"{directory.path} is finished and has no {PREDICTIONS_FILE}: {mend}")
        return (directory.result() or {}) if first else {}
    silence_lightning()
    atexit.register(leave_process_group)
    if composed.start and directory.checkpoint() is None:
        assemble(run, directory).data.prepare_data()  # refuse now, before another run trains for hours
        _finish_earlier_run(composed.start, (run.trainer.steps, *later))
    mark_phase("model")
    parts = assemble(run, directory, later)
    begun = _begin(run, directory, parts)
    mark_phase("provenance")
    if first:
        environment.warn_unclean()
        provenance.begin_provenance(parts.module, directory.path, resumed=begun.checkpoint is not None)
    mark_phase("data")
    parts.data.prepare_data()  # after all checks; on every rank, and the store's lock lets one work
    parts.data.check_ranks(parts.trainer.world_size)
    mark_phase("start of training")
    what = describe_run(run, parts)
    parts.clock.begin(parts.trainer, what)
    preemption = Preemption(run, directory.last, parts.clock)
    parts.trainer.callbacks += [begun.origin, begun.draws, preemption]  # type: ignore[attr-defined]

    def facts() -> dict[str, Any]:
        return _facts(composed, parts, begun)

    opened = directory.opened(begun.checkpoint, begun.done) if parts.trainer.is_global_zero else nullcontext()
    watching = watched(parts.trainer, parts.clock, parts.step, directory.config, begun.checkpoint is not None)
    with opened, preemption.listening(parts.trainer), watching, _recorded(directory, run, parts.trainer, facts):
        _train(run, directory, parts, begun, what)
        scores = _score(directory, parts)
        if not parts.trainer.is_global_zero:
            return {}
        done = directory.finish("finished", facts() | scores)
        log_row(parts.trainer, result.final_row(done), parts.trainer.global_step)
        return done


@dataclass(frozen=True)
class StartingPoint:
    """Where a run starts: from nothing, from a checkpoint, or with the weights of another run."""

    checkpoint: Path | None  # the one to resume
    done: int  # steps that it has completed
    best: Path | None  # the best checkpoint so far if it lies in another directory; no later one may be better
    origin: transfer.Origin
    draws: DrawHistory


def _begin(run: RunConfig, directory: RunDirectory, parts: Assembly) -> StartingPoint:
    """Puts the first weights of a run into its module. UsageError if the run can't resume from its checkpoint."""
    if (checkpoint := directory.checkpoint()) is not None:
        return _resume(run, directory, parts.module, checkpoint)
    if not run.init:
        return StartingPoint(None, 0, None, transfer.Origin(), DrawHistory())
    moved = transfer.transfer_weights(parts.module, *checkpoints.read_checkpoint(run.init), run.init)
    say(moved.describe(run.init), *moved.notes)
    return StartingPoint(None, 0, None, transfer.Origin(asdict(moved)), DrawHistory())


def _resume(run: RunConfig, directory: RunDirectory, module: TaskModule, checkpoint: Path) -> StartingPoint:
    """Resumes from a checkpoint. UsageError if it is of another run, or the run has nothing left to do."""
    # Lightning loads it again, but its errors say less
    weights, identity = checkpoints.read_checkpoint(checkpoint)
    if identity["task"] != directory.task and directory.same_task(identity["task"]):
        mend = f"{directory.mend(identity['task'])}begin another run, name=, with its weights, init={checkpoint}"
        raise UsageError(f"{checkpoint} is of {identity['task']}, and {directory.asked}: {mend}")
    _refuse_other(identity["config"], directory.config, checkpoint)
    checkpoints.load_into(module, weights, identity, checkpoint)
    own = checkpoint.parent.resolve() == directory.path.resolve()
    done, best, drawn, waited = checkpoints.read_progress(checkpoint)
    if best and checkpoints.find_damage(best):
        over = f"or remove {checkpoint.name}, and resume=auto starts over; " if own else ""
        raise UsageError(  # refuse now: if no later one is better, the test would have no checkpoint
            f"{best} is missing or damaged, the best of what {checkpoint} has behind it: put it back; "
            f"{over}or begin another run, name=, with init={checkpoint}"
        )
    scoring = own and directory.best.exists()  # only scoring may be left to do
    if stopped := run.trainer.patience is not None and waited >= run.trainer.patience:
        mend = f"trainer.patience={run.trainer.patience} has ended training there: use init="
    else:
        mend = "raise trainer.steps to go on, or use init="
    trained = stopped or done >= run.trainer.steps
    if trained and not scoring:
        raise UsageError(f"{checkpoint} has {done} steps behind it: {mend}")
    draws = DrawHistory(drawn or UNKNOWN_DRAWS)
    if not trained:  # otherwise nothing more is drawn
        draws.resume(checkpoint, done, run.draws == "changed")
    return StartingPoint(checkpoint, done, None if own else best, transfer.Origin(), draws)


def _train(run: RunConfig, directory: RunDirectory, parts: Assembly, begun: StartingPoint, what: str) -> None:
    if begun.best and parts.trainer.is_global_zero:
        with replace_file(directory.best) as file:
            file.write(begun.best.read_bytes())
    onward = f"\ngoes on after step {begun.done:,} of {run.trainer.steps:,}" if begun.checkpoint else ""
    say(f"{directory.path}: {what}{onward}", *parts.data.differences())
    if crowd := crowding_note(run):
        say(crowd)
    parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=begun.checkpoint, weights_only=True)


def _score(directory: RunDirectory, parts: Assembly) -> dict[str, Any]:
    """Scores the test sets with the best checkpoint and writes its weights. Returns the scores on rank 0, else {}."""
    data, module, trainer = parts.data, parts.module, parts.trainer
    mark_phase("test")
    say(f"scoring {describe_test_sets(data)}")
    checkpoints.verify_checkpoint(directory.best)  # if it is gone, `read_checkpoint` would ask for another
    weights, identity = checkpoints.read_checkpoint(directory.best)
    identity["provenance"] = module.provenance  # names all sessions, also those after the best checkpoint
    # Lightning does not load it: that would set the callbacks' counts back to that step
    checkpoints.load_into(module, weights, identity, directory.best)
    trainer.test(module, datamodule=data, verbose=False)
    predicted = gather_predictions(module, data, trainer) if module.run.predictions else {}  # of all ranks
    if not trainer.is_global_zero:
        return {}
    mark_phase("result")
    provenance.end_provenance(module)
    checkpoints.save_weights(module, directory.weights)
    if predicted:
        write_predictions(directory.predictions, predicted)
    best = trainer.checkpoint_callback.best_model_score  # type: ignore[union-attr]
    return {"val": {"accuracy": float(best)}} | result.test_scores(module, data, trainer)


def _facts(composed: ComposedConfig, parts: Assembly, begun: StartingPoint) -> dict[str, Any]:
    """Returns the facts for result.json, no matter how the run ends."""
    counts, plateau = parts.step.counts, parts.step.plateau
    known = {
        "resumed": begun.checkpoint is not None, "transfer": begun.origin.transfer, "draws": begun.draws.sessions,
        "attention": parts.attention, "engine": parts.engine, "skipped_updates": counts.skipped if counts else 0,
    }  # fmt: skip
    if plateau is not None and plateau.stops:
        known["stopped"] = {"step": parts.trainer.global_step, "reason": plateau.describe()}
    facts = result.result_facts(composed, parts.module, parts.trainer, parts.clock)
    return facts | known | result.result_costs(parts.clock)


def _refuse_other(there: dict[str, Any], here: dict[str, Any], checkpoint: Path) -> None:
    """Raises a UsageError if a checkpoint's run differs in more than `RESUME_FIELDS`."""
    if changed := list_differences(there, here, RESUME_FIELDS):
        raise UsageError(
            f"{checkpoint} is of a run with another configuration ({'; '.join(changed)}): "
            f"give its fields, or take its weights alone, init={checkpoint}"
        )


def _finish_earlier_run(args: Iterable[Override], later: tuple[int, ...]) -> None:
    """Finishes the run from which another one starts. `later`: as of `_fit`."""
    try:
        _fit([*map(str, args), "resume=auto"], later)
    except UsageError as error:
        if error.of_earlier_run:  # of the one before that one
            raise
        raise UsageError(f"{error} {EARLIER_RUN_NOTE}", of_earlier_run=True) from None
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # rank 0 has just written its result
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def _recorded(
    directory: RunDirectory, run: RunConfig, trainer: pl.Trainer, facts: Callable[[], dict[str, Any]]
) -> Iterator[None]:
    """Writes result.json if the run inside fails. What the user can mend becomes a UsageError."""
    clear_kernels_run()
    try:
        yield
    except RendezvousError:
        if trainer.is_global_zero:
            directory.withdraw()
        raise
    except Exception as error:
        if is_out_of_memory(error):
            known, advice = facts(), advise_smaller_batch(run, trainer, " and resume=auto")
            if others := known["runs_per_device"] - 1:
                advice += f"; {others} more on this {device_kind(trainer)} have their share of it"
            if trainer.is_global_zero:
                directory.finish("oom", known | {"error": advice})
            raise UsageError(advice) from None
        if said := explain_system_error(error, directory.path) or caches.explain_damage(error):
            if trainer.is_global_zero and trainer.strategy.launcher is not None:  # other ranks would wait for this one
                trainer.strategy.launcher.kill(signal.SIGKILL)  # type: ignore[attr-defined]
            raise UsageError(f"{said}; then resume=auto goes on from the last checkpoint, if there is one") from error
        if trainer.is_global_zero:
            directory.finish("failed", facts() | {"error": repr(error), "traceback": traceback.format_exc()})
        raise
