"""Stand-ins for the packages of remote loggers: modules that keep the calls of Lightning's loggers and of ours."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Calls = list[tuple[str, Any]]


def stand_in(monkeypatch: pytest.MonkeyPatch, service: str, calls: Calls) -> None:
    """Puts a module in the place of a service's package. Every call that matters goes to `calls`."""
    for name, content in {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}[service](calls).items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin="stand-in")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("wandb._WANDB_AVAILABLE", "mlflow._MLFLOW_AVAILABLE"):
        monkeypatch.setattr(f"pytorch_lightning.loggers.{name}", True)


def _wandb(calls: Calls) -> dict[str, dict[str, Any]]:
    class Run:
        def __init__(self, **given: Any):
            calls.append(("init", given))
            self.id, self.url = given["id"] or f"made{len(calls)}", "https://wandb.example/run"
            self.config = SimpleNamespace(update=lambda config, **_: calls.append(("config", config)))

        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def log(self, row: dict[str, float]) -> None:
            calls.append(("log", row))

        def finish(self, exit_code: int) -> None:
            calls.append(("end", exit_code))

    disabled = type("RunDisabled", (), {})
    return {
        "wandb": {"run": None, "init": lambda **given: Run(**given), "Settings": lambda **given: given},
        "wandb.sdk": {}, "wandb.sdk.lib": {"RunDisabled": disabled}, "wandb.wandb_run": {"Run": Run},
    }  # fmt: skip


def _mlflow(calls: Calls) -> dict[str, dict[str, Any]]:
    class Client:
        def __init__(self, where: str): ...

        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(lifecycle_stage="active", experiment_id=name)

        def get_run(self, run: str) -> Any:
            return SimpleNamespace(info=SimpleNamespace(experiment_id="lra"))

        def create_run(self, experiment_id: str, tags: dict[str, str]) -> Any:
            calls.append(("init", {"id": None, "name": tags["mlflow.runName"], "project": experiment_id}))
            return SimpleNamespace(info=SimpleNamespace(run_id=f"made{len(calls)}"))

        def update_run(self, run: str, status: str) -> None:
            calls.append(("init", {"id": run, "name": None, "project": "lra"}))

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            if params:
                calls.append(("config", dict(params)))
            if metrics:
                calls.append(("log", {key: value for key, value, _ in metrics} | {"step": metrics[0][2]}))

        def set_terminated(self, run: str, status: str) -> None:
            calls.append(("end", int(status != "FINISHED")))

    entities = {
        "Param": lambda key, value: (key, value), "Metric": lambda key, value, timestamp, step: (key, value, step)
    }  # fmt: skip
    return {
        "mlflow": {"get_tracking_uri": lambda: "http://mlflow.example", "set_tracking_uri": lambda _: None},
        "mlflow.tracking": {"MlflowClient": Client}, "mlflow.entities": entities, "mlflow.utils": {},
        "mlflow.utils.mlflow_tags": {"MLFLOW_RUN_NAME": "mlflow.runName"},
        "mlflow.tracking.context": {}, "mlflow.tracking.context.registry": {"resolve_tags": lambda tags: tags},
    }  # fmt: skip


def _trackio(calls: Calls) -> dict[str, dict[str, Any]]:
    def init(project: str, name: str, config: dict[str, Any], resume: str, embed: bool) -> None:
        print("* many lines of Trackio's own")
        calls.append(("init", {"id": name if resume == "allow" else None, "name": name, "project": project}))
        calls.append(("config", config))

    return {"trackio": {
        "init": init, "log": lambda row, step: calls.append(("log", row | {"step": step})),
        "finish": lambda: calls.append(("end", 0)),
    }}  # fmt: skip
