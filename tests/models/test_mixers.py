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
from lra.config.model import ModelConfig
from lra.errors import UsageError
from lra.kernels.convolution import convolve, fft_length
from lra.models.attention import ATTENTIONS, Capabilities, gla
from lra.models.attention.base import AttentionSpec, Mixer
from lra.models.transformer import EncoderBlock
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


def average_by_steps(average: Any, x: Tensor) -> Tensor:
    """Equations 3 and 4 of Mega's paper: each dimension of each feature keeps an average."""
    alpha, delta = average.alpha.sigmoid(), average.delta.sigmoid()
    y = average.omega * x
    for direction in range(len(alpha)):
        state, found = torch.zeros_like(alpha[direction]), []
        for u in x.flip(0) if direction else x:
            spread = average.beta[direction] * u[:, None]
            state = alpha[direction] * spread + (1 - alpha[direction] * delta[direction]) * state
            found.append((average.eta[direction] * state).sum(1) / state.shape[1] ** 0.5)
        if found:
            y = y + torch.stack(found[::-1] if direction else found)
    return F.silu(y)


def mega_by_steps(mixer: Any, x: Tensor, residual: Tensor | None = None, chunk: int | None = None) -> Tensor:
    """Section 3.3 of the paper, with all scores of one head in a matrix."""
    n, residual = len(x), x if residual is None else residual
    averaged = average_by_steps(mixer.average, x) if mixer.average is not None else x
    update, reset, z, candidate = mixer.gates(averaged).split(mixer.sizes, -1)
    q, k = (F.silu(z) * mixer.scale[i] + mixer.shift[i] for i in (0, 1))
    if mixer.config.rotary:
        angle = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(z.shape[1] // 2) / (z.shape[1] // 2))
        turn = torch.complex(angle.cos(), angle.sin())

        def turned(rows: Tensor) -> Tensor:
            pairs = torch.complex(*rows.chunk(2, 1)) * turn
            return torch.cat((pairs.real, pairs.imag), 1)

        q, k = turned(q), turned(k)
    place = torch.arange(n)
    unseen = (place > place[:, None]) if mixer.spec.causal else torch.zeros(n, n, dtype=torch.bool)
    if chunk:
        unseen = unseen | (place // chunk != place[:, None] // chunk)
    p = (q @ k.T * z.shape[1] ** -0.5).masked_fill(unseen, -math.inf).softmax(1)
    candidate = F.silu(candidate + mixer.output(F.silu(reset) * (p @ F.silu(mixer.value(x)))))
    update = update.sigmoid()
    return update * candidate + (1 - update) * residual - residual


BY_STEPS = {"s4d": s4d_by_steps, "gla": gla_by_steps, "mega": mega_by_steps}
OPTIONS: dict[str, dict[str, Any]] = {"mega": {"expansion": 3, "key_dim": 8, "value_dim": 20}}  # 3 heads, one not full


def strengthen(mixer: Any) -> None:
    """Makes queries and keys of Mega as large as other rows, so that scores differ."""
    if mixer.name == "mega":
        with torch.no_grad():
            for parameter in (mixer.scale, mixer.shift, mixer.gates.weight, mixer.value.weight, mixer.output.weight):
                parameter.normal_()


@pytest.mark.parametrize("name", BY_STEPS)
@directions
def test_result_and_gradients_are_those_of_the_recurrence(name, causal):
    mixer, batch = build(name, causal, **OPTIONS.get(name, {})), make_batch(LENGTHS, False, CPU)
    strengthen(mixer)
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


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_average_by_kernels_is_that_by_fft(causal):
    """Compiled on a GPU, else interpreted on the CPU."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = make_batch((5, 0, 9), False, device)
    x, found = rows_of(batch).float().to(device).requires_grad_(), []
    for impl in ("triton", "fft"):
        mixer: Any = build("mega", causal, impl=impl, expansion=2).float().to(device)
        assert mixer.resolve(device, "fp32").startswith(f"mega by {impl} around standard")
        y = mixer.average(x, batch)
        weights = torch.linspace(-1, 1, y.numel(), device=device).view_as(y)
        found.append((y, *torch.autograd.grad((y * weights).sum(), [x, *mixer.average.parameters()])))
    for by_kernels, by_fft in zip(*found, strict=True):
        torch.testing.assert_close(by_kernels, by_fft, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", ["flash", "butterfly block=64 factors=1", "local window=64 pattern=blocks"])
@pytest.mark.parametrize("causal", [False, True])
def test_mega_by_kernels_is_near_that_of_a_cpu(inner, causal):
    """In bf16 against fp32, with a head that is not full."""

    def results(device: str) -> list[Tensor]:
        mixer: Any = build("mega", causal, 300, inner=inner, key_dim=64, value_dim=160)
        strengthen(mixer)
        with torch.no_grad():
            mixer.scale.mul_(0.1)  # with larger scores, rounding to bf16 chooses other keys
        mixer, batch = mixer.float().to(device), make_batch((300, 0, 129), False, torch.device(device))
        x = rows_of(batch).float().to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, device == "cuda"):
            out = mixer.mix_ragged(x, batch)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(device)
        grads = torch.autograd.grad((out * weights).sum(), [x, mixer.scale, mixer.average.alpha])
        return [y.detach().double().cpu() for y in (out, *grads)]

    for found, wanted in zip(results("cuda"), results("cpu"), strict=True):
        assert (found - wanted).norm() <= 0.08 * wanted.norm()


def test_mega_blends_with_the_residual_that_a_norm_comes_after():
    config = ModelConfig(d_model=16, heads=2, layers=1, d_ff=0, classifier="linear", positions="none", attn_dropout=0)
    torch.manual_seed(0)
    attn = ATTENTIONS.get("mega").Config(inner="standard", **OPTIONS["mega"])
    block = EncoderBlock(config, attn, 70, 0, False).double()
    batch = make_batch((5,), False, CPU)
    x = 3 * rows_of(batch) + 1
    expected = x + mega_by_steps(block.attention, block.attn_norm(x), x)
    torch.testing.assert_close(block.eval()(x, batch, None), expected)


def test_mega_without_an_average():
    mixer, batch = build("mega", expansion=0), make_batch((5,), False, CPU)
    strengthen(mixer)
    x = rows_of(batch)
    torch.testing.assert_close(mixer.mix_ragged(x, batch), mega_by_steps(mixer, x))
    assert mixer.resolve(CPU, "fp32").startswith("mega without average around standard, 1 head of 64")


@pytest.mark.parametrize("rotary", [False, True])
def test_an_attention_with_its_options_works_inside_mega(rotary):
    """The one of Mega-chunk: blocks of 16 tokens that do not see each other."""
    options = {**OPTIONS["mega"], "rotary": rotary, "inner": "local window=16 pattern=blocks"}
    mixer, batch = build("mega", **options), make_batch((5, 40), False, CPU)
    strengthen(mixer)
    x = rows_of(batch)
    expected = torch.cat([mega_by_steps(mixer, x[own], chunk=16) for own in each(batch)])
    torch.testing.assert_close(mixer.float().mix_ragged(x.float(), batch).double(), expected, atol=1e-4, rtol=1e-3)
    described = mixer.resolve(CPU, "fp32")
    assert described.startswith("mega by fft around local by gather, blocks, window 16") and "3 heads of 8" in described


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
    ("gla", {"gate_rank": 0}, "attn.gate_rank=0 must be"), ("mega", {"expansion": -1}, "attn.expansion=-1 must"),
    ("mega", {"expansion": 0, "impl": "fft"}, "attn.impl=fft is of the average, and attn.expansion=0 leaves none"),
    ("mega", {"key_dim": 7}, "attn.key_dim=7 must be even, or attn.rotary=false"),
    ("mega", {"inner": "flash", "key_dim": 256}, "attn.inner, with attn.key_dim=256: attn=flash supports head dim"),
    ("mega", {"inner": ""}, "attn.inner=: .*unknown attention"), ("mega", {"inner": "flsh"}, "did you mean 'flash'"),
    ("mega", {"inner": "flash block=64"}, "attn.inner=flash: unknown field 'block'"),
    ("mega", {"inner": "s4d"}, "attn.inner=s4d: it is a mixer"),
    ("mega", {"inner": "reformer"}, "attn.inner=reformer: it makes keys of queries"),
    ("mega", {"inner": "linear"}, "attn.inner=linear: it turns features itself"),
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
    with pytest.raises(UsageError, match=r"attn=shifted returns \[T, 1\] for rows of \[T, 16\]: its mix must"):
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
