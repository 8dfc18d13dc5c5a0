"""The cards of released weights and checkpoints/README.md, of each release's result.json.

A card names the runs before its own, so their results must lie in benchmarks/results/runs or be released, too.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages import measured
from benchmarks.pages.measured import mark, table
from lra.errors import UsageError
from lra.experiments.results.ledger import describe_gpus
from lra.tasks import TASKS

RELEASES = measured.ROOT / "checkpoints"
# what lit pixels' weights are known to begin, and how: from those of Path-64 nobody learned Path-X yet
LARGER = {"pathfinder": ("path64", "positions.scale=image"), "pathx": ("path256",)}
MADE = "<!-- made by benchmarks/pages/cards.py of result.json: make docs -->"
HEAD = """# Checkpoints

<!-- made by benchmarks/pages/cards.py: make docs -->

Released weights live here, one folder each: a run's `config.yaml`, `model.safetensors` and `result.json`, and a card \
that says what it is, how it was trained and how to use it."""
TAIL = """`python -m benchmarks.release <run directory> <name>` adds one. *Of another seed*: accuracy on examples of a \
seed that no run has seen, neither in training nor in validation \
(`python -m benchmarks.studies.rescoring.study <name>`).

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


def card(name: str, result: Result, runs: dict[str, list[tuple[Path, Result]]]) -> str:
    """The whole text of a release's README.md."""
    chain, folder = stages(result, runs), f"{RELEASES.name}/{name}"
    other = "" if _used(result) == result["attn"] else f" attn={_used(result)}"
    return "\n\n".join([
        f"# {name}",
        MADE,
        table(("", ""), _facts(result)),
        "## Accuracy",
        table(*_scores(result)),
        "± is the 95% bound from sampling the test set; the run is one of one seed.",
        "## Use",
        "In the checkout, or with the folder's path after `init=`:",
        _shell(
            f"lra test init={folder}{other}   # scores it on the test set",
            f"{further(name, result)}   # starts from it",
        ),
        f'In Python `lra.load("{folder}")` is the module in evaluation mode. `config.yaml` names the run from which '
        "this one started; the weights need nothing of it.",
        *([_SEED] if "data_seed" in result["config"]["task"] else []),
        "## Training",
        _shell(*(command(stage) for stage in chain)),
        *([_ALONE] if len(chain) > 1 and not any(_says_init(stage) for stage in chain) else []),
        table(
            ("run", "protocol", "steps", "batch", "test accuracy, %", "training", "GPU", "date"),
            (_stage(number, stage) for number, stage in enumerate(chain, 1)),
        ),
    ]) + "\n"  # fmt: skip


_SEED = (
    "Its test set follows its training set in one stream: with other numbers of examples choose another "
    "`task.data_seed`; fewer for training are refused, as what it was trained on would be scored."
)
_ALONE = "Each run starts from the weights of the one before. The last command alone trains those before it, too."


def command(result: Result) -> str:
    """What trains a run."""
    overrides = [text for text in result["overrides"] if not text.startswith("resume=")]
    task, _, version = result["task"].partition("@")
    chosen = any(text.startswith("task.version=") for text in overrides)
    if not chosen and "version" in TASKS.get(task).Config.__dataclass_fields__:  # the default may be a newer one by now
        overrides.append(f"task.version={version}")
    return shlex.join(["lra", "fit", *_selectors(result, _task(result), result["attn"]), *overrides])


def further(name: str, result: Result) -> str:
    """What trains another run from a release, on larger images where there are any."""
    kept = [text for text in result["overrides"] if text.startswith(("model.", "task.tokens="))]
    lit = "task.tokens=lit" in kept
    again = (_task(result), f"seed={result['seed'] + 1}")
    task, *fields = LARGER.get(_task(result), again) if lit else again
    start = _selectors(result, task, _used(result))
    return shlex.join(["lra", "fit", *start, *kept, f"init={RELEASES.name}/{name}", *fields])


def _selectors(result: Result, task: str, attn: str) -> tuple[str, str, str]:
    return f"task={task}", f"attn={attn}", f"recipe={result['recipe']}"


def _used(result: Result) -> str:
    """The attention that weights are used with: its own, or what computes the same in linear memory."""
    return "flash" if result["attn"] == "standard" else result["attn"]


def _task(result: Result) -> str:
    return result["task"].partition("@")[0]


def _says_init(result: Result) -> bool:
    return any(text.startswith("init=") for text in result["overrides"])


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    config, made_with = result["config"], result["environment"]
    model, versions = config["model"], made_with["versions"]
    yield "task", f"`{result['task']}`"
    if result.get("protocol"):
        yield "protocol", result["protocol"]
    yield "attention", f"`{result['attn']}`, computed as {result['attention']}"
    yield (
        "model",
        f"{result['parameters']:,} parameters: {model['layers']} layers of {model['d_model']}, {model['heads']} heads, "
        f"feed-forward {model['d_ff']}, {model['positions']} positions on {model['axes']} axes, {model['pooling']} "
        "pooling",
    )
    yield "recipe", f"`{result['recipe']}`, seed {result['seed']}, {config['trainer']['precision']}"
    fields = " ".join(f"`{key}={value}`" for key, value in config["task"].items() if key not in ("name", "source"))
    seed = config["task"].get("data_seed")
    yield "data", f"{result['data']['source']}{'' if seed is None else f', seed {seed}'}; {fields}"
    yield "store", f"`{result['data']['store']}`"
    yield "trained with", f"{_hardware(result)}, CUDA {made_with['cuda']}, {made_with['platform']}"
    named = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    yield "versions", f"commit {made_with['commit']}{mark(result)}; {named}"
    yield "date", made_with["date"][:10]
    project = tomllib.loads((measured.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield "license", f"{project['license']}, the project's: [LICENSE](../../LICENSE)"


def _scores(result: Result) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the accuracy on each test set beside its baselines."""
    scored = {name: score for name, score in result.items() if isinstance(score, dict) and "plus_minus" in score}
    baselines = list(dict.fromkeys(rule for score in scored.values() for rule in score["baselines"]))
    rows = [
        [name, accuracy(score), *(_percent(score["baselines"].get(rule)) for rule in baselines)]
        for name, score in scored.items()
    ]
    return ["test set", "accuracy, %", *(f"{rule}, %" for rule in baselines)], rows


def accuracy(score: dict[str, Any]) -> str:
    """For people: percent, its 95% bound, and of how many."""
    return f"{_percent(score['accuracy'])} ± {_percent(score['plus_minus'])} of {score['n']:,}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def _stage(number: int, result: Result) -> list[str]:
    whole = not result["resumed"] or result.get("wall_seconds")  # an older lra counted the last session alone
    seconds = f"{result['train_seconds']:,.0f} s" if whole else ""
    return [
        f"{number}{mark(result)}", result.get("protocol") or result["task"], f"{result['steps']:,}",
        str(result["config"]["batch"]["size"]), accuracy(result["test"]), seconds, _hardware(result),
        result["environment"]["date"][:10],
    ]  # fmt: skip


def _hardware(result: Result) -> str:
    return describe_gpus(result["environment"]["gpu"], result["world_size"])


def _shell(*lines: str) -> str:
    return "\n".join(["```sh", *lines, "```"])


def rescored(root: Path = measured.BENCHMARKS) -> dict[str, str]:
    """Of released weights, by their folder, the accuracy on examples of another seed."""
    found = measured.read(root, "studies/rescoring/*/*.json")
    return {result["checkpoint"]: accuracy(result["test"]) for _, result in found}


def make(releases: Path = RELEASES, results: Path = measured.RUNS) -> dict[Path, str]:
    """The text of each file."""
    runs, found = known(releases, results), released(releases)
    others = rescored()
    cards = {releases / name / "README.md": card(name, result, runs) for name, result in found.items()}
    rows = [
        (
            f"[{name}]({name}/README.md){mark(result)}",
            f"`{result['task']}`", result.get("protocol") or "", f"`{result['attn']}`",
            accuracy(result["test"]), others.get(f"{RELEASES.name}/{name}", ""), f"{result['parameters']:,}",
        )
        for name, result in found.items()
    ]  # fmt: skip
    header = ("weights", "task", "protocol", "attention", "test accuracy, %", "of another seed, %", "parameters")
    return {releases / "README.md": "\n\n".join([HEAD, *([table(header, rows)] if rows else []), TAIL]) + "\n"} | cards
