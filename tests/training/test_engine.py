"""The captured step: the same as the eager one, on batches that are filled up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lra
from lra.batch import Batch
from lra.config.schema import RunConfig
from lra.data import resident
from lra.data.collated import CollatedBatch
from lra.data.split import Split
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.training import assembly, session
from lra.training import step as step_module
from lra.training.assembly import build_modules
from lra.training.checkpoints import read_checkpoint
from lra.training.clock import Clock
from lra.training.compiling import ANY_ROWS, compile_batched
from lra.training.curves import read_curves
from lra.training.engine import CapturedStep
from lra.training.fit import configure
from lra.training.optim import SGD, trained_parameters
from lra.training.optim import make_optimizer as build_optimizer
from lra.training.step import Step
from tests.equal_learning import use_static_buffers
from tests.training.conftest import arguments
from tests.training.test_fit import interrupt_at

CUDA = torch.device("cuda")
PLAIN = ("model.attn_dropout=0", "trainer.log_every=1")  # SDPA's dropout depends on the layout
CATALOGUE = ATTENTIONS.builtins()


def losses(result: dict[str, Any]) -> list[float]:
    lines = Path(result["directory"], "metrics.csv").read_text(encoding="utf-8").splitlines()[1:]
    return [float(line.split(",")[1]) for line in lines if line.split(",")[1]]


@pytest.fixture
def without_graphs(monkeypatch):
    """As `use_static_buffers` says."""
    use_static_buffers(monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("batch.micro=3",),
        ("batch.layout=padded",),
        ("optim.clip=0.1",),
        ("model.pooling=cls",),
        ("optim.label_smoothing=0.1",),
    ],
    ids=lambda options: options[0] if options else "plain",
)
def test_filled_up_batches_and_static_buffers_change_nothing(small, monkeypatch, request, options):
    eager = small("name=eager", *PLAIN, *options)
    request.getfixturevalue("without_graphs")
    static = small("name=static", *PLAIN, *options)
    assert losses(static) == pytest.approx(losses(eager), rel=1e-5)


def norms(result: dict[str, Any]) -> list[float]:
    rows = read_curves(Path(result["directory"], "metrics.csv"))
    return [float(row["train/grad_norm"]) for row in rows if row["train/grad_norm"]]


@pytest.mark.parametrize("clip", ["null", "0.1"])
def test_static_buffers_have_the_same_norm_of_the_gradient(small, monkeypatch, request, clip):
    options = (*PLAIN, "batch.micro=3", f"optim.clip={clip}", "trainer.log_grad_norm=true")
    eager = norms(small("name=eager", *options))
    request.getfixturevalue("without_graphs")
    assert norms(small("name=static", *options)) == pytest.approx(eager, rel=1e-4) and len(eager) == 12


@pytest.mark.gpu
@pytest.mark.parametrize("clip", ["null", "0.1"])
def test_the_captured_norm_of_the_gradient_is_the_eager_one_on_a_gpu(small, clip):
    options = (*PLAIN, f"optim.clip={clip}", "trainer.log_grad_norm=true", "trainer.accelerator=gpu")
    eager, captured = (norms(small(f"name={engine}", f"engine={engine}", *options)) for engine in ("eager", "captured"))
    assert captured == pytest.approx(eager, rel=1e-2) and len(eager) == 12


def broken(small, monkeypatch, *args: str) -> dict[str, Any]:
    """The result of a run that died and was resumed."""
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(6, patch)
        small("name=parts", *args)
    return small("name=parts", "resume=true", *args)


def test_a_resumed_run_is_the_unbroken_one(small, without_graphs, monkeypatch):
    whole, parts = small("name=whole"), broken(small, monkeypatch)
    a, b = (read_checkpoint(result["directory"])[0] for result in (whole, parts))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_test_set_is_scored_by_the_same_code_whatever_came_before(small, without_graphs, monkeypatch):
    compiled: list[str] = []

    def compile(function: Any, **options: Any) -> Any:
        compiled.append(function.__name__)
        return function

    def fail(*_: Any) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(step_module.torch, "compile", compile)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(session.checkpoints, "save_weights", fail)
        small("name=whole")
    assert compiled == ["forward", "loss", "judge"]
    compiled.clear()
    result = small("name=whole", "resume=true")
    assert compiled == ["forward"]  # nothing is left to be trained
    lra.test(f"init={result['directory']}")
    assert compiled == ["forward", "forward"]


def test_what_is_compiled_for_deterministic_attention_depends_on_no_other_batch(monkeypatch):
    asked: list[dict[str, Any]] = []

    def compile(function: Any, **how: Any) -> Any:
        asked.append(how)
        return lambda batch: [getattr(rows, "_dynamo_weak_dynamic_indices", None) for rows in (batch.tokens,)]

    monkeypatch.setattr(step_module.torch, "compile", compile)
    marked = []
    for deterministic in ("false", "true"):
        run: RunConfig = configure(arguments(f"attn.deterministic={deterministic}")).config
        compiled = compile_batched(len, run.attn.deterministic)  # type: ignore[arg-type]
        marked += compiled(filled_batch(0).to("cpu"))
    # no realize_opcount_threshold: each use of a dropout hash in a kernel of 100 operations is computed again when
    # PyTorch counts operations, and 2^16 uses take longer than anybody waits
    assert asked == [{"options": ANY_ROWS}, {"dynamic": False, "options": {"deterministic": True}}]
    assert marked == [{0}, None] and "deterministic" in torch._inductor.list_options()


def test_what_cannot_be_captured_says_why(tmp_path, monkeypatch):
    def run(*args: str) -> tuple[Step, Any]:
        config: RunConfig = configure(arguments(*args)).config
        module = build_modules(config)[1]
        return module.step, module  # type: ignore[return-value]

    step, module = run()
    assert step.captures(module, CUDA) and not step.captures(module, torch.device("cpu"))
    step, module = run("engine=eager")
    assert not step.captures(module, CUDA)
    step, module = run("engine=captured")
    with pytest.raises(UsageError, match="engine=captured, but there is no GPU"):
        step.captures(module, torch.device("cpu"))
    redraw = ("attn=performer", "model.attn_dropout=0", "attn.redraw=10")
    step, module = run(*redraw)
    assert not step.captures(module, CUDA)
    step, module = run(*redraw, "engine=captured")
    with pytest.raises(UsageError, match=r"engine=captured, but attn.redraw draws features on the host"):
        step.captures(module, CUDA)


DRAWN = np.random.default_rng(0)
SPLIT = Split.from_offsets(
    DRAWN.integers(0, 15, 320, np.uint8), np.cumsum([0, 1, 0, 77, 60, 64, 20, 38, 60]), DRAWN.integers(0, 10, 8)
)


def filled_batch(seed: int) -> CollatedBatch:
    """Packed, of always the same shape, and 64 rows fill it up."""
    return SPLIT.collate(np.random.default_rng(seed).permutation(8), max_length=400, multiple=128)


def test_a_graph_is_of_one_length_by_which_kernels_are_launched():
    """Lit tokens have several, of as many rows."""
    split = Split.from_offsets(np.full(16, 9, np.uint8), np.array([0, 4, 8, 9, 16]))
    batches = [split.collate(rows, max_length=64, threshold=8, multiple=4) for rows in ([0, 1], [2, 3], [0, 1])]
    assert len({(batch.rows, len(batch.start)) for batch in batches}) == 1
    seen, weight = [], torch.nn.Parameter(torch.ones(()))

    def loss(batch: Batch) -> torch.Tensor:
        seen.append((batch.max_length, batch.length.tolist()))
        return weight * batch.tokens.sum()

    engine = CapturedStep(loss, [weight], SGD([weight], 0.1), lambda gradient: None, torch.device("cpu"))
    for batch in batches:
        engine.add(batch)
    assert seen == [(4, [4, 4, 0, 0]), (8, [1, 7, 0, 0]), (4, [4, 4, 0, 0])]


def test_data_that_is_uploaded_goes_through_static_buffers(small, without_graphs, monkeypatch):
    host = small("name=host")
    monkeypatch.setattr(resident, "device_memory", lambda _: 1 << 30)
    there = small("name=there")
    a, b = (read_checkpoint(result["directory"])[0] for result in (host, there))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_attention_can_be_captured(name):
    if CATALOGUE[name].missing:
        pytest.skip(f"{name} needs {', '.join(CATALOGUE[name].missing)}")
    facts = ATTENTIONS.facts_of(CATALOGUE[name])
    options = ("model.d_model=64", "model.heads=2", "task.max_length=400", "model.attn_dropout=0", "model.dropout=0")
    run = configure(arguments(f"attn={name}", "trainer.accelerator=gpu", "trainer.precision=bf16", *options)).config
    torch.manual_seed(0)
    module = build_modules(run)[1].to(CUDA).train()
    step = module.step
    if not step.captures(module, CUDA):  # type: ignore[attr-defined]
        pytest.skip(f"{name} is declared as not to be captured")
    assert facts.dtypes

    def loss(batch: Batch) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return module.loss(batch)

    optimizer = build_optimizer(run.optim, module)
    engine = CapturedStep(module.loss, trained_parameters(module), optimizer, lambda gradient: None, CUDA, bf16=True)
    engine.begin(1, 0.0)
    for seed in range(4):  # as it is, captured, replayed twice
        batch = filled_batch(seed)
        expected = torch.autograd.grad(
            loss(batch.to(CUDA).with_seed(engine.seed)), trained_parameters(module), allow_unused=True
        )
        engine.flat.zero_()
        engine.add(batch)
        for got, want in zip(engine.sums, expected, strict=True):
            want = torch.zeros_like(got) if want is None else want
            scale = float(want.abs().max())
            assert got.isfinite().all() and float((got - want).abs().max()) <= 0.02 * scale + 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("batch.micro=3", "optim.clip=0.1")], ids=["whole", "micro-batches"])
def test_captured_and_eager_agree_on_a_gpu(small, options):
    shared = ("trainer.accelerator=gpu", "trainer.steps=40", "trainer.eval_every=40", *PLAIN, *options)
    eager, captured = (small(f"name={engine}", f"engine={engine}", *shared) for engine in ("eager", "captured"))
    assert captured["engine"] == "captured"
    assert losses(captured) == pytest.approx(losses(eager), rel=1e-4)


@pytest.mark.gpu
def test_a_captured_run_resumes_on_a_gpu(small, monkeypatch):
    shared = ("trainer.accelerator=gpu", "attn.deterministic=true")
    whole, parts = small("name=whole", *shared), broken(small, monkeypatch, *shared)
    assert losses(parts)[-1:] == pytest.approx(losses(whole)[-1:], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["captured", "eager"])
def test_a_run_begun_on_a_cpu_goes_on_on_a_gpu(small, engine):
    begun = small("name=begun")
    gpu = ("trainer.accelerator=gpu", f"engine={engine}", f"resume={begun['directory']}/last.ckpt")
    assert small("name=longer", "trainer.steps=24", *gpu)["steps"] == 24


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["captured", "eager"])
def test_steps_do_not_wait_for_the_gpu(small, monkeypatch, engine):
    class Strict(Clock):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            strict = trainer.global_step == 40  # after the first loss was logged; the second one is after 60
            torch.cuda.set_sync_debug_mode("error" if strict else "default")

    monkeypatch.setattr(assembly, "Clock", Strict)
    gpu = ("trainer.accelerator=gpu", "trainer.log_every=30", "trainer.steps=60", "trainer.eval_every=60",
           "trainer.average=ema")  # fmt: skip
    try:
        assert small(f"engine={engine}", *gpu)["engine"] == engine
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_compiled_validation_scores_as_the_checkpoint_does(small):
    result = small("trainer.accelerator=gpu", "trainer.steps=40", "trainer.eval_every=20")
    again = lra.test(f"init={result['directory']}", "trainer.accelerator=gpu")
    assert again["test"]["accuracy"] == pytest.approx(result["test"]["accuracy"], abs=0.02)
    assert again["test"]["loss"] == pytest.approx(result["test"]["loss"], rel=1e-3)


def test_the_api_names_the_engine(small):
    assert small()["engine"] == "eager" and lra.fit(*arguments())["engine"] == "eager"
