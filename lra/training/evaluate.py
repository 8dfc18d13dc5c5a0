"""Test and load: what the command line and the Python API do with finished weights."""

from __future__ import annotations

import atexit
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from lra.config.compose import restore
from lra.config.override import Override, parse_overrides
from lra.config.schema import MASK_FIELDS, RunConfig
from lra.errors import UsageError, is_out_of_memory
from lra.models.attention import ATTENTIONS
from lra.tasks.base import TaskModule
from lra.training import checkpoints, result, transfer
from lra.training.assembly import build_modules, make_rank, resolve_attention, resolve_engine
from lra.training.describe import advise_smaller_batch, describe_device, describe_test_sets
from lra.training.fit import REGISTRIES
from lra.training.hardware import crowding_note, join_launch, trainer_hardware
from lra.training.lightning import leave_process_group, silence_lightning
from lra.training.output import console, say
from lra.training.predictions import gather_predictions, write_predictions
from lra.training.progress import progress_options
from lra.training.run_directory import HARDWARE_FIELDS, PREDICTIONS_FILE
from lra.training.run_files import as_mapping, read_result
from lra.training.step import Step

# fields that, like those of optim and augment, change no score of trained weights
TRAINING_ONLY_FIELDS = (
    "name", "resume", "draws", "logger", "trainer.log_grad_norm", "train_share", "mask_loss", "head",
    "model.dropout", "model.attn_dropout", "model.layer_drop", "model.embedding_std", "attn.deterministic",
    "batch.size", "batch.micro", "trainer.steps", "trainer.eval_every", "trainer.log_every", "trainer.on_nan",
    "trainer.average", "trainer.average_decay", "trainer.average_share",
    "trainer.patience", "trainer.epochs",
)  # fmt: skip


def parse_test(args: Iterable[str | Override]) -> dict[str, Override]:
    """Returns the arguments of `test` by field. UsageError if one has no use there or `init=` is missing."""
    given = {override.field: override for override in parse_overrides(args)}
    if "init" not in given:
        raise UsageError("lra test needs one init=<run directory or checkpoint>")
    training = {field for field in given if field in TRAINING_ONLY_FIELDS or field.startswith(("optim.", "augment."))}
    _refuse_unused(given, training, "used only in training, it changes no score")
    return given


def unused_fields(run: RunConfig) -> tuple[str, ...]:
    """Returns fields that change no score of what this run learns. Scores of labels are of inputs that hide nothing."""
    if run.pretrain == "none":
        return ("denoise", "pixel_loss", *MASK_FIELDS) if run.denoise else ()
    of_classifier = ("model.pooling", "model.classifier")
    return (*of_classifier, "model.causal") if run.pretrain == "causal" else of_classifier


def _refuse_unused(given: Mapping[str, Override], unused: Collection[str], why: str) -> None:
    if names := " ".join(str(override) for field, override in given.items() if field in unused):
        raise UsageError(f"{names}: {why}; leave it out")


def test(*args: str) -> dict[str, Any]:
    """Scores the test sets with a checkpoint. Writes nothing but `predictions=true`: `predictions.npz` of the run.

    Another resolution, another attention, `positions.resize` and `positions.scale` work as in `fit`, without training.

    Args:
        args: `init=<checkpoint>`, and the fields that differ from its run. The default of `trainer.devices` is 1.

    Returns:
        For each test set accuracy, loss and the accuracy of the baselines. Ranks other than 0 return an empty dict.

    Raises:
        UsageError: for anything that the user can mend, including memory that ran out.
    """
    given = parse_test(args)
    path = given["init"].text
    weights, identity = checkpoints.read_checkpoint(path)
    saved = transfer.drop_origin(identity["config"])
    saved["trainer"] = {field: saved["trainer"][field] for field in ("precision", "accelerator")}
    # both are of training alone; advice on weights that diverged depends on the clip
    saved.pop("augment", None)
    saved["optim"] = {"clip": as_mapping(saved.get("optim")).get("clip")}
    saved["model"] |= {"dropout": 0.0, "attn_dropout": 0.0}  # not every attention can have dropout
    run = restore(RunConfig, REGISTRIES, saved, given.values())
    learned = "labels" if run.pretrain == "none" else f"pretrain={run.pretrain}"
    _refuse_unused(given, unused_fields(run), f"it changes no score of {learned}")
    if run.predictions:
        _check_own_predictions(path, given)
    join_launch(run, "trainer.devices" in given)
    checkpoints.check_vocabulary(run.task, identity, path)  # without this, its model may not even be possible
    silence_lightning()
    atexit.register(leave_process_group)
    trainer = pl.Trainer(
        **trainer_hardware(run),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **progress_options(console),
    )
    step = Step(run)
    data, module = build_modules(run, make_rank(trainer), step=step)
    moved = transfer.transfer_weights(module, weights, identity, path, score=True)
    if not moved.fresh:
        initial = ATTENTIONS.get_declared(run.attn.name).facts.initial
        drawing = {"seed", *(f"attn.{option}" for option in initial)}
        _refuse_unused(given, drawing, "nothing is drawn to score these weights, it changes no score")
    if moved.task != module.identity()["task"] or moved.changed or moved.resized:
        say(moved.describe(path))
    resolve_attention(module, trainer.strategy.root_device)
    resolve_engine(module, step, trainer.strategy.root_device)
    data.prepare_data()
    data.check_ranks(trainer.world_size)
    try:
        data.setup("test")
        say(
            f"{path}: scoring {describe_test_sets(data)}, {describe_device(trainer)}", *moved.notes, *data.differences()
        )
        if crowd := crowding_note(run):
            say(crowd)
        trainer.test(module, datamodule=data, verbose=False)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(advise_smaller_batch(run, trainer)) from None
    predicted = gather_predictions(module, data, trainer) if run.predictions else {}  # of all ranks
    if not trainer.is_global_zero:
        return {}
    if predicted:
        write_predictions(Path(path) / PREDICTIONS_FILE, predicted)
    return {"checkpoint": path, "transfer": asdict(moved)} | result.test_scores(module, data, trainer)


def _check_own_predictions(path: str, given: Mapping[str, Override]) -> None:
    """Raises a UsageError if `predictions.npz` would not be what a finished run predicts."""
    folder = Path(path)
    if not folder.is_dir() or (read_result(folder / "result.json") or {}).get("status") != "finished":
        raise UsageError(f"predictions=true needs init=<the directory of a finished run>: {path} is none")
    if others := sorted(given.keys() - {"init", "predictions", *HARDWARE_FIELDS}):
        raise UsageError(f"predictions=true keeps what the run itself predicts: leave out {', '.join(others)}")


def load(path: str | Path) -> TaskModule:
    """Returns the task's LightningModule, in evaluation mode, with the weights of a run's directory or checkpoint.

    `module(module.make_batch(sequences))` has the class scores of sequences of token ids.
    """
    weights, identity = checkpoints.read_checkpoint(path)
    _, module = build_modules(restore(RunConfig, REGISTRIES, identity["config"]))
    checkpoints.load_into(module, weights, identity, path)
    return module.eval()
