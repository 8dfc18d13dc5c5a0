"""The cards of released weights and checkpoints/README.md, of each release's result.json.

A card names the runs before its own, so their results must lie in benchmarks/results/runs or be released, too.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages import measured
from benchmarks.pages.measured import mark, table
from lra.errors import UsageError
from lra.experiments.reproduction import format_mean_std
from lra.experiments.results.card import (
    SCORED_TOKENS,
    card_facts,
    format_accuracy,
    next_command,
    score_table,
    shell_block,
    task_name,
    trained_on,
    training_command,
    used_attention,
)
from lra.experiments.results.run_groups import setting_of

RELEASES = measured.ROOT / "checkpoints"
# what lit pixels' weights are known to begin, and how: from those of Path-64 nobody learned Path-X yet
LARGER = {"pathfinder": ("path64", "positions.scale=image"), "pathx": ("path256",)}
# of the study of grey levels: what was done to the images
MOVED = {
    "rounded": "rounded to whole grey levels, as in training", "truncated": "truncated to whole grey levels",
    "moved": "rounded, then each pixel moved by -1, 0 or 1",
}  # fmt: skip
MOST_LOST = 1.0  # points, of weights that do not rely on single grey levels
MADE = "<!-- made by benchmarks/pages/cards.py of result.json: make docs -->"
HEAD = """# Checkpoints

<!-- made by benchmarks/pages/cards.py: make docs -->

Released weights live here, one folder each: a run's `config.yaml`, `model.safetensors` and `result.json`, and a card \
that says what it is, how it was trained and how to use it."""
TAIL = """`python -m benchmarks.release <run directory> <name>` adds one. *Mean of all seeds*: the weights are \
those of the seed that is best on validation. *Of other examples*: accuracy on examples of a seed of data that no run \
has seen, neither in training nor in validation (`python -m benchmarks.studies.rescoring.study <name>`).

`runs/` is where `lra fit` writes, below the folder it is started in: \
`runs/<task>/<attn>/<recipe>[+<overrides>]-s<seed>/`. Git ignores it.
Score a run, or start another from its weights, with `init=<folder>`: \
`lra test init=checkpoints/runs/listops/flash/demo-s0`."""

Result = dict[str, Any]


def released(releases: Path = RELEASES) -> dict[str, Result]:
    """The result of every release by its name."""
    files = sorted(releases.glob("[!.]*/result.json"))
    return {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}


def known(releases: Path = RELEASES, results: Path = measured.RUNS) -> dict[str, list[tuple[Path, Result]]]:
    """Results of runs, with their files, by what `init=` calls the run: its directory, and that of its release."""
    found: dict[str, list[tuple[Path, Result]]] = {}
    for file in sorted(results.rglob("result.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(result["directory"], []).append((file, result))
    for name, result in released(releases).items():
        for directory in (result["directory"], f"{RELEASES.name}/{name}"):
            found.setdefault(directory, []).append((releases / name / "result.json", result))
    return found


def stages(result: Result, runs: dict[str, list[tuple[Path, Result]]]) -> list[Result]:
    """The runs from the first, which started from nothing, to this one, each from the weights of the one before."""
    chain = [result]
    while init := chain[0]["config"].get("init"):
        directory = Path(init).parent if Path(init).suffix in (".ckpt", ".safetensors") else Path(init)
        found = runs.get(directory.as_posix(), [])
        if not found:
            raise UsageError(
                f"{chain[0]['directory']} starts from {directory}, whose result is not known: release that run first, "
                "or copy its result.json to benchmarks/results/runs"
            )
        if any(before != found[0][1] for _, before in found):
            files = " and ".join(str(file) for file, _ in found)
            raise UsageError(f"{files} are different results of {directory}: keep the one of the weights")
        chain.insert(0, found[0][1])
    return chain


def card(name: str, result: Result, runs: dict[str, list[tuple[Path, Result]]], levels: Result | None = None) -> str:
    """The whole text of a release's README.md. `levels`: what its weights lose when grey levels move, if measured."""
    chain, folder = stages(result, runs), f"{RELEASES.name}/{name}"
    other = "" if used_attention(result) == result["attn"] else f" attn={used_attention(result)}"
    return "\n\n".join([
        f"# {name}",
        MADE,
        table(("", ""), _facts(result, chain[:-1])),
        "## Accuracy",
        table(*score_table(result)),
        "± is the 95% bound from sampling the test set. It is of one run, of one seed.",
        *_beside_other_seeds(result, runs),
        *_chosen_by(chain),
        *(_grey_levels(levels) if levels else []),
        "## Use",
        "Run this in the checkout, or write the folder's path after `init=`:",
        shell_block(
            f"lra test init={folder}{other}   # scores it on the test set",
            f"{further(name, result)}   # starts from it",
        ),
        f'In Python `module = lra.load("{folder}")` gives the module in evaluation mode, and '
        "`module(module.make_batch(sequences))` its scores of sequences of token ids. `config.yaml` may name a run "
        "from which this one started. You do not need that run to use the weights.",
        *([_SEED] if _generated(result["config"]["task"]) else []),
        "## Training",
        shell_block(*(training_command(stage) for stage in chain)),
        *([_ALONE] if len(chain) > 1 and not any(_says_init(stage) for stage in chain) else []),
        table(
            ("run", "protocol", "steps", "batch", "test accuracy, %", "training", "GPU", "date"),
            (_stage(number, stage) for number, stage in enumerate(chain, 1)),
        ),
    ]) + "\n"  # fmt: skip


_SEED = (
    "The test set follows the training set in one stream of examples. If you set other numbers of examples, choose "
    "another `task.data_seed`, too. Fewer training examples are refused, because the test would score examples that "
    "the weights were trained on."
)
_ALONE = "Each run starts from the weights of the one before. The last command alone trains all of them."


def _generated(task: dict[str, Any]) -> bool:
    """Whether the splits of a task follow one another in one stream."""
    return task["source"] == "generate"


def _chosen_by(chain: list[Result]) -> Iterator[str]:
    """Which runs before the last one chose their best checkpoint by images of the last one's test set."""
    last = chain[-1]["config"]["task"]
    if not _generated(last):
        return
    test = range(last["train"] + last["val"], last["train"] + last["val"] + last["test"])
    for number, stage in enumerate(chain[:-1], 1):
        task = stage["config"]["task"]
        if all(task.get(field) == last.get(field) for field in ("name", "source", "level", "data_seed")):
            end = task["train"] + task["val"]
            if task["train"] < test.stop and test.start < end:
                yield (
                    f"Run {number} below was validated on these test images, and its best checkpoint chosen by them. "
                    "No run was trained on them. [checkpoints](../README.md) has the accuracy on images of another "
                    "seed, where it was measured."
                )


def _seeds(result: Result, runs: dict[str, list[tuple[Path, Result]]]) -> dict[int, Result]:
    """The results that differ from this one in nothing but the seed, itself included, by seed."""
    own = Path(result["directory"])
    alike = [
        found
        for directory, ((_, found), *_) in runs.items()
        if (path := Path(directory)).parent == own.parent and setting_of(path) == setting_of(own)
    ]
    return {found["seed"]: found for found in sorted(alike, key=lambda found: found["seed"])}


def _mean(seeds: dict[int, Result]) -> str:
    """Mean and standard deviation of test accuracies, in %."""
    return format_mean_std([100 * found["test"]["accuracy"] for found in seeds.values()], 1)


def _beside_other_seeds(result: Result, runs: dict[str, list[tuple[Path, Result]]]) -> Iterator[str]:
    if len(seeds := _seeds(result, runs)) < 2:
        return
    scores = ", ".join(f"{100 * found['test']['accuracy']:.2f}" for found in seeds.values())
    best = result["val"]["accuracy"] == max(found["val"]["accuracy"] for found in seeds.values())
    chosen = ", the best of them on validation" if best else ""
    yield (
        f"{len(seeds)} seeds were trained in this way, with {scores} on test: {_mean(seeds)}. "
        f"These are the weights of seed {result['seed']}{chosen}."
    )


def _grey_levels(levels: Result) -> Iterator[str]:
    yield "## Grey levels"
    yield table(("test images", "accuracy, %"), ((MOVED[name], f"{100 * it:.2f}") for name, it in
                                                 levels["accuracy"].items()))  # fmt: skip
    points = 100 * lost(levels)
    most = "These weights rely on how grey levels were rounded" if points > MOST_LOST else "A grey level matters little"
    where = "[studies/levels](../../benchmarks/studies/levels/README.md)"
    yield f"{most}: they lose {max(points, 0):.2f} points at most on these {levels['n']:,} images ({where})."


def lost(levels: Result) -> float:
    """The largest share of images that are lost when grey levels move by one."""
    accuracy = levels["accuracy"]
    return max(accuracy["rounded"] - accuracy[name] for name in accuracy)


def digest(folder: Path) -> str:
    """SHA-256 of a folder's model.safetensors, as hex digits."""
    with open(folder / "model.safetensors", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def grey_levels(root: Path = measured.BENCHMARKS) -> dict[str, Result]:
    """What weights lose when grey levels move by one, by the digest of the weights."""
    return {result["sha256"]: result for _, result in measured.read(root, "studies/levels/*/*.json")}


def further(name: str, result: Result) -> str:
    """What trains another run from a release, on larger images where there are any."""
    lit = "task.tokens=lit" in result["overrides"]
    again = (task_name(result), f"seed={result['seed'] + 1}")
    task, *fields = LARGER.get(task_name(result), again) if lit else again
    return next_command(result, task, f"{RELEASES.name}/{name}", *fields)


def _facts(result: Result, before: list[Result]) -> Iterator[tuple[str, str]]:
    for name, value in card_facts(result, before):
        yield name, value.replace(";", f"{mark(result)};", 1) if name == "versions" else value
    project = tomllib.loads((measured.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield "license", f"{project['license']}, the project's: [LICENSE](../../LICENSE)"


def _league(result: Result, runs: dict[str, list[tuple[Path, Result]]]) -> str:
    """The league without its reasons; empty for a pretraining."""
    return dict(card_facts(result, stages(result, runs)[:-1])).get("league", "").partition(":")[0]


def _says_init(result: Result) -> bool:
    return any(text.startswith("init=") for text in result["overrides"])


def _stage(number: int, result: Result) -> list[str]:
    whole = not result["resumed"] or result.get("wall_seconds")  # an older lra counted the last session alone
    seconds = f"{result['train_seconds']:,.0f} s" if whole else ""
    scored = format_accuracy(result["test"])
    if objective := result.get("pretrain"):
        scored += f" {SCORED_TOKENS[objective]}"
    return [
        f"{number}{mark(result)}", result.get("protocol") or result["task"], f"{result['steps']:,}",
        str(result["config"]["batch"]["size"]), scored, seconds, trained_on(result),
        result["environment"]["date"][:10],
    ]  # fmt: skip


def rescored(root: Path = measured.BENCHMARKS) -> dict[str, str]:
    """The accuracy on examples of another seed, by the digest of the weights."""
    found = measured.read(root, "studies/rescoring/*/*.json")
    return {result["sha256"]: format_accuracy(result["test"]) for _, result in found}


def make(releases: Path = RELEASES, results: Path = measured.RUNS) -> dict[Path, str]:
    """The text of each file."""
    runs, found = known(releases, results), released(releases)
    others, levels = rescored(), grey_levels()
    cards = {
        releases / name / "README.md": card(name, result, runs, levels.get(digest(releases / name)))
        for name, result in found.items()
    }
    seeds = {name: _seeds(result, runs) for name, result in found.items()}
    means = {name: f"{_mean(own)} ({len(own)})" for name, own in seeds.items() if len(own) > 1}
    rows = [
        (
            f"[{name}]({name}/README.md){mark(result)}",
            f"`{result['task']}`", result.get("protocol") or "", _league(result, runs), f"`{result['attn']}`",
            format_accuracy(result["test"]), means.get(name, ""), others.get(digest(releases / name), ""),
            f"{result['parameters']:,}",
        )
        for name, result in found.items()
    ]  # fmt: skip
    header = (
        "weights",
        "task",
        "protocol",
        "league",
        "attention",
        "test accuracy, %",
        "mean of all seeds (how many)",
        "of other examples, %",
        "parameters",
    )
    return {releases / "README.md": "\n\n".join([HEAD, *([table(header, rows)] if rows else []), TAIL]) + "\n"} | cards
