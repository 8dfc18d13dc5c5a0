"""What follows attention, fused: kernels, interpreted or compiled, against the layers in float64."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, library, nn
from torch.nn import functional as F

from lra.bench.cell import make_batch
from lra.config.schema import ModelConfig
from lra.kernels.feed_forward import ops
from lra.kernels.feed_forward.api import CHUNK, WIDTHS, feed_forward, on_hopper, takes
from lra.kernels.flash import tuning
from lra.kernels.testing import compare, poisoned_empty
from lra.models import transformer
from lra.models.attention import ATTENTIONS
from lra.models.dropout import drop, keep_scale, threshold
from lra.models.transformer import Encoder
from tests.kernels.compiling import compiled
from tests.sampling import sampled

HALF, BF16 = torch.float16, torch.bfloat16
NAMES = ["y", "do", "dx", "dout", "dout_bias", "dgain", "dshift", "dup", "dup_bias", "ddown", "ddown_bias"]
EPS, SITE = 1e-5, 7


def tensors(rows: int, d: int, f: int, dtype: torch.dtype, device: Any) -> tuple[list[Tensor], Tensor, Tensor]:
    """(o, x and the weights), keys of rows, the gradient of the result."""
    generator = torch.Generator(device).manual_seed(rows + d)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device) * scale

    layers = [
        random(d, d, scale=d**-0.5), random(d), 1 + random(d, scale=0.3), random(d, scale=0.3),
        random(f, d, scale=d**-0.5), random(f, scale=0.3), random(d, f, scale=f**-0.5), random(d),
    ]  # fmt: skip
    keys = torch.randint(-(2**31), 2**31 - 1, (rows,), generator=generator, device=device).to(torch.int32)
    return [random(rows, d).to(dtype), random(rows, d), *layers], keys, random(rows, d)


def layers(o: Tensor, x: Tensor, *rest: Any, half: torch.dtype | None = None) -> Tensor:
    """The layers as PyTorch has them, in the dtype of x; with `half` what they multiply is rounded to it."""
    out, out_bias, gain, shift, up, up_bias, down, down_bias, rate, keys = rest

    def rounded(values: Tensor) -> Tensor:
        return values.to(half).to(values.dtype) if half else values

    z = x + drop(F.linear(rounded(o), rounded(out), out_bias), rate, keys, SITE)
    n = rounded(F.layer_norm(z, z.shape[1:], gain, shift, EPS))
    h = rounded(drop(F.gelu(F.linear(n, rounded(up), up_bias)), rate, keys, SITE + 1))
    return z + drop(F.linear(h, rounded(down), down_bias), rate, keys, SITE + 2)


def fused(*arguments: Any) -> Tensor:
    *given, rate, keys = arguments
    return ops.FeedForward.apply(*given, EPS, keep_scale(threshold(rate)), threshold(rate), keys, SITE)  # type: ignore[no-any-return]


def results(function: Any, given: list[Tensor], dy: Tensor, rate: float, keys: Tensor | None, **more: Any) -> Any:
    leaves = [x.detach().clone().requires_grad_() for x in given]
    with poisoned_empty():
        y = function(*leaves, rate, keys if rate else None, **more)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def assert_within_budget(rows: int, d: int, f: int, rate: float, dtype: torch.dtype, device: Any) -> None:
    given, keys, dy = tensors(rows, d, f, dtype, device)
    actual = results(fused, given, dy, rate, keys)
    exact = results(layers, [x.double() for x in given], dy, rate, keys)
    plain = results(layers, [x.float() for x in given], dy, rate, keys, half=dtype)
    for name, a, e, p in zip(NAMES, actual, exact, plain, strict=True):
        assert a.shape == e.shape and a.dtype == (dtype if name == "do" else torch.float32), f"{name} {a.dtype}"
        assert a.is_contiguous(), f"{name}: a sum of all gradients would take a launch for each"
        error = compare(a.to(dtype), e, p.to(dtype))
        assert error.ok, f"{name}: error {error.error:.3g}, budget {error.budget:.3g}"


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("rate", sampled([0.0, 0.1, 0.5]))
@pytest.mark.parametrize(("rows", "d", "f"), [(150, 64, 128), (70, 128, 256), (33, 32, 192), (64, 16, 64), (1, 16, 64)])
def test_within_budget(rows, d, f, rate, dtype, device):
    assert_within_budget(rows, d, f, rate, dtype, device)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_in_fp32_the_layers_to_the_last_digits(rate, device):
    """So GELU is the exact one, the norm's sums are in fp32, and the mask is `drop`'s."""
    given, keys, dy = tensors(100, 64, 128, torch.float32, device)
    actual, expected = (results(function, given, dy, rate, keys) for function in (fused, layers))
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=3e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_no_rows(device):
    given, keys, dy = tensors(0, 32, 64, HALF, device)
    for found, leaf in zip(results(fused, given, dy, 0.1, keys)[1:], given, strict=True):
        assert found.shape == leaf.shape and not found.any()


def test_operators_keep_their_contracts(device):
    (o, x, out, out_bias, _, _, up, up_bias, down, down_bias), keys, dy = tensors(70, 32, 64, HALF, device)
    out, up, down, dropout = out.to(HALF), up.to(HALF), down.to(HALF), (threshold(0.1), keys, SITE)
    forward = (o, x, out, out_bias, up, up_bias, down, down_bias, EPS, *dropout)
    library.opcheck(ops.feed_forward, forward)
    kept = ops.feed_forward(*forward)[1:]
    library.opcheck(ops.feed_forward_backward, (dy, o, *kept, out, up, up_bias, down, *dropout))


def test_only_once_differentiable(device):
    given, keys, _ = tensors(20, 16, 64, HALF, device)
    x = given[1].requires_grad_()
    (dx,) = torch.autograd.grad(fused(given[0], x, *given[2:], 0.1, keys).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        dx.sum().backward()


def encoder(pooling: Literal["max", "mean"] = "max") -> Encoder:
    torch.manual_seed(0)
    model = ModelConfig(d_model=32, d_ff=64, heads=2, layers=2, dropout=0.2, attn_dropout=0.0, pooling=pooling)
    return Encoder(model, ATTENTIONS.get("flash").Config(), vocabulary=9, max_length=40)


def trained(model: Encoder, compiled: bool = False) -> list[Tensor]:
    """The result of a batch in training, and the gradient of every parameter."""
    batch = make_batch((40, 3, 17), False, torch.device("cpu"), seed=torch.tensor(5))
    batch = dataclasses.replace(batch, tokens=batch.tokens % 9)
    found = (torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model)(batch)
    return [found.detach(), *torch.autograd.grad((found * torch.arange(32)).sum(), list(model.parameters()))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels on the CPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_use_it_and_compute_the_same(compiled, monkeypatch):
    """In fp32, which `takes` does not but the interpreter does, and with dropout, a function of the place."""
    model = encoder()
    expected, calls = trained(model), []
    monkeypatch.setattr(transformer, "takes", lambda *_: calls.append(1) or True)
    for actual, wanted in zip(trained(model, compiled), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)
    assert len(calls) == 2
    torch.compiler.reset()


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels on the CPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_evaluation_drops_nothing(compiled, monkeypatch):
    model = encoder().eval()
    batch = make_batch((40, 3, 17), False, torch.device("cpu"))
    batch = dataclasses.replace(batch, tokens=batch.tokens % 9)
    expected = model(batch).detach()
    monkeypatch.setattr(transformer, "takes", lambda *_: True)
    evaluate = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with torch.inference_mode():
        torch.testing.assert_close(evaluate(batch), expected, atol=1e-4, rtol=1e-4)
    torch.compiler.reset()


def test_what_the_kernels_take(monkeypatch):
    """In 16 bits with a residual in fp32, widths that divide into tiles, on Hopper where ptxas can be relied on."""
    refusals: list[str | None] = [None]
    monkeypatch.setattr(tuning, "hopper_refusal", lambda capability: refusals[-1])

    class OnGPU:
        is_cuda = True

        def __init__(self, dtype: torch.dtype):
            self.dtype = dtype

    def taken(o: Any = BF16, x: Any = torch.float32, d: int = WIDTHS[-1], f: int = 4 * CHUNK) -> bool:
        return takes(OnGPU(o), OnGPU(x), nn.Linear(d, f))  # type: ignore[arg-type]

    assert taken() and taken(o=HALF) and all(taken(d=d) for d in WIDTHS)
    assert not any([taken(o=torch.float32), taken(x=BF16), taken(d=96), taken(d=256), taken(f=4 * CHUNK + 16)])
    assert not takes(torch.zeros(2, 64, dtype=BF16), torch.zeros(2, 64), nn.Linear(64, 128))
    refusals.append("ptxas 12.8 is known to miscompile for Hopper")
    assert not taken()


def test_torch_compile_takes_the_answer_for_a_constant(monkeypatch):
    """It asks for the version of ptxas, which is no tensor's business."""
    monkeypatch.setattr(tuning, "hopper_refusal", lambda capability: None)
    found = torch.compile(lambda x: x + 1 if on_hopper() else x, fullgraph=True, backend="eager")(torch.zeros(2))
    assert found.tolist() == [1, 1]


COMPILED = [
    dict(dtype=dtype, rate=rate, d=d, f=f)
    for dtype, rate, d, f in (
        ("bfloat16", 0.1, 64, 128),
        ("float16", 0.0, 64, 256),
        ("bfloat16", 0.1, 128, 256),
        ("bfloat16", 0.0, 128, 512),
        ("bfloat16", 0.1, 16, 64),
    )
]


def test_kernels_compile():
    """With the products on tensor cores. Of the backward's registers some are put aside: with fewer, more programs run
    at once, which was measured faster."""
    for case, kernels in compiled(COMPILED, "tests.kernels.test_feed_forward"):
        assert [kernel["name"] for kernel in kernels] == ["feed_forward_kernel", "feed_forward_backward_kernel"]
        for kernel in kernels:
            where = f"{case}: {kernel}"
            assert kernel["stack"] <= (256 if case["d"] == 128 else 128), where
            assert kernel["wgmma"] and not kernel["mma"] and not kernel["atomics"], where
            assert kernel["shared"] <= 113 * 1024, where  # two programs on a multiprocessor


def launch_case(case: dict[str, Any]) -> None:
    from lra.kernels.feed_forward.launch import launch_backward, launch_forward
    from tests.kernels.aot import choose

    choose(90, hopper=True)
    dtype = getattr(torch, case["dtype"])
    (o, x, *layers), keys, dy = tensors(256, case["d"], case["f"], dtype, "cpu")
    layers = [weight.to(dtype) if weight.dim() == 2 else weight for weight in layers]
    out, out_bias, _, _, up, up_bias, down, down_bias = layers
    dropout = threshold(case["rate"]), keys if case["rate"] else None, SITE
    _, unit, rstd = launch_forward(o, x, out, out_bias, up, up_bias, down, down_bias, EPS, *dropout)
    launch_backward(dy, o, unit, rstd, out, up, up_bias, down, *dropout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize(("d", "f"), [(64, 128), (128, 256), (128, 512), (32, 64), (16, 192)])
def test_many_rows(d, f, rate, dtype):
    assert_within_budget(50_001, d, f, rate, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_modules_are_taken_under_autocast(rate):
    """By `feed_forward` with layers in fp32; its result is what the layers give in 16 bits, but for rounding."""
    torch.manual_seed(0)
    d, f = 64, 128
    out, norm = nn.Linear(d, d).cuda(), nn.LayerNorm(d).cuda()
    up, down = nn.Linear(d, f).cuda(), nn.Linear(f, d).cuda()
    _, keys, _ = tensors(999, d, f, BF16, "cuda")
    o, x = torch.randn(999, d, device="cuda", dtype=BF16), torch.randn(999, d, device="cuda")
    assert takes(o, x, up)
    with torch.autocast("cuda", BF16):
        dropped, scale = threshold(rate), keep_scale(threshold(rate))
        actual = feed_forward(o, x, out, norm, up, down, scale=scale, threshold=dropped, keys=keys, site=SITE)
        z = x + drop(out(o), rate, keys, SITE)
        h = drop(F.gelu(up(norm(z))), rate, keys, SITE + 1)
        expected = z + drop(down(h), rate, keys, SITE + 2)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=0.05, rtol=0.02)


@pytest.mark.gpu
def test_a_model_on_a_gpu_learns_the_same(monkeypatch):
    """Under autocast and with dropout the gradients by the kernels are the layers', but for rounding."""
    model = encoder("mean").cuda()  # of a maximum another row may be the largest after rounding
    batch = make_batch((40, 3, 17), False, torch.device("cuda"), seed=torch.tensor(5, device="cuda"))
    batch = dataclasses.replace(batch, tokens=batch.tokens % 9)
    calls: list[bool] = []

    def gradients() -> Tensor:
        with torch.autocast("cuda", BF16):
            found = model(batch)
        return torch.cat([g.flatten() for g in torch.autograd.grad(found.square().sum(), list(model.parameters()))])

    monkeypatch.setattr(transformer, "takes", lambda *given: calls.append(takes(*given)) or calls[-1])
    actual = gradients()
    if not on_hopper():
        pytest.skip("the kernels are for Hopper")
    assert calls == [True, True]
    monkeypatch.setattr(transformer, "takes", lambda *_: False)
    expected = gradients()
    assert (actual - expected).norm() < 0.03 * expected.norm()
