"""`lra fit` in a process of its own that kills itself where it is told to."""

from __future__ import annotations

import csv
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lra import cli
from lra.data import store
from lra.data.writer import StoreWriter
from lra.tasks.base import TaskData, TaskModule
from lra.training import checkpoints
from lra.training.curves import Curves
from lra.training.narrator import Narrator
from lra.training.run_directory import RunDirectory
from lra.training.step import Step

FUNCTIONS: dict[str, tuple[Any, str]] = {
    "build": (store, "_build"), "add": (StoreWriter, "add"), "complete": (StoreWriter, "finish"),
    "hash": (store, "_file_hash"),
    "sync": (os, "fsync"), "rename": (Path, "rename"), "open": (RunDirectory, "_open"), "setup": (TaskData, "setup"),
    "step": (Step, "__call__"), "log": (Curves, "log_metrics"), "rewrite": (csv.DictWriter, "writerows"),
    "validate": (TaskModule, "validation_step"), "tell": (Narrator, "on_validation_end"), "save": (torch, "save"),
    "replace": (os, "replace"), "test": (TaskModule, "test_step"), "weights": (checkpoints, "save_weights"),
    "finish": (RunDirectory, "finish"),
}  # fmt: skip


class Moment(NamedTuple):
    """The `count`-th call of a function, of those that name `file` in their arguments."""

    function: str  # of FUNCTIONS
    count: int = 1
    when: str = "before"  # or after, or, of save alone, half: as many of the bytes are in the file
    file: str = ""


def fit(folder: Path, *args: str, kill: Moment | None = None) -> tuple[int, str]:
    """Exit code, negative for a signal, and output of `lra fit` in this folder, its prepared data there too."""
    context = multiprocessing.get_context("forkserver")  # a fork of a process that has the imports behind it
    context.set_forkserver_preload(["lra.training.fit"])
    process = context.Process(target=_fit, args=(folder, args, kill))
    process.start()
    process.join(240)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode, (folder / "output.txt").read_text()


def _fit(folder: Path, args: tuple[str, ...], kill: Moment | None) -> None:
    os.chdir(folder)
    os.environ["LRA_DATA"] = str(folder / "data")
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    torch.set_num_threads(1)
    if kill:
        _set(kill)
    sys.argv = ["lra", "fit", *args]
    cli.main()


def _set(kill: Moment) -> None:
    of, name = FUNCTIONS[kill.function]
    genuine: Callable[..., Any] = getattr(of, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += any(kill.file in str(arg) for arg in args)
        if calls != kill.count:
            return genuine(*args, **kwargs)
        if kill.when == "half":
            checkpoint, file = args
            genuine(checkpoint, whole := io.BytesIO())
            file.write(whole.getvalue()[: whole.tell() // 2])
            file.flush()
        elif kill.when == "after":
            genuine(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(of, name, call)
