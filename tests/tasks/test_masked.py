"""Self-pretraining: which tokens are hidden, what the loss is of, and that a run can start from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lra
from lra.batch import Batch
from lra.data.split import IGNORED_LABEL, Pairs, Split
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.masked import commonest_token, hidden_rows
from lra.training import checkpoints, fit
from lra.training import step as step_module
from lra.training.step import Step
from tests.fixtures import pngs, write_cifar10
from tests.training.test_fit import interrupt_at

SEED = torch.tensor(3 << 33 | 5)
MODEL = ("model.d_model=32", "model.layers=1", "model.d_ff=32", "trainer.accelerator=cpu")
LAYOUTS: dict[str, dict[str, Any]] = {"packed": {}, "padded": {"layout": "padded"}, "filled": {"multiple": 64}}


def split(count: int = 12, longest: int = 40, vocabulary: int = 15) -> Split:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, longest + 1, count)
    offsets = np.concatenate([[0], lengths.cumsum()])
    return Split.from_offsets(rng.integers(0, vocabulary, offsets[-1]).astype(np.uint8), offsets)


def pairs(count: int = 6) -> Pairs:
    return Pairs(split(), np.random.default_rng(1).integers(0, 12, (count, 2)), np.zeros(count, np.int64))


def gathered(examples: Any, rows: Any = None, **options: Any) -> Batch:
    rows = np.arange(len(examples)) if rows is None else np.asarray(rows)
    return examples.collate(rows, index=rows, **{"max_length": 32, **options}).to("cpu").with_seed(SEED)


def places(batch: Batch, share: float, prefix: int | None = None) -> set[tuple[int, int, int]]:
    """Sequence in the global batch, position and token of all that is hidden."""
    rows = batch.per_row(batch.index), batch.token_positions(), batch.tokens
    return set(zip(*(each[hidden_rows(batch, share, prefix)].tolist() for each in rows), strict=True))


@pytest.mark.parametrize("options", [{}, {"prefix": 15}, {"threshold": 4}], ids=["plain", "cls", "lit"])
@pytest.mark.parametrize("examples", [split(), pairs()], ids=["sequences", "pairs"])
def test_what_is_hidden_depends_on_the_place_alone(examples, options):
    prefix = options.get("prefix")
    whole = places(gathered(examples, **options), 0.4, prefix)
    assert whole
    for layout in LAYOUTS.values():
        assert places(gathered(examples, **options, **layout), 0.4, prefix) == whole
        for size in (1, 4, len(examples) // 2):  # micro-batches; two ranks
            parts = (range(i, min(i + size, len(examples))) for i in range(0, len(examples), size))
            found = [places(gathered(examples, part, **options, **layout), 0.4, prefix) for part in parts]
            assert set.union(*found) == whole and sum(map(len, found)) == len(whole)


def test_golden_places():
    """What a seed hides must stay: a run that is resumed relies on it."""
    made = Split.from_offsets(np.zeros(60, np.uint8), np.array([0, 7, 8, 40, 60]))
    batch = gathered(made)
    trained, evaluated = (
        hidden_rows(each, 0.2, None).nonzero().flatten().tolist()
        for each in (batch, dataclasses.replace(batch, seed=None))
    )
    assert trained == [9, 11, 15, 24, 30, 32, 33, 39, 47, 53, 55, 59]
    assert evaluated == [
        1,
        10,
        13,
        15,
        19,
        26,
        30,
        34,
        40,
        47,
        52,
        56,
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("examples", [split(), pairs()], ids=["sequences", "pairs"])
def test_cls_padding_and_filling_are_never_hidden(examples, layout):
    batch = gathered(examples, prefix=15, **LAYOUTS[layout])
    rows = hidden_rows(batch, 1 - 2**-24, 15)  # as good as all
    ends = (batch.start + batch.length).tolist()
    wanted = [
        label != IGNORED_LABEL for label in batch.label.repeat_interleave(batch.size // len(batch.label)).tolist()
    ]
    real = torch.zeros_like(rows)
    for start, end, counts in zip(batch.start.tolist(), ends, wanted, strict=True):
        real[start + 1 : end] = counts
    assert torch.equal(rows, real) and all(wanted) == (layout != "filled")


def test_the_share_is_that_asked_for_and_every_step_draws_anew():
    offsets = np.arange(51) * 2000
    long = Split.from_offsets(np.zeros(offsets[-1], np.uint8), offsets)
    batch = long.collate(np.arange(50), max_length=2000).to("cpu")
    n = batch.tokens.numel()
    for share in (0.1, 0.15, 0.5):
        one, other = (hidden_rows(batch.with_seed(torch.tensor(seed)), share, None) for seed in (1, 2))
        for drawn, expected in (
            (one, share), (other, share), (one & other, share**2), (one[1:] & one[:-1], share**2),
        ):  # fmt: skip
            assert abs(drawn.float().mean() - expected) < 5 * (expected * (1 - expected) / n) ** 0.5
    fixed = hidden_rows(batch, 0.5, None)  # in evaluation
    assert torch.equal(fixed, hidden_rows(batch, 0.5, None)) and not torch.equal(fixed, one)


def module(task: str, *args: str) -> Any:
    shared = (f"task={task}", "attn=flash", "recipe=demo", *MODEL, "task.max_length=32", "pretrain=masked",
              "model.dropout=0.2")  # fmt: skip
    given = {arg.partition("=")[0]: arg for arg in (*shared, *args)}
    built = fit.build_modules(fit.configure(list(given.values())).config)[1]
    torch.manual_seed(1)
    for parameter in built.parameters():  # so that predictions differ
        torch.nn.init.normal_(parameter, std=0.3)
    return built.train()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(("task", "examples"), [("listops", split()), ("retrieval", pairs())])
def test_the_loss_is_the_same_however_the_batch_is_divided(task, examples, pooling):
    pretraining = module(task, f"model.pooling={pooling}", "mask=0.4")
    prefix = pretraining.model.encoder.prefix
    whole = pretraining.loss(gathered(examples, prefix=prefix))
    named = list(pretraining.parameters())
    wanted = torch.autograd.grad(whole, named)
    for layout in LAYOUTS.values():
        for size in (2, 5, len(examples)):
            parts = (range(i, min(i + size, len(examples))) for i in range(0, len(examples), size))
            batches = [gathered(examples, part, prefix=prefix, **layout) for part in parts]
            total = torch.stack([pretraining.loss(batch) for batch in batches]).sum()
            assert float(total.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
            for one, other in zip(torch.autograd.grad(total, named), wanted, strict=True):
                assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize(("task", "examples", "each"), [("listops", split(), 1), ("retrieval", pairs(), 2)])
def test_the_loss_is_the_mean_over_what_is_expected_to_be_hidden(task, examples, each):
    """Of an example of two sequences half of each counts."""
    pretraining, batch = module(task, "mask=0.5"), gathered(examples)
    scores, target, losses = pretraining.losses(batch)
    by_hand = 0.0
    for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True):
        by_hand += float(losses[start : start + length].detach().sum()) / (0.5 * length * each)
    assert float(pretraining.loss(batch).detach()) == pytest.approx(by_hand, rel=1e-5)
    assert torch.equal(target != IGNORED_LABEL, hidden_rows(batch, 0.5, None)) and scores.dtype == torch.float32


def test_rows_that_are_not_hidden_give_the_decoder_nothing():
    pretraining, batch = module("listops"), gathered(split(), layout="padded")
    scores, target, losses = pretraining.losses(batch)
    (gradient,) = torch.autograd.grad(losses.sum(), scores, retain_graph=True)
    seen = target == IGNORED_LABEL
    assert not gradient[seen].any() and gradient[~seen].any(1).all()
    rows = []
    pretraining.model.decoder.register_forward_pre_hook(lambda _, given: rows.append(given[0]))
    loss = pretraining.losses(batch)[2].sum()
    (gradient,) = torch.autograd.grad(loss, rows[0])
    assert not gradient[seen].any() and gradient[~seen].any(1).all()


def test_a_hidden_token_is_not_read():
    pretraining, batch = module("listops", "mask=0.5", "model.dropout=0"), gathered(split())
    other = batch.tokens.where(~hidden_rows(batch, 0.5, None), (batch.tokens + 1) % 15)
    before = pretraining.losses(batch)[0]
    after = pretraining.losses(Batch(**{**vars(batch), "tokens": other}))[0]
    assert torch.equal(before, after)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_keeps_sums(layout):
    pretraining = module("listops", "mask=0.5").eval()
    batch = Batch(**{**vars(gathered(split(), **LAYOUTS[layout])), "seed": None})
    found, loss, *counts = pretraining(batch).tolist()
    scores, target, losses = pretraining.losses(batch)
    rows = target != IGNORED_LABEL
    assert found == (scores.argmax(1) == target)[rows].sum() and loss == pytest.approx(
        float(losses[rows].detach().sum())
    )
    assert counts == np.bincount(target[rows].numpy(), minlength=len(counts)).tolist() and len(counts) == 15


def test_every_task_has_a_share_and_the_commonest_token_is_counted():
    shares = {name: TASKS.declared(entry).mask for name, entry in TASKS.catalogue().items()}
    assert shares == {"text": 0.15, "retrieval": 0.15, "listops": 0.1} | dict.fromkeys(
        ("image", "pathfinder", "path64", "pathx", "path256"), 0.5
    )
    for examples, options in ((split(), {}), (split(), {"threshold": 5}), (pairs(), {})):
        tokens = gathered(examples, **options).tokens.numpy()
        assert commonest_token(examples, {"max_length": 32, **options}, at_once=5) == np.bincount(tokens).argmax()


def test_refusals():
    for args, message in (
        (("mask=0.2",), "mask=0.2 is the share of tokens that pretrain=masked hides: add that"),
        (("pretrain=masked", "mask=0"), r"mask=0\.0 must be above 0 and below 1"),
        (("pretrain=masked", "mask=1"), r"mask=1\.0 must be above 0 and below 1"),
        (("pretrain=masked", "init=there", "head=kept"), "head=kept: pretrain=masked trains no classifier"),
        (("pretrain=causal",), "pretrain"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            fit.configure(["task=listops", "attn=flash", *args])
        assert "\n" not in str(error.value)
    saved = fit.configure(["task=listops", "attn=flash"]).config.saved()
    assert not {"pretrain", "mask"} & saved.keys()  # older runs are not of another configuration


def plain_images(folder: Path) -> str:
    """Every picture of one grey, its class's."""

    def rows(count: int) -> dict[str, Any]:
        labels = np.arange(count) % 10
        return {"img": pngs(np.broadcast_to(25 * labels[:, None, None, None], (count, 32, 32, 3)).astype(np.uint8)),
                "label": labels}  # fmt: skip

    return f"source={write_cifar10(folder / 'cifar10', train=rows(60), test=rows(20))}"


SHORT = ("task.train=500", "task.val=50", "task.test=50", "task.fresh=50", "task.max_length=32")
# task: its data, steps, and whether these suffice to find more than the commonest token
CASES: dict[str, tuple[tuple[str, ...], int, bool]] = {
    "listops": ((*SHORT, "batch.size=32", "mask=0.3"), 300, True),
    "image": (("batch.size=4", "batch.eval=4"), 30, True),
    "pathfinder": (("task.train=24", "task.val=6", "task.test=12", "tokens=all", "batch.size=4"), 10, False),
}


@pytest.mark.parametrize("task", CASES)
def test_pretrained_then_trained(task, tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    monkeypatch.chdir(tmp_path)
    fields, steps, learns = CASES[task]
    fields += (plain_images(tmp_path),) if task == "image" else ()
    shared = [f"task={task}", "attn=flash", "recipe=demo", *MODEL, "optim.warmup=10", "trainer.log_every=10",
              *(field for field in fields if not field.startswith("mask="))]  # fmt: skip
    masked = [field for field in fields if field.startswith("mask=")]
    before = lra.fit(*shared, *masked, "pretrain=masked", "name=before", "optim.lr=1e-2", f"trainer.steps={steps}",
                     f"trainer.eval_every={steps}")  # fmt: skip
    assert before["pretrain"] == "masked" and before["config"]["pretrain"] == "masked"
    share = 0.3 if masked else TASKS.get(task).facts.mask
    tests = TASKS.get(task).Data.test_sets
    for name in tests:
        scored = before[name]
        assert set(scored) == {"accuracy", "plus_minus", "loss", "n", "baselines"} and set(scored["baselines"]) == {
            "majority"
        }
        assert scored["accuracy"] > scored["baselines"]["majority"] + 0.03 or not learns
    count = {"image": 20 * 1024, "pathfinder": 12 * 1024}.get(task)
    assert count is None or abs(before["test"]["n"] / count - share) < 0.02
    again = lra.test(f"init={before['directory']}", "batch.eval=3", "batch.layout=padded")
    assert again["pretrain"] == "masked"
    for name in tests:
        assert again[name]["n"] == before[name]["n"] and again[name]["baselines"] == before[name]["baselines"]
        assert again[name]["accuracy"] == pytest.approx(before[name]["accuracy"], abs=1e-3)
        assert again[name]["loss"] == pytest.approx(before[name]["loss"], rel=1e-4)

    after = lra.fit(*shared, "name=after", f"init={before['directory']}", "trainer.steps=10", "trainer.eval_every=10")
    assert after["status"] == "finished" and "pretrain" not in after and after["test"]["n"] == len_of(after)
    moved = json.loads(Path(after["directory"], "result.json").read_text())["transfer"]
    assert moved["changed"] == {"pretrain": ["masked", "none"]}
    assert moved["fresh"] == ["head"] and moved["left"] == ["decoder", "MASK"]
    with pytest.raises(UsageError, match="has no head for this model, and untrained weights can't be scored"):
        lra.test(f"init={before['directory']}", "pretrain=none", "mask=null")


def len_of(result: dict[str, Any]) -> int:
    return {"listops": 50, "image": 20, "pathfinder": 12}[result["config"]["task"]["name"]]


@pytest.fixture
def pretrained(tmp_path, monkeypatch):
    """`pretrained("field=value", …)` pretrains on ListOps for a few steps and returns the result."""
    monkeypatch.chdir(tmp_path)
    shared = ("task=listops", "attn=flash", "recipe=demo", *MODEL, *SHORT, "pretrain=masked", "mask=0.3",
              "batch.size=8", "batch.eval=16", "trainer.steps=4", "trainer.eval_every=2",
              "trainer.log_every=1")  # fmt: skip

    def run(*args: str) -> dict[str, Any]:
        return lra.fit(*{arg.partition("=")[0]: arg for arg in (*shared, *args)}.values())

    return run


def same(a: dict[str, Any], b: dict[str, Any], rel: float = 1e-4) -> None:
    for name in ("test", "fresh"):
        assert a[name]["n"] == b[name]["n"] and a[name]["loss"] == pytest.approx(b[name]["loss"], rel=rel)


def test_neither_layout_nor_micro_batches_nor_buffers_change_a_run(pretrained, monkeypatch):
    dropout = ("model.dropout=0.1", "model.pooling=cls")
    packed = pretrained("name=packed", *dropout)
    same(packed, pretrained("name=padded", *dropout, "batch.layout=padded"))
    same(packed, pretrained("name=parts", *dropout, "batch.micro=3"))
    monkeypatch.setattr(Step, "captures", lambda *_: True)  # the captured step's buffers, without graphs
    monkeypatch.setattr(step_module.torch, "compile", lambda function, **options: function)
    same(packed, pretrained("name=static", *dropout, "batch.micro=3"))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("batch.layout=padded",), ("model.pooling=cls", "batch.micro=3")])
def test_captured_and_eager_agree_on_a_gpu(pretrained, options):
    shared = ("trainer.accelerator=gpu", "trainer.steps=40", "trainer.eval_every=40", "model.dropout=0.1", *options)
    eager, captured = (pretrained(f"name={engine}", f"engine={engine}", *shared) for engine in ("eager", "captured"))
    assert captured["engine"] == "captured"
    same(eager, captured, rel=1e-3)


def test_resuming_a_pretraining_changes_nothing(pretrained, monkeypatch):
    whole = pretrained("name=whole", "model.dropout=0.1")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(3, patch)
        pretrained("name=parts", "model.dropout=0.1")
    parts = pretrained("name=parts", "model.dropout=0.1", "resume=true")
    a, b = (checkpoints.read_checkpoint(result["directory"])[0] for result in (whole, parts))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) and parts["resumed"]
    assert parts["test"] == whole["test"]


ATTENTIONS = ("butterfly", "flash", "linformer", "local", "lsformer", "performer", "reformer", "smyrf", "standard")


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_every_attention_pretrains(attn, pretrained):
    for layout in ("packed", "padded"):
        options = (f"attn={attn}", f"batch.layout={layout}", f"name={layout}", "trainer.steps=2")
        assert np.isfinite(pretrained(*options)["test"]["loss"])


def test_nothing_hidden_is_said(pretrained):
    with pytest.raises(UsageError, match=r"mask=1e-06 hides no token of val: raise mask="):
        pretrained("name=none", "mask=1e-6", "task.val=3")
