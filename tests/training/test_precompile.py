"""Kernels are compiled in parallel before the first step, and nothing else changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lra.timeline import FILE_VARIABLE
from lra.training import step as step_module
from lra.training.assembly import build_modules
from lra.training.fit import configure
from lra.training.precompile import compile_noted, noted_launches, precompile_kernels
from tests.command_line import RUN
from tests.equal_learning import use_static_buffers
from tests.training.conftest import arguments
from tests.training.test_engine import filled_batch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kernel(monkeypatch):
    """A kernel of Triton whose launches are listed instead of made."""
    jit = pytest.importorskip("triton.runtime.jit")
    launches: list[tuple[Any, ...]] = []

    class Kernel(jit.JITFunction):
        cache_key = "hash"

        def __init__(self):
            pass

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((args, grid, warmup, options, threading.current_thread().name))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    return Kernel(), launches


def test_noted_launches_are_compiled_by_threads_and_not_made(kernel):
    launched, launches = kernel
    with noted_launches() as noted:
        launched[(7,)](1, x=2)
    assert not launches
    launched[(8,)](3)
    compile_noted(noted, threads=2, device=torch.device("cpu"))
    launched[(9,)](4)
    assert [each[:4] for each in launches] == [
        ((3,), (8,), False, {}), ((1,), (7,), True, {"x": 2}), ((4,), (9,), False, {}),
    ]  # fmt: skip
    assert "Pool" in launches[1][-1] and launches[2][-1] == "MainThread"


def test_the_next_launch_alone_waits_for_the_threads(kernel):
    launched, launches = kernel
    go, waiting = threading.Event(), threading.Event()
    with noted_launches() as noted:
        launched[(1,)]()
    noted[id(launched)].append(go.wait)
    compile_noted(noted, threads=1, device=torch.device("cpu"))  # returns before the threads are done

    def launch():
        waiting.set()
        launched[(2,)]()

    thread = threading.Thread(target=launch)
    thread.start()
    assert waiting.wait(10)
    time.sleep(0.05)
    assert [each[1] for each in launches] == [(1,)], "the launch came before its kernel was compiled"
    go.set()
    thread.join(10)
    launched[(3,)]()
    assert [each[1] for each in launches] == [(1,), (2,), (3,)]


def test_an_error_of_the_compiler_is_left_to_the_launch(kernel, capsys):
    launched, launches = kernel
    with noted_launches() as noted:
        launched[(1,)]()
    noted[id(launched)][0] = lambda: 1 / 0
    compile_noted(noted, threads=1, device=torch.device("cpu"))
    launched[(2,)]()
    assert [each[1] for each in launches] == [(2,)]
    assert "could not compile 1 of a step's kernels (ZeroDivisionError: division by zero)" in capsys.readouterr().out


def test_threads_load_what_they_compile(kernel):
    launched, _ = kernel
    loaded = []

    class Compiled:
        run = property(lambda self: loaded.append(threading.current_thread().name))

    with noted_launches() as noted:
        launched[(1,)]()
    noted[id(launched)][0] = Compiled
    compile_noted(noted, threads=1, device=torch.device("cpu"))
    launched[(2,)]()
    assert len(loaded) == 1 and "Pool" in loaded[0]


def test_the_first_batch_to_evaluate_stands_for_all(monkeypatch):
    module = build_modules(configure(arguments()).config)[1]
    batch = filled_batch(0).to(torch.device("cpu"))
    seen = []
    monkeypatch.setattr(type(module), "forward", lambda self, batch: seen.append((batch, self.training)) or batch)
    monkeypatch.setattr(type(module), "loss", lambda self, batch: sum(each.sum() for each in self.parameters()))
    precompile_kernels(
        module, batch.with_seed(torch.tensor(5)), iter([batch, batch.with_seed(torch.tensor(6))]), bf16=True, threads=1
    )
    assert seen == [(batch, False)]


@pytest.mark.parametrize(("layers", "noted"), [(1, [0]), (2, [0, 1]), (4, [0, 3])])
def test_the_first_and_the_last_layer_stand_for_all(layers, noted, monkeypatch):
    """The last one may pool, which other layers do not."""
    module = build_modules(configure(arguments(f"model.layers={layers}")).config)[1]
    blocks, batch, seen = list(module.model.encoder.blocks), filled_batch(0).to(torch.device("cpu")), []

    def loss(self, batch):
        seen.extend(blocks.index(block) for block in self.model.encoder.blocks)
        return sum(each.sum() for each in self.parameters())

    monkeypatch.setattr(type(module), "loss", loss)
    precompile_kernels(module, batch.with_seed(torch.tensor(5)), [], bf16=True, threads=1)
    assert seen == noted


@pytest.mark.parametrize("options", [(), ("model.norm=batch", "model.layers=3")])
def test_the_module_and_the_generator_stay_as_they_are(options):
    module = build_modules(
        configure(arguments("task.max_length=400", "model.dropout=0.1", "model.attn_dropout=0.1", *options)).config
    )[1]
    module.train()
    before = {name: value.clone() for name, value in (*module.named_parameters(), *module.named_buffers())}
    layers, state = len(module.model.encoder.blocks), torch.get_rng_state()
    batch = filled_batch(0).to(torch.device("cpu")).with_seed(torch.tensor(5))
    precompile_kernels(module, batch, [batch], bf16=True, threads=1)
    after = dict((*module.named_parameters(), *module.named_buffers()))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.training and len(module.model.encoder.blocks) == layers and torch.equal(state, torch.get_rng_state())


def test_a_captured_run_compiles_once_before_its_first_step(small, monkeypatch):
    calls: list[tuple[int, bool, int, int]] = []
    monkeypatch.setattr(
        step_module, "precompile_kernels",
        lambda module, batch, scored, bf16, threads: calls.append((batch.size, bf16, threads, len(scored))),
    )  # fmt: skip
    small()
    assert not calls, "an eager step compiles nothing"
    use_static_buffers(monkeypatch)
    small("name=static", "batch.micro=4")
    ((size, *_, scored),) = calls
    assert size >= 4 and calls[0][1:] >= (False, 1), "the first micro-batch, filled up"
    assert scored, "validation's batches"


@pytest.mark.gpu
def test_no_kernel_is_left_to_the_first_step(tmp_path):
    """With an empty cache, Triton compiles in the threads alone."""
    file = tmp_path / "timeline.json"
    caches = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "LRA_DATA")}
    fields = [*(field for field in RUN if "accelerator" not in field), "trainer.accelerator=gpu"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | caches | {FILE_VARIABLE: str(file), "PYTHONPATH": path}
    environment.pop("TORCHINDUCTOR_COMPILE_THREADS", None)  # with 1, torch.compile's kernels are this process's, too
    command = [sys.executable, "-m", "lra", "fit", *fields, "trainer.precision=bf16", "model.d_model=64"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    phases = found["phases"]
    left = {name: took for name, took in phases.items() if name.endswith("compiling kernels")}
    assert any("waiting for kernels" in name for name in phases)
    assert sum(left.values()) < 1, json.dumps([left, found["kernels"]])
