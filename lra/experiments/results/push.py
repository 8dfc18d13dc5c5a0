"""`lra results push`: a finished run's weights, records and card to a model repository of the Hugging Face Hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lra.config.compose import list_differences
from lra.config.options import parse_options
from lra.data import hub, hub_errors
from lra.errors import UsageError
from lra.experiments.results.archive import StoredRun
from lra.experiments.results.card import hub_card, task_name
from lra.training import checkpoints
from lra.training.hub_weights import CONFIG_FILE, RESULT_FILE, SCHEME, WEIGHTS_FILE, is_model_name
from lra.training.provenance import weights_digest
from lra.training.run_files import as_mapping, read_result

FILES = (WEIGHTS_FILE, CONFIG_FILE, RESULT_FILE)  # a run without one of them is not pushed
RECORDS = ("metrics.csv", "env.json")  # released weights have none
CARD = "README.md"


@dataclass(frozen=True)
class PushOptions:
    repo: str = ""  # owner/name
    private: bool = False  # a new repository is then for its owner alone
    revision: str = "main"  # a branch, which is made if it is missing
    license: str = "apache-2.0"  # of the weights, as the Hub names it

    def __post_init__(self) -> None:
        for name in ("revision", "license"):
            if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._/-]*", value := getattr(self, name)):
                raise UsageError(f"{name}={value}: use letters, digits, '.', '_', '/' and '-'")
        if not self.repo:
            raise UsageError("lra results push needs repo=<owner>/<name>")
        if not is_model_name(self.repo):
            raise UsageError(f"repo={self.repo} is no name on the Hub: write <owner>/<name>")


def finished_run(path: Path) -> dict[str, Any]:
    """Returns the result of a finished run. UsageError if there is none, or if its files belong to several runs."""
    run = StoredRun(path)
    result = run.finished() if path.is_dir() else None
    if result is None:
        raise UsageError(f"{path} holds no finished run: name a directory whose result.json says finished")
    weights, identity = checkpoints.read_checkpoint(path)
    for file, config in ((CONFIG_FILE, run.config()), (WEIGHTS_FILE, identity["config"])):
        if changed := list_differences(config, result["config"]):
            raise UsageError(f"{file} and result.json of {path} belong to different runs: {'; '.join(changed)}")
    ended = as_mapping(result.get("provenance")).get("ended")  # an older lra states none
    if ended not in (None, weights_digest(weights)):
        raise UsageError(f"{path} has other weights than result.json scored: get {WEIGHTS_FILE} again, or train anew")
    return result


def results_before(result: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Returns the results of the runs before this one, the first of all first; None if one is not in its folder.

    A result counts if it is of the weights that the next run took.
    """
    found = []
    for ancestor in as_mapping(result.get("provenance")).get("ancestors") or []:
        before = read_result(Path(str(ancestor["run"])) / "result.json")
        ended = as_mapping((before or {}).get("provenance")).get("ended")
        if before is None or ended is None or ended != ancestor.get("ended"):
            return None
        found.append(before)
    return found if found or not as_mapping(result["config"]).get("init") else None


def push_run(path: str, args: Sequence[str], dry_run: bool = False) -> list[str]:
    """Uploads a finished run in one commit, and returns lines to print.

    Args:
        path: the run's directory, or a folder of released weights.
        args: `field=value` of `PushOptions`.
        dry_run: whether to say only what would be uploaded. Then the Hub is not asked.

    Raises:
        UsageError: the run is not finished, or its result is not of its weights, or the Hub does not take it.
    """
    options, folder = parse_options(PushOptions, args), Path(path)
    result = finished_run(folder)
    files: dict[str, Path | bytes] = {name: folder / name for name in (*FILES, *RECORDS) if (folder / name).is_file()}
    files[CARD] = hub_card(result, options.repo, options.license, results_before(result)).encode()
    sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in files.items()}
    listed = [f"{name:18} {size:>12,} bytes" for name, size in sizes.items()]
    where = f"{options.repo}, branch {options.revision}"
    if dry_run:
        kind = "private" if options.private else "public"
        return [f"nothing is uploaded; without --dry-run, to {where}, {kind} if it is new:", *listed]
    if offline := hub.offline_variable():
        raise UsageError(f"{offline} is set: unset it to upload")
    try:
        commit = _upload(options, files, f"Add {task_name(result)} with attention {result['attn']}")
    except UsageError:
        raise
    except Exception as error:  # the Hub's client and the network raise what they like
        raise UsageError(f"{where}: {_explain(error)}") from error
    return [f"uploaded to {where}:", *listed, f"use it with init={SCHEME}{options.repo}@{commit}"]


def _upload(options: PushOptions, files: dict[str, Path | bytes], message: str) -> str:
    """Returns the commit."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi()
    api.create_repo(options.repo, private=options.private or None, exist_ok=True)
    if options.private and not api.model_info(options.repo).private:
        raise UsageError(f"{options.repo} is there already and public: name another repo=, or leave out private=true")
    if options.revision != "main":
        api.create_branch(options.repo, branch=options.revision, exist_ok=True)
    added = [CommitOperationAdd(name, file) for name, file in files.items()]
    return api.create_commit(options.repo, added, commit_message=message, revision=options.revision).oid


def _explain(error: Exception) -> str:
    from huggingface_hub import get_token

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404) and not get_token():
        return "the Hub lets only known users write: log in with hf auth login"
    if status == 403:
        return "you may not write there: name a repo= of yours, or log in with a token that may write"
    return hub_errors.explain_failure(error, "model")
