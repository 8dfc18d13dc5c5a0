"""What every test runs under: its own data folder, no network, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores; before PyTorch starts its threads
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
os.environ["LRA_WARNED_UNCLEAN"] = "true"  # what is printed does not depend on whether the tree is clean

import pytest
import torch

pytest.register_assert_rewrite("tests.equal_learning")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA GPU"
    if not os.environ.get("LRA_TEST_DATA"):
        missing["realdata"] = "needs the real data sets: LRA_TEST_DATA names no folder"
    for item in items:
        for marker in missing.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[marker]))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder that a test runs in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs for a grid's runs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Measurements of milliseconds, on the CPU but for the tests that need a GPU."""
    from lra.bench import timing

    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "BUDGET_MS", 1.0)


@pytest.fixture
def registered() -> Iterator[Callable[..., Any]]:
    """Registers an attention or mixer as `trial`, for one test, and returns it for the checks of the contract."""
    from lra.models.attention import ATTENTIONS
    from lra.models.conformance.subject import Subject

    def register(cls: type, **facts: Any) -> Subject:
        own: Any = type(cls.__name__, (cls,), {"__module__": cls.__module__})
        ATTENTIONS.register("trial", paper="", **{"exact": True, "causal": True, "ragged": True, **facts})(own)
        return Subject("trial")

    yield register
    ATTENTIONS._classes.pop("trial", None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on one core, for models so small that threads cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell's background job ignores SIGINT, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prepared data and caches go to folders of this session, never the user's; xdist's workers share them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ |= {"LRA_DATA": str(folder / "lra-data"), "XDG_CACHE_HOME": str(folder / "cache")}
