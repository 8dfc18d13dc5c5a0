"""Self-pretraining: what the loss is of, and that a run can start from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lra
from lra.batch import IGNORED_LABEL, Batch
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.hiding import findable_rows, hidden_rows
from lra.tasks.pretraining import commonest_token
from lra.training import assembly, fit
from tests.config.effects import merged
from tests.equal_learning import check_captured, check_layouts_and_buffers, check_resuming
from tests.fixtures import pngs, write_cifar10
from tests.sampling import sampled
from tests.tasks.test_hiding import LAYOUTS, gathered, pairs, split

MODEL = ("model.d_model=32", "model.layers=1", "model.d_ff=32", "trainer.accelerator=cpu")


def test_the_loss_of_all_tokens_is_a_mean_over_them():
    pretraining, batch = (
        module("listops", "mask=0.5", "mask_loss=all", "model.pooling=cls"),
        gathered(split(), prefix=15),
    )
    scores, hidden = pretraining.find(batch)
    rows = findable_rows(batch, 15)
    assert int(rows.sum()) == int((batch.length - 1).sum()) > int(hidden.sum())
    losses = pretraining.hiding.losses(scores, batch, rows)[1].detach()
    by_hand = sum(
        float(losses[start : start + length].sum()) / (length - 1)
        for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True)
    )
    assert float(pretraining.loss(batch).detach()) == pytest.approx(by_hand, rel=1e-5)
    assert pretraining(batch)[2:].sum() == hidden.sum(), "scores are of hidden tokens"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("mask_random=0.1", "mask_random=0.1 says how tokens are hidden: add pretrain=masked"),
        ("mask_loss=all", "mask_loss=all says how tokens are hidden"),
        ("mask_random=1.5 pretrain=masked", "mask_random=1.5 must be 0, or at least 2e-5 and at most 1"),
        ("mask_random=1e-6 pretrain=masked", "mask_random=1e-06 must be 0, or at least"),
        ("mask_span=0 pretrain=masked", "mask_span=0 must be at least 1"),
    ],
)
def test_options_that_can_not_be_are_refused(field, message):
    with pytest.raises(UsageError, match=message):
        fit.configure(["task=listops", "attn=flash", *field.split()])


def test_options_at_their_defaults_are_not_saved():
    kept = fit.configure(["task=listops", "attn=flash", "pretrain=masked", "mask_span=2"]).config.to_saved_dict()
    assert [name for name in kept if name.startswith("mask")] == ["mask", "mask_span"]


def module(task: str, *args: str) -> Any:
    shared = (f"task={task}", "attn=flash", "recipe=demo", *MODEL, "task.max_length=32", "pretrain=masked",
              "model.dropout=0.2")  # fmt: skip
    given = {arg.partition("=")[0]: arg for arg in (*shared, *args)}
    built = assembly.build_modules(fit.configure(list(given.values())).config)[1]
    torch.manual_seed(1)
    for parameter in built.parameters():  # so that predictions differ
        torch.nn.init.normal_(parameter, std=0.3)
    return built.train()


def losses_of(pretraining: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of each row, hidden tokens or IGNORED, and their cross-entropy."""
    scores, hidden = pretraining.find(batch)
    return scores, *pretraining.hiding.losses(scores, batch, hidden)


OPTIONS = ("mask_random=0.3", "mask_span=3", "mask_loss=all")


@pytest.mark.parametrize("options", [("model.pooling=mean",), ("model.pooling=cls",), ("model.pooling=cls", *OPTIONS)])
@pytest.mark.parametrize(("task", "examples"), [("listops", split()), ("retrieval", pairs())])
def test_the_loss_is_the_same_however_the_batch_is_divided(task, examples, options):
    pretraining = module(task, "mask=0.4", *options)
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
    scores, target, losses = losses_of(pretraining, batch)
    by_hand = 0.0
    for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True):
        by_hand += float(losses[start : start + length].detach().sum()) / (0.5 * length * each)
    assert float(pretraining.loss(batch).detach()) == pytest.approx(by_hand, rel=1e-5)
    assert torch.equal(target != IGNORED_LABEL, hidden_rows(batch, 0.5, None)) and scores.dtype == torch.float32


def test_rows_that_are_not_hidden_give_the_decoder_nothing():
    pretraining, batch = module("listops"), gathered(split(), layout="padded")
    scores, target, losses = losses_of(pretraining, batch)
    (gradient,) = torch.autograd.grad(losses.sum(), scores, retain_graph=True)
    seen = target == IGNORED_LABEL
    assert not gradient[seen].any() and gradient[~seen].any(1).all()
    rows = []
    pretraining.model.decoder.register_forward_pre_hook(lambda _, given: rows.append(given[0]))
    loss = losses_of(pretraining, batch)[2].sum()
    (gradient,) = torch.autograd.grad(loss, rows[0])
    assert not gradient[seen].any() and gradient[~seen].any(1).all()


def test_a_hidden_token_is_not_read():
    pretraining, batch = module("listops", "mask=0.5", "model.dropout=0"), gathered(split())
    other = batch.tokens.where(~hidden_rows(batch, 0.5, None), (batch.tokens + 1) % 15)
    before = losses_of(pretraining, batch)[0]
    after = losses_of(pretraining, Batch(**{**vars(batch), "tokens": other}))[0]
    assert torch.equal(before, after)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_keeps_sums(layout):
    pretraining = module("listops", "mask=0.5").eval()
    batch = Batch(**{**vars(gathered(split(), **LAYOUTS[layout])), "seed": None})
    found, loss, *counts = pretraining(batch).tolist()
    scores, target, losses = losses_of(pretraining, batch)
    rows = target != IGNORED_LABEL
    assert found == (scores.argmax(1) == target)[rows].sum() and loss == pytest.approx(
        float(losses[rows].detach().sum())
    )
    assert counts == np.bincount(target[rows].numpy(), minlength=len(counts)).tolist() and len(counts) == 15


def test_every_task_has_a_share_and_the_commonest_token_is_counted():
    shares = {name: TASKS.facts_of(entry).mask for name, entry in TASKS.catalogue().items()}
    assert shares == {"text": 0.15, "retrieval": 0.15, "listops": 0.1} | dict.fromkeys(
        ("image", "pathfinder", "path64", "pathx", "path256"), 0.5
    )
    for examples, options in ((split(), {}), (split(), {"threshold": 5}), (pairs(), {})):
        tokens = gathered(examples, **options).tokens.numpy()
        assert commonest_token(examples, {"max_length": 32, **options}, at_once=5) == np.bincount(tokens).argmax()


def test_refusals():
    for args, message in (
        (("mask=0.2",), "mask=0.2 says how tokens are hidden: add pretrain=masked"),
        (("pretrain=masked", "mask=0"), r"mask=0\.0 must be at least 2e-5 and below 1"),
        (("pretrain=masked", "mask=1"), r"mask=1\.0 must be at least 2e-5 and below 1"),
        (("pretrain=masked", "init=there", "head=kept"), "head=kept: pretrain=masked trains no classifier"),
        (("pretrain=next",), "pretrain=next: write none, masked or causal"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            fit.configure(["task=listops", "attn=flash", *args])
        assert "\n" not in str(error.value)
    saved = fit.configure(["task=listops", "attn=flash"]).config.to_saved_dict()
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


@pytest.mark.parametrize("task", sampled(CASES))
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
    with pytest.raises(UsageError, match="^model.pooling=max: it changes no score of pretrain=masked; leave it out$"):
        lra.test(f"init={before['directory']}", "model.pooling=max")


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
        return lra.fit(*merged(*shared, *args))

    return run


def test_neither_layout_nor_micro_batches_nor_buffers_change_a_run(pretrained, monkeypatch):
    check_layouts_and_buffers(pretrained, monkeypatch, "model.dropout=0.1", "model.pooling=cls", *OPTIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("batch.layout=padded",), ("model.pooling=cls", "batch.micro=3", *OPTIONS)])
def test_captured_and_eager_agree_on_a_gpu(pretrained, options):
    check_captured(pretrained, "model.dropout=0.1", *options)


def test_resuming_a_pretraining_changes_nothing(pretrained, monkeypatch):
    check_resuming(pretrained, monkeypatch, "model.dropout=0.1", *OPTIONS)


ATTENTIONS = ("butterfly", "flash", "linformer", "local", "lsformer", "performer", "reformer", "smyrf", "standard")


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_every_attention_pretrains(attn, pretrained):
    for layout in ("packed", "padded"):
        options = (f"attn={attn}", f"batch.layout={layout}", f"name={layout}", "trainer.steps=2")
        assert np.isfinite(pretrained(*options)["test"]["loss"])


def test_nothing_hidden_is_said(pretrained):
    with pytest.raises(UsageError, match=r"mask=2e-05 hides no token of val: raise mask="):
        pretrained("name=none", "mask=2e-5", "task.val=3")
