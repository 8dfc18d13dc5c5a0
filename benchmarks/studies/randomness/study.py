"""Applies the statistical tests of TestU01 (L'Ecuyer and Simard, TOMS 2007) to the random words of dropout.

    python -m benchmarks.studies.randomness.study --testu01 /usr/local [--layers] [--crush] --out FILE

`--testu01` is where TestU01 is installed (github.com/umontreal-simul/TestU01-2009). A stream has the words of one key
of attention along rows or down columns of the mask, all four words of each draw or one of them. With `--layers` it has
those of one sequence between layers, also over the sites of a model for each place. The bits are as they are, or
reversed, as most tests look at the upper ones. SmallCrush runs on all streams, some seconds each. `--crush` runs Crush
instead, on streams with all words, half an hour each.

A p-value outside [0.001, 0.999] is suspect; a perfect generator has two of a thousand. One within 1e-10 of 0 or 1 is a
failure, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command
from lra import environment
from lra.bench.output import write_measurement
from lra.errors import UsageError
from lra.kernels.flash.reference import LOW_32_BITS, ROW_FACTORS, philox
from lra.kernels.layers.reference import SITE_STRIDE
from lra.models.dropout import sequence_keys

SOURCE = Path(__file__).with_suffix(".c")
SEED, INDEX, HEAD = 1, 12345, 3
ORDERS = ("along rows", "down columns", "over sites")
WORDS = ("x", "y", "z", "w", "all", "between layers")
LAYERS = WORDS.index("between layers")
# draws of the innermost of two: of attention those in a row of 16,384 keys, else of 128 features, or so many rows
WIDTHS, LAYERS_WIDTHS = (2048, 2048), (32, 1 << 20, 32)
SITES_OF_MODEL = 13  # four layers
SUSPECT, FAILED = 1e-3, 1e-10


def key(word: int) -> list[int]:
    """The key of one head of a sequence, or of the sequence between layers."""
    if word == LAYERS:
        return [int(sequence_keys(torch.tensor([INDEX], dtype=torch.int32), torch.tensor(SEED))) & LOW_32_BITS, 0, 0, 0]
    counter = tuple(map(torch.tensor, (INDEX, HEAD, 0, 0)))
    return [int(word) for word in philox(counter, (torch.tensor(SEED & LOW_32_BITS), torch.tensor(SEED >> 32)))]


def widths(word: int) -> tuple[int, ...]:
    """The widths of the orders in which this word has streams."""
    return LAYERS_WIDTHS if word == LAYERS else WIDTHS


def build(testu01: Path, program: Path) -> None:
    given = {
        "ROW_FACTORS": ",".join(f"{factor}u" for factor in ROW_FACTORS),
        "SITES": f"{SITE_STRIDE}u", "SITES_OF_MODEL": SITES_OF_MODEL,
    }  # fmt: skip
    libraries = ["-ltestu01", "-lprobdist", "-lmylib", "-lm"]
    defined = [f"-D{name}={value}" for name, value in given.items()]
    command = ["gcc", "-O2", *defined, f"-I{testu01}/include", "-o", str(program), str(SOURCE), f"-L{testu01}/lib"]
    done = subprocess.run([*command, *libraries], capture_output=True, text=True)
    if done.returncode:
        said = next(iter(done.stderr.splitlines()), "")
        raise UsageError(f"TestU01 is not in {testu01}, or gcc fails: {said}")


def run(program: Path, crush: bool, stream: tuple[int, int, int]) -> dict[str, Any]:
    order, reverse, word = stream
    given = [int(crush), order, reverse, word, widths(word)[order], *key(word)]
    done = subprocess.run([str(program), *map(str, given)], capture_output=True, text=True, check=True)
    found = re.findall(r"^p (.*) = (\S+)$", done.stdout, re.MULTILINE)
    return {
        "battery": "Crush" if crush else "SmallCrush", "order": ORDERS[order],
        "words": WORDS[word], "bits": "reversed" if reverse else "as they are",
        "p_values": [{"test": test.strip(), "p": float(p)} for test, p in found],
    }  # fmt: skip


def beyond(stream: dict[str, Any], bound: float) -> list[dict[str, Any]]:
    return [found for found in stream["p_values"] if not bound <= found["p"] <= 1 - bound]


@command
def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--testu01", type=Path, required=True)
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--crush", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    given = parser.parse_args(arguments)
    words = [LAYERS] if given.layers else [WORDS.index("all")] if given.crush else range(LAYERS)
    streams = [*itertools.product(range(len(widths(words[0]))), (0, 1), words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        program = Path(folder, "randomness")
        build(given.testu01, program)
        results = list(pool.map(partial(run, program, given.crush), streams))
    drawn_for = {"seed": SEED, "index": INDEX} | ({} if given.layers else {"head": HEAD})
    write_measurement(given.out, {"environment": environment.describe(), **drawn_for, "streams": results})
    for stream in results:
        what = ", ".join(stream[name] for name in ("battery", "order", "words", "bits"))
        suspect = "; ".join(f"{found['test']} {found['p']:.6g}" for found in beyond(stream, SUSPECT))
        print(f"{what}: {len(stream['p_values'])} p-values, suspect: {suspect or 'none'}")
    return int(any(beyond(stream, FAILED) for stream in results))


if __name__ == "__main__":
    sys.exit(main())
