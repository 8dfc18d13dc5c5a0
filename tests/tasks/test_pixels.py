"""Pixels as numbers in training: what hides them, the two losses, and that runs do not depend on their batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lra
from lra.batch import IGNORED_LABEL, Batch
from lra.data.split import Split
from lra.errors import UsageError
from lra.models.pixels import grey_values
from lra.tasks.hiding import hidden_rows
from lra.training import assembly, fit
from tests.config.effects import merged
from tests.equal_learning import check_captured, check_layouts_and_buffers, check_resuming, same
from tests.tasks.test_hiding import LAYOUTS, gathered, split
from tests.tasks.test_masked import MODEL, plain_images

NUMBERS, LIT = "model.pixels=numbers", {"threshold": 8}
PIXELS = split(vocabulary=256)


def module(*args: str, task: str = "pathfinder", std: float = 0.3) -> Any:
    """A module in training. All of its parameters are drawn, so that predictions differ; with `std=0` none is."""
    shared = (f"task={task}", "attn=flash", "recipe=demo", *MODEL, NUMBERS, "model.dropout=0.2")
    given = {arg.partition("=")[0]: arg for arg in (*shared, *args)}
    built = assembly.build_modules(fit.configure(list(given.values())).config)[1]
    torch.manual_seed(1)
    for parameter in built.parameters() if std else ():
        torch.nn.init.normal_(parameter, std=std)
    return built.train()


def changed(batch: Batch, tokens: torch.Tensor) -> Batch:
    return dataclasses.replace(batch, tokens=tokens.to(batch.tokens.dtype))


OBJECTIVES = ("pretrain=masked", "denoise=0.5")
HOW = {
    "l1": ("pixel_loss=l1",),
    "all": ("pixel_loss=l1", "mask_loss=all", "mask_random=0.3", "model.pooling=cls", "model.axes=2"),
    "cross_entropy": ("model.positions=sinusoidal",),
}


@pytest.mark.parametrize("options", [{}, LIT], ids=["all", "lit"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_is_the_same_however_the_batch_is_divided(objective, how, options):
    pretraining = module(objective, "mask=0.4", *HOW[how])
    options = {**options, "prefix": pretraining.model.encoder.prefix}
    named = list(pretraining.parameters())
    whole = pretraining.loss(gathered(PIXELS, **options))
    wanted = torch.autograd.grad(whole, named)
    assert all(gradient.any() for gradient in wanted), "all of the model learns"
    for layout in LAYOUTS.values():
        for size in (5, len(PIXELS)):
            parts = (range(i, min(i + size, len(PIXELS))) for i in range(0, len(PIXELS), size))
            batches = [gathered(PIXELS, part, **options, **layout) for part in parts]
            total = torch.stack([pretraining.loss(batch) for batch in batches]).sum()
            assert float(total.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
            for one, other in zip(torch.autograd.grad(total, named), wanted, strict=True):
                assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@torch.no_grad()
def test_l1_is_the_mean_distance_of_grey_values_and_accuracy_counts_the_nearest():
    pretraining, batch = module("pretrain=masked", "mask=0.5", "pixel_loss=l1"), gathered(PIXELS)
    decoded, hidden = pretraining.find(batch)
    assert decoded.shape == (len(batch.tokens), 1) and decoded.dtype == torch.float32 and 0 < hidden.sum() < len(hidden)
    target, losses = pretraining.hiding.losses(decoded, batch, hidden)
    distance = (decoded[:, 0] - grey_values(batch.tokens, 256)).abs()
    assert torch.equal(losses, distance.where(hidden, 0)) and torch.equal(target != IGNORED_LABEL, hidden)
    by_hand = sum(
        float(losses[start : start + length].sum()) / (0.5 * length)
        for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True)
    )
    assert float(pretraining.loss(batch)) == pytest.approx(by_hand, rel=1e-5)

    pretraining.eval()
    batch = dataclasses.replace(batch, seed=None)
    decoded, hidden = pretraining.find(batch)
    exact = (decoded[:, 0] - grey_values(batch.tokens, 256)).abs() < 1 / 255
    found, loss, *counts = pretraining(batch).tolist()
    assert found == int((exact & hidden).sum()) and len(counts) == 256 and sum(counts) == int(hidden.sum())
    assert loss == pytest.approx(float(pretraining.hiding.losses(decoded, batch, hidden)[1].sum()))
    near = grey_values(batch.tokens, 256)[:, None] + 0.9 / 255
    assert torch.equal(pretraining.hiding.predicted_tokens(near), batch.tokens.long())


@torch.no_grad()
def test_l1_beside_labels_is_weighted():
    batch = gathered(PIXELS)
    denoised = module("denoise=0.5", "mask=0.4", "pixel_loss=l1")
    shown, hidden = denoised.hiding.hide(batch)
    rows = denoised.model.encoder.rows(shown)
    of_labels = F.cross_entropy(denoised.model(shown).float(), batch.label, reduction="sum")
    of_pixels = denoised.hiding.loss(denoised.model.decoder(rows), batch, hidden)
    assert float(denoised.loss(batch)) == pytest.approx(float(of_labels + 0.5 * of_pixels), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("options", [(), ("mask_random=0.3", "mask_span=2", "model.pooling=cls")])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_hidden_pixel_is_not_read_and_another_is(objective, options):
    pretraining = module(objective, "mask=0.5", "pixel_loss=l1", *options)
    prefix, hiding, encoder = pretraining.model.encoder.prefix, pretraining.hiding, pretraining.model.encoder
    batch = gathered(PIXELS, prefix=prefix)
    hidden = hidden_rows(batch, 0.5, prefix, hiding.side)
    before = encoder.rows(hiding.hide(batch)[0])
    other = changed(batch, torch.where(hidden, 255 - batch.tokens, batch.tokens))
    assert not torch.equal(other.tokens, batch.tokens)
    assert torch.equal(encoder.rows(hiding.hide(other)[0]), before)
    seen = ~hidden & (batch.tokens < 256)
    other = changed(batch, torch.where(seen, 255 - batch.tokens, batch.tokens))
    assert not torch.equal(encoder.rows(hiding.hide(other)[0]), before)


@torch.no_grad()
def test_hidden_pixels_are_flagged_and_random_ones_are_grey_values():
    batch = gathered(PIXELS)
    for share, flagged in ((0.0, 1.0), (0.4, 0.6), (1.0, 0.0)):
        pretraining = module("pretrain=masked", "mask=0.5", f"mask_random={share}")
        shown, hidden = pretraining.hiding.hide(batch)
        embedding, tokens = pretraining.model.encoder.embedding, shown.tokens[hidden]
        assert float((tokens == embedding.mask).float().mean()) == pytest.approx(flagged, abs=0.15)
        inputs = torch.stack((grey_values(tokens, 256).where(tokens < 256, 0), (tokens >= 256).float()), 1)
        torch.testing.assert_close(embedding(tokens), F.linear(inputs, embedding.weight, embedding.bias))


@torch.no_grad()
@pytest.mark.parametrize("task", ["image", "pathfinder"])
def test_one_level_of_grey_changes_scores_little(task):
    """Of a table neighbouring levels are as different as any."""
    rng = np.random.default_rng(0)
    images = Split.from_offsets(rng.integers(1, 255, 4 * 1024).astype(np.uint8), np.arange(5) * 1024)
    batch = gathered(images, max_length=1024)
    steps = torch.from_numpy(rng.choice([-1, 1], 4 * 1024))
    moved = {}
    for kind in ("ids", "numbers"):
        plain = module(f"model.pixels={kind}", task=task, std=0).eval()
        scores, other = (plain(each) for each in (batch, changed(batch, batch.tokens + steps)))
        far = plain(changed(batch, 255 - batch.tokens))
        moved[kind] = float((scores - other).abs().max() / (scores - far).abs().max())
    assert moved["numbers"] < 0.05 and moved["ids"] > 10 * moved["numbers"]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """`trained("field=value", …)` trains on lit pixels for a few steps and returns the result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    shared = ("task=pathfinder", "task.tokens=lit", "task.train=24", "task.val=6", "task.test=12", "attn=flash",
              "recipe=demo", *MODEL, NUMBERS, "pixel_loss=l1", "batch.size=8", "batch.eval=8", "model.dropout=0.1",
              "trainer.steps=4", "trainer.eval_every=2", "trainer.log_every=1")  # fmt: skip

    def run(*args: str) -> dict[str, Any]:
        return lra.fit(*merged(*shared, *args))

    return run


def test_neither_layout_nor_micro_batches_nor_buffers_change_a_run(trained, monkeypatch):
    how = ("pretrain=masked", "mask_random=0.3", "mask_loss=all", "model.pooling=cls")
    check_layouts_and_buffers(trained, monkeypatch, *how)
    same(trained("name=beside", "denoise=1"), trained("name=padded_beside", "denoise=1", "batch.layout=padded"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        ("pretrain=masked",),
        ("pretrain=masked", "batch.layout=padded", "pixel_loss=cross_entropy"),
        ("pretrain=masked", "model.pooling=cls", "batch.micro=3", "mask_random=0.3", "mask_loss=all"),
        ("denoise=1", "task.tokens=all"),
        ("pixel_loss=cross_entropy",),
    ],
)
def test_captured_and_eager_agree_on_a_gpu(trained, options):
    check_captured(trained, *options)


@pytest.mark.parametrize("objective", [("pretrain=masked",), ("denoise=1",), ("pixel_loss=cross_entropy",)])
def test_resuming_changes_nothing(trained, monkeypatch, objective):
    check_resuming(trained, monkeypatch, *objective)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["l1", "cross_entropy"])
def test_images_are_pretrained_then_trained(loss, tmp_path, monkeypatch):
    """Each image has one grey, which hidden pixels have, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    shared = ("task=image", "attn=flash", "recipe=demo", *MODEL, NUMBERS, plain_images(tmp_path), "batch.size=4",
              "batch.eval=4", "optim.warmup=5", "optim.lr=1e-2", "trainer.log_every=10")  # fmt: skip
    before = lra.fit(*shared, "pretrain=masked", f"pixel_loss={loss}", "name=before", "trainer.steps=30",
                     "trainer.eval_every=30")  # fmt: skip
    assert before["config"]["model"]["pixels"] == "numbers"
    assert before["config"].get("pixel_loss") == (None if loss == "cross_entropy" else loss)
    # without learning the mean distance is half of the range, 0.5, and the cross-entropy log 256
    assert before["test"]["loss"] < (0.15 if loss == "l1" else 3.0)
    again = lra.test(f"init={before['directory']}", "batch.eval=3", "batch.layout=padded")
    assert again["test"]["loss"] == pytest.approx(before["test"]["loss"], rel=1e-3)
    after = lra.fit(*shared, "name=after", f"init={before['directory']}", "trainer.steps=10", "trainer.eval_every=10")
    assert after["status"] == "finished" and after["test"]["n"] == 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("pixel_loss=l1", "pretrain=masked"), "pixel_loss=l1 is of numbers, not of ids: set model.pixels=numbers"),
        (("pixel_loss=l1", NUMBERS), "pixel_loss=l1, but nothing is hidden: add pretrain=masked or denoise=1"),
        (("pixel_loss=l2", NUMBERS, "pretrain=masked"), "pixel_loss"),
        ((NUMBERS, "model.positions=rotary", "model.embedding_std=1"), "leaves no table to draw, nor a CLS token"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(UsageError, match=message) as error:
        fit.configure(["task=pathfinder", "attn=flash", "recipe=demo", *fields])
    assert "\n" not in str(error.value)


def test_a_task_without_an_image_is_refused():
    with pytest.raises(UsageError, match="model.pixels=numbers needs an image task: use model.pixels=ids here"):
        module(task="listops")


def test_options_at_their_defaults_are_not_saved():
    saved = fit.configure(["task=pathfinder", "attn=flash", "pretrain=masked"]).config.to_saved_dict()
    assert "pixels" not in saved["model"] and "pixel_loss" not in saved
