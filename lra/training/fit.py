"""Fit, test and load: what the command line and the Python API call."""

from __future__ import annotations

import atexit
import gc
import math
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_only

from lra import caches
from lra.config.compose import GIVEN, Composed, compose, differences, restore
from lra.config.recipes import read_recipe
from lra.config.schema import RunConfig
from lra.errors import UsageError, naming, out_of_memory, unusable
from lra.kernels.library import forget_kernels
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.training import checkpoints, result, transfer
from lra.training.assembly import build, make_trainer, quiet, resolve_attention, resolve_engine
from lra.training.callbacks import Clock, console
from lra.training.draws import UNKNOWN, Draws
from lra.training.hardware import crowding, hardware, join
from lra.training.preemption import Preemption
from lra.training.progress import bar
from lra.training.rendezvous import RendezvousError
from lra.training.run import COMPUTING, RunDirectory, replacing

REGISTRIES = {"task": TASKS, "attn": ATTENTIONS}
MAY_CHANGE = ("name", "trainer.steps", *COMPUTING)  # where a checkpoint is gone on from
# fields that change no score of trained weights, beside those of optim
OF_TRAINING = (
    "name", "resume", "draws", "model.dropout", "model.attn_dropout", "model.embedding_std", "batch.size",
    "batch.micro", "trainer.steps", "trainer.eval_every", "trainer.log_every", "trainer.on_nan",
)  # fmt: skip

OF_STAGE = "(a run before this one: init=null leaves it out, name= does not reach it)"


def _locate(args: Sequence[str]) -> str:
    return str(RunDirectory(configure(args)).path)


def configure(args: Sequence[str], locate: Callable[[tuple[str, ...]], str] = _locate) -> Composed:
    """The configuration of `task=… attn=… [recipe=…] [field=value …]`.

    Where the recipe starts a run from another one, `init` is that one's directory, as `locate` gives it. Without
    `recipe=` it is that of the run that `init=` names, if it has the task, and else the task's.
    """
    return compose(RunConfig, REGISTRIES, args, locate, _recipe_of_init(args))


def _recipe_of_init(args: Sequence[str]) -> str | None:
    given = {name: value for name, _, value in (arg.partition("=") for arg in args)}
    if given.get("init") in (None, "", "null") or "recipe" in given:
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
        _assembled(run, directory)[0].prepare_data()  # what is refused is refused before another run trains for hours
        _before(composed.start)
    data, module, trainer, clock, attention, engine = _assembled(run, directory)
    checkpoint, carried, origin, draws, done = directory.checkpoint(), None, transfer.Origin(), Draws(), 0
    trainer.callbacks += [origin, draws]  # type: ignore[attr-defined]
    if checkpoint is not None:
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
        carried = None if own else best  # nothing after it may be better
        scoring = own and directory.best.exists()  # may be what is left to do
        if done >= run.trainer.steps and not scoring:
            raise UsageError(f"{checkpoint} has {done} steps behind it: raise trainer.steps to go on, or use init=")
        if done < run.trainer.steps:
            draws.go_on(checkpoint, done, drawn, run.draws == "changed")
        else:  # nothing more is drawn
            draws.sessions = drawn or UNKNOWN
    elif run.init:
        moved = transfer.start(module, run.init)
        origin.transfer = asdict(moved)
        _say(moved.describe(run.init), *moved.notes)
    data.prepare_data()  # after all that can be refused; on every rank: the store's lock lets one of them work
    data.check_ranks(trainer.world_size)
    what = ", ".join((
        f"attention {attention}", f"{result.count(module):,} parameters", f"batch {_batch(run, trainer)}",
        run.trainer.precision, f"engine {engine}", _device(trainer),
    ))  # fmt: skip
    clock.begin(trainer, what)

    def facts() -> dict[str, Any]:
        known = {"resumed": checkpoint is not None, "transfer": origin.transfer, "draws": draws.sessions}
        counts = module.step.counts  # type: ignore[attr-defined]
        known |= {"attention": attention, "engine": engine, "skipped_updates": counts.skipped if counts else 0}
        return result.facts(composed, module, trainer, clock) | known | result.spent(clock)

    preemption = Preemption(run, directory.last, clock)
    trainer.callbacks.append(preemption)  # type: ignore[attr-defined]
    opened = directory.opened(checkpoint, done) if trainer.is_global_zero else nullcontext()
    with opened, preemption.listening(trainer), _recorded(directory, run, trainer, facts):
        if carried and trainer.is_global_zero:
            with replacing(directory.best) as file:
                file.write(carried.read_bytes())
        onward = f"\ngoes on after step {done:,} of {run.trainer.steps:,}" if checkpoint else ""
        _say(f"{directory.path}: {what}{onward}", *data.differences())
        if crowd := crowding(run):
            _say(crowd)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        _say(f"scoring {_sets(data)}")
        checkpoints.verify(directory.best)  # if it is gone by now, `read` would ask its user for another
        # not by Lightning, which would take what the callbacks have counted back to that step, too
        checkpoints.load(module, *checkpoints.read(directory.best), directory.best)
        trainer.test(module, datamodule=data, verbose=False)
        if not trainer.is_global_zero:
            return {}
        checkpoints.save_weights(module, directory.weights)
        best = trainer.checkpoint_callback.best_model_score  # type: ignore[union-attr]
        scores = {"val": {"accuracy": float(best)}} | result.scores(module, data, trainer)
        return directory.finish("finished", facts() | scores)


def _refuse_other(there: dict[str, Any], here: dict[str, Any], checkpoint: Path) -> None:
    """UsageError if a checkpoint is of a run that differs in more than `MAY_CHANGE`."""
    if changed := differences(there, here, MAY_CHANGE):
        raise UsageError(
            f"{checkpoint} is of a run with another configuration ({'; '.join(changed)}): "
            f"give its fields, or take its weights alone, init={checkpoint}"
        )


def _assembled(run: RunConfig, directory: RunDirectory) -> tuple[TaskData, TaskModule, pl.Trainer, Clock, str, str]:
    """All that trains a run, and what computes its attention and its steps; UsageError if it can't here."""
    data, module = build(run)
    trainer, clock = make_trainer(run, directory)
    if run.batch.size % trainer.world_size:
        raise UsageError(f"batch.size={run.batch.size} is not a multiple of the {trainer.world_size} devices")
    device = trainer.strategy.root_device
    return data, module, trainer, clock, resolve_attention(module, device), resolve_engine(module, device)


def _before(args: Sequence[str]) -> None:
    """Makes sure that the run is finished from which another one starts."""
    try:
        fit(*args, "resume=auto")
    except UsageError as error:
        if str(error).endswith(OF_STAGE):  # of the one before that one
            raise
        raise UsageError(f"{error} {OF_STAGE}") from None
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # rank 0 has just written its result
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def _recorded(
    directory: RunDirectory, run: RunConfig, trainer: pl.Trainer, facts: Callable[[], dict[str, Any]]
) -> Iterator[None]:
    """Leaves a result.json also when the run inside fails; what the user can mend becomes a UsageError."""
    forget_kernels()
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


def test(*args: str) -> dict[str, Any]:
    """Scores the test sets with a checkpoint: `init=<checkpoint>`, and fields that differ from its own run.

    A task of another resolution, another attention, `positions.resize` and `positions.scale` are as in `fit`, before
    any training, and on one device unless `trainer.devices` is given. Returns accuracy and loss per test set, beside
    what the baselines reach; on ranks but the first, nothing. Writes nothing.
    """
    inits = [arg for arg in args if arg.startswith("init=")]
    if len(inits) != 1 or inits == ["init="]:
        raise UsageError("lra test needs one init=<run directory or checkpoint>")
    if ignored := [arg for arg in args if arg.partition("=")[0] in OF_TRAINING or arg.startswith("optim.")]:
        raise UsageError(f"{' '.join(ignored)}: of training alone, it changes no score; leave it out")
    path = inits[0].removeprefix("init=")
    weights, identity = checkpoints.read(path)
    saved = transfer.without_origin(identity["config"])
    saved["trainer"] = {field: saved["trainer"][field] for field in ("precision", "accelerator")}
    saved["model"] |= {"dropout": 0.0, "attn_dropout": 0.0}  # of training alone, and not every attention has the latter
    run = restore(RunConfig, REGISTRIES, saved, args)
    join(run, any(arg.startswith("trainer.devices=") for arg in args))
    checkpoints.check_vocabulary(run.task, identity, path)  # whose model may not even be possible
    quiet()
    atexit.register(_leave_process_group)
    data, module = build(run)
    moved = transfer.apply(module, weights, identity, path, score=True)
    if not moved.fresh and (seed := [arg for arg in args if arg.startswith("seed=")]):
        raise UsageError(f"{seed[0]}: nothing is drawn to score these weights, it changes no score; leave it out")
    if moved.task != module.identity()["task"] or moved.changed or moved.resized:
        _say(moved.describe(path))
    without = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    trainer = pl.Trainer(**hardware(run), **without, **bar(console))
    resolve_attention(module, trainer.strategy.root_device)
    resolve_engine(module, trainer.strategy.root_device)
    data.prepare_data()
    data.check_ranks(trainer.world_size)
    data.setup()
    _say(f"{path}: scoring {_sets(data)}, {_device(trainer)}", *moved.notes, *data.differences())
    if crowd := crowding(run):
        _say(crowd)
    try:
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
