"""Averages of the weights: what they are, that they are scored and kept, and that training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lra
from lra.config.trainer import TrainerConfig
from lra.errors import UsageError
from lra.training import step as step_module
from lra.training.average import WeightAverage, newest_share
from lra.training.checkpoints import read_checkpoint
from lra.training.fit import configure
from tests.training.conftest import arguments
from tests.training.test_engine import losses, without_graphs  # noqa: F401 - a fixture
from tests.training.test_fit import interrupt_at

EMA = ("trainer.average=ema", "trainer.average_decay=0.7")
TAIL = ("trainer.average=tail", "trainer.average_share=0.5")  # of 12 steps
PLAIN = ("optim.lr=0.01", "optim.warmup=0", "trainer.log_every=1")
Weights = dict[str, torch.Tensor]


def loaded(result: dict[str, Any], name: str = "last.ckpt") -> dict[str, Any]:
    return torch.load(Path(result["directory"], name), weights_only=True)


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-6) for name in a)


@pytest.fixture
def trail(monkeypatch):
    """The weights after each update of a run."""
    found: list[Weights] = []
    update = WeightAverage.update

    def observed(self: WeightAverage) -> None:
        update(self)
        found.append([parameter.detach().clone() for parameter in self.averaged])  # type: ignore[arg-type]

    monkeypatch.setattr(WeightAverage, "update", observed)
    return found


def test_the_shares_of_all_steps_are_those_of_the_average():
    def weighed(config: TrainerConfig, steps: int) -> list[float]:
        shares: list[float] = []
        for step in range(steps):
            newest = newest_share(config, step)
            shares = [share * (1 - newest) for share in shares] + [newest]
        return shares

    ema = TrainerConfig(average="ema", average_decay=0.5)
    assert weighed(ema, 3) == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    tail = TrainerConfig(steps=8, eval_every=8, log_every=8, average="tail", average_share=0.5)
    assert weighed(tail, 8) == pytest.approx([0] * 4 + [0.25] * 4)
    assert weighed(tail, 3) == [0, 0, 1], "before the tail it is the weights"
    short = TrainerConfig(steps=2, eval_every=2, log_every=1, average="tail", average_share=0.1)
    assert weighed(short, 2) == [0, 1], "at least one step"


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("options", [EMA, TAIL], ids=["ema", "tail"])
def test_the_average_is_scored_and_kept_and_training_goes_on_with_the_weights(small, trail, request, engine, options):
    if engine == "static":
        request.getfixturevalue("without_graphs")
    plain = small("name=plain", *PLAIN)
    result = small("name=mean", *PLAIN, *options)
    checkpoint, raw = loaded(result), loaded(plain)["state_dict"]
    assert equal(checkpoint["training_weights"], raw) and losses(result) == losses(plain)
    assert not equal(checkpoint["state_dict"], raw)
    age = range(len(trail) - 1, -1, -1)
    shares = torch.tensor([0.7**each if options == EMA else float(each < 6) for each in age])
    mean = [torch.einsum("n,n...->...", shares / shares.sum(), torch.stack(each)) for each in zip(*trail, strict=True)]
    found = lra.load(Path(result["directory"], "last.ckpt")).parameters()
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, mean, strict=True))
    scored, best = read_checkpoint(result["directory"])[0], loaded(result, "best.ckpt")
    assert equal({f"model.{name}": value for name, value in scored.items()}, best["state_dict"])
    again = lra.test(f"init={result['directory']}")
    assert all(again[split]["accuracy"] == result[split]["accuracy"] for split in ("test", "fresh"))


def test_validation_scores_the_average(small, monkeypatch):
    """There is one validation, and it scores the weights that are kept."""
    seen: list[Weights] = []
    evaluate = step_module.Step.evaluate

    def observed(self: Any, module: Any, batch: Any) -> Any:
        seen.append({name: value.clone() for name, value in module.state_dict().items()})
        return evaluate(self, module, batch)

    monkeypatch.setattr(step_module.Step, "evaluate", observed)
    result = small(*PLAIN, *EMA, "trainer.eval_every=12")
    assert seen and all(equal(each, loaded(result)["state_dict"]) for each in seen)


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("options", [EMA, TAIL], ids=["ema", "tail"])
def test_a_resumed_run_is_the_unbroken_one(small, monkeypatch, request, engine, options):
    if engine == "static":
        request.getfixturevalue("without_graphs")
    whole = small("name=whole", *options)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(9, patch)
        small("name=parts", *options)
    parts = small("name=parts", *options, "resume=auto")
    for name in ("last.ckpt", "best.ckpt"):
        a, b = loaded(whole, name), loaded(parts, name)
        assert equal(a["state_dict"], b["state_dict"]) and equal(a["training_weights"], b["training_weights"])
    assert all(whole[split] == parts[split] for split in ("val", "test", "fresh"))


def test_a_finished_run_goes_on_with_its_training_weights(small):
    constant = (*PLAIN, *EMA, "optim.schedule=constant")
    first = small("name=first", *constant)
    longer = small("name=longer", *constant, "trainer.steps=20", f"resume={first['directory']}/last.ckpt")
    whole = small("name=whole", *constant, "trainer.steps=20")
    assert equal(loaded(longer)["training_weights"], loaded(whole)["training_weights"])
    assert equal(loaded(longer)["state_dict"], loaded(whole)["state_dict"])


def test_a_layout_changes_no_average(small):
    plain = (*PLAIN, *EMA, "model.attn_dropout=0", "model.dropout=0")
    packed, padded = (small(f"name={layout}", f"batch.layout={layout}", *plain) for layout in ("packed", "padded"))
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-4)
    assert packed["test"]["loss"] == pytest.approx(padded["test"]["loss"], rel=1e-3)


def test_a_run_without_an_average_says_nothing_of_it(small):
    assert "training_weights" not in loaded(small())
    saved = configure(arguments()).config.to_saved_dict()["trainer"]
    assert not [name for name in saved if name.startswith("average")]
    assert configure(arguments("trainer.average=ema")).config.to_saved_dict()["trainer"]["average"] == "ema"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["trainer.average_decay=0.9"], "trainer.average_decay=0.9 needs trainer.average=ema: set that, or leave it"),
        ([*EMA, "trainer.average_share=0.5"], "trainer.average_share=0.5 needs trainer.average=tail: set that"),
        ([*EMA, "trainer.average_decay=1"], "trainer.average_decay=1.0 must be above 0 and below 1"),
        ([*TAIL, "trainer.average_share=0"], "trainer.average_share=0.0 must be above 0 and at most 1"),
        (["trainer.average=swa"], "trainer.average=swa: write none, ema or tail"),
    ],
)
def test_an_average_that_can_not_be_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        configure(list({field.partition("=")[0]: field for field in arguments(*fields)}.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [EMA, TAIL], ids=["ema", "tail"])
def test_a_captured_average_is_the_eager_one(small, options):
    """The two round differently, and Adam enlarges that. An average is far from the weights of the last step."""
    shared = ("trainer.accelerator=gpu", "model.attn_dropout=0", *PLAIN, *options)
    runs = [loaded(small(f"name={engine}", f"engine={engine}", *shared)) for engine in ("eager", "captured")]
    eager, captured, last = (
        torch.cat([weight.flatten() for weight in weights.values()])
        for weights in (*(run["state_dict"] for run in runs), runs[1]["training_weights"])
    )
    assert (captured - eager).norm() < 0.05 * (captured - last).norm()
