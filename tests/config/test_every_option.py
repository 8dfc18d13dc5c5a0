"""Every option does something: another value changes what a run does, or is refused. That it is stated is not enough.

Fields come from the dataclasses, components from the registries, and other values from a field's type. Tables here
only say what a field needs beside it, or which values do the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch

import lra
from lra.bench.sparse import PEERS
from lra.config.compose import flatten
from lra.config.model import ModelConfig
from lra.config.recipes import read_recipe, recipe_names
from lra.config.registry import Registry
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.tasks import TASKS
from lra.training import fit as fit_module
from lra.training.fit import configure
from tests.config.baseline import (
    BESIDE,
    DATA,
    IMAGES,
    INTERPRETED,
    LARGEST,
    LONGEST,
    OF_IMAGES,
    ON_GPU,
    OPTION_SAME,
    OPTION_VALUES,
    OPTIONS,
    OPTIONS_BESIDE,
    RUN,
    SAME,
    VALUES,
)
from tests.config.effects import (
    Refused,
    Work,
    alternatives,
    digest,
    fitted,
    idle,
    leaves,
    merged,
    ragged,
    refusing,
    served,
    text,
)
from tests.fixtures import pngs, write_aan_papers, write_cifar10, write_imdb

CHANCE = np.random.default_rng(0)


pytestmark = pytest.mark.usefixtures("here", "one_thread")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs to start from, by their positions."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {
            kind: str(folder / lra.fit(*merged(*RUN, f"model.positions={kind}"))["directory"])
            for kind in ("learned", "sinusoidal")
        }


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Data sets for the tasks that draw none, as fields."""
    folder = tmp_path_factory.mktemp("sources")
    words = ["".join(CHANCE.choice(list("abcdef "), 15 + 2 * i)) for i in range(30)]
    reviews = {"text": words, "label": [0, 1] * 15}
    others = {"text": [word[::-1] for word in words], "label": [0, 1] * 15}
    images, unlike = (
        {"img": pngs(CHANCE.integers(0, 256, (20, 32, 32, 3), np.uint8)), "label": [*range(10)] * 2} for _ in range(2)
    )
    papers = {f"P{i}": word for i, word in enumerate(words)}
    pairs = [(i % 2, f"P{i}", f"P{(7 * i + 3) % 30}") for i in range(30)]
    aan = write_aan_papers(folder / "aan", papers, train=pairs, val=pairs[:6], test=pairs[6:12])
    return {
        "text": {"source": str(write_imdb(folder / "imdb", train=reviews, test=others))},
        "image": {"source": str(write_cifar10(folder / "cifar", train=images, test=unlike))},
        "retrieval": {"source": str(aan), "dataset": "scisumm"},
    }


@pytest.fixture
def small_data(sources, tmp_path_factory, monkeypatch):
    """A task's fields with which its data are small; imported data have a folder of their own."""

    def fields(task: str) -> dict[str, Any]:
        known = {field.name for field in dataclasses.fields(TASKS.get(task).Config)}
        if task in sources:
            monkeypatch.setenv("LRA_DATA", str(tmp_path_factory.getbasetemp() / f"every-option-{task}"))
        return {name: value for name, value in DATA.items() if name in known} | sources.get(task, {})

    return fields


def fields_of_run() -> list[str]:
    """All but those of the components, which are in tests of their own."""
    return [name for name, _, _ in leaves(configure(RUN).config) if not name.startswith(("task.", "attn."))]


def on_task(*args: str) -> tuple[str, ...]:
    """The baseline's run on another task."""
    return tuple(merged(*(arg for arg in RUN if not arg.startswith("task")), *args))


def problem(field: str, base: tuple[str, ...], finished: dict[str, str], seen: dict[Any, Any]) -> str:
    """What is wrong with a field of a run, by real runs."""
    beside = [arg for arg in BESIDE.get(field, ()) if possible(arg, base)]
    args = merged(*base, *(arg.format(**finished) for arg in beside))
    composed = refusing(lambda: configure(args).config)
    example = configure(base).config if isinstance(composed, Refused) else composed
    hint, value = {name: (hint, value) for name, hint, value in leaves(example)}[field]
    groups = VALUES[field]() if field in VALUES else alternatives(hint, value)
    same = SAME.get(field, ())
    if field.startswith("attn."):
        groups, same = OPTION_VALUES.get(field[5:]) or groups, OPTION_SAME.get(field[5:], ())
    pixels = TASKS.get(example.task.name).grid(example.task)
    if field == "batch.layout" and pixels and getattr(example.task, "tokens", "all") == "all":  # all of one length
        same = ("packed", "padded")

    def act(*given: str) -> Any:
        own = f"run{next(COUNT)}"  # a directory, as a finished run is not done again
        run = fitted(*merged(*args, f"name={own}", *given))
        return run | {"name": run["name"].replace(own, "")} if isinstance(run, dict) else run

    if (key := tuple(args)) not in seen:
        seen[key] = act()
    return idle(seen[key], lambda other: act(f"{field}={text(other).format(**finished)}"), groups, same)


def possible(arg: str, base: tuple[str, ...]) -> bool:
    """Whether a task can have what a field needs beside it."""
    if arg.startswith("task.max_length="):
        return "task.max_length=" in str(base)
    task = configure(base).config.task
    return not arg.startswith("model.pixels=") or TASKS.get(task.name).grid(task) is not None


COUNT = itertools.count()


@pytest.fixture(scope="module")
def seen():
    """What baselines do, so that each is run once."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("field", fields_of_run())
def test_a_field_of_the_run(field, finished, seen):
    of_images = field.startswith("augment.") and field != "augment.operands"
    assert not problem(field, on_task(*IMAGES) if of_images else RUN, finished, seen)


@pytest.mark.slow
@pytest.mark.parametrize("field", OF_IMAGES)
def test_a_field_of_images(field, seen):
    base = on_task(*IMAGES)
    taken = fitted(*merged(*base, *BESIDE.get(field, ()), f"{field}={OF_IMAGES[field]}", "name=taken"))
    assert not isinstance(taken, Refused), taken
    assert not problem(field, base, {}, seen)


def test_a_run_is_seen_as_it_was_before_and_a_field_that_nothing_reads_is_found(monkeypatch, finished):
    model = dataclasses.make_dataclass("Model", [("idle", int, 3)], bases=(ModelConfig,), frozen=True)
    fields = [("model", model, dataclasses.field(default_factory=model)), ("unread", bool, True)]
    monkeypatch.setattr(fit_module, "RunConfig", dataclasses.make_dataclass(
        "Run", fields, bases=(RunConfig,), frozen=True
    ))  # fmt: skip
    for field in ("model.idle", "unread"):
        assert "changes nothing" in problem(field, RUN, finished, {})


def test_a_type_that_is_not_known_fails():
    with pytest.raises(pytest.fail.Exception, match="no other value is known of the type dict"):
        alternatives(dict[str, int], {})


# attentions, alone


def attentions() -> list[tuple[Registry, str]]:
    return [(registry, name) for registry in (ATTENTIONS, PEERS) for name in registry.catalogue()]


def attended(cls: Any, options: dict[str, Any], max_length: int = LONGEST) -> Any:
    """What an attention has and computes in two training steps; if it is refused here, what it is made of."""
    torch.manual_seed(0)
    try:
        config = cls.Config(**options)
        dropout = 0.25 if cls.facts.dropout else 0.0
        attention = cls(config, AttentionSpec(2, 16, max_length, dropout)).train()
        layout = getattr(attention, "layout", None)
        made = digest(attention.state_dict() | ({} if layout is None else {"layout": layout.blocks}))
        if layout is not None:
            made["rules"] = str((layout.block, layout.band, layout.globals, layout.causal))
    except UsageError as error:
        return Refused(str(error))
    try:
        attention.resolve(torch.device("cpu"), cls.facts.dtypes[0])
    except UsageError as error:
        return Refused(str(error), made)
    results: dict[str, Any] = {}
    steps = (1,) if options.get("impl") == "triton" else (1, 2)  # interpreted
    with Work() as work:
        for seed in steps:
            batch = ragged(max_length, not cls.facts.ragged, seed)
            shape = (3, batch.tokens.numel(), 2, 16)
            q, k, v = (x.requires_grad_() for x in torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
            torch.manual_seed(seed)
            out = attention.mix_ragged(q.flatten(1), batch) if cls.facts.mixes else attention(q, k, v, batch)
            out.square().sum().backward()
            results |= {
                f"{name}{seed}": x
                for name, x in (("o", out), ("q", q.grad), ("k", k.grad), ("v", v.grad))
                if x is not None
            }
    grads = {name: p.grad for name, p in attention.named_parameters()}
    return {"made": made, "results": digest(results | grads), "work": work.done}


def small_options(cls: Any) -> dict[str, Any]:
    """The defaults, but for those that would see all of a short sequence."""
    options = {}
    for field in dataclasses.fields(cls.Config):
        value = OPTIONS.get(field.name, field.default)
        options[field.name] = min(value, LARGEST) if type(value) is int else value
    return options


def options_problem(registry: Registry, name: str, skip: Collection[str]) -> str:
    """What is wrong with the options of an attention."""
    cls, ours = registry.get(name), registry is ATTENTIONS  # peers refuse what chooses among butterfly's own kernels
    for field, hint, _ in leaves(cls.Config()):
        if field in skip:
            continue
        options = small_options(cls)
        options |= {key: value for key, value in OPTIONS_BESIDE.get(field, {}).items() if ours and key in options}
        groups = OPTION_VALUES.get(field) or alternatives(hint, options[field])
        act = lambda value, o=options, f=field: attended(cls, o | {f: value})  # noqa: E731
        if wrong := idle(attended(cls, options), act, groups, OPTION_SAME.get(field, ()) if ours else ()):
            return f"attn.{field}: {wrong}"
    return ""


@pytest.mark.parametrize("interpreted", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("registry", "name"), attentions(), ids=lambda x: x if isinstance(x, str) else "")
def test_an_option_of_an_attention(registry, name, interpreted):
    if missing := registry.catalogue()[name].missing:
        pytest.skip(f"needs {', '.join(missing)}")
    cls = registry.get(name)
    names = {field for field, _, _ in leaves(cls.Config())}
    if cls.facts.needs_gpu:
        assert "GPUs only" in attended(cls, small_options(cls)).why
        names -= ON_GPU
    assert not options_problem(registry, name, ON_GPU | (names - INTERPRETED if interpreted else INTERPRETED))


# tasks, by their data


def fields_of_tasks() -> list[Any]:
    long = {name for name in TASKS.catalogue() if TASKS.get(name).facts.length > 4096}
    return [
        pytest.param(task, field.name, marks=[pytest.mark.slow] if task in long else [])
        for task in TASKS.catalogue()
        for field in dataclasses.fields(TASKS.get(task).Config)
    ]


@pytest.mark.parametrize(("task", "field"), fields_of_tasks())
def test_a_field_of_a_task(task, field, small_data, seen):
    beside = dict(arg.removeprefix("task.").split("=") for arg in BESIDE.get(f"task.{field}", ()))
    fields, kind = small_data(task) | beside, (task, *beside)
    if kind not in seen:
        seen[kind] = served(task, fields)
    example = TASKS.get(task).Config(**fields)
    hint, value = {name: (hint, value) for name, hint, value in leaves(example)}[field]
    act = lambda value: served(task, fields | {field: value})  # noqa: E731
    assert not idle(seen[kind], act, alternatives(hint, value))


# recipes


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_key_of_a_recipe_reaches_a_run(recipe):
    """Some run of it has the value from just there."""
    content = read_recipe(recipe)
    tasks, attns = content["tasks"], content.get("attns") or {}
    label = f"recipe/{recipe}.yaml"
    reached = set()
    plain = next(
        entry.name for entry in ATTENTIONS.catalogue().values() if entry.name not in attns and not entry.missing
    )
    for task, attn in itertools.product(tasks, attns):
        if task in attns[attn] or (task == next(iter(tasks)) and "all" in attns[attn]):
            composed = configure([f"task={task}", f"attn={attn}", f"recipe={recipe}", "init=other"])
            reached |= {(origin, field) for field, origin in composed.origin.items()}
    for task in tasks:
        composed = configure([f"task={task}", f"attn={plain}", f"recipe={recipe}", "init=other"])  # no rule applies
        reached |= {(origin, field) for field, origin in composed.origin.items()}
    keys = {(label, field) for field, _ in flatten(content["defaults"])}
    keys |= {(f"{label} {task}", field) for task in tasks for field, _ in flatten(tasks[task] or {})}
    for attn, sections in attns.items():
        keys |= {(f"{label} {attn}.{part}", field) for part in sections for field, _ in flatten(sections[part])}
    assert keys <= reached


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipe_names())
def test_what_a_recipe_says_of_an_attention_suits_it(recipe):
    content = read_recipe(recipe)
    for attn, task in itertools.product(content.get("attns") or {}, content["tasks"]):
        config = configure([f"task={task}", f"attn={attn}", f"recipe={recipe}"]).config
        model = config.model
        spec = AttentionSpec(model.heads, model.head_dim, min(config.task.max_length, 4096), model.attn_dropout)
        ATTENTIONS.get(attn)(config.attn, spec).resolve(torch.device("cpu"), config.trainer.precision)


@pytest.mark.gpu
@pytest.mark.parametrize(("registry", "name"), attentions(), ids=lambda x: x if isinstance(x, str) else "")
def test_an_option_of_compilation(registry, name, monkeypatch):
    """It is how torch.compile is called."""
    if registry.catalogue()[name].missing:
        with pytest.raises(UsageError):
            registry.get(name)
        return
    cls = registry.get(name)
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: asked.append(how) or function)
    for field, hint, value in leaves(cls.Config()):
        for (choice,) in alternatives(hint, value) if field in ON_GPU else ():
            from lra.models.attention import flex

            flex._compiled.cache_clear()
            attention = cls(cls.Config(**{field: choice}), AttentionSpec(2, 16, 256))
            attention.dense(*torch.randn(3, 1, 256, 2, 16, device="cuda"))
            assert {"mode": choice} in asked  # beside what flex_attention itself asks for
            asked.clear()
            flex._compiled.cache_clear()


# all of it, by real runs


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS.catalogue())
def test_every_field_of_a_run_of_each_task(task, small_data):
    data = [f"task.{name}={text(value)}" for name, value in small_data(task).items()]
    model = ("model.d_model=8", "model.heads=1", "model.layers=1", "model.attn_dropout=0", "batch.size=2")
    base = on_task(f"task={task}", "attn=linear", *model, *data)
    finished = {
        kind: lra.fit(*merged(*base, f"model.positions={kind}", f"name={kind}"))["directory"]
        for kind in ("learned", "sinusoidal")
    }
    seen: dict[Any, Any] = {}
    known = [name for name, _, _ in leaves(configure(base).config)]
    wrong = {field: found for field in known if (found := problem(field, base, finished, seen))}
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("attn", ATTENTIONS.catalogue())
def test_every_option_of_an_attention_in_real_runs(attn, finished):
    if ATTENTIONS.catalogue()[attn].missing:
        return
    cls, seen = ATTENTIONS.get(attn), {}
    for name, _, _ in leaves(cls.Config()):
        if name in ON_GPU:
            continue
        options = small_options(cls) | {k: v for k, v in OPTIONS_BESIDE.get(name, {}).items() if hasattr(cls.Config, k)}
        args = [f"attn.{key}={text(value)}" for key, value in options.items()]
        base = tuple(merged(*RUN, f"attn={attn}", "model.attn_dropout=0", *args))
        assert not problem(f"attn.{name}", base, finished, seen), name
