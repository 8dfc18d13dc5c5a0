"""Every registered attention and mixer, those of installed packages too, keeps the contract on every device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lra.batch import Batch
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS, Capabilities
from lra.models.attention.base import Attention
from lra.models.conformance.checks import CHECKS, COMPILED, DIFFERENCES
from lra.models.conformance.expectations import NotAsked
from lra.models.conformance.subject import Subject

CATALOGUE = ATTENTIONS.catalogue()
EVERY = {name: ATTENTIONS.facts_of(entry) for name, entry in CATALOGUE.items()}
FACTS = {name: facts for name, facts in EVERY.items() if not facts.mixes}
PATTERNS = ("bigbird", "butterfly", "local", "longformer", "openai_sparse")  # have a layout, with a reference
UNCOMPILED = {"flex": "calls torch.compile itself", "flash_attn": "is left out of graphs"}


def subjects(
    able: Callable[[Capabilities], bool] = lambda facts: True,
    slow: Sequence[str] = (),
    of: Mapping[str, Capabilities] = FACTS,
):
    """For each test the attentions with these facts, on the CPU and on a GPU, with what each needs to run.

    They are all attentions unless `of` has others. Those named `slow` are left to make test-all.
    """
    params = []
    for name, facts in of.items():
        missing = CATALOGUE[name].missing
        marks = [pytest.mark.skip(reason=f"{name} needs {', '.join(missing)}")] if missing else []
        marks += [pytest.mark.slow] * (name in slow)
        for device in ("cuda",) if facts.needs_gpu else ("cpu", "cuda"):
            gpu = [pytest.mark.gpu] if device == "cuda" else []
            params.append(pytest.param(Subject(name, device), marks=marks + gpu, id=f"{name}-{device}"))
    return pytest.mark.parametrize("subject", [param for param in params if able(of[param.values[0].name])])


def attend(attention: Attention, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention.attend(q, k, v, batch)


@pytest.mark.parametrize("asked", [name for name in CHECKS if name != COMPILED])
@subjects(of=EVERY)
def test_it_keeps_what_every_attention_must_keep(subject, asked):
    """What is not asked of it is what it says that it lacks."""
    facts = EVERY[subject.name]
    unasked = {
        "causal: no later token is seen": not facts.causal,
        "dropout acts in training alone, and keeps the mean": not facts.dropout,
        "it equals the reference in float64 within the budget": not facts.exact and subject.name not in PATTERNS,
        DIFFERENCES: subject.device == "cuda",
    }
    try:
        CHECKS[asked](subject)
    except NotAsked:
        assert unasked.get(asked)


@subjects(
    slow=[name for name in FACTS if name not in ("butterfly", "flash", "performer", "standard")], of=EVERY
)  # half a minute for all of them
def test_torch_compile_makes_one_graph_with_the_same_result_and_gradients(subject):
    if subject.name in UNCOMPILED:
        pytest.skip(f"{subject.name} {UNCOMPILED[subject.name]}")
    CHECKS[COMPILED](subject)


@subjects()
def test_half_precision_stays_half(subject):
    """That of lra's own, and without autocast, too: `lra bench attention` casts the module instead."""
    if subject.name not in ATTENTIONS.builtins():
        pytest.skip("the contract asks for neither")
    module, batch = subject.build().eval(), subject.batch()
    for autocast in (True, False):
        with torch.autocast(subject.device, torch.bfloat16, autocast):
            assert subject.call(module, batch, *(x.bfloat16() for x in subject.inputs())).dtype == torch.bfloat16


@subjects(lambda facts: facts.dropout)
def test_the_share_that_is_dropped_has_steps_of_1_in_256(subject):
    attention: Any = subject.build(dropout=0.3)
    assert attention.train().dropout_rate == 77 / 256


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("flash", {"head_dim": 192, "dropout": 0.1}, "attn=flash supports head dimensions 1 to 128, not 192"),
        ("linear", {"dropout": 0.1}, "attn=linear supports no dropout on its probabilities: set model.attn_dropout=0"),
        ("cudnn", {"head_dim": 20}, "attn=cudnn supports head dimensions that are multiples of 8, not 20"),
    ],
)
def test_what_is_named_in_place_of_an_attention_can_do_what_it_was_asked_for(name, asked, message):
    with pytest.raises(UsageError, match=f"^{message}, or use attn=") as error:
        Subject(name, "cpu").build(**asked)
    others = str(error.value).rpartition("attn=")[2].split("|")
    assert "standard" in others and not any(CATALOGUE[other].missing for other in others)
    for other in others:
        Subject(other, "cpu").build(**asked)


def test_an_attention_that_needs_a_gpu_says_so_before_training():
    attention: Any = Subject("standard", "cpu").build()
    attention.facts = dataclasses.replace(attention.facts, needs_gpu=True)
    assert attention.resolve(torch.device("cuda"), "bf16") == "standard"
    with pytest.raises(UsageError, match=r"attn=standard supports GPUs only, or use attn=.*flash"):
        attention.resolve(torch.device("cpu"), "bf16")


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("shape", [(1, 16), (2, 1), (2, 16, 1), (2,)])
def test_an_attention_that_returns_another_shape_is_refused(shape, ragged):
    """Most of these the residual would broadcast, and training would go on."""
    subject = Subject("linear", "cpu")
    attention: Any = subject.build()
    attention.facts = dataclasses.replace(attention.facts, ragged=ragged, rotates=False)
    attention.forward = lambda q, k, v, batch: v.new_zeros(len(v), *shape)
    with pytest.raises(
        UsageError, match=r"linear.py:\d+: .*attn=linear\) returns \[\d+, .* for values of \[\d+, 2, 16\]: return a"
    ):
        attention.attend(*subject.inputs()[:3], subject.batch())
