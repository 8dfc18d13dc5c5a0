"""Puts the random words of attention's dropout to the statistical tests of TestU01 (L'Ecuyer and Simard, TOMS 2007).

    python benchmarks/randomness.py --testu01 /usr/local [--crush] [--out benchmarks/results/dropout-randomness.json]

`--testu01` is where TestU01 is installed (github.com/umontreal-simul/TestU01-2009). A stream has the words of one key
along rows or down columns of the mask, all four words of each draw or one of them, as they are or with their bits
reversed, as most tests look at the upper ones. SmallCrush is run on all streams, some seconds each; `--crush` runs
Crush instead, on the four that have all words, half an hour each. A p-value outside [0.001, 0.999] is suspect, as two
of a thousand are of a perfect generator; one within 1e-10 of 0 or 1 is a failure, and the exit code is 1.
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

from lra import environment
from lra.bench.files import write
from lra.kernels.flash.reference import LOW_32_BITS, ROW_FACTORS, philox

SOURCE = Path(__file__).with_suffix(".c")
RESULT = Path("benchmarks/results/dropout-randomness.json")
WIDTH = 2048  # draws in a row, of 16,384 keys
SEED, INDEX, HEAD = 1, 12345, 3
WORDS = ("x", "y", "z", "w", "all")
SUSPECT, FAILED = 1e-3, 1e-10


def key() -> list[int]:
    counter = tuple(map(torch.tensor, (INDEX, HEAD, 0, 0)))
    return [int(word) for word in philox(counter, (torch.tensor(SEED & LOW_32_BITS), torch.tensor(SEED >> 32)))]


def build(testu01: Path, program: Path) -> None:
    factors = f"-DROW_FACTORS={','.join(f'{factor}u' for factor in ROW_FACTORS)}"
    libraries = ["-ltestu01", "-lprobdist", "-lmylib", "-lm"]
    command = ["gcc", "-O2", factors, f"-I{testu01}/include", "-o", str(program), str(SOURCE), f"-L{testu01}/lib"]
    done = subprocess.run([*command, *libraries], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"randomness: TestU01 is not in {testu01}, or gcc fails:\n{done.stderr[-2000:]}")


def run(program: Path, crush: bool, stream: tuple[int, int, int]) -> dict[str, Any]:
    columns_first, reverse, word = stream
    given = [int(crush), columns_first, reverse, word, WIDTH, *key()]
    done = subprocess.run([str(program), *map(str, given)], capture_output=True, text=True, check=True)
    found = re.findall(r"^p (.*) = (\S+)$", done.stdout, re.MULTILINE)
    return {
        "battery": "Crush" if crush else "SmallCrush", "order": "down columns" if columns_first else "along rows",
        "words": WORDS[word], "bits": "reversed" if reverse else "as they are",
        "p_values": [{"test": test.strip(), "p": float(p)} for test, p in found],
    }  # fmt: skip


def beyond(stream: dict[str, Any], bound: float) -> list[dict[str, Any]]:
    return [found for found in stream["p_values"] if not bound <= found["p"] <= 1 - bound]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--testu01", type=Path, required=True)
    parser.add_argument("--crush", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args(arguments)
    words = [WORDS.index("all")] if given.crush else range(len(WORDS))
    streams = [*itertools.product((0, 1), (0, 1), words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        program = Path(folder, "randomness")
        build(given.testu01, program)
        results = list(pool.map(partial(run, program, given.crush), streams))
    drawn_for = {"seed": SEED, "index": INDEX, "head": HEAD}
    write(given.out, {"environment": environment.describe(), **drawn_for, "streams": results})
    for stream in results:
        what = ", ".join(stream[name] for name in ("battery", "order", "words", "bits"))
        suspect = "; ".join(f"{found['test']} {found['p']:.6g}" for found in beyond(stream, SUSPECT))
        print(f"{what}: {len(stream['p_values'])} p-values, suspect: {suspect or 'none'}")
    return int(any(beyond(stream, FAILED) for stream in results))


if __name__ == "__main__":
    sys.exit(main())
