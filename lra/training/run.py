"""A run's directory: its name, what state it is in, and the files it ends with."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import yaml

from lra import environment
from lra.config.compose import Composed, differences
from lra.errors import UsageError

RUNS = Path("checkpoints") / "runs"
# fields that choose or continue a run, not what it computes
NOT_NAMED = ("seed", "name", "resume")


class RunDirectory:
    """`checkpoints/runs/<task>/<attn>/<recipe>[+<overrides>]-s<seed>` below the current folder."""

    def __init__(self, composed: Composed):
        run = composed.config
        overrides = [text for text in composed.overrides if text.partition("=")[0] not in NOT_NAMED]
        middle = run.name or "+".join([run.recipe, *([_short(",".join(overrides))] if overrides else [])])
        self.path = RUNS / run.task.name / run.attn.name / f"{middle}-s{run.seed}"
        self.best, self.last = self.path / "best.ckpt", self.path / "last.ckpt"
        self.weights, self.curves = self.path / "model.safetensors", self.path / "metrics.csv"
        self.config = run.saved()
        self.resume = run.resume

    def result(self) -> dict[str, Any] | None:
        """The result of a run that ended by itself."""
        file = self.path / "result.json"
        return json.loads(file.read_text()) if file.exists() else None

    @property
    def finished(self) -> bool:
        result = self.result()
        return result is not None and result["status"] == "finished"

    def check(self) -> None:
        """Refuses to go on in a directory that belongs to another configuration or holds an unfinished run."""
        path = Path(self.resume)
        if self.resume not in ("false", "true", "auto") and not (path.suffix == ".ckpt" and path.is_file()):
            raise UsageError(f"resume={self.resume}: no such checkpoint; resume is false, true, auto or a .ckpt file")
        file = self.path / "config.yaml"
        if file.exists():
            changed = differences(yaml.safe_load(file.read_text()), self.config)
            if changed:
                raise UsageError(
                    f"{self.path} holds a run with another configuration ({'; '.join(changed)}): choose another name="
                )
        if self.finished:
            return
        if self.resume == "true" and not self.last.exists():
            raise UsageError(f"resume=true, but {self.path} has no last.ckpt: leave resume out to start there")
        if self.resume == "false" and file.exists():
            raise UsageError(
                f"{self.path} holds an unfinished run: add resume=auto to go on, or name= to start another"
            )

    def checkpoint(self) -> Path | None:
        """Where training starts: a checkpoint, or None for the beginning."""
        if self.resume in ("true", "auto"):
            return self.last if self.last.exists() else None
        return None if self.resume == "false" else Path(self.resume)

    def open(self) -> None:
        """Creates the directory with its configuration and environment."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "result.json").unlink(missing_ok=True)
            write(self.path / "env.json", json.dumps(environment.describe(), indent=2) + "\n")
            write(self.path / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
        except OSError as error:
            raise UsageError(f"cannot write to {self.path} ({error.strerror}): start in another folder") from error

    def finish(self, status: Literal["finished", "oom", "failed"], result: dict[str, Any]) -> dict[str, Any]:
        """Writes result.json, last and whole."""
        result = {"status": status, "directory": str(self.path)} | result
        write(self.path / "result.json", json.dumps(result, indent=2) + "\n")
        return result


def write(path: Path, text: str) -> None:
    """Replaces a file in one step: a reader sees the old one or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else a power cut may leave the name without the content
    os.replace(aside, path)


def _short(overrides: str) -> str:
    plain = overrides.replace("/", "_").replace(" ", "")
    return plain if len(plain) <= 100 else f"{plain[:80]}~{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
