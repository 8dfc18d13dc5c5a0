"""What a card says of a run's weights, from the run's result: for released weights and for the Hub."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lra.config.compose import restore
from lra.config.schema import RunConfig
from lra.experiments.grid.league import league_of, list_reasons
from lra.experiments.results.ledger import describe_gpus
from lra.tasks import TASKS
from lra.terminal import Bold
from lra.training.fit import REGISTRIES
from lra.training.hub_weights import SCHEME, is_hub_address, parse_address
from lra.training.leakage import restore_task
from lra.training.run_files import as_mapping, describe_ancestry

Result = Mapping[str, Any]
LIBRARY = "lra"
BOUND_NOTE = "± is the 95% bound from sampling the test set. It is of one run, of one seed."
SCORED_TOKENS = {"masked": "hidden tokens", "causal": "next tokens"}  # what a pretraining's accuracy is of


def card_facts(result: Result, before: Sequence[Result] | None) -> Iterator[tuple[str, str]]:
    """Yields what is known of a run: name and text, in Markdown.

    Args:
        before: results of the runs before it, the first of all first; None if they are not known.
    """
    config, made_with = result["config"], result["environment"]
    model, versions = config["model"], made_with["versions"]
    yield "task", f"`{result['task']}`"
    if result.get("protocol"):
        yield "protocol", result["protocol"]
    yield _objective(result, before)
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
    if differences := result["data"].get("differences"):
        yield "the data differ", "; ".join(map(str, differences))
    yield "trained with", f"{trained_on(result)}, CUDA {made_with['cuda']}, {made_with['platform']}"
    named = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    yield "versions", f"commit {made_with['commit']}; {named}"
    yield "date", made_with["date"][:10]


def _objective(result: Result, before: Sequence[Result] | None) -> tuple[str, str]:
    """What the accuracy of a pretraining is of, or the league of that of a run with labels."""
    if objective := result.get("pretrain"):
        return "objective", f"`pretrain={objective}`: accuracies are of {SCORED_TOKENS[objective]}"
    if before is None:
        return "league", "not known, as results of runs before it are not here"
    # the league is no matter of the attention, whose code may be gone
    run, *stages = (restore(RunConfig, REGISTRIES, run["config"], ["attn=standard"]) for run in (result, *before))
    reasons = list_reasons(run, stages)
    return "league", league_of(reasons) + (f": {'; '.join(reasons)}" if reasons else "")


def scored_sets(result: Result) -> dict[str, dict[str, Any]]:
    """Returns the scores of each test set by its name."""
    return {name: score for name, score in result.items() if isinstance(score, dict) and "plus_minus" in score}


def score_table(result: Result) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows: the accuracy on each test set beside its baselines."""
    scored = scored_sets(result)
    baselines = list(dict.fromkeys(rule for score in scored.values() for rule in score["baselines"]))
    rows = [
        [name, format_accuracy(score), *(_percent(score["baselines"].get(rule)) for rule in baselines)]
        for name, score in scored.items()
    ]
    return ["test set", "accuracy, %", *(f"{rule}, %" for rule in baselines)], rows


def format_accuracy(score: Mapping[str, Any]) -> str:
    """Returns an accuracy in percent, its 95% bound, and of how many examples."""
    return f"{_percent(score['accuracy'])} ± {_percent(score['plus_minus'])} of {score['n']:,}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def training_command(result: Result) -> str:
    """Returns the command that trains a run."""
    overrides = [text for text in result["overrides"] if not text.startswith("resume=")]
    task, _, version = result["task"].partition("@")
    chosen = any(text.startswith("task.version=") for text in overrides)
    if not chosen and "version" in TASKS.get(task).Config.__dataclass_fields__:  # the default may be a newer one by now
        overrides.append(f"task.version={version}")
    return shlex.join(["lra", "fit", *_selectors(result, task, result["attn"]), *overrides])


def next_command(result: Result, task: str, init: str, *fields: str) -> str:
    """Returns the command that trains another run from the weights of this one.

    Args:
        task: of the other run.
        init: where the weights are.
        fields: more fields of the other run. It has the model of this one.
    """
    used = used_attention(result)
    sections = ("model.", "task.tokens=", "task.max_length=", *(["attn."] if used == result["attn"] else []))
    kept = [text for text in result["overrides"] if text.startswith(sections)]
    return shlex.join(["lra", "fit", *_selectors(result, task, used), *kept, f"init={init}", *fields])


def _selectors(result: Result, task: str, attn: str) -> tuple[str, str, str]:
    return f"task={task}", f"attn={attn}", f"recipe={result['recipe']}"


def used_attention(result: Result) -> str:
    """Returns the attention that weights are used with: their own, or what computes the same in linear memory."""
    return "flash" if result["attn"] == "standard" else result["attn"]


def task_name(result: Result) -> str:
    return result["task"].partition("@")[0]


def trained_on(result: Result) -> str:
    return describe_gpus(result["environment"]["gpu"], result["world_size"])


def shell_block(*lines: str) -> str:
    return "\n".join(["```sh", *lines, "```"])


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, with its bold cells."""
    lines = [header, ["---"] * len(header), *rows]
    shown = ((f"**{cell}**" if isinstance(cell, Bold) else cell for cell in line) for line in lines)
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in shown)


def hub_card(result: Result, repo: str, license: str, before: Sequence[Result] | None) -> str:
    """Returns the README.md of a model on the Hub.

    Args:
        repo: `owner/name` of the model.
        license: an identifier that the Hub knows, such as `apache-2.0`.
        before: as in `card_facts`.
    """
    address, ancestry = f"{SCHEME}{repo}", describe_ancestry(result)
    further = next_command(result, task_name(result), address, f"seed={result['seed'] + 1}")
    return "\n\n".join([
        f"---\n{_head(result, repo, license)}\n---",
        f"# {repo.partition('/')[2]}",
        f"A Transformer for the task {task_name(result)} of the Long Range Arena{_protocol(result)}, trained with "
        f"`{LIBRARY}`.",
        markdown_table(("", ""), card_facts(result, before)),
        "## Accuracy",
        markdown_table(*score_table(result)),
        BOUND_NOTE,
        "## Use",
        shell_block(
            f"lra test init={address}   # scores it on the test set",
            f"{further}   # starts from it",
        ),
        f'In Python `module = lra.load("{address}")` gives the module in evaluation mode, and '
        "`module(module.make_batch(sequences))` its scores of sequences of token ids.",
        "## Training",
        shell_block(training_command(result)),
        *([f"Runs that led to these weights, oldest first: {ancestry}."] if ancestry else []),
    ]) + "\n"  # fmt: skip


def _head(result: Result, repo: str, license: str) -> str:
    """Returns the metadata of a card as YAML, in the form that the Hub reads."""
    from huggingface_hub import EvalResult, ModelCardData

    task, sources = task_name(result), _hub_data(result)
    scores = [
        EvalResult(
            task_type=_pipeline(result), dataset_type=sources[0] if sources else task,
            dataset_name=f"Long Range Arena: {result['task']}{_protocol(result)}", dataset_split=name,
            metric_type="accuracy",
            metric_value=round(score["accuracy"], 6), metric_name=f"accuracy ({name} set)",
        )
        for name, score in scored_sets(result).items()
    ]  # fmt: skip
    data = ModelCardData(
        license=license, library_name=LIBRARY, tags=["long-range-arena", task, f"attention-{result['attn']}"],
        datasets=sources or None, metrics=["accuracy"], base_model=_base_model(result),
        model_name=repo.partition("/")[2], eval_results=scores,
    )  # fmt: skip
    return data.to_yaml().strip()


def _protocol(result: Result) -> str:
    """Returns the protocol in parentheses, where a task has several: scores of one are none of another."""
    return f" ({result['protocol']})" if result.get("protocol") else ""


def _pipeline(result: Result) -> str:
    """Returns the Hub's word for a task."""
    grid = TASKS.get(task_name(result)).grid(restore_task(result["config"]["task"]))
    return "image-classification" if grid else "text-classification"


def _hub_data(result: Result) -> list[str]:
    """Returns the data set of the Hub that a run was trained on. Other sources are paths, or are generated."""
    source = result["data"]["source"]
    default = getattr(TASKS.get(task_name(result)).Config, "source", "generate")
    return [source] if source == default and source.count("/") == 1 else []


def _base_model(result: Result) -> str | None:
    """Returns the model of the Hub that a run started from."""
    record = as_mapping(result.get("provenance"))
    stated = [each.get("source") for each in record.get("ancestors", ())][-1:]
    return parse_address(stated[0]).repo if stated and is_hub_address(str(stated[0])) else None
