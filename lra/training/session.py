"""A session of a run: what one process does for it, once its fields are checked. It needs PyTorch and Lightning."""

from __future__ import annotations

import atexit
import gc
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lra import caches, environment
from lra.config.compose import ComposedConfig
from lra.config.schema import RunConfig
from lra.errors import UsageError, explain_system_error, is_out_of_memory
from lra.files import replace_file
from lra.kernels.operators import clear_kernels_run
from lra.tasks.base import TaskModule
from lra.timeline import mark_phase
from lra.training import checkpoints, leakage, provenance, result, transfer
from lra.training.assembly import Assembly, assemble, build_modules
from lra.training.curves import log_row
from lra.training.describe import advise_smaller_batch, describe_run, describe_test_sets, device_kind
from lra.training.draws import UNKNOWN_DRAWS, DrawHistory
from lra.training.hardware import crowding_note
from lra.training.lightning import leave_process_group, silence_lightning
from lra.training.output import say
from lra.training.predictions import gather_predictions, write_predictions
from lra.training.preemption import Preemption
from lra.training.remote_loggers import watched
from lra.training.rendezvous import RendezvousError
from lra.training.run_directory import RESUME_FIELDS, RunDirectory


def begin_session() -> None:
    """Keeps Lightning quiet, and leaves the ranks' process group when this process ends."""
    silence_lightning()
    atexit.register(leave_process_group)


def refuse_untrainable(run: RunConfig, directory: RunDirectory, before: Sequence[RunConfig]) -> None:
    """Raises a UsageError if a run can't be trained here, before others train for hours to start it.

    Args:
        before: those others, the nearest first.
    """
    parts, (_, nearest) = assemble(run, directory), build_modules(before[0])
    nearest.seen = leakage.sets_of_tasks(each.task for each in before[1:])
    transfer.transfer_weights(parts.module, nearest.model.state_dict(), nearest.identity(), str(run.init))  # untrained
    parts.data.prepare_data()


def train_run(composed: ComposedConfig, directory: RunDirectory, later: Sequence[int] = ()) -> dict[str, Any]:
    """Trains a run, or the rest of it, and scores its test sets once with the best checkpoint of validation.

    Args:
        later: steps of each run that follows in the same command.

    Returns:
        The content of result.json, and on ranks other than 0 an empty dict.
    """
    run: RunConfig = composed.config
    mark_phase("model")
    parts = assemble(run, directory, later)
    begun = _begin(run, directory, parts)
    mark_phase("provenance")
    if parts.trainer.is_global_zero:
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

    opens = parts.trainer.is_global_zero
    opened = directory.opened(begun.checkpoint, begun.done, len(later)) if opens else nullcontext()
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
    _refuse_other(identity["config"], directory, checkpoint)
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
    say(f"{what}{onward}", *parts.data.differences())
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


def _refuse_other(there: dict[str, Any], here: RunDirectory, checkpoint: Path) -> None:
    """Raises a UsageError if a checkpoint's run differs in more than `RESUME_FIELDS` and where its data lies."""
    if changed := here.list_changes(there, RESUME_FIELDS):
        raise UsageError(
            f"{checkpoint} is of a run with another configuration ({'; '.join(changed)}): "
            f"give its fields, or take its weights alone, init={checkpoint}"
        )


def end_earlier_run() -> None:
    """Waits until every rank has ended a run that another one starts from, and frees its memory."""
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
