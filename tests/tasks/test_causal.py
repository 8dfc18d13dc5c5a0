"""Self-pretraining by next tokens: what is to be found, what the loss is of, and that a run can start from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lra
from lra.batch import IGNORED_LABEL, Batch
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention
from lra.printing import console, print_scores
from lra.tasks.causal import next_tokens
from lra.training import assembly, fit
from tests.config.effects import merged
from tests.equal_learning import check_captured, check_layouts_and_buffers, check_resuming, same
from tests.fixtures import write_imdb
from tests.sampling import sampled
from tests.tasks.test_hiding import LAYOUTS, gathered, pairs, split
from tests.tasks.test_masked import MODEL, SHORT, plain_images

EXAMPLES = pytest.mark.parametrize(("task", "examples"), [("listops", split()), ("retrieval", pairs())])


def module(task: str, *args: str) -> Any:
    shared = (f"task={task}", "attn=flash", "recipe=demo", *MODEL, "task.max_length=32", "pretrain=causal",
              "model.dropout=0.2")  # fmt: skip
    given = {arg.partition("=")[0]: arg for arg in (*shared, *args)}
    built = assembly.build_modules(fit.configure(list(given.values())).config)[1]
    torch.manual_seed(1)
    for parameter in built.parameters():  # so that predictions differ
        torch.nn.init.normal_(parameter, std=0.3)
    return built.train()


@pytest.mark.parametrize("options", [{}, {"prefix": 15}, {"threshold": 4}], ids=["plain", "cls", "lit"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("examples", [split(), pairs()], ids=["sequences", "pairs"])
def test_each_row_finds_the_next_token_of_its_sequence(examples, layout, options):
    batch = gathered(examples, **options, **LAYOUTS[layout])
    expected = torch.full_like(batch.tokens, IGNORED_LABEL).long()
    labels = batch.label.repeat_interleave(batch.size // len(batch.label)).tolist()
    for start, length, label in zip(batch.start.tolist(), batch.length.tolist(), labels, strict=True):
        if label != IGNORED_LABEL and length > 1:
            expected[start : start + length - 1] = batch.tokens[start + 1 : start + length].long()
    assert torch.equal(next_tokens(batch), expected) and (expected != IGNORED_LABEL).any()
    assert not (expected == 15).any(), "CLS is never to be found"
    assert (IGNORED_LABEL in labels) == (layout == "filled")


@pytest.mark.parametrize("layout", LAYOUTS)
@EXAMPLES
def test_the_loss_is_the_mean_over_each_sequence(task, examples, layout):
    """Of an example of two sequences half of each counts."""
    pretraining, batch = module(task), gathered(examples, **LAYOUTS[layout])
    _, target, losses = pretraining.score_rows(batch)
    by_hand, each = 0.0, 2 if task == "retrieval" else 1
    for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True):
        own = losses[start : start + length].detach()
        by_hand += float(own.sum()) / (max(length - 1, 1) * each)
        assert not len(own) or float(own[-1]) == 0, "the last token has no next one"
    assert float(pretraining.loss(batch).detach()) == pytest.approx(by_hand, rel=1e-5) and by_hand > 1
    assert losses.dtype == torch.float32 and torch.equal(target, next_tokens(batch))


@pytest.mark.parametrize("options", [(), ("model.pooling=cls",), ("model.causal=true", "model.pooling=last")])
@EXAMPLES
def test_the_loss_is_the_same_however_the_batch_is_divided(task, examples, options):
    pretraining = module(task, *options)
    prefix, named = pretraining.model.encoder.prefix, list(pretraining.parameters())
    whole = pretraining.loss(gathered(examples, prefix=prefix))
    wanted = torch.autograd.grad(whole, named)
    for layout in LAYOUTS.values():
        for size in (2, 5, len(examples)):
            parts = (range(i, min(i + size, len(examples))) for i in range(0, len(examples), size))
            batches = [gathered(examples, part, prefix=prefix, **layout) for part in parts]
            total = torch.stack([pretraining.loss(batch) for batch in batches]).sum()
            assert float(total.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
            for one, other in zip(torch.autograd.grad(total, named), wanted, strict=True):
                assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", ["true", "false"])
def test_a_token_is_not_read_where_it_is_to_be_found(causal, layout):
    """Whatever the configuration says of the model; a classifier sees what that says."""
    batch = gathered(split(), **LAYOUTS[layout])
    place = batch.start.long() + batch.length.long() // 2
    other = batch.tokens.index_copy(0, place, (batch.tokens[place] + 1) % 15)
    changed = dataclasses.replace(batch, tokens=other)
    earlier = batch.token_positions() < batch.per_row(batch.length // 2)
    for options, expected in (((), True), (("pretrain=none",), causal == "true")):
        built = module("listops", f"model.causal={causal}", *options).eval()
        before, after = (built.model.encoder.rows(each) for each in (batch, changed))
        assert torch.equal(before[earlier], after[earlier]) == expected and earlier.any()
        assert not torch.allclose(before[place], after[place])
        attentions = [part for part in built.modules() if isinstance(part, Attention)]
        assert {attention.spec.causal for attention in attentions} == {expected}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_keeps_sums(layout):
    pretraining = module("listops").eval()
    batch = Batch(**{**vars(gathered(split(), **LAYOUTS[layout])), "seed": None})
    found, loss, *counts = pretraining(batch).tolist()
    predicted, target, losses = pretraining.score_rows(batch)
    rows = target != IGNORED_LABEL
    assert found == (predicted == target)[rows].sum() > 0
    assert loss == pytest.approx(float(losses[rows].detach().sum()))
    assert counts == np.bincount(target[rows].numpy(), minlength=len(counts)).tolist() and len(counts) == 15


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("mask=0.2", r"mask=0\.2 says how tokens are hidden: pretrain=causal hides none, leave it out"),
        ("mask_random=0.1", "mask_random=0.1 says how tokens are hidden: pretrain=causal hides none"),
        ("mask_span=3", "mask_span=3 says how tokens are hidden: pretrain=causal hides none"),
        ("mask_loss=all", "mask_loss=all says how tokens are hidden: pretrain=causal hides none"),
        ("denoise=1", "denoise=1.0 is beside labels, pretrain=causal has none: choose one"),
        ("init=there head=kept", "head=kept: pretrain=causal trains no classifier"),
        ("optim.label_smoothing=0.1", "pretrain=causal trains without labels, set optim.label_smoothing=0"),
        ("model.causal=true model.pooling=cls", "model.pooling=cls: the first token of a causal model sees only"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(UsageError, match=message) as error:
        fit.configure(["task=listops", "attn=flash", "pretrain=causal", *fields.split()])
    assert "\n" not in str(error.value)


def test_what_is_saved():
    saved = fit.configure(["task=listops", "attn=flash", "pretrain=causal"]).config.to_saved_dict()
    assert saved["pretrain"] == "causal" and "mask" not in saved and "causal" not in saved["model"]
    kept = fit.configure(["task=listops", "attn=flash", "model.causal=true", "model.pooling=mean"]).config
    assert kept.to_saved_dict()["model"]["causal"] is True


@pytest.fixture
def pretrained(tmp_path, monkeypatch):
    """`pretrained("field=value", …)` pretrains on ListOps for a few steps and returns the result."""
    monkeypatch.chdir(tmp_path)
    shared = ("task=listops", "attn=flash", "recipe=demo", *MODEL, *SHORT, "pretrain=causal", "batch.size=8",
              "batch.eval=16", "trainer.steps=4", "trainer.eval_every=2", "trainer.log_every=1")  # fmt: skip

    def run(*args: str) -> dict[str, Any]:
        return lra.fit(*merged(*shared, *args))

    return run


def test_neither_layout_nor_micro_batches_nor_buffers_change_a_run(pretrained, monkeypatch):
    check_layouts_and_buffers(pretrained, monkeypatch, "model.dropout=0.1", "model.pooling=cls")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [(), ("batch.layout=padded",), ("model.pooling=cls", "batch.micro=3"), ("attn=butterfly",)]
)
def test_captured_and_eager_agree_on_a_gpu(pretrained, options):
    check_captured(pretrained, "model.dropout=0.1", *options)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_captured_causal_classifier_agrees_with_eager_on_a_gpu(pretrained, layout):
    classifier = ("pretrain=none", "model.causal=true", "model.pooling=last")
    check_captured(pretrained, "model.dropout=0.1", *classifier, f"batch.layout={layout}")


@pytest.mark.parametrize("options", [(), ("pretrain=none", "model.causal=true", "model.pooling=last")])
def test_resuming_changes_nothing(pretrained, monkeypatch, options):
    check_resuming(pretrained, monkeypatch, "model.dropout=0.1", *options)


ABLE = sorted(
    entry.name
    for entry in ATTENTIONS.catalogue().values()
    if ATTENTIONS.facts_of(entry).causal and not entry.missing and not ATTENTIONS.facts_of(entry).needs_gpu
)


@pytest.mark.parametrize("attn", sampled(ABLE))
def test_every_causal_attention_pretrains(attn, pretrained):
    packed, padded = (
        pretrained(f"attn={attn}", f"batch.layout={layout}", f"name={layout}", "trainer.steps=2")
        for layout in ("packed", "padded")
    )
    same(packed, padded)


def test_another_attention_is_refused_before_data_is_read(pretrained):
    with pytest.raises(UsageError, match=r"^attn=linformer supports no causal attention .*, or use attn=.*flash"):
        pretrained("attn=linformer")


def test_no_next_token_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    monkeypatch.chdir(tmp_path)
    train, test = ({"text": [f"{i} {part}" for i in range(20)], "label": [0, 1] * 10} for part in ("train", "test"))
    source = f"task.source={write_imdb(tmp_path / 'imdb', train=train, test=test)}"
    fields = ("task=text", "attn=flash", "recipe=demo", *MODEL, source, "task.max_length=1", "batch.size=4")
    with pytest.raises(UsageError, match="pretrain=causal: no sequence of val has a second token: raise task.max_leng"):
        lra.fit(*fields, "pretrain=causal", "trainer.steps=1", "trainer.eval_every=1")


# task: its data, steps, and whether these suffice to find more than the commonest token
CASES: dict[str, tuple[tuple[str, ...], int, bool]] = {
    "listops": ((*SHORT, "batch.size=32"), 30, False),
    "image": (("batch.size=4", "batch.eval=4"), 20, True),  # every picture is of one grey
    "pathfinder": (("task.train=24", "task.val=6", "task.test=12", "tokens=all", "batch.size=4"), 10, False),
}


@pytest.mark.parametrize("task", sampled(CASES))
def test_pretrained_then_trained(task, tmp_path, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    monkeypatch.chdir(tmp_path)
    fields, steps, learns = CASES[task]
    fields += (plain_images(tmp_path),) if task == "image" else ()
    shared = [f"task={task}", "attn=flash", "recipe=demo", *MODEL, "optim.warmup=10", "trainer.log_every=10", *fields]
    before = lra.fit(*shared, "pretrain=causal", "name=before", "optim.lr=1e-2", f"trainer.steps={steps}",
                     f"trainer.eval_every={steps}")  # fmt: skip
    assert before["pretrain"] == "causal" and before["config"]["pretrain"] == "causal"
    scored = before["test"]
    assert set(scored["baselines"]) == {"majority"}
    assert scored["accuracy"] > scored["baselines"]["majority"] + 0.03 or not learns
    assert scored["n"] == {"image": 20 * 1023, "pathfinder": 12 * 1023}.get(task, scored["n"])
    with console.capture() as said:
        print_scores(before)
    assert "next tokens" in said.get() and "hidden" not in said.get()
    again = lra.test(f"init={before['directory']}", "batch.eval=3", "batch.layout=padded")
    assert again["pretrain"] == "causal" and again["test"]["n"] == scored["n"]
    assert again["test"]["baselines"] == scored["baselines"]
    assert again["test"]["accuracy"] == pytest.approx(scored["accuracy"], abs=1e-3)
    assert again["test"]["loss"] == pytest.approx(scored["loss"], rel=1e-4)

    short = ("trainer.steps=10", "trainer.eval_every=10", f"init={before['directory']}")
    for name, options in (("wide", ()), ("causal", ("model.causal=true", "model.pooling=last"))):
        after = lra.fit(*shared, *short, f"name={name}", *options)
        assert after["status"] == "finished" and "pretrain" not in after
        moved = json.loads(Path(after["directory"], "result.json").read_text())["transfer"]
        kept = {"model.pooling": ["mean", "last"]} if options else {"model.causal": [True, False]}
        assert moved["changed"] == {"pretrain": ["causal", "none"]} | kept
        assert moved["fresh"] == ["head"] and moved["left"] == ["decoder"]
    with pytest.raises(UsageError, match="has no head for this model, and untrained weights can't be scored"):
        lra.test(f"init={before['directory']}", "pretrain=none")


def test_it_moves_to_and_from_hidden_tokens_and_denoising(pretrained):
    causal = pretrained("name=causal")
    moved = pretrained("name=masked", f"init={causal['directory']}", "pretrain=masked")["transfer"]
    assert moved["fresh"] == ["MASK"] and not moved["left"]
    with pytest.raises(UsageError, match="has no MASK for this model, and untrained weights can't be scored"):
        lra.test(f"init={causal['directory']}", "pretrain=masked")
    denoised = pretrained("name=denoised", "pretrain=none", "denoise=1", "model.pooling=mean")
    moved = pretrained("name=back", f"init={denoised['directory']}")["transfer"]
    assert moved["left"] == ["head", "MASK"] and not moved["fresh"]
    assert moved["changed"] == {"model.causal": [False, True], "pretrain": ["none", "causal"], "denoise": [1.0, 0.0]}
