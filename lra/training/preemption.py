"""Ends a run on a signal: SIGTERM and SIGUSR1 from a scheduler, or SIGINT, the user's Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch

from lra.config.schema import RunConfig
from lra.training.clock import Clock
from lra.training.lightning import exit_rank
from lra.training.output import print_line


class RankPoll:
    """Finds the highest number over all ranks. The answer is that of the call before, so no host waits for it."""

    def __init__(self, device: torch.device):
        self.device, self.answered = device, torch.cuda.Event() if device.type == "cuda" else None
        self.answer = torch.zeros((), dtype=torch.int32, pin_memory=self.answered is not None)

    def ask(self, number: int) -> int:
        if self.answered is not None:
            self.answered.synchronize()
        last = int(self.answer)
        highest = torch.full((), number, dtype=torch.int32, device=self.device)
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        self.answer.copy_(highest, non_blocking=True)
        if self.answered is not None:
            self.answered.record()
        return last


HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def start_compilers() -> None:
    """Starts the processes in which torch.compile compiles kernels, with the signals of `HANDLED_SIGNALS` blocked.

    Schedulers signal all processes of a job, and PyTorch waits for ever for a compiler process that is gone. Then the
    run could not write its checkpoint. The processes end with this process.
    """
    from torch._inductor.async_compile import AsyncCompile  # this import takes a second, and only runs on a GPU need it

    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)  # a new process inherits the mask of its parent
    try:
        AsyncCompile.warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Preemption(pl.Callback):
    """Ends a run with exit code 128 + signal number, at a point where nothing is lost.

    This point is the end of a stride of steps or of a validation. Before and after training, and in the first stride,
    the run ends at once. Several devices stop at the same step, one stride later.

    Args:
        last: the checkpoint from which the run resumes. This callback must be the last, because another one writes the
            checkpoint after validation.
        clock: is stopped before the checkpoint is written.
    """

    TWICE_S = 2.0  # seconds; a second signal so soon is the same one, passed on by a launcher

    def __init__(self, run: RunConfig, last: Path, clock: Clock):
        self.run, self.last, self.clock = run, last, clock
        self.arrived, self.when = 0, 0.0
        self.training = False
        self.ranks: RankPoll | None = None

    @contextmanager
    def listening(self, trainer: pl.Trainer) -> Iterator[None]:
        """Handles signals instead of Lightning."""
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
            yield
            return

        def handle(number: int, _: Any) -> None:
            if self.arrived:
                if number != signal.SIGINT and time.monotonic() - self.when < self.TWICE_S:
                    return
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self.arrived, self.when = number, time.monotonic()
            if not self.training:
                self._end(trainer, number)
            if trainer.is_global_zero:
                text = f"{signal.Signals(number).name}: up to {self.run.trainer.stride} steps are finished first"
                with suppress(OSError):
                    os.write(2, f"{text}; once more ends the run at once\n".encode())  # print may be interrupted

        # a shell makes background jobs ignore Ctrl-C
        ignored = {signal.SIGINT} if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else set()
        before = {number: signal.signal(number, handle) for number in HANDLED_SIGNALS if number not in ignored}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.world_size > 1:
            self.ranks = RankPoll(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.training = True  # before this, the first steps compile and there is nothing to lose
        if trainer.global_step % self.run.trainer.eval_every == 0:
            return  # validation follows
        if number := self.ranks.ask(self.arrived) if self.ranks else self.arrived:
            self.clock.stop(trainer)
            trainer.save_checkpoint(self.last)
            self._end(trainer, number)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._heed(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._heed(trainer)
        self.training = False

    def _heed(self, trainer: pl.Trainer) -> None:
        """Ends the run if any rank has received a signal. Waits for all ranks."""
        number = self.arrived
        if self.ranks:
            self.ranks.ask(number)
            number = self.ranks.ask(number)  # the answer to the first call
        if number:
            self._end(trainer, number)

    def _end(self, trainer: pl.Trainer, number: int) -> NoReturn:
        kept = "add resume=auto to go on" if self.last.exists() else "nothing is kept yet, resume=auto starts over"
        print_line(trainer, f"{signal.Signals(number).name} after step {trainer.global_step}: {kept}")
        launcher = trainer.strategy.launcher
        if launcher is not None and not self.training:  # end the ranks that wait for this one
            launcher.kill(signal.SIGKILL)  # type: ignore[attr-defined]
        exit_rank(trainer, 128 + number)
