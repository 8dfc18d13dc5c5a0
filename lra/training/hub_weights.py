"""Weights on the Hugging Face Hub: `hf://owner/name[@revision]`, in place of a run's directory.

`lra results push` writes such a repository. What is downloaded stays in the Hub's own cache, and is read from there
if the Hub does not answer. Only safetensors are read, never a pickle.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

from lra.data import hub_errors
from lra.errors import UsageError
from lra.training.output import say
from lra.training.run_files import read_config

SCHEME = "hf://"
CONFIG_FILE, WEIGHTS_FILE, RESULT_FILE = "config.yaml", "model.safetensors", "result.json"
PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
COMMIT = re.compile("[0-9a-f]{40}")


class HubAddress(NamedTuple):
    repo: str  # owner/name
    revision: str  # a branch, a tag or a commit

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}@{self.revision}"


def is_hub_address(path: str | Path) -> bool:
    return str(path).startswith(SCHEME)


def parse_address(text: str) -> HubAddress:
    """Returns the parts of an address. The default revision is main. UsageError if it is not of this form."""
    repo, marked, revision = text.removeprefix(SCHEME).partition("@")
    if not is_model_name(repo) or bool(revision) != bool(marked):
        raise UsageError(f"{text} is no address of the Hub: write {SCHEME}<owner>/<name> or …@<revision>")
    return HubAddress(repo, revision or "main")


def is_model_name(text: str) -> bool:
    """Whether a text is an owner and a name, as the Hub allows them."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return text.count("/") == 1


def pinned_address(text: str) -> str:
    """Returns the address with the commit of the weights that this process has read."""
    return str(HubAddress(parse_address(text).repo, fetch_weights(text).name))


@functools.cache
def fetch_weights(text: str) -> Path:
    """Returns a folder of the Hub's cache with the weights of an address. Its name is the commit.

    It is the same one in all of a process, also if the revision moves.

    Raises:
        UsageError: the weights can't be had, or are not lra's.
    """
    from lra.data import hub  # here, as it imports Arrow, and a run begins without

    address = parse_address(text)
    pinned = COMMIT.fullmatch(address.revision)
    if pinned and (folder := _cached(address)):
        return folder
    failure: Exception | None = None
    if not (offline := hub.offline_variable()):
        try:
            return _download(address, text)
        except UsageError:
            raise
        except Exception as error:  # the Hub's client and the network raise what they like
            if answer := _explain_answer(error, address):
                raise UsageError(f"{text}: {answer}") from error
            failure = error
    why = hub_errors.explain_failure(failure, "model") if failure else f"{offline} is set"
    if folder := _cached(address):
        say(f"note: {why}: the copy of commit {folder.name} in the Hub's cache is used")
        return folder
    raise UsageError(f"{text}: {why}; no copy is in the Hub's cache") from failure


def _download(address: HubAddress, text: str) -> Path:
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    # asked first, because a download that gets no answer tries for half a minute
    info = HfApi().model_info(address.repo, revision=address.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    names = {file.rfilename for file in info.siblings or ()}
    if missing := [name for name in (CONFIG_FILE, WEIGHTS_FILE) if name not in names]:
        pickles = sorted(name for name in names if name.endswith(PICKLES))
        what = f"; {pickles[0]} may be a pickle, which is never read" if pickles and WEIGHTS_FILE in missing else ""
        mend = "name a model that lra results push has made"
        raise UsageError(f"{text} has no {missing[0]}{what}: {mend}")
    config = Path(hf_hub_download(address.repo, CONFIG_FILE, revision=address.revision))
    if not {"task", "attn"} <= (read_config(config) or {}).keys():  # before gigabytes of something else
        raise UsageError(f"{text}: its {CONFIG_FILE} is no configuration of a run: name another model")
    folder = config.parent
    for name in (WEIGHTS_FILE, RESULT_FILE):
        if name in names:
            hf_hub_download(address.repo, name, revision=folder.name)
    return folder


def _cached(address: HubAddress) -> Path | None:
    """Returns the folder of a revision in the Hub's cache, if the weights are there."""
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(address.repo, WEIGHTS_FILE, constants.HF_HUB_CACHE, address.revision)
    return Path(found).parent if isinstance(found, str) else None


def _explain_answer(error: Exception, address: HubAddress) -> str:
    """Explains an answer of the Hub that a cached copy does not change; empty for all other errors."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):  # a subclass of RepositoryNotFoundError
        return "its owner gives access on request: ask on its page there, then log in with hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {address.revision}: name a branch, a tag or a commit"
    if isinstance(error, RepositoryNotFoundError):
        said = hub_errors.explain_failure(error, "model")
        return said if "log in" in said else f"{said}: mend the name, or log in with hf auth login if it is private"
    return ""
