"""Optimisers by name, and parameter groups."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lra
from lra.config.optim import OPTIM_OPTIONS, OptimConfig
from lra.errors import UsageError
from lra.models.positions import LearnedPositions
from lra.tasks.base import TaskModule
from lra.training import optim
from lra.training.assembly import build_modules
from lra.training.checkpoints import read_checkpoint
from lra.training.fit import configure
from lra.training.optim import OPTIMIZERS
from tests.training.conftest import arguments
from tests.training.test_engine import losses, without_graphs  # noqa: F401 - a fixture
from tests.training.test_faults import inject, same, state
from tests.training.test_fit import interrupt_at

SGD = "optim.name=sgd"
# options that are not the defaults, as far as an optimiser has them
OPTIONS: dict[str, Any] = {"betas": (0.7, 0.8), "eps": 1e-4, "momentum": 0.5}
NOT_ADAMW = [name for name in OPTIMIZERS if name != "adamw"]


def config_of(name: str, **options: Any) -> OptimConfig:
    named = {option: value for option, value in OPTIONS.items() if name in OPTIM_OPTIONS[option]}
    return OptimConfig(name, **({"lr": 0.01, "weight_decay": 0.1} | named | options))  # type: ignore[arg-type]


def beside(name: str) -> tuple[str, ...]:
    """What a run needs beside an optimiser's name: the recipe sets betas."""
    momentum, betas = (name in OPTIM_OPTIONS[option] for option in ("momentum", "betas"))
    return ("optim.momentum=0.9",) * momentum + ("optim.betas=null",) * (not betas)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))


def take(module: nn.Module, update: Any, number: int) -> None:
    """A step, whose gradients depend on its number."""
    for parameter in module.parameters():
        parameter.grad = torch.cos(parameter.detach() + number)
    update()


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and moments."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [*weights, *(value for each in optimizer.state.values() for value in each.values())]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_is_pytorchs_with_the_options_that_it_has(name):
    config, plain = config_of(name), {"adamw": "AdamW", "adam": "Adam", "adamax": "Adamax", "nadam": "NAdam",
        "radam": "RAdam", "rmsprop": "RMSprop", "sgd": "SGD"}  # fmt: skip
    ours, theirs = model(), model()
    optimizer = optim.make_optimizer(config, ours)
    options = {option: value for option, value in OPTIONS.items() if name in OPTIM_OPTIONS[option]}
    other = getattr(torch.optim, plain[name])(theirs.parameters(), lr=0.01, weight_decay=0.1, **options)
    for number in range(3):
        optimizer.set_rate(0.01 * (number + 1))
        other.param_groups[0]["lr"] = 0.01 * (number + 1)
        take(ours, optimizer.update, number)
        take(theirs, other.step, number)
    assert all(torch.equal(a, b) for a, b in zip(states(optimizer), states(other), strict=True))
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0].keys() == other.param_groups[0].keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_is_taken_back_leaves_nothing(name):
    """As on a GPU, where no host looks: the first update, of which no state is there, and a later one."""
    skipping, plain = (optim.make_optimizer(config_of(name), model()) for _ in range(2))
    modules = [nn.ParameterList(each.param_groups[0]["params"]) for each in (skipping, plain)]
    for number, out in enumerate((1.0, 0.0, 1.0, 0.0)):
        take(modules[0], lambda out=out: skipping._update_unless(torch.tensor(out)), number)
        if not out:
            take(modules[1], plain.update, number)
    assert all(torch.equal(a, b) for a, b in zip(states(skipping), states(plain), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_has_the_moments_and_not_the_options(name):
    before, after = (
        optim.make_optimizer(config_of(name), model()),
        optim.make_optimizer(config_of(name, lr=0.5), model()),
    )
    module, other = (nn.ParameterList(each.param_groups[0]["params"]) for each in (before, after))
    take(module, before.update, 0)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert after.param_groups[0]["lr"] == 0.5
    with torch.no_grad():
        for one, two in zip(other, module, strict=True):
            one.copy_(two)
    after.set_rate(0.01)
    for each, optimizer in ((module, before), (other, after)):
        take(each, optimizer.update, 1)
    assert all(torch.equal(a, b) for a, b in zip(states(before), states(after), strict=True))


@pytest.mark.parametrize("options", [(SGD, "optim.momentum=0.9", "optim.betas=null"), ("optim.name=nadam",)])
@pytest.mark.parametrize("engine", ["eager", "static"])
def test_a_run_with_another_optimiser_learns_skips_and_resumes(small, monkeypatch, request, engine, options):
    if engine == "static":
        request.getfixturevalue("without_graphs")
    lr = ("optim.lr=0.01", "optim.clip=1", "trainer.on_nan=skip")
    inject(monkeypatch, "loss", 1, 6)
    whole = small("name=whole", *options, *lr)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(7, patch)
        small("name=parts", *options, *lr)
    parts = small("name=parts", *options, *lr, "resume=auto")
    assert whole["skipped_updates"] == parts["skipped_updates"] == 2 and losses(whole) == losses(parts)
    assert same(*(state(Path(each["directory"], "last.ckpt")) for each in (whole, parts)))
    assert min(losses(whole)) < losses(whole)[0]


def test_what_an_older_lra_trained_is_the_default_and_says_nothing_new():
    assert "name" not in configure(arguments()).config.to_saved_dict()["optim"]
    run = configure(arguments(SGD, "optim.momentum=0.9", "optim.betas=null")).config
    assert run.optim.betas is run.optim.eps is None
    assert run.to_saved_dict()["optim"].keys() == {
        "name",
        "lr",
        "momentum",
        "weight_decay",
        "clip",
        "schedule",
        "warmup",
    }
    cooled = configure(
        arguments("optim.schedule=constant", "optim.warmup=0", "optim.cooldown=3")
    ).config.to_saved_dict()["optim"]
    assert cooled["cooldown"] == 3 and "cooldown_to" not in cooled


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["optim.name=lion"], r"optim.name=lion: write adamw, adam, .* or sgd"),
        (["optim.momentum=0.9"], "optim.momentum=0.9: optim.name=adamw does not have that; set optim.momentum=null"),
        (
            [SGD, "optim.eps=1e-6"],
            r"optim.betas=\[0.9, 0.98\], .*eps=1e-06: .*sgd .*set optim.betas=null optim.eps=null",
        ),
        ([SGD, "optim.betas=null", "optim.momentum=1"], "optim.momentum=1.0 must be at least 0 and below 1"),
        (["optim.decay=matrices", "optim.weight_decay=0"], "optim.decay=matrices, but nothing decays"),
    ],
)
def test_an_option_that_an_optimiser_has_not_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        configure(arguments(*fields))


def test_the_layer_of_a_pixel_is_an_embedding_and_does_not_decay_where_matrices_do():
    fields = ("task=pathfinder", "attn=flash", "recipe=demo", "model.pixels=numbers")
    module = build_modules(configure(fields).config)[1]
    groups = optim.parameter_groups(OptimConfig(weight_decay=0.1, decay="matrices"), module)
    (others,) = (group["params"] for group in groups if "weight_decay" in group)
    assert any(parameter is module.model.encoder.embedding.weight for parameter in others)


def test_norms_biases_and_embeddings_do_not_decay_where_matrices_do():
    module = build_modules(configure(arguments("attn=linformer", "model.attn_dropout=0")).config)[1]
    names = {parameter: name for name, parameter in module.named_parameters()}
    decaying, others = optim.parameter_groups(OptimConfig(weight_decay=0.1, decay="matrices"), module)
    if "weight_decay" in decaying:
        decaying, others = others, decaying
    assert others["weight_decay"] == 0 and "weight_decay" not in decaying
    left = {names[parameter] for parameter in others["params"]}
    assert all(parameter.ndim > 1 for parameter in decaying["params"])
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding | LearnedPositions)]
    assert len(tables) == 2 and {names[p] for table in tables for p in table.parameters()} <= left
    assert {name for name in left if names and module.get_parameter(name).ndim > 1} == {
        names[p] for table in tables for p in table.parameters()
    }
    assert len(decaying["params"]) + len(others["params"]) == len(names)


def test_coefficients_and_norms_of_more_than_one_axis_do_not_decay_where_matrices_do():
    for attn, kept in (("mega", (".average.", ".scale", ".shift")), ("lsformer", ("token_norm.", "landmark_norm."))):
        fields = ("task=listops", f"attn={attn}", "recipe=demo", "model.attn_dropout=0")
        module = build_modules(configure(fields).config)[1]
        groups = optim.parameter_groups(OptimConfig(weight_decay=0.1, decay="matrices"), module)
        decaying = {parameter for group in groups if "weight_decay" not in group for parameter in group["params"]}
        named = {name: p for name, p in module.named_parameters() if any(part in name for part in kept)}
        assert len(named) > 3 and not decaying & {*named.values()}


def marked(monkeypatch: pytest.MonkeyPatch, **mark: Any) -> None:
    """Marks the last bias of every module's head, as code of a component does."""
    network = TaskModule.network

    def marking(self: TaskModule) -> Any:
        made: Any = network(self)
        made.head[-1].bias._optim = mark
        return made

    monkeypatch.setattr(TaskModule, "network", marking)


@pytest.mark.parametrize("engine", ["eager", "static"])
def test_a_mark_gives_a_parameter_its_own_rate_and_decay(small, monkeypatch, request, engine):
    if engine == "static":
        request.getfixturevalue("without_graphs")
    one = ("trainer.steps=2", "trainer.eval_every=2", "trainer.log_every=1", "optim.lr=0.01", "optim.clip=null",
           "optim.schedule=linear", "optim.warmup=0", "optim.weight_decay=0.5")  # fmt: skip
    start = build_modules(configure(arguments(*one)).config)[1].model.state_dict()
    plain = small(*one, "name=plain")
    marked(monkeypatch, lr=0.0)
    still = small(*one, "name=still")
    a, b = (read_checkpoint(result["directory"])[0] for result in (plain, still))
    name = "head.2.bias"
    assert torch.equal(b[name], start[name]) and not torch.equal(a[name], start[name])
    assert any(not torch.equal(b[key], start[key]) for key in b)
    marked(monkeypatch, lr=0.03, weight_decay=0.0)
    whole = small(*one, "name=whole")
    moments = torch.load(Path(whole["directory"], "last.ckpt"), weights_only=True)["optimizer_states"][0]
    assert [(len(group["params"]), group["weight_decay"]) for group in moments["param_groups"]][1] == (1, 0.0)
    assert [float(group["lr"]) for group in moments["param_groups"]] == pytest.approx([0.0, 0.0], abs=1e-9)
    longer = (*one, "trainer.steps=4")
    unbroken = small(*longer, "name=unbroken")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(3, patch)
        small(*longer, "name=parts")
    parts = small(*longer, "name=parts", "resume=auto")
    assert same(*(state(Path(each["directory"], "last.ckpt")) for each in (unbroken, parts)))


def test_the_schedule_scales_a_marked_rate_in_proportion():
    module = model()
    module[1].bias._optim = {"lr": 0.03, "weight_decay": 0.2}  # type: ignore[union-attr]
    module[2].bias._optim = {"weight_decay": 0.2}  # type: ignore[union-attr]
    optimizer = optim.make_optimizer(OptimConfig(lr=0.01, weight_decay=0.1), module)
    optimizer.set_rate(0.005)
    rates = [(len(group["params"]), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert rates == [(3, 0.005, 0.1), (1, pytest.approx(0.015), 0.2), (1, 0.005, 0.2)]


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ({"rate": 0.1}, r"is marked with _optim\['rate'\]: a mark has lr and weight_decay, leave it out"),
        ({"lr": -1}, r"is marked with _optim\['lr'\]=-1: write a finite number, at least 0"),
        ({"weight_decay": "no"}, r"is marked with _optim\['weight_decay'\]=no: write a finite number"),
    ],
)
def test_a_mark_that_is_not_understood_is_refused_before_the_run(small, monkeypatch, mark, message):
    marked(monkeypatch, **mark)
    with pytest.raises(UsageError, match=rf"head.*bias {message}"):
        small("name=marked")
    assert not Path("checkpoints/runs/listops/flash/marked-s0/result.json").exists()


def test_a_checkpoint_whose_marks_were_others_is_refused(small, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(7, patch)
        small("name=parts")
    marked(monkeypatch, lr=0.03)
    with pytest.raises(UsageError, match=r"the checkpoint's optimiser has groups of \[\d+\] parameters, .* \[\d+, 1\]"):
        small("name=parts", "resume=auto")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("decay", ["all", "matrices"])
def test_every_optimiser_can_be_captured(small, name, decay):
    options = (f"optim.name={name}", f"optim.decay={decay}", "optim.weight_decay=0.1", "optim.lr=3e-4", *beside(name))
    shared = ("trainer.accelerator=gpu", "trainer.steps=20", "trainer.eval_every=20", "model.attn_dropout=0")
    names = ("eager", "captured")
    eager, captured = (small(f"name={engine}", f"engine={engine}", *shared, *options) for engine in names)
    assert (eager["engine"], captured["engine"]) == names
    assert losses(captured) == pytest.approx(losses(eager), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("engine", ["captured", "eager"])
def test_every_optimiser_skips_on_a_gpu(small, monkeypatch, name, engine):
    """The first step, of which no state is there, the second, which is captured, and one that is replayed."""
    inject(monkeypatch, "loss", 1, 2, 33)
    gpu = ("trainer.accelerator=gpu", "trainer.steps=40", "trainer.eval_every=20", "trainer.log_every=10")
    result = small(f"engine={engine}", "trainer.on_nan=skip", f"optim.name={name}", *beside(name), *gpu)
    assert result["skipped_updates"] == 3 and result["engine"] == engine
    moments = state(Path(result["directory"], "last.ckpt"))
    assert all(value.isfinite().all() for value in moments.values())
    assert {float(value) for key, value in moments.items() if key.endswith(" step")} <= {37.0}


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_run_of_every_optimiser_resumes(small, monkeypatch, name):
    options = (f"optim.name={name}", *beside(name), "attn.deterministic=true", "trainer.accelerator=gpu")
    whole = small("name=whole", *options)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        interrupt_at(6, patch)
        small("name=parts", *options)
    parts = small("name=parts", "resume=auto", *options)
    assert losses(parts)[-1:] == pytest.approx(losses(whole)[-1:], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("engine", ["captured", "eager"])
def test_a_run_of_every_optimiser_moves_to_a_gpu_and_back(small, name, engine):
    options = (f"optim.name={name}", *beside(name))
    begun = small("name=begun", *options)
    gpu = ("trainer.accelerator=gpu", f"engine={engine}", f"resume={begun['directory']}/last.ckpt")
    there = small("name=there", *options, "trainer.steps=24", *gpu)
    back = small("name=back", *options, "trainer.steps=36", f"resume={there['directory']}/last.ckpt")
    assert (there["engine"], there["steps"], back["engine"], back["steps"]) == (engine, 24, "eager", 36)


@pytest.mark.gpu
def test_a_mark_is_obeyed_in_a_captured_step(small, monkeypatch):
    marked(monkeypatch, lr=0.0, weight_decay=0.0)
    gpu = ("trainer.accelerator=gpu", "engine=captured", "optim.lr=0.01", "optim.weight_decay=0.5", "name=marked")
    weights = read_checkpoint(small(*gpu)["directory"])[0]
    start = build_modules(lra.load("checkpoints/runs/listops/flash/marked-s0").run)[1].model.state_dict()
    name = "head.2.bias"
    assert torch.equal(weights[name], start[name]) and not all(torch.equal(weights[k], start[k]) for k in start)


def test_an_optimiser_is_fused_as_its_device_wants_whatever_the_checkpoint_says():
    weight = torch.nn.Parameter(torch.ones(3))
    before, after = (optim.AdamW([weight], fused=fused) for fused in (False, True))
    weight.grad = torch.ones(3)
    before.step()
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert after.param_groups[0]["fused"] and not before.param_groups[0]["fused"]
    after.step()
    assert after.state[weight]["step"] == 2


@pytest.mark.parametrize("most", [optim.MOST_PIECES, 1])
def test_the_fused_update_in_pieces_is_that_of_whole_tensors(most, monkeypatch):
    """As many as they come to, or as few as that many."""
    cuts, update = [], torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *lists, **options: cuts.append(len(lists[0])) or update(*lists, **options)
    )
    monkeypatch.setattr(optim, "MOST_PIECES", most)
    torch.manual_seed(0)
    start = [
        torch.randn(3),
        torch.randn(2 * optim.PIECE_SIZE + 5),
        torch.randn(optim.PIECE_SIZE // 64, 64),
        torch.zeros(0, 4),
    ]
    updated = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        weights = [torch.nn.Parameter(each.clone()) for each in start]
        optimizer = kind(weights, 0.01, (0.8, 0.9), 1e-5, weight_decay=0.3, fused=True)
        for step in range(3):
            for weight in weights[step == 1 :]:  # once one has no gradient
                weight.grad = torch.cos(weight.detach() + step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
        updated.append([*weights, *moments])
    for ours, theirs in zip(*updated, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert max(cuts) == (6 if most > 1 else 4)


def test_an_optimiser_that_was_captured_on_a_gpu_goes_on_on_a_cpu():
    weight = torch.nn.Parameter(torch.ones(3))
    before, after = optim.AdamW([weight], fused=False), optim.AdamW([weight], fused=False)
    weight.grad = torch.ones(3)
    before.step()
    before.param_groups[0].update(lr=torch.tensor(1e-3), capturable=True)
    after.load_state_dict(before.state_dict())
    after.param_groups[0]["lr"] = 1e-3  # as the eager step does
    after.step()
    assert after.state[weight]["step"] == 2
