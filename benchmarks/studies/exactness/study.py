"""Compares the flash kernels with their reference on random cases on a GPU, and records every error.

    python -m benchmarks.studies.exactness.study [KIND] [--cases 200] [--workers 8] --out FILE

KIND is `flash`, `shared-keys` or `block-sparse`. `shared-keys` has cases for Hopper's kernels, computed by the forward
whose groups of warps share keys; the cases of `flash` have too few rows for it. `block-sparse` has random layouts.
Several GPUs share the cases. Case `i` is drawn from seed `i`, its dtype in turn from those of KINDS. Its result and
three gradients are compared in float64 with the budget of lra.kernels.testing. A ratio is error / budget, so that 1 is
the limit. The exit code is 1 if any case is over budget or fails, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command
from lra import environment
from lra.errors import UsageError
from lra.kernels import device
from lra.kernels.flash import tuning
from lra.kernels.flash.dispatch import shared_kernel
from lra.kernels.testing import RESULT_NAMES, Case, check_case
from lra.training.run_directory import write_text as replace_file
from tests.kernels.cases import random_case, random_hopper_case, random_sparse_case

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHARED = "shared-keys"
KINDS = {
    "flash": (random_case, DTYPES),
    SHARED: (random_hopper_case, DTYPES[1:]),
    "block-sparse": (random_sparse_case, DTYPES),
}
MAX_LENGTH = 2048


@dataclass(frozen=True)
class Outcome:
    """The result of one case."""

    number: int
    case: Case
    ratios: tuple[float | None, ...]  # one for each of RESULT_NAMES; None where it is not finite or the case failed
    error: str | None = None  # why the case gave no numbers

    @property
    def ok(self) -> bool:
        return self.error is None and all(ratio is not None and ratio <= 1 for ratio in self.ratios)


def draw(number: int, kind: str) -> Case:
    make, dtypes = KINDS[kind]
    return make(random.Random(number), (dtypes[number % len(dtypes)],), MAX_LENGTH)


@contextmanager
def sharing_keys(case: Case) -> Iterator[None]:
    """Inside, the forward is `hopper_shared` with its tile for the case, however few rows there are."""
    kernel = shared_kernel(case.max_length)
    with tuning.force_tile(kernel, tuning.find_tile(kernel, case.dtype, case.head_dim, case.dropout > 0)) as launched:
        yield
    if kernel not in launched:
        raise RuntimeError(f"{kernel} did not run")


def measure(number: int, case: Case, kind: str = "flash", device: str = "cuda") -> Outcome:
    """Runs one case. A failure is an outcome, so no case is left out."""
    try:
        if device == "cuda":
            torch.cuda.set_device(number % torch.cuda.device_count())
        with sharing_keys(case) if kind == SHARED else nullcontext():
            errors = check_case(case, device, "triton")
    except Exception as error:  # whatever a compiler or a driver raises
        return _failure(number, case, error)
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()  # the workers share the GPU
    return Outcome(number, case, tuple(_ratio(errors[name].error, errors[name].budget) for name in RESULT_NAMES))


def survey(cases: Sequence[Case], workers: int, kind: str) -> list[Outcome]:
    """All outcomes, in order. There are several processes, as compiling kernels takes most of the time."""
    outcomes = []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(measure, number, case, kind) for number, case in enumerate(cases)]
        for number, (case, future) in enumerate(zip(cases, futures, strict=True)):
            try:
                outcomes.append(future.result())
            except Exception as error:  # the worker died
                outcomes.append(_failure(number, case, error))
    return outcomes


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The number of cases of each dtype and their worst ratios, what the cases covered, every ratio, and the
    failures.
    """
    cases = [outcome.case for outcome in outcomes]
    by_dtype = {}
    for name in dict.fromkeys(_dtype(case) for case in cases):
        these = [outcome for outcome in outcomes if _dtype(outcome.case) == name]
        worst = {what: _worst([outcome.ratios[i] for outcome in these]) for i, what in enumerate(RESULT_NAMES)}
        failed = sum(not outcome.ok for outcome in these)
        by_dtype[name] = {"cases": len(these), "worst": worst, "failures": failed}
    return {
        "cases": len(outcomes),
        "coverage": {
            "dropout": sum(case.dropout > 0 for case in cases),
            "packed": sum(case.layout == "packed" for case in cases),
            "padded": sum(case.layout == "padded" for case in cases),
            "causal": sum(bool(case.sparse.causal if case.sparse else case.causal) for case in cases),
            "layouts": len({case.sparse.key for case in cases if case.sparse}),
            "rules": sum(bool(case.sparse and case.sparse.ruled) for case in cases),
            "length": [min(min(case.lengths) for case in cases), max(max(case.lengths) for case in cases)],
            "head_dim": sorted({case.head_dim for case in cases}),
        },
        "dtypes": by_dtype,
        "failures": [
            {"number": outcome.number, "case": str(outcome.case), "error": outcome.error}
            | dict(zip(RESULT_NAMES, outcome.ratios, strict=True))
            for outcome in outcomes
            if not outcome.ok
        ],
        "ratios": {what: [_round(outcome.ratios[i]) for outcome in outcomes] for i, what in enumerate(RESULT_NAMES)},
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Writes one key a line: this is readable, and the ratios stay compact."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in result.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, f"{{\n{lines}\n}}\n")


@command
def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare the flash kernels with their reference on a GPU.")
    parser.add_argument("kind", nargs="?", default="flash", choices=KINDS)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    given = parser.parse_args(arguments)
    if min(given.cases, given.workers) < 1:
        parser.error("--cases and --workers must be at least 1")
    if not torch.cuda.is_available():
        raise UsageError("PyTorch finds no GPU, and the compiled kernels need one: run it on a machine that has one")
    made_with = environment.describe()
    ptxas = device.format_version(device.find_ptxas(device.compute_capability()).version)  # some miscompile
    result = {"environment": made_with, "ptxas": ptxas}
    cases = [draw(number, given.kind) for number in range(given.cases)]
    result |= summarise(survey(cases, given.workers, given.kind))
    write(result, given.out)
    print(f"worst error / budget of {result['cases']} cases on {made_with['gpu']}, in {given.out}")
    for dtype, found in result["dtypes"].items():
        print(f"{dtype}: {found}")
    for failure in result["failures"]:
        print("failed:", json.dumps(failure))
    return 1 if result["failures"] else 0


def _failure(number: int, case: Case, error: Exception) -> Outcome:
    return Outcome(number, case, (None,) * len(RESULT_NAMES), f"{type(error).__name__}: {error}")


def _ratio(error: float, budget: float) -> float | None:
    ratio = error / budget if budget else 0.0 if error == 0 else math.inf
    return ratio if math.isfinite(ratio) else None


def _worst(ratios: Sequence[float | None]) -> float | None:
    """The largest ratio; None if one is not finite, which is worse than any."""
    finite = [ratio for ratio in ratios if ratio is not None]
    return _round(max(finite)) if len(finite) == len(ratios) else None


def _round(ratio: float | None) -> float | None:
    return None if ratio is None else float(f"{ratio:.3g}")


def _dtype(case: Case) -> str:
    return str(case.dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
