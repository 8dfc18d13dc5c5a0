"""Mega, beside what test_mixers.py asks of each mixer: it is the recurrence and the attention of its paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lra.bench.cases import make_batch
from lra.config.model import ModelConfig
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.models.transformer import EncoderBlock
from tests.models.test_mixers import CPU, LENGTHS, build, directions, each, rows_of

OPTIONS: dict[str, Any] = {"expansion": 3, "key_dim": 8, "value_dim": 20}  # 3 heads, one not full


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


def strengthen(mixer: Any) -> None:
    """Makes queries and keys as large as other rows, so that scores differ."""
    with torch.no_grad():
        for parameter in (mixer.scale, mixer.shift, mixer.gates.weight, mixer.value.weight, mixer.output.weight):
            parameter.normal_()


@directions
def test_result_and_gradients_are_those_of_the_recurrence(causal):
    mixer, batch = build("mega", causal, **OPTIONS), make_batch(LENGTHS, False, CPU)
    strengthen(mixer)
    x = rows_of(batch).requires_grad_()
    out, expected = mixer.mix_ragged(x, batch), torch.cat([mega_by_steps(mixer, x[own]) for own in each(batch)])
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-8)
    weights, leaves = torch.randn_like(out), [x, *mixer.parameters()]
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), leaves) for y in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)


def test_fp32_stays_near_the_recurrence_on_long_sequences():
    mixer, batch = build("mega", max_length=1500), make_batch((1500,), False, CPU)
    x = rows_of(batch)
    expected = mega_by_steps(mixer, x)
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
    attn = ATTENTIONS.get("mega").Config(inner="standard", **OPTIONS)
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
    options = {**OPTIONS, "rotary": rotary, "inner": "local window=16 pattern=blocks"}
    mixer, batch = build("mega", **options), make_batch((5, 40), False, CPU)
    strengthen(mixer)
    x = rows_of(batch)
    expected = torch.cat([mega_by_steps(mixer, x[own], chunk=16) for own in each(batch)])
    torch.testing.assert_close(mixer.float().mix_ragged(x.float(), batch).double(), expected, atol=1e-4, rtol=1e-3)
    described = mixer.resolve(CPU, "fp32")
    assert described.startswith("mega by fft around local by gather, blocks, window 16") and "3 heads of 8" in described


@pytest.mark.parametrize(("options", "message"), [
    ({"expansion": -1}, "attn.expansion=-1 must"),
    ({"expansion": 0, "impl": "fft"}, "attn.impl=fft is of the average, and attn.expansion=0 leaves none"),
    ({"key_dim": 7}, "attn.key_dim=7 must be even, or attn.rotary=false"),
    ({"inner": "flash", "key_dim": 256}, "attn.inner, with attn.key_dim=256: attn=flash supports head dim"),
    ({"inner": ""}, "attn.inner=: .*unknown attention"), ({"inner": "flsh"}, "did you mean 'flash'"),
    ({"inner": "flash block=64"}, "attn.inner=flash: unknown field 'block'"),
    ({"inner": "s4d"}, "attn.inner=s4d: it is a mixer"),
    ({"inner": "reformer"}, "attn.inner=reformer: it makes keys of queries"),
    ({"inner": "linear"}, "attn.inner=linear: it turns features itself"),
])  # fmt: skip
def test_a_bad_option_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        build("mega", **options)
