"""Mixers, beside what test_attention.py asks of each; each is the recurrence that its paper states."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.bench.cases import make_batch
from lra.errors import UsageError
from lra.kernels.convolution import convolve, fft_length
from lra.models.attention import ATTENTIONS, Capabilities, gla
from lra.models.attention.base import AttentionSpec, Mixer
from lra.training.fit import configure

CPU = torch.device("cpu")
LENGTHS = (5, 0, 17, 1, 70)
CATALOGUE = {name: entry for name, entry in ATTENTIONS.catalogue().items() if ATTENTIONS.facts_of(entry).mixes}
HERE = sorted(name for name, entry in CATALOGUE.items() if not entry.missing and not entry.facts.get("needs_gpu"))
mixers = pytest.mark.parametrize("name", HERE)
directions = pytest.mark.parametrize("causal", [False, True])


def build(name: str, causal: bool = False, max_length: int = 70, **options: Any) -> Mixer:
    torch.manual_seed(0)
    cls = ATTENTIONS.get(name)
    if name == "mega":
        options = {"inner": "standard"} | options  # flash takes no float64
    return cls(cls.Config(**options), AttentionSpec(2, 8, max_length, causal=causal)).double().eval()


def rows_of(batch: Batch) -> Tensor:
    return torch.randn(batch.tokens.numel(), 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def each(batch: Batch) -> Iterator[slice]:
    """The rows of each sequence."""
    for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True):
        yield slice(start, start + length)


@mixers
@directions
def test_sequences_are_apart_and_a_causal_mixer_does_not_look_ahead(name, causal):
    if causal and not CATALOGUE[name].facts.get("causal"):
        with pytest.raises(UsageError, match="no causal attention"):
            build(name, causal=True)
        return
    mixer, batch = build(name, causal), make_batch(LENGTHS, False, CPU)
    x = rows_of(batch).requires_grad_()
    out = mixer.mix_ragged(x, batch)
    sequence, place = slice(5, 22), 14  # the third one, and a row in it
    (grad,) = torch.autograd.grad(out[place].sum(), x, retain_graph=True)
    seen = grad.abs().sum(1) > 1e-12
    assert seen[place] and seen[sequence][:5].any() and seen[place + 1 : sequence.stop].any() != causal
    assert not seen[: sequence.start].any() and not seen[sequence.stop :].any()
    for own in each(batch):  # alone as in the batch
        if own.stop > own.start:
            alone = mixer.mix_ragged(x[own], make_batch((own.stop - own.start,), False, CPU))
            torch.testing.assert_close(alone, out[own])


@mixers
def test_a_batch_may_have_no_token(name):
    mixer, batch = build(name), make_batch((0, 0), False, CPU)
    batch = dataclasses.replace(batch, max_length=1, tokens=batch.tokens[:0])
    x = torch.zeros(0, 16, dtype=torch.float64, requires_grad=True)
    mixer.mix_ragged(x, batch).sum().backward()
    assert x.grad is not None and all(p.grad is None or p.grad.isfinite().all() for p in mixer.parameters())


@mixers
def test_torch_compile_makes_one_graph_for_any_number_of_rows(name):
    mixer, shapes = build(name), []

    def count(graph: Any, inputs: Any) -> Any:
        shapes.append(inputs)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(mixer.mix_ragged, backend=count, fullgraph=True)
    for lengths in (LENGTHS, (9, 30, 2, 70, 8), (70, 70, 1, 3, 4)):  # of one batch size and longest sequence
        batch = make_batch(lengths, False, CPU)
        x = rows_of(batch)
        for rows in (x, batch.tokens):
            torch._dynamo.maybe_mark_dynamic(rows, 0)
        torch.testing.assert_close(compiled(x, batch), mixer.mix_ragged(x, dataclasses.replace(batch)))
    torch.compiler.reset()
    assert len(shapes) == 1


# the recurrences of the papers, token by token, in float64 and complex arithmetic


def s4d_by_steps(mixer: Any, x: Tensor) -> Tensor:
    step = mixer.log_step.exp()[:, None]
    a = torch.complex(-mixer.log_decay.exp(), mixer.frequency)
    kept, held = (step * a).exp(), ((step * a).exp() - 1) / a
    y = mixer.skip * x
    for direction, c in enumerate(torch.complex(*mixer.output)):
        state, found = torch.zeros_like(a), []
        for u in x.flip(0) if direction else x:
            if direction:  # what came before this token
                found.append(2 * (c * state).sum(1).real)
            state = kept * state + held * u[:, None]
            if not direction:
                found.append(2 * (c * state).sum(1).real)
        if found:
            y = y + torch.stack(found[::-1] if direction else found)
    return F.glu(mixer.gated(F.gelu(y)), -1)


def gla_by_steps(mixer: Any, x: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(-1, (2, -1)) for layer in (mixer.query, mixer.key, mixer.value))
    total = torch.zeros_like(v)
    for direction, fade in enumerate(mixer.fades):
        gate = (fade(x).sigmoid() ** (1 / mixer.config.temperature)).clamp(min=math.exp(-5)).unflatten(-1, (2, -1))
        state, found = v.new_zeros(2, k.shape[-1], v.shape[-1]), []
        order = range(len(x))
        for t in reversed(order) if direction else order:
            state = gate[t, :, :, None] * state + k[t, :, :, None] * v[t, :, None]
            found.append(torch.einsum("hk,hkv->hv", q[t], state) * k.shape[-1] ** -0.5)
        if found:
            total = total + torch.stack(found[::-1] if direction else found)
    return mixer.output(mixer.norm(total).flatten(1) * F.silu(mixer.gate(x)))


BY_STEPS = {"s4d": s4d_by_steps, "gla": gla_by_steps}


@pytest.mark.parametrize("name", BY_STEPS)
@directions
def test_result_and_gradients_are_those_of_the_recurrence(name, causal):
    mixer, batch = build(name, causal), make_batch(LENGTHS, False, CPU)
    if name == "gla":  # gates of all sizes, and below the least one
        with torch.no_grad():
            for fade in mixer.fades:  # type: ignore[union-attr]
                fade[1].bias.copy_(torch.linspace(-150, 5, len(fade[1].bias)))
    x = rows_of(batch).requires_grad_()
    out, expected = mixer.mix_ragged(x, batch), torch.cat([BY_STEPS[name](mixer, x[own]) for own in each(batch)])
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-8)
    weights, leaves = torch.randn_like(out), [x, *mixer.parameters()]
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), leaves) for y in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", BY_STEPS)
def test_fp32_stays_near_the_recurrence_on_long_sequences(name):
    mixer, batch = build(name, max_length=1500), make_batch((1500,), False, CPU)
    x = rows_of(batch)
    expected = BY_STEPS[name](mixer, x)
    torch.testing.assert_close(mixer.float().mix_ragged(x.float(), batch).double(), expected, atol=1e-4, rtol=1e-3)


def test_gates_that_forget_at_once_are_finite_in_fp32():
    logs = torch.full((1, 1, 200, 4), gla.LEAST_LOG_GATE, requires_grad=True)
    q, k, v = (30 * torch.randn(1, 1, 200, 4) for _ in range(3))
    out = gla.fade_and_add(q.requires_grad_(), k.requires_grad_(), v, logs)
    out.square().sum().backward()
    assert all(x is not None and x.isfinite().all() for x in (out, q.grad, k.grad, logs.grad))
    last = sum((q[0, 0, 199] * k[0, 0, t]).sum() * math.exp(-5 * (199 - t)) * v[0, 0, t] for t in range(190, 200))
    torch.testing.assert_close(out[0, 0, 199], last, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("both", [False, True])
def test_a_convolution_is_the_sum_over_its_taps(both):
    x = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(2, 9 if both else 5, dtype=torch.float64, requires_grad=True)
    after = taps.shape[1] - 5
    out = convolve(x, taps)
    rows = [sum(taps[:, n - m + after] * x[:, m] for m in range(5) if n - m + after >= 0) for n in range(5)]
    torch.testing.assert_close(out, torch.stack(rows, 1))  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(convolve, (x, taps))
    assert [fft_length(n) for n in (1, 2, 9, 11, 13, 2049, 4001)] == [1, 2, 10, 12, 14, 2560, 4096]


# options, marks and refusals


def test_s4d_has_its_own_rate_for_a_and_the_step_size():
    mixer: Any = build("s4d", dt_min=0.01, dt_max=0.02)
    marked = {name for name, p in mixer.named_parameters() if getattr(p, "_optim", None)}
    assert marked == {"log_step", "log_decay", "frequency"} and mixer.log_step._optim == {
        "lr": 1e-3,
        "weight_decay": 0.0,
    }
    assert mixer.log_step.exp().min() >= 0.00999 and mixer.log_step.exp().max() <= 0.02001
    torch.testing.assert_close(mixer.frequency[3], math.pi * torch.arange(32).double(), rtol=1e-6, atol=0)


def test_initial_frequencies_of_s4d_are_those_of_the_paper():
    inv: Any = build("s4d", state=4, init="inv")
    torch.testing.assert_close(inv.frequency[5], torch.tensor([12 / math.pi, 4 / (3 * math.pi)]).double())
    n = torch.arange(8.0, dtype=torch.float64)
    hippo = -torch.outer(2 * n + 1, 2 * n + 1).sqrt().tril(-1) - torch.diag(n + 1)  # HiPPO-LegS
    normal = hippo + torch.outer(n + 0.5, n + 0.5).sqrt()
    found = torch.linalg.eigvals(normal)
    torch.testing.assert_close(found.real, torch.full_like(n, -0.5))
    legs: Any = build("s4d", state=8, init="legs", frequency=3.0)
    wanted = 3 * found.imag.sort(descending=True).values[:4]
    torch.testing.assert_close(legs.frequency, wanted.repeat(16, 1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("s4d", {"state": 3}, "attn.state=3 must be even"), ("s4d", {"dt_min": 0.2}, "attn.dt_min=0.2 and attn.dt_max=0.1"),
    ("s4d", {"frequency": 0.0}, "attn.frequency=0.0 must be finite"),
    ("gla", {"temperature": 0.0}, "attn.temperature=0.0 must be"),
    ("gla", {"gate_rank": 0}, "attn.gate_rank=0 must be"),
])  # fmt: skip
def test_a_bad_option_is_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        build(name, **options)


@mixers
def test_recipes_suit_a_mixer_and_what_it_lacks_is_refused(name):
    for recipe in ("xiong2021", "amos2024", "miralles2025", "tay2021", "demo"):
        run = configure(["task=image", f"attn={name}", f"recipe={recipe}", "init=null"]).config
        assert run.model.attn_dropout == 0 and run.model.positions != "rotary" and not run.model.qk_norm


class Shifted(Mixer):
    """Each row plus that of the token before it, by one that reads the padded form."""

    name, facts = "shifted", Capabilities(exact=False, mixes=True, ragged=False, paper="")

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        assert batch.padded
        return F.pad(batch.pad(x), (0, 0, 1, 0))[:, :-1].flatten(0, 1)


def test_a_mixer_that_is_not_ragged_gets_the_padded_form_and_its_shape_is_checked():
    mixer, batch = Shifted(None, AttentionSpec(2, 8, 9)), make_batch((3, 0, 2), False, CPU)
    x = rows_of(batch)
    expected = x.roll(1, 0)
    expected[[0, 3]] = 0
    assert torch.equal(mixer.mix_ragged(x, batch), expected)
    mixer.mix = lambda x, batch: x[:, :1]  # type: ignore[method-assign]
    with pytest.raises(
        UsageError, match=r"mix of Shifted \(attn=shifted\) returns \[9, 1\] for rows of \[9, 16\]: return"
    ):
        mixer.mix_ragged(x, batch)


def test_facts_of_a_mixer():
    assert not Shifted.facts.dropout and not Shifted.facts.head_dims
    with pytest.raises(ValueError, match="mixes=True has no queries and keys"):
        Capabilities(exact=True, mixes=True, paper="")
    with pytest.raises(UsageError, match="set model.attn_dropout=0$"):
        Shifted(None, AttentionSpec(2, 8, 9, dropout=0.1))
    wrong: Any = type("Wrong", (Shifted,), {"facts": Capabilities(exact=False, paper="", dropout=False)})
    with pytest.raises(UsageError, match=r"attn=shifted is a Mixer: add mixes=True, where tests\.models"):
        wrong(None, AttentionSpec(2, 8, 9))
    assert isinstance(Shifted(None, AttentionSpec(1, 4096, 9)), nn.Module)  # any width of a head


# what is documented


def test_the_mixer_of_the_guide_acts():
    """The code in docs/mixers.md as it stands."""
    guide = (Path(__file__).parent.parent.parent / "docs" / "mixers.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    space: dict[str, Any] = {"__name__": __name__}
    try:
        exec(code, space)
    finally:
        ATTENTIONS._classes.pop("pooling", None)
    mixer = space["Pooling"](space["Pooling"].Config(), AttentionSpec(2, 8, 9)).double()
    batch = make_batch((3, 0, 2), False, CPU)
    x = rows_of(batch)
    mean = mixer.inner(x[:3]).mean(0)
    torch.testing.assert_close(mixer.mix_ragged(x, batch)[0], mixer.outer(mean * mixer.gate(x[0]).sigmoid()))


def test_cu_seqlens():
    assert make_batch((3, 0, 2), False, CPU).cu_seqlens.tolist() == [0, 3, 3, 5]
    padded = make_batch((3, 0, 2), True, CPU)
    assert padded.cu_seqlens.tolist() == [0, 3, 6, 9] and padded.cu_seqlens.dtype == torch.int32
