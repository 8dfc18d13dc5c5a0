"""Each check of the contract fails for an attention or mixer that breaks it, and `lra check` says so."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention, Mixer
from lra.models.conformance.checks import CHECKS, COMPILED
from lra.models.conformance.report import CheckResult, check_component
from lra.models.conformance.subject import Subject
from tests.command_line import lra, refused

SHAPE, LAYOUTS, SHORT, PADDING, NEIGHBOURS, ORDER, STRIDES, CAUSAL, DIFFERENCES, DROPOUT, SEEDS, EVALUATION = list(
    CHECKS
)[:12]
CHECKPOINT, AUTOCAST, EXACT, _ = list(CHECKS)[12:]


class Softmax(Attention):
    """Keeps all properties. What follows breaks one of them at a time."""

    reads_padding = sees_later = drops_always = False

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.spec.head_dim**-0.5

    def forward(self, q, k, v, batch):
        q, k, v = (batch.pad(x).transpose(1, 2) for x in (q, k, v))
        hidden = ~batch.mask()[:, None, None, :]
        if self.spec.causal and not self.sees_later:
            place = torch.arange(batch.max_length, device=q.device)
            hidden = hidden | (place > place[:, None])
        scores = self.scores(q, k)
        if not self.reads_padding:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        rate = self.spec.dropout if self.drops_always else self.dropout_rate
        out = F.dropout(scores.softmax(-1), rate).to(v.dtype) @ v
        return batch.unpad(out.transpose(1, 2))


class OneHead(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch)[:, :1]


class Double(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch).double()


class OtherWhenPadded(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch) * (1.1 if batch.padded else 1.0)


class OtherGradientWhenPadded(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v.detach() if batch.padded else v, batch)


class DividesByLengthMinusOne(Softmax):
    def forward(self, q, k, v, batch):
        out = super().forward(q, k, v, batch)
        return out + batch.per_row(0.0 / (batch.length - 1))[:, None, None]


class DividesByLongest(Softmax):
    """NaN only if no sequence has two tokens."""

    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch) + 0.0 / (batch.length.max() - 1)


class ReadsPadding(Softmax):
    reads_padding = True


class SeesNeighbours(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch) + 0.01 * v.mean(0)


class KnowsItsPlace(Softmax):
    def forward(self, q, k, v, batch):
        place = batch.per_row(torch.arange(batch.size, device=v.device))
        return super().forward(q, k, v, batch) * (1 + 0.01 * place)[:, None, None]


class TakesRowsForContiguous(Softmax):
    def forward(self, q, k, v, batch):
        v = v.as_strided(v.shape, (v.shape[1] * v.shape[2], v.shape[2], 1))
        return super().forward(q, k, v, batch)


class SeesLater(Softmax):
    sees_later = True


class SeesLaterALittle(Softmax):
    """Less than rounding, and yet no rounding."""

    def forward(self, q, k, v, batch):
        shown = batch.pad(v)
        shown = shown.masked_fill(~batch.mask()[:, :, None, None], 0)
        return super().forward(q, k, v, batch) + 2e-8 * batch.unpad(shown.sum(1, keepdim=True).expand_as(shown))


class HalfTheGradient(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, (k + k.detach()) / 2, v, batch)


class InfiniteGradient(Softmax):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) + (q - q).abs().sum(-1, keepdim=True).sqrt()


class NoGradient(Softmax):
    @torch.no_grad()
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch)


class DropsInEvaluation(Softmax):
    drops_always = True


class NeverDrops(Softmax):
    dropout_rate = 0.0  # type: ignore[assignment]


class DropsWithoutScaling(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch) * (1 - self.dropout_rate)


class DrawsWithoutSeed(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch) * (1 + 0.1 * random.random() * self.training)


class DrawsTheSame(Softmax):
    def forward(self, q, k, v, batch):
        torch.manual_seed(3)
        return super().forward(q, k, v, batch)


class DrawsInEvaluation(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch) + 0.01 * torch.randn_like(v[:1])


class NeedsASeed(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch) + 0 * batch.seed


class ForgetsItsFeatures(Softmax):
    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.features = torch.randn(spec.head_dim, spec.head_dim)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q @ self.features, k)


class HasNoHalf(Softmax):
    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.features = nn.Parameter(torch.eye(spec.head_dim))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            return super().scores(q @ self.features, k)


class Overflows(Softmax):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) + (torch.inf if q.dtype == torch.bfloat16 else 0)


class OtherScale(Softmax):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * (1 + 1e-4)


class OtherGradient(Softmax):
    """Its result is right to the last bit."""

    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch) + 1e-4 * (v - v.detach())


class DecidesOnTheHost(Softmax):
    def forward(self, q, k, v, batch):
        return super().forward(q, k, v, batch) if v.sum().item() else v


BROKEN = {
    OneHead: SHAPE, Double: SHAPE, OtherWhenPadded: LAYOUTS, OtherGradientWhenPadded: LAYOUTS,
    DividesByLengthMinusOne: SHORT, DividesByLongest: SHORT, ReadsPadding: PADDING, SeesNeighbours: NEIGHBOURS,
    KnowsItsPlace: ORDER, TakesRowsForContiguous: STRIDES, SeesLater: CAUSAL, SeesLaterALittle: CAUSAL,
    HalfTheGradient: DIFFERENCES,
    InfiniteGradient: DIFFERENCES, NoGradient: DIFFERENCES, DropsInEvaluation: DROPOUT, NeverDrops: DROPOUT,
    DropsWithoutScaling: DROPOUT, DrawsWithoutSeed: SEEDS, DrawsTheSame: SEEDS, DrawsInEvaluation: EVALUATION,
    NeedsASeed: EVALUATION, ForgetsItsFeatures: CHECKPOINT, HasNoHalf: AUTOCAST, Overflows: AUTOCAST,
    OtherScale: EXACT, OtherGradient: EXACT, DecidesOnTheHost: COMPILED,
}  # fmt: skip


def failures(subject: Subject, compile: bool = False) -> dict[str, str]:
    return {name: why for name, status, why in check_component(subject, compile) if status == "failed"}


@pytest.mark.parametrize("ragged", [True, False])
def test_an_attention_that_keeps_all_passes(registered, ragged):
    results = [*check_component(registered(Softmax, ragged=ragged), True)]
    assert results == [CheckResult(name, "passed") for name in CHECKS]


@pytest.mark.parametrize(("broken", "asked"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_breaks_a_property_fails_its_check(registered, broken, asked):
    found = failures(registered(broken), compile=asked == COMPILED)
    assert asked in found and "\n" not in found[asked] and len(found[asked]) < 300


def test_each_property_is_broken_once():
    assert {*BROKEN.values()} == {*CHECKS}


def test_what_is_wrong_with_an_approximate_attention_is_found_without_a_reference(registered):
    """As no budget speaks."""
    found = failures(registered(ReadsPadding, exact=False, causal=False, dropout=False))
    assert PADDING in found and EXACT not in found


class OwnProjection(Attention):
    """Reads no q and no k, and has a linear layer: in training its fp32 weights meet bf16 only under autocast."""

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.linear = nn.Linear(spec.head_dim, spec.head_dim)

    def forward(self, q, k, v, batch):
        return self.linear(v)


def test_no_more_is_asked_than_the_contract_says(registered):
    subject = registered(OwnProjection, exact=False, dropout=False, causal=False)
    found = {name: (status, why) for name, status, why in check_component(subject)}
    unasked = {name: why for name, (status, why) in found.items() if status == "not asked"}
    assert unasked.keys() == {CAUSAL, DROPOUT, EXACT, COMPILED} and "compile=true" in unasked[COMPILED]
    assert "dropout=False" in unasked[DROPOUT] and all(status != "failed" for status, _ in found.values())


class ReadsRowBefore(Mixer):
    """Which belongs to the sequence before, if it is packed."""

    def mix(self, x, batch):
        return x.roll(1, 0)


class ReadsOwnRowBefore(Mixer):
    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.linear = nn.Linear(spec.d_model, spec.d_model)

    def mix(self, x, batch):
        return self.linear(batch.unpad(F.pad(batch.pad(x), (0, 0, 1, 0))[:, :-1]))


def test_a_mixer_is_asked_for_the_same(registered):
    facts = {"mixes": True, "exact": False}
    assert {LAYOUTS, PADDING, NEIGHBOURS, ORDER} <= failures(registered(ReadsRowBefore, **facts), True).keys()


@pytest.mark.parametrize("ragged", [True, False])
def test_a_mixer_that_keeps_all_passes(registered, ragged):
    subject = registered(ReadsOwnRowBefore, mixes=True, exact=False, ragged=ragged)
    assert failures(subject, True) == {} and len([*subject.inputs()]) == 1


class Jumps(Attention):
    def forward(self, q, k, v, batch):
        return (1e4 * v).round() / 1e3 + v - v.detach()


def test_what_jumps_is_compared_with_no_differences(registered):
    subject = registered(Jumps, exact=False, dropout=False, causal=False)
    status, why = next((status, why) for name, status, why in check_component(subject) if name == DIFFERENCES)
    assert status == "not asked" and "jumps" in why


@pytest.mark.parametrize(("dims", "multiple", "chosen"), [((1, 1024), 1, 16), ((20, 64), 8, 24), ((1, 12), 8, 8)])
def test_the_head_dimension_is_one_that_it_supports(registered, dims, multiple, chosen):
    subject = registered(Softmax, head_dims=dims, head_dim_multiple=multiple)
    assert subject.head_dim == chosen and subject.build().spec.head_dim == chosen


@pytest.mark.parametrize("name", ["flash", "linear", "megatron"])
def test_the_verb_passes_built_in_attentions(name):
    done = lra("check", f"attn={name}", "device=cpu")
    rows = {row[0]: row[1] for row in done.rows}
    assert done.code == 0 and rows.keys() == {*CHECKS} and "failed" not in rows.values()
    assert rows[COMPILED] == "not asked" and rows[PADDING] == "passed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, entry in ATTENTIONS.catalogue().items() if not ATTENTIONS.facts_of(entry).needs_gpu]
)
def test_the_verb_passes_every_attention_that_runs_on_a_cpu(name):
    done = lra("check", f"attn={name}", "device=cpu", "compile=true")
    assert done.code == 0 and {row[1] for row in done.rows} <= {"passed", "not asked"}


def test_the_verb_names_what_fails_and_exits_with_1(registered):
    registered(HasNoHalf)
    done = lra("check", "attn=trial", "device=cpu")
    rows = {row[0]: row[1:] for row in done.rows}
    assert done.code == 1 and rows[AUTOCAST][0] == "failed"
    assert "RuntimeError" in rows[AUTOCAST][1] and "(test_conformance.py, line " in rows[AUTOCAST][1]
    assert done.out.splitlines()[-1] == "13 passed, 2 failed, 1 not asked"


def test_options_of_the_attention_are_those_of_fit():
    done = lra("check", "attn=linformer", "attn.k=4", "device=cpu")
    assert done.code == 0 and done.out.startswith("attn=linformer on cpu, float32")
    assert Subject("linformer", options=("k=4",)).build().config.k == 4
    for field, message in (
        ("attn.kk=4", "attn=linformer: unknown field 'kk': did you mean 'k'"),
        ("attn.k=0", "attn.k=0 must be at least 1"),
        ("task=listops", "unknown field 'task'"),
        ("device=tpu", "device=tpu: write cpu, cuda or null"),
    ):
        refused(lra("check", "attn=linformer", field), message)


def test_what_can_not_be_checked_here_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(lra("check"), "attn= missing: attn= is one of bigbird, ")
    refused(lra("check", "attn=flahs"), "unknown attention 'flahs': did you mean 'flash'")
    refused(lra("check", "attn=flex"), "attn=flex supports GPUs only")
    refused(lra("check", "attn=flash", "device=cuda"), "PyTorch finds no GPU")
