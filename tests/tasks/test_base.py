"""The loss of every task that has labels."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from lra.batch import IGNORED_LABEL
from lra.data.split import Split
from lra.errors import UsageError
from lra.training.assembly import build_modules
from lra.training.fit import configure
from tests.training.conftest import arguments, small  # noqa: F401 - a fixture

DRAWN = np.random.default_rng(0)
SPLIT = Split.from_offsets(DRAWN.integers(0, 15, 60, np.uint8), np.array([0, 20, 32, 60]), np.array([9, 0, 4]))


@pytest.mark.parametrize("options", [{}, {"layout": "padded"}, {"multiple": 128}], ids=["packed", "padded", "filled"])
def test_a_smoothed_label_is_partly_of_every_class_and_what_fills_a_batch_up_has_none(options):
    fields = arguments("optim.label_smoothing=0.2", "model.dropout=0", "model.attn_dropout=0")
    module = build_modules(configure(fields).config)[1]
    batch = SPLIT.collate(np.arange(3), max_length=32, **options).to("cpu")
    scores, real = module(batch).detach(), batch.label != IGNORED_LABEL
    wanted = 0.8 * torch.eye(10)[batch.label[real]] + 0.02
    expected = -(wanted * scores[real].log_softmax(1)).sum()
    assert real.sum() == 3 and float(module.loss(batch).detach()) == pytest.approx(float(expected), rel=1e-5)


def test_a_smoothed_loss_is_of_training_alone(small):  # noqa: F811
    """With a learning rate that moves nothing, validation and test say the same with smoothing."""
    still = ("optim.lr=1e-30", "optim.warmup=0", "model.dropout=0", "model.attn_dropout=0")
    plain, smoothed = (small(*still, f"optim.label_smoothing={share}", f"name=s{share}") for share in (0, 0.3))
    assert all(plain[split] == smoothed[split] for split in ("val", "test", "fresh"))
    curves = []
    for result in (plain, smoothed):
        with Path(result["directory"], "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        curves.append({name: [row[name] for row in rows if row[name]] for name in ("train/loss", "val/loss")})
    assert curves[0]["val/loss"] == curves[1]["val/loss"] and curves[0]["train/loss"] != curves[1]["train/loss"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["pretrain=masked"], "pretrain=masked trains without labels, set optim.label_smoothing=0"),
        (["optim.label_smoothing=1"], "optim.label_smoothing=1.0 must be at least 0 and below 1"),
    ],
)
def test_smoothing_that_can_not_be_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        configure(arguments("optim.label_smoothing=0.1", *fields))
