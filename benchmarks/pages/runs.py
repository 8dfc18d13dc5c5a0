"""Makes results/runs.csv: a row for every run that was measured. Its file has its command and versions.

Accuracies are in %. Peak memory is the most that PyTorch held on one GPU, with evaluation. Training is the time of the
steps. Wall time runs from the prepared data to the scores; a run that an older version resumed has none. What a run
does not have is empty.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import measured
from lra.experiments.results import ledger
from lra.experiments.results.ledger import ResultFile
from lra.training.run_directory import time_and_memory

PAGE = measured.BENCHMARKS / "results" / "runs.csv"
# overrides that change only where a run reads, writes or goes on, or what another column shows
NOT_SHOWN = ("task.source", "name", "resume", "seed", "trainer.accelerator", "trainer.devices")
SCORE = ("accuracy", "plus_minus", "examples", "baseline", "baseline_accuracy")


def rows(folder: Path) -> list[dict[str, Any]]:
    """Of all runs below a folder, in the order of task, attention, recipe and seed."""
    order = ("task", "attn", "recipe", "overrides", "seed")
    found = sorted(ledger.find_results(folder)[0], key=lambda entry: [entry.result[field] for field in order])
    return [_row(entry, folder) for entry in found]


def _row(entry: ResultFile, folder: Path) -> dict[str, Any]:
    result, made_with = entry.result, entry.result["environment"]
    seconds, peak = time_and_memory(result)
    return {
        "task": result["task"],
        "dataset": result["config"]["task"].get("dataset"),
        "attention": result["attn"],
        "recipe": result["recipe"],
        "changed": " ".join(_changes(result["overrides"])),
        "seed": result["seed"],
        "status": result["status"],
        "protocol": result.get("protocol"),
        **_score("", result.get("test")),
        **_score("fresh_", result.get("fresh")),
        "peak_gb": None if peak is None else f"{peak / 1e9:.2f}",
        "train_minutes": f"{result['train_seconds'] / 60:.1f}",
        "wall_minutes": None if seconds is None else f"{seconds / 60:.1f}",
        "gpu": made_with["gpu"],
        "gpus": result["world_size"] if made_with["gpu"] else None,
        "commit": made_with.get("commit"),
        "date": made_with["date"],
        "file": entry.path.relative_to(folder).as_posix(),
    }


def _changes(overrides: Iterable[str]) -> Iterable[str]:
    """What a run changed of its recipe; of another run's weights the name, as paths mean nothing elsewhere."""
    for text in overrides:
        field, _, value = text.partition("=")
        if field not in NOT_SHOWN:
            run = Path(value)
            yield f"init={run.parent.name if run.suffix else run.name}" if field == "init" else text


def _score(prefix: str, score: Mapping[str, Any] | None) -> dict[str, Any]:
    shown: tuple[Any, ...] = (None,) * len(SCORE)
    if score is not None:
        best = max(score["baselines"], key=score["baselines"].__getitem__)
        shares = (score["accuracy"], score["plus_minus"], score["baselines"][best])
        accuracy, bound, baseline = (f"{100 * share:.2f}" for share in shares)
        shown = accuracy, bound, score["n"], best, baseline
    return {prefix + name: value for name, value in zip(SCORE, shown, strict=True)}


def make() -> dict[Path, str]:
    found, text = rows(measured.BENCHMARKS), io.StringIO()
    writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return {PAGE: text.getvalue()}
