"""Makes docs/runs.md of the runs in benchmarks/results: make docs.

    python -m benchmarks.runs [--check]

A run is a result.json, copied as `<task>-<attn>-<recipe or name>[-<stage>]-s<seed>.json`, its curves beside it as .csv.
With --check nothing is written, and the exit code is 1 if the page is not what would be.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.release import accuracy
from lra.experiments.results.ledger import gpus
from lra.training.run import spent

PAGE = pages.ROOT / "docs" / "runs.md"
HEAD = (
    "# Runs\n\n<!-- made by benchmarks/runs.py of benchmarks/results: make docs -->\n\nEvery run that was measured; "
    "its command, versions and commit are in its file. Peak memory is the most that PyTorch held on one GPU, with "
    "evaluation; training is the time of the steps, wall time runs from the prepared data to the scores. A run that an "
    "older version resumed has only its training time. Runs of one task and recipe are side by side in "
    "[table3.md](table3.md)."
)
# overrides that change only where a run reads, writes or goes on, or what another column shows
NOT_SHOWN = ("task.source", "name", "resume", "seed", "trainer.accelerator", "trainer.devices")


def runs(results: Path) -> str:
    header = (
        "task", "attention", "recipe", "seed", "protocol", "test accuracy, %", "fresh test set, %",
        "peak GPU memory", "training", "wall time", "GPU",
    )  # fmt: skip
    order = ("task", "attn", "recipe", "overrides", "seed")
    found = sorted(pages.read(results, "-s[0-9]*"), key=lambda pair: [pair[1][field] for field in order])
    return pages.table(header, (_run(*pair) for pair in found))


def _run(file: Path, result: dict[str, Any]) -> Sequence[str]:
    recipe = " ".join([result["recipe"], *(f"`{change}`" for change in _changes(result["overrides"]))])
    ended = {"finished": "", "oom": "OOM", "failed": "failed"}[result["status"]]
    (seconds, peak), gpu = spent(result), result["environment"]["gpu"]
    return (
        f"[{_task(result)}](../benchmarks/results/{file.name})",
        result["attn"],
        recipe,
        str(result["seed"]),
        result.get("protocol") or "",
        _score(result.get("test")) or ended,
        _score(result.get("fresh")),
        "" if peak is None else f"{peak / 1e9:.2f} GB",
        f"{result['train_seconds'] / 60:.1f} min",
        "" if seconds is None else f"{seconds / 60:.1f} min",
        "" if gpu is None else gpus(gpu, result["world_size"]),
    )


def _task(result: dict[str, Any]) -> str:
    """The task, and the data set where there is more than one of its kind."""
    dataset = result["config"]["task"].get("dataset")
    return result["task"] if dataset is None else f"{result['task']}, data set {dataset}"


def _changes(overrides: Iterable[str]) -> Iterable[str]:
    """What a run changed of its recipe; of another run's weights the name, as paths mean nothing elsewhere."""
    for text in overrides:
        field, _, value = text.partition("=")
        if field not in NOT_SHOWN:
            run = Path(value)
            yield f"init={run.parent.name if run.suffix else run.name}" if field == "init" else text


def _score(score: dict[str, Any] | None) -> str:
    if score is None:
        return ""
    best = max(score["baselines"], key=score["baselines"].__getitem__)
    return f"{accuracy(score)}; {best} {100 * score['baselines'][best]:.2f}"


def make() -> dict[Path, str]:
    return {PAGE: f"{HEAD}\n\n{runs(pages.RESULTS)}\n"}


if __name__ == "__main__":
    sys.exit(pages.main(make))
