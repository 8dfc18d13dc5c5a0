"""Sends curves to services that show them: Weights & Biases, MLflow and Trackio. Their packages are optional.

A service that fails ends no run: the user is told once, and the run goes on without it. `loggers.json` in the run's
directory has the service's name for the run, by which a resumed run goes on in the same one, and where to look at it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, util
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytorch_lightning as pl

from lra.config.compose import flatten
from lra.errors import UsageError, name_error
from lra.training.clock import Clock
from lra.training.curves import RowLogger
from lra.training.output import print_line
from lra.training.run_directory import write_text
from lra.training.run_files import LINKS_FILE, read_links
from lra.training.step import Step

MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
PROJECT = "lra"  # on every service, unless its own environment variable names another


class RemoteRun(NamedTuple):
    """A run as a service is told of it."""

    name: str  # its directory, without the folder of all runs
    folder: Path
    config: dict[str, Any]  # by dotted field
    id: str | None  # the service's name for the run, if it goes on


class Service(Protocol):
    """A run on a service. Whoever makes one begins the run there, or goes on with it."""

    id: str
    link: str  # an address, or the command that shows the run

    def log(self, row: Mapping[str, float], step: int) -> None: ...

    def end(self, status: str) -> None:
        """`status` is finished, failed or stopped."""
        ...


class WandbRun:
    """By Lightning's logger. WANDB_PROJECT, WANDB_MODE and all other variables of W&B keep their meaning."""

    def __init__(self, run: RemoteRun):
        from pytorch_lightning.loggers import WandbLogger

        wandb: Any = import_module("wandb")
        settings = wandb.Settings(console="off", quiet=True)  # what a run prints stays as it is
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self.logger = WandbLogger(run.name, run.folder, project=project, id=run.id, settings=settings)
        self.logger.log_hyperparams(run.config)
        there: Any = self.logger.experiment
        self.id = there.id
        self.link = there.url or f"wandb sync {run.folder}/wandb/offline-run-*-{there.id}"  # of all sessions

    def log(self, row: Mapping[str, float], step: int) -> None:
        self.logger.log_metrics(row, step)

    def end(self, status: str) -> None:
        self.logger.experiment.finish(exit_code=int(status != "finished"))


class MlflowRun:
    """By Lightning's logger. MLFLOW_TRACKING_URI says where."""

    def __init__(self, run: RemoteRun):
        # MLflow's own limits let a run wait for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from pytorch_lightning.loggers import MLFlowLogger

        mlflow: Any = import_module("mlflow")
        where, project = mlflow.get_tracking_uri(), os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        self.logger = MLFlowLogger(project, run.name, where, run_id=run.id)
        self.id = str(self.logger.run_id)
        if run.id is None:  # MLflow refuses another value of a parameter
            self.logger.log_hyperparams(run.config)
        else:
            self.logger.experiment.update_run(self.id, "RUNNING")
        page = f"{where}/#/experiments/{self.logger.experiment_id}/runs/{self.id}"
        self.link = page if where.startswith("http") else f"mlflow ui --backend-store-uri {where}"

    def log(self, row: Mapping[str, float], step: int) -> None:
        self.logger.log_metrics(row, step)

    def end(self, status: str) -> None:
        self.logger.experiment.set_terminated(self.id, MLFLOW_STATUS[status])


class TrackioRun:
    """By Trackio's own functions, as Lightning has no logger for it. TRACKIO_SPACE_ID sends curves to a Space."""

    def __init__(self, run: RemoteRun):
        self.trackio: Any = import_module("trackio")
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = self.trackio.init(
                PROJECT, run.name, config=run.config, resume="never" if run.id is None else "allow", embed=False
            )
        self.id, space = run.name, os.environ.get("TRACKIO_SPACE_ID")  # of several runs of a name it takes the last
        self.link = f"https://huggingface.co/spaces/{space}" if space else f"trackio show --project {PROJECT}"

    def log(self, row: Mapping[str, float], step: int) -> None:
        self.trackio.log(dict(row), step)

    def end(self, status: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.trackio.finish()


SERVICES: dict[str, Callable[[RemoteRun], Service]] = {"wandb": WandbRun, "mlflow": MlflowRun, "trackio": TrackioRun}


class RemoteLogger(RowLogger):
    """Sends the rows of a run to a service, from `begin` to `end`.

    Args:
        service: a name of `SERVICES`.
        folder: the run's directory.

    Raises:
        UsageError: the service's package is not installed.
    """

    def __init__(self, service: str, folder: Path):
        super().__init__()
        spec = util.find_spec(service)
        if spec is None or spec.origin is None:  # a folder of that name is none, such as the one that W&B makes
            raise UsageError(f"logger={service} needs a package that is not installed: pip install {service}")
        self.service, self.folder = service, folder
        self._run: Service | None = None  # None before the run begins, after it ends, and after a failure
        self._say: Callable[[str], None] = print
        self._measure: Callable[[], dict[str, float]] = dict

    def begin(
        self, config: Mapping[str, Any], resumed: bool, measure: Callable[[], dict[str, float]] = dict,
        say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        """Begins the run on the service.

        Args:
            config: as it is saved.
            resumed: whether the run goes on from a checkpoint. Then it goes on in the same run of the service.
            measure: returns what is added to the rows of training.
            say: tells the user that the service failed.
        """
        self._say, self._measure = say, measure
        links = read_links(self.folder)
        known = links.get(self.service, {}).get("id") if resumed else None
        named = RemoteRun("/".join(self.folder.parts[-3:]), self.folder, dict(flatten(config)), known)
        with self._guarded():
            self._run = SERVICES[self.service](named)
            links[self.service] = {"id": self._run.id, "link": self._run.link}
            write_text(self.folder / LINKS_FILE, json.dumps(links, indent=2) + "\n")

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._run is None:
            return
        assert step is not None
        with self._guarded():
            self._run.log(metrics | (self._measure() if "train/loss" in metrics else {}), step)

    def end(self, status: str) -> None:
        """Ends the run on the service: finished, failed or stopped."""
        if self._run is not None:
            with self._guarded():
                self._run.end(status)
            self._run = None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the services' clients raise what they like
            self._run = None
            self._say(f"note: logger={self.service} failed, the run goes on without it ({name_error(error)})")

    def finalize(self, status: str) -> None:
        pass  # Lightning calls this before the test; `end` ends


class Meter:
    """Measures the speed of training between two calls, and memory."""

    def __init__(self, trainer: pl.Trainer, clock: Clock, step: Step):
        self.trainer, self.clock, self.step = trainer, clock, step
        self._last: tuple[float, int, int] | None = None

    def __call__(self) -> dict[str, float]:
        """Returns tokens and steps per second since the last call, and the peak memory of a GPU in GB.

        The first call returns no speed, because the first steps compile.
        """
        now = self.clock.trained(), self.step.tokens * self.trainer.world_size, self.trainer.global_step
        last, self._last = self._last, now
        row: dict[str, float] = {}
        if last is not None and (seconds := now[0] - last[0]) > 0:
            row = {"speed/tokens_per_second": (now[1] - last[1]) / seconds}
            row["speed/steps_per_second"] = (now[2] - last[2]) / seconds
        return row | ({"memory/peak_gpu_gb": peak / 1e9} if (peak := self.clock.peak()) else {})


@contextlib.contextmanager
def watched(
    trainer: pl.Trainer, clock: Clock, step: Step, config: Mapping[str, Any], resumed: bool
) -> Iterator[None]:  # fmt: skip
    """Sends what is logged inside to the services of a run, on rank 0. `RemoteLogger.begin` explains the arguments."""
    loggers = [each for each in trainer.loggers if isinstance(each, RemoteLogger) and trainer.is_global_zero]
    for each in loggers:
        each.begin(config, resumed, Meter(trainer, clock, step), lambda text: print_line(trainer, text))
    status = "stopped"
    try:
        yield
        status = "finished"
    except Exception:
        status = "failed"
        raise
    finally:
        for each in loggers:
            each.end(status)
