"""Labels with denoising beside them: what the loss is, what evaluation sees, and what other runs take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lra
from lra.errors import UsageError
from lra.training import assembly, fit
from tests.config.effects import merged
from tests.equal_learning import check_captured, check_layouts_and_buffers, check_resuming
from tests.tasks.test_hiding import LAYOUTS, gathered, pairs, split
from tests.tasks.test_masked import MODEL, SHORT


def module(task: str, *args: str) -> Any:
    shared = (f"task={task}", "attn=flash", "recipe=demo", *MODEL, "task.max_length=32", "model.dropout=0.2")
    built = assembly.build_modules(fit.configure([*shared, *args]).config)[1]
    torch.manual_seed(1)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built.train()


@pytest.mark.parametrize(
    "options", [("model.pooling=mean",), ("model.pooling=cls", "mask_loss=all", "mask_random=0.3"), ("mask_span=3",)]
)
@pytest.mark.parametrize(("task", "examples"), [("listops", split()), ("retrieval", pairs())])
def test_the_loss_is_the_same_however_the_batch_is_divided(task, examples, options):
    denoised = module(task, "denoise=0.5", "mask=0.4", *options)
    prefix, named = denoised.model.encoder.prefix, list(denoised.parameters())
    whole = denoised.loss(gathered(examples, prefix=prefix))
    wanted = torch.autograd.grad(whole, named)
    assert all(gradient.any() for gradient in wanted), "all of the model learns"
    for layout in LAYOUTS.values():
        for size in (2, 5, len(examples)):
            parts = (range(i, min(i + size, len(examples))) for i in range(0, len(examples), size))
            batches = [gathered(examples, part, prefix=prefix, **layout) for part in parts]
            total = torch.stack([denoised.loss(batch) for batch in batches]).sum()
            assert float(total.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
            for one, other in zip(torch.autograd.grad(total, named), wanted, strict=True):
                assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize(("task", "examples"), [("listops", split()), ("retrieval", pairs())])
def test_the_loss_is_of_labels_and_tokens_of_one_corrupted_input(task, examples):
    batch = gathered(examples)
    for weight in (0.5, 2.0):
        denoised = module(task, f"denoise={weight}", "mask=0.4")
        shown, hidden = denoised.hiding.hide(batch)
        of_labels = F.cross_entropy(denoised.model(shown).float(), batch.label, reduction="sum")
        of_tokens = denoised.hiding.loss(denoised.model.decoder(denoised.model.encoder.rows(shown)), batch, hidden)
        assert hidden.any() and float(of_tokens) > 0
        assert float(denoised.loss(batch)) == pytest.approx(float(of_labels + weight * of_tokens), rel=1e-5)


@torch.no_grad()
def test_evaluation_reads_the_input_as_it_is():
    denoised, plain = module("listops", "denoise=1", "mask=0.5").eval(), module("listops").eval()
    weights = denoised.model.state_dict()
    kept = {key: value for key, value in weights.items() if not key.startswith("decoder.")}
    kept["encoder.embedding.weight"] = kept["encoder.embedding.weight"][:-1]
    plain.model.load_state_dict(kept)
    batch = gathered(split())
    assert torch.allclose(denoised(batch), plain(batch), atol=1e-6)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """`trained("field=value", …)` trains on ListOps for a few steps and returns the result."""
    monkeypatch.chdir(tmp_path)
    shared = ("task=listops", "attn=flash", "recipe=demo", *MODEL, *SHORT, "denoise=1", "batch.size=8", "batch.eval=16",
              "model.dropout=0.1", "trainer.steps=4", "trainer.eval_every=2", "trainer.log_every=1")  # fmt: skip

    def run(*args: str) -> dict[str, Any]:
        return lra.fit(*merged(*shared, *args))

    return run


def test_neither_layout_nor_micro_batches_nor_buffers_change_a_run(trained, monkeypatch):
    packed = check_layouts_and_buffers(trained, monkeypatch, "mask_loss=all")
    assert "pretrain" not in packed and packed["test"]["n"] == 50


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("batch.layout=padded",), ("model.pooling=cls", "batch.micro=3")])
def test_captured_and_eager_agree_on_a_gpu(trained, options):
    check_captured(trained, *options)


def test_resuming_changes_nothing(trained, monkeypatch):
    check_resuming(trained, monkeypatch)


def test_other_runs_leave_the_decoder_and_the_token_behind(trained):
    first = trained("name=first", "mask=0.3", "model.pooling=cls")
    path = f"init={first['directory']}"
    assert (first["config"]["denoise"], first["config"]["mask"]) == (1.0, 0.3)
    for fields in ((), ("denoise=0", "mask=null")):
        again = lra.test(path, *fields, "batch.eval=3")
        assert again["test"]["accuracy"] == first["test"]["accuracy"]
        assert again["test"]["loss"] == pytest.approx(first["test"]["loss"], rel=1e-4)
    moved = trained("name=plain", path, "denoise=0", "model.pooling=cls")["transfer"]
    assert moved["changed"] == {"denoise": [1.0, 0.0]} and moved["left"] == ["decoder", "MASK"] and not moved["fresh"]
    moved = trained("name=weaker", path, "denoise=0.5", "model.pooling=cls")["transfer"]
    assert moved["changed"] == {"denoise": [1.0, 0.5]} and not moved["left"] and not moved["fresh"]
    moved = trained("name=masked", path, "denoise=0", "pretrain=masked", "model.pooling=cls")["transfer"]
    assert moved["left"] == ["head"] and not moved["fresh"]


def test_it_starts_from_a_pretraining_and_from_labels(trained):
    masked = trained("name=masked", "denoise=0", "pretrain=masked")
    moved = trained("name=tuned", f"init={masked['directory']}")["transfer"]
    assert moved["changed"] == {"pretrain": ["masked", "none"], "denoise": [0.0, 1.0]}
    assert moved["fresh"] == ["head"] and not moved["left"]
    plain = trained("name=plain", "denoise=0")
    assert "denoise" not in plain["config"] and "mask" not in plain["config"]
    beside = trained("name=beside", f"init={plain['directory']}")
    moved = beside["transfer"]
    assert moved["fresh"] == ["decoder", "MASK"] and not moved["left"]
    for run, fields in ((plain, "denoise=1"), (beside, "denoise=2"), (beside, "mask=0.9 mask_random=1 mask_span=4")):
        with pytest.raises(UsageError, match=f"^{fields}: it changes no score of labels; leave it out$"):
            lra.test(f"init={run['directory']}", *fields.split())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("denoise=-1", "denoise=-1.0 must be finite and at least 0"),
        ("denoise=1 pretrain=masked", "denoise=1.0 is beside labels, pretrain=masked has none: choose one"),
        ("denoise=0 mask=0.3", "mask=0.3 says how tokens are hidden: add pretrain=masked or denoise=1"),
        ("denoise=1 mask=1e-6", "mask=1e-06 must be at least 2e-5 and below 1"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(UsageError, match=message):
        fit.configure(["task=listops", "attn=flash", *fields.split()])


@torch.no_grad()
def test_labels_are_smoothed_beside_denoising():
    plain, smoothed = (module("listops", "denoise=0.5", f"optim.label_smoothing={share}") for share in (0, 0.1))
    batch = gathered(split())
    assert float(plain.loss(batch)) != pytest.approx(float(smoothed.loss(batch)), rel=1e-3)
