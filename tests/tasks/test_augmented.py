"""Augmentation in runs: which tasks have it, what it leaves alone, and that engines, layouts and resuming agree."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

import lra
from lra.config.augment import AugmentConfig
from lra.config.compose import restore
from lra.config.schema import RunConfig
from lra.data.split import Split
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from lra.tasks.objectives import with_objective
from lra.training import assembly, checkpoints, fit
from lra.training.compiling import compile_batched
from tests.config.effects import merged
from tests.equal_learning import check_captured, check_layouts_and_buffers, check_resuming, same
from tests.sampling import sampled
from tests.tasks.test_augmentations import expressions
from tests.tasks.test_hiding import LAYOUTS, gathered
from tests.tasks.test_masked import MODEL, SHORT

OPERANDS = ("augment.operands=true",)
IMAGES = (
    "augment.flip=both", "augment.rotate=10", "augment.shift=0.1", "augment.scale=0.1", "augment.shear=10",
    "augment.brightness=0.2", "augment.contrast=0.2", "augment.levels=2",
)  # fmt: skip
FIELDS = {"listops": OPERANDS, "pathfinder": IMAGES}
TASK_FIELDS = {"listops": "task.max_length=60", "pathfinder": "task.tokens=all"}


def module(task: str, *args: str) -> Any:
    shared = (f"task={task}", "attn=flash", "recipe=demo", *MODEL, "model.dropout=0.2", TASK_FIELDS[task])
    built = assembly.build_modules(fit.configure(merged(*shared, *args)).config)[1]
    torch.manual_seed(1)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built.train()


def examples(task: str, count: int = 6) -> Split:
    if task == "listops":
        return expressions(count)[0]
    pixels = np.random.default_rng(0).integers(0, 256, 1024 * count).astype(np.uint8)
    return Split.from_offsets(pixels, np.arange(count + 1) * 1024)


def batch_of(task: str, rows: Any = None, **options: Any) -> Any:
    return gathered(examples(task), rows, **{"max_length": 60 if task == "listops" else 1024, **options})


def test_off_it_is_not_there():
    for task in TASKS.catalogue():
        run = fit.configure([f"task={task}", "attn=flash"]).config
        assert run.augment == AugmentConfig() and not run.augment.changes() and "augment" not in run.to_saved_dict()
        assert with_objective(TASKS.get(task), run) is TASKS.get(task)


def test_only_what_changes_something_is_saved():
    run = fit.configure(["task=listops", "attn=flash", *OPERANDS]).config
    saved = run.to_saved_dict()
    assert saved["augment"] == {"operands": True}
    assert restore(RunConfig, {"task": TASKS, "attn": ATTENTIONS}, saved) == run
    assert fit.configure(["task=image", "attn=flash", "augment.rotate=0"]).config.augment == AugmentConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("task=text augment.flip=both", "augment.flip=both: task=text has no images, leave out what changes images"),
        ("task=listops augment.shift=0.1 augment.operands=true", "shift=0.1, augment.operands=true: task=listops has"),
        ("task=retrieval augment.operands=true", "augment.operands=true: task=retrieval has no operators of ListOps"),
        ("task=image augment.operands=true", "augment.operands=true: task=image has no operators of ListOps, leave"),
        (
            "task=path64 task.tokens=lit augment.rotate=5",
            "rotate=5.0: tokens=lit leaves pixels out, set task.tokens=all, or leave out augment.rotate$",
        ),
        ("task=text augment.levels=1", "augment.levels=1: task=text has no images, leave out what changes images"),
        ("task=pathfinder augment.levels=256", "augment.levels=256 is too large: use at most 255"),
        ("task=image augment.rotate=-1", "augment.rotate=-1.0 must be at least 0"),
        ("task=image augment.rotate=181", "augment.rotate=181.0 is too large: use at most 180"),
        ("task=image augment.scale=1", "augment.scale=1.0 is too large: use at most 0.9"),
        ("task=image augment.shear=90", "augment.shear=90.0 is too large: use at most 80"),
        ("task=image augment.flip=vertical", "augment.flip=vertical: write none, horizontal or both"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(UsageError, match=message) as error:
        assembly.build_modules(fit.configure([*fields.split(), "attn=flash"]).config)
    assert "\n" not in str(error.value)


@torch.no_grad()
@pytest.mark.parametrize("objective", [(), ("denoise=0.5", "mask=0.3"), ("pretrain=masked", "mask=0.3")])
@pytest.mark.parametrize("task", FIELDS)
def test_the_objective_sees_the_augmented_batch_and_evaluation_does_not(task, objective):
    here, plain, batch = module(task, *FIELDS[task], *objective), module(task, *objective), batch_of(task)
    plain.model.load_state_dict(here.model.state_dict())
    augmented = here.augment(batch)
    assert not torch.equal(augmented.tokens, batch.tokens) and issubclass(type(here), TASKS.get(task))
    assert float(here.loss(batch)) == float(plain.loss(augmented)) != float(plain.loss(batch))
    assert torch.equal(here.eval()(batch), plain.eval()(batch))


LIT = ("task.tokens=lit", "augment.flip=both", "augment.levels=1")


def test_some_pixels_are_mirrored_and_their_grey_levels_change():
    batch = batch_of("pathfinder", threshold=8)
    flipped = module("pathfinder", *LIT, "augment.levels=0").augment(batch)
    assert torch.equal(batch.tokens.sort()[0], flipped.tokens.sort()[0])
    assert not torch.equal(batch.token_positions(), flipped.token_positions())
    changed = module("pathfinder", *LIT).augment(batch)
    assert torch.equal(changed.token_positions(), flipped.token_positions())
    assert (changed.tokens.long() - flipped.tokens.long()).unique().tolist() == [-1, 0, 1]


@torch.no_grad()
@pytest.mark.slow
def test_some_pixels_are_changed_alike_when_compiled(monkeypatch):
    here = module("pathfinder", *LIT, "model.attn_dropout=0")
    torch.compiler.reset()
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, fullgraph=True))
    both: Any = compile_batched(lambda batch: (here.loss(batch), here.augment(batch).tokens), False)  # type: ignore
    batch = batch_of("pathfinder", threshold=8, multiple=64)
    loss, tokens = both(batch)
    assert torch.equal(tokens, here.augment(batch).tokens)
    assert float(loss) == pytest.approx(float(here.loss(batch)), rel=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("task", FIELDS)
def test_the_loss_is_the_same_however_the_batch_is_divided(task, pooling):
    here = module(task, *FIELDS[task], f"model.pooling={pooling}")
    prefix, named = here.model.encoder.prefix, list(here.parameters())
    whole = here.loss(batch_of(task, prefix=prefix))
    wanted = torch.autograd.grad(whole, named)
    for name, layout in LAYOUTS.items():
        if task == "pathfinder" and name == "filled":  # images are all of one length: nothing is filled up
            continue
        batches = [batch_of(task, part, prefix=prefix, **layout) for part in (range(4), range(4, 6))]
        total = torch.stack([here.loss(batch) for batch in batches]).sum()
        assert float(total.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
        for one, other in zip(torch.autograd.grad(total, named), wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("task", sampled(FIELDS))
def test_compiled_is_the_same(task, backend, monkeypatch):
    here = module(task, *FIELDS[task], "model.attn_dropout=0")
    torch.compiler.reset()
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, fullgraph=True, backend=backend))
    both: Any = compile_batched(lambda batch: (here.loss(batch), here.augment(batch).tokens), False)  # type: ignore
    for rows in (range(6), range(3)):  # of other numbers of rows
        batch = batch_of(task, rows)
        loss, tokens = both(batch)
        assert torch.equal(tokens, here.augment(batch).tokens)
        assert float(loss) == pytest.approx(float(here.loss(batch)), rel=1e-5)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """`trained(task, "field=value", …)` trains with augmentation for a few steps and returns the result."""
    monkeypatch.chdir(tmp_path)
    shared = ("attn=linear", "recipe=demo", *MODEL, "batch.eval=16", "model.dropout=0.1", "model.attn_dropout=0",
              "trainer.steps=4", "trainer.eval_every=2", "trainer.log_every=1")  # fmt: skip
    fields = {
        "listops": (*SHORT, *OPERANDS, "batch.size=8"),
        "pathfinder": ("task.train=8", "task.val=2", "task.test=4", "task.tokens=all", *IMAGES, "batch.size=2"),
    }

    def run(task: str, *args: str) -> dict[str, Any]:
        return lra.fit(*merged(f"task={task}", *shared, *fields[task], *args))

    return run


def weights(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    return checkpoints.read_checkpoint(result["directory"])[0]


def alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    one, other = weights(a), weights(b)
    return all(torch.allclose(one[key], other[key], atol=1e-6) for key in one)


def test_neither_layout_nor_micro_batches_nor_buffers_change_a_run(trained, monkeypatch):
    train = functools.partial(trained, "listops")

    def check(one: dict[str, Any], other: dict[str, Any]) -> None:
        assert alike(one, other)

    packed = check_layouts_and_buffers(train, monkeypatch, check=check)
    plain = train("name=plain", "augment.operands=false")
    assert packed["config"]["augment"] == {"operands": True} and "augment" not in plain["config"]
    assert not alike(packed, plain)
    same(packed, lra.test(f"init={packed['directory']}", "batch.eval=5"))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("batch.layout=padded",), ("model.pooling=cls", "batch.micro=1")])
@pytest.mark.parametrize("task", FIELDS)
def test_captured_and_eager_agree_on_a_gpu(task, trained, options):
    check_captured(functools.partial(trained, task), *options)


@pytest.mark.parametrize("task", FIELDS)
def test_resuming_changes_nothing(task, trained, monkeypatch):
    check_resuming(functools.partial(trained, task), monkeypatch)
