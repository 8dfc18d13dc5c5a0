"""Fit, test and load: what the command line and the Python API call."""

from __future__ import annotations

import atexit
import gc
import math
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_only

from lra import caches, environment
from lra.config.compose import GIVEN, Composed, compose, differences, restore
from lra.config.override import Override, parse_overrides
from lra.config.recipes import read_recipe
from lra.config.schema import RunConfig
from lra.errors import UsageError, naming, out_of_memory, unusable
from lra.kernels.library import clear_kernels_run
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.training import checkpoints, provenance, result, transfer
from lra.training.assembly import Assembly, assemble, build, rank_of, resolve_attention, resolve_engine
from lra.training.draws import UNKNOWN, Draws
from lra.training.hardware import crowding, hardware, join
from lra.training.lightning import quiet
from lra.training.output import console
from lra.training.preemption import Preemption
from lra.training.progress import bar
from lra.training.rendezvous import RendezvousError
from lra.training.run import COMPUTING, RunDirectory, replacing
from lra.training.step import Step

REGISTRIES = {"task": TASKS, "attn": ATTENTIONS}
MAY_CHANGE = ("name", "trainer.steps", *COMPUTING)  # where a checkpoint is gone on from
# fields that change no score of trained weights, beside those of optim
OF_TRAINING = (
    "name", "resume", "draws", "model.dropout", "model.attn_dropout", "model.embedding_std", "batch.size",
    "batch.micro", "trainer.steps", "trainer.eval_every", "trainer.log_every", "trainer.on_nan",
)  # fmt: skip

OF_STAGE = "(a run before this one: init=null leaves it out, name= does not reach it)"


def _locate(args: Iterable[Override]) -> str:
    return str(RunDirectory(configure(args)).path)


def configure(args: Iterable[str | Override], locate: Callable[[tuple[Override, ...]], str] = _locate) -> Composed:
    """The configuration of `task=… attn=… [recipe=…] [field=value …]`.

    Where the recipe starts a run from another one, `init` is that one's directory, as `locate` gives it. Without
    `recipe=` it is that of the run that `init=` names, if it has the task, and else the task's.
    """
    overrides = parse_overrides(args)
    return compose(RunConfig, REGISTRIES, overrides, locate, _recipe_of_init(overrides))


def _recipe_of_init(overrides: Iterable[Override]) -> str | None:
    given = {override.field: override.text for override in overrides}
    if given.get("init") in (None, "null") or "recipe" in given:
        return None
    try:
        recipe = checkpoints.read(given["init"])[1]["config"]["recipe"]
        return recipe if given.get("task") in read_recipe(recipe)["tasks"] else None
    except UsageError:  # no checkpoint, or of a recipe that is no more: what reads its weights says so
        return None


def fit(*args: str) -> dict[str, Any]:
    """Trains, scores test once with the best checkpoint of validation, and returns the result.

    Where the recipe starts a run from another one, that one is trained first, or finished, if it isn't yet.

    Args:
        args: what `lra fit` takes: `"task=listops", "attn=flash", "trainer.steps=100"`.

    Returns:
        The content of result.json; a finished run returns its own at once. On ranks but the first, nothing.

    Raises:
        UsageError: for anything the user can mend, memory that ran out included.
    """
    composed = configure(args)
    run: RunConfig = composed.config
    first = join(run, composed.origin["trainer.devices"] == GIVEN).rank == 0
    directory = RunDirectory(composed)
    if first:  # the other ranks arrive in the directory that it opened
        directory.check()
    if directory.finished:
        return (directory.result() or {}) if first else {}
    quiet()
    atexit.register(_leave_process_group)
    if composed.start and directory.checkpoint() is None:
        assemble(run, directory).data.prepare_data()  # what is refused is refused before another run trains for hours
        _before(composed.start)
    parts = assemble(run, directory)
    begun = _begin(run, directory, parts)
    if first:
        environment.warn_unclean()
        provenance.begin(parts.module, directory.path, resumed=begun.checkpoint is not None)
    parts.data.prepare_data()  # after all that can be refused; on every rank: the store's lock lets one of them work
    parts.data.check_ranks(parts.trainer.world_size)
    what = _described(run, parts)
    parts.clock.begin(parts.trainer, what)
    preemption = Preemption(run, directory.last, parts.clock)
    parts.trainer.callbacks += [begun.origin, begun.draws, preemption]  # type: ignore[attr-defined]

    def facts() -> dict[str, Any]:
        return _facts(composed, parts, begun)

    opened = directory.opened(begun.checkpoint, begun.done) if parts.trainer.is_global_zero else nullcontext()
    with opened, preemption.listening(parts.trainer), _recorded(directory, run, parts.trainer, facts):
        _train(run, directory, parts, begun, what)
        scores = _score(directory, parts)
        return directory.finish("finished", facts() | scores) if parts.trainer.is_global_zero else {}


@dataclass(frozen=True)
class Beginning:
    """Where a run begins: anew, from a checkpoint of its own or another one's, or with another run's weights."""

    checkpoint: Path | None  # to resume
    done: int  # steps it has behind it
    best: Path | None  # the best checkpoint so far, which lies in another directory: nothing after it may be better
    origin: transfer.Origin
    draws: Draws


def _begin(run: RunConfig, directory: RunDirectory, parts: Assembly) -> Beginning:
    """Puts the weights that a run begins with into its module; UsageError if it can't go on from a checkpoint."""
    if (checkpoint := directory.checkpoint()) is not None:
        return _resume(run, directory, parts.module, checkpoint)
    if not run.init:
        return Beginning(None, 0, None, transfer.Origin(), Draws())
    moved = transfer.start(parts.module, run.init)
    _say(moved.describe(run.init), *moved.notes)
    return Beginning(None, 0, None, transfer.Origin(asdict(moved)), Draws())


def _resume(run: RunConfig, directory: RunDirectory, module: TaskModule, checkpoint: Path) -> Beginning:
    """Goes on from a checkpoint; UsageError if it is of another run, or has nothing left to do."""
    # Lightning loads it again, and says less well what does not fit
    weights, identity = checkpoints.read(checkpoint)
    if identity["task"] != directory.task and directory.same_task(identity["task"]):
        mend = f"{directory.mend(identity['task'])}begin another run, name=, with its weights, init={checkpoint}"
        raise UsageError(f"{checkpoint} is of {identity['task']}, and {directory.asked}: {mend}")
    _refuse_other(identity["config"], directory.config, checkpoint)
    checkpoints.load(module, weights, identity, checkpoint)
    own = checkpoint.parent.resolve() == directory.path.resolve()
    done, best, drawn = checkpoints.behind(checkpoint)
    if best and checkpoints.fault(best):
        over = f"or remove {checkpoint.name}, and resume=auto starts over; " if own else ""
        raise UsageError(  # now: in the end, if nothing after it is better, the test set would have no checkpoint
            f"{best} is missing or damaged, the best of what {checkpoint} has behind it: put it back; "
            f"{over}or begin another run, name=, with init={checkpoint}"
        )
    scoring = own and directory.best.exists()  # may be what is left to do
    if done >= run.trainer.steps and not scoring:
        raise UsageError(f"{checkpoint} has {done} steps behind it: raise trainer.steps to go on, or use init=")
    draws = Draws(drawn or UNKNOWN)
    if done < run.trainer.steps:  # else nothing more is drawn
        draws.go_on(checkpoint, done, run.draws == "changed")
    return Beginning(checkpoint, done, None if own else best, transfer.Origin(), draws)


def _train(run: RunConfig, directory: RunDirectory, parts: Assembly, begun: Beginning, what: str) -> None:
    if begun.best and parts.trainer.is_global_zero:
        with replacing(directory.best) as file:
            file.write(begun.best.read_bytes())
    onward = f"\ngoes on after step {begun.done:,} of {run.trainer.steps:,}" if begun.checkpoint else ""
    _say(f"{directory.path}: {what}{onward}", *parts.data.differences())
    if crowd := crowding(run):
        _say(crowd)
    parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=begun.checkpoint, weights_only=True)


def _score(directory: RunDirectory, parts: Assembly) -> dict[str, Any]:
    """Scores the test sets with the best checkpoint of validation and writes its weights; what result.json says of it.

    On ranks but the first, nothing.
    """
    data, module, trainer = parts.data, parts.module, parts.trainer
    _say(f"scoring {_sets(data)}")
    checkpoints.verify(directory.best)  # if it is gone by now, `read` would ask its user for another
    record = module.provenance  # of all sessions, also of those after the best checkpoint
    # not by Lightning, which would take what the callbacks have counted back to that step, too
    checkpoints.load(module, *checkpoints.read(directory.best), directory.best)
    trainer.test(module, datamodule=data, verbose=False)
    if not trainer.is_global_zero:
        return {}
    provenance.end(module, record)
    checkpoints.save_weights(module, directory.weights)
    best = trainer.checkpoint_callback.best_model_score  # type: ignore[union-attr]
    return {"val": {"accuracy": float(best)}} | result.scores(module, data, trainer)


def _facts(composed: Composed, parts: Assembly, begun: Beginning) -> dict[str, Any]:
    """What result.json says, however the run ends."""
    counts = parts.step.counts
    known = {
        "resumed": begun.checkpoint is not None, "transfer": begun.origin.transfer, "draws": begun.draws.sessions,
        "attention": parts.attention, "engine": parts.engine, "skipped_updates": counts.skipped if counts else 0,
    }  # fmt: skip
    return result.facts(composed, parts.module, parts.trainer, parts.clock) | known | result.spent(parts.clock)


def _described(run: RunConfig, parts: Assembly) -> str:
    """What computes the run and in which portions, for people; the speed of steps depends on it."""
    return ", ".join((
        f"attention {parts.attention}", f"{result.count(parts.module):,} parameters",
        f"batch {_batch(run, parts.trainer)}", run.trainer.precision, f"engine {parts.engine}", _device(parts.trainer),
    ))  # fmt: skip


def _refuse_other(there: dict[str, Any], here: dict[str, Any], checkpoint: Path) -> None:
    """UsageError if a checkpoint is of a run that differs in more than `MAY_CHANGE`."""
    if changed := differences(there, here, MAY_CHANGE):
        raise UsageError(
            f"{checkpoint} is of a run with another configuration ({'; '.join(changed)}): "
            f"give its fields, or take its weights alone, init={checkpoint}"
        )


def _before(args: Iterable[Override]) -> None:
    """Makes sure that the run is finished from which another one starts."""
    try:
        fit(*map(str, args), "resume=auto")
    except UsageError as error:
        if error.of_earlier_run:  # of the one before that one
            raise
        raise UsageError(f"{error} {OF_STAGE}", of_earlier_run=True) from None
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # rank 0 has just written its result
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def _recorded(
    directory: RunDirectory, run: RunConfig, trainer: pl.Trainer, facts: Callable[[], dict[str, Any]]
) -> Iterator[None]:
    """Leaves a result.json also when the run inside fails; what the user can mend becomes a UsageError."""
    clear_kernels_run()
    try:
        yield
    except RendezvousError:
        if trainer.is_global_zero:
            directory.withdraw()
        raise
    except Exception as error:
        if out_of_memory(error):
            known, advice = facts(), _smaller(run, trainer, " and resume=auto")
            if others := known["runs_per_device"] - 1:
                advice += f"; {others} more on this {_kind(trainer)} have their share of it"
            if trainer.is_global_zero:
                directory.finish("oom", known | {"error": advice})
            raise UsageError(advice) from None
        if said := unusable(error, directory.path) or caches.damaged(error):
            if trainer.is_global_zero and trainer.strategy.launcher is not None:  # other ranks would wait for this one
                trainer.strategy.launcher.kill(signal.SIGKILL)  # type: ignore[attr-defined]
            raise UsageError(f"{said}; then resume=auto goes on from the last checkpoint, if there is one") from error
        if trainer.is_global_zero:
            directory.finish("failed", facts() | {"error": repr(error), "traceback": traceback.format_exc()})
        raise


def parse_test(args: Iterable[str | Override]) -> dict[str, Override]:
    """The arguments of `test` by their fields; UsageError if one is of no use there, or `init=` is missing."""
    given = {override.field: override for override in parse_overrides(args)}
    if "init" not in given:
        raise UsageError("lra test needs one init=<run directory or checkpoint>")
    if ignored := [str(given[field]) for field in given if field in OF_TRAINING or field.startswith("optim.")]:
        raise UsageError(f"{' '.join(ignored)}: of training alone, it changes no score; leave it out")
    return given


def test(*args: str) -> dict[str, Any]:
    """Scores the test sets with a checkpoint: `init=<checkpoint>`, and fields that differ from its own run.

    A task of another resolution, another attention, `positions.resize` and `positions.scale` are as in `fit`, before
    any training, and on one device unless `trainer.devices` is given. Returns accuracy and loss per test set, beside
    what the baselines reach; on ranks but the first, nothing. Writes nothing.
    """
    given = parse_test(args)
    path = given["init"].text
    weights, identity = checkpoints.read(path)
    saved = transfer.without_origin(identity["config"])
    saved["trainer"] = {field: saved["trainer"][field] for field in ("precision", "accelerator")}
    saved["model"] |= {"dropout": 0.0, "attn_dropout": 0.0}  # of training alone, and not every attention has the latter
    run = restore(RunConfig, REGISTRIES, saved, given.values())
    join(run, "trainer.devices" in given)
    checkpoints.check_vocabulary(run.task, identity, path)  # whose model may not even be possible
    quiet()
    atexit.register(_leave_process_group)
    trainer = pl.Trainer(
        **hardware(run), logger=False, enable_checkpointing=False, enable_model_summary=False, **bar(console)
    )
    step = Step(run)
    data, module = build(run, rank_of(trainer), step=step)
    moved = transfer.apply(module, weights, identity, path, score=True)
    if not moved.fresh and "seed" in given:
        raise UsageError(f"{given['seed']}: nothing is drawn to score these weights, it changes no score; leave it out")
    if moved.task != module.identity()["task"] or moved.changed or moved.resized:
        _say(moved.describe(path))
    resolve_attention(module, trainer.strategy.root_device)
    resolve_engine(module, step, trainer.strategy.root_device)
    data.prepare_data()
    data.check_ranks(trainer.world_size)
    try:
        data.setup("test")
        _say(f"{path}: scoring {_sets(data)}, {_device(trainer)}", *moved.notes, *data.differences())
        if crowd := crowding(run):
            _say(crowd)
        trainer.test(module, datamodule=data, verbose=False)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise UsageError(_smaller(run, trainer)) from None
    if not trainer.is_global_zero:
        return {}
    return {"checkpoint": path, "transfer": asdict(moved)} | result.scores(module, data, trainer)


def load(path: str | Path) -> TaskModule:
    """The task's LightningModule with the weights of a run's directory or checkpoint, in evaluation mode."""
    weights, identity = checkpoints.read(path)
    _, module = build(restore(RunConfig, REGISTRIES, identity["config"]))
    checkpoints.load(module, weights, identity, path)
    return module.eval()


def _smaller(run: RunConfig, trainer: pl.Trainer, also: str = "") -> str:
    training = trainer.lightning_module.training  # else it was evaluation that ran out
    field, count = ("micro", run.batch.divide(trainer.world_size)[1]) if training else ("eval", run.batch.eval)
    if count == 1:
        return (
            f"out of {_kind(trainer)} memory with one sequence at a time: "
            "use attn=flash, a shorter task.max_length or a smaller model"
        )
    advice = f"out of {_kind(trainer)} memory at batch.{field}={count}: set batch.{field}={count // 2}{also}"
    return f"{advice}, gradients are then accumulated to batch.size={run.batch.size}" if training else advice


def _batch(run: RunConfig, trainer: pl.Trainer) -> str:
    share, micro = run.batch.divide(trainer.world_size)
    if micro == run.batch.size:
        return f"{micro}"
    return f"{run.batch.size} ({trainer.world_size} devices, {math.ceil(share / micro)} micro-batches of {micro})"


def _kind(trainer: pl.Trainer) -> str:
    return "GPU" if trainer.strategy.root_device.type == "cuda" else "CPU"


def _device(trainer: pl.Trainer) -> str:
    device = trainer.strategy.root_device
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU with {torch.get_num_threads()} threads"
    )


def _leave_process_group() -> None:
    """Lightning leaves gloo's threads running, and a process that exits over them may abort."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _sets(data: TaskData) -> str:
    """The test sets and how many sequences or pairs each has."""
    return " and ".join(f"{name} of {len(data.parts[name]):,}" for name in data.test_sets)


@rank_zero_only
def _say(text: str, *notes: str) -> None:
    with naming("the standard output"):
        for line in (text, *(f"note: {note}" for note in notes)):
            console.print(line)
