"""Kernels that another process compiles are those of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import concurrent.futures, json, multiprocessing, sys
from typing import Any, cast
import torch
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from tests.kernels import aot
from lra.training import precompile

if __name__ == "__main__":
    driver.set_active(cast(Any, aot.CompileOnlyDriver()))
    aot.choose(90, sys.argv[1] == "hopper")
    loaded = []
    CompiledKernel._init_handles = lambda self: setattr(self, "_run", loaded.append(self.name) or True)
    here = []
    knobs.compilation.listener = lambda metadata, cache_hit, **_: here.append((metadata["name"], cache_hit))
    with precompile.noted_launches() as noted:
        aot.launch("bfloat16", 32, 0.1, False, False, None, False)
    workers = concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
    precompile.compile_noted(noted, 4, torch.device("cpu"), workers)
    compilation = next(iter(noted.values()))[0]
    type(compilation.args[0]).run(*compilation.args, **compilation.keywords)  # waits
    print(json.dumps({"loaded": loaded, "here": here, "there": precompile.kernel_seconds}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hopper", "plain"])
def test_what_another_process_compiles_is_in_the_cache_of_this_one(family, tmp_path):
    pytest.importorskip("triton")
    program, root = tmp_path / "program.py", Path(__file__).parents[2]
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}

    def run():
        done = subprocess.run(
            [sys.executable, program, family], env=environment, capture_output=True, text=True, cwd=root, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    cold, warm = run(), run()
    assert len(cold["there"]) == len(set(cold["loaded"])) >= 3 and all(took > 0 for took in cold["there"].values())
    assert all(hit for found in (cold, warm) for _, hit in found["here"]), "compiled once more here"
    assert not warm["there"] and sorted(set(warm["loaded"])) == sorted(cold["there"])
