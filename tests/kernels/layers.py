"""Cases of the layers around attention, fused and as PyTorch has them, and what of both is compared."""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lra.kernels.dropout import dropout_threshold
from lra.kernels.layers import layer_ops
from lra.kernels.layers.fused_layers import pooled_feed_forward
from lra.kernels.testing import measure_error, poisoned_empty
from lra.models.dropout import drop, keep_scale

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
EPS, SITE = 1e-5, 7
SHAPES = [(150, 64, 128), (70, 128, 256), (1, 64, 64), (200, 64, 192)]  # rows, width of the model, hidden features


def drawn(*shape: int, scale: float = 1.0, device: Any = "cpu") -> Tensor:
    return torch.randn(*shape, device=device) * scale


@dataclasses.dataclass
class Case:
    """Arguments of a function, keys of rows, and gradients of its results."""

    given: list[Tensor]
    keys: Tensor
    dy: list[Tensor]


def feed_forward_case(rows: int, d: int, f: int, dtype: torch.dtype, device: Any = "cpu") -> Case:
    torch.manual_seed(rows + d)
    layers = [
        drawn(d, d, scale=d**-0.5), drawn(d), 1 + drawn(d, scale=0.3), drawn(d, scale=0.3),
        drawn(f, d, scale=d**-0.5), drawn(f, scale=0.3), drawn(d, f, scale=f**-0.5), drawn(d),
    ]  # fmt: skip
    keys = torch.randint(-(2**31), 2**31 - 1, (rows,)).to(torch.int32)
    given = [drawn(rows, d).to(dtype), drawn(rows, d), *layers]
    return Case([x.to(device) for x in given], keys.to(device), [drawn(rows, d).to(device)])


def project_case(rows: int, d: int, dtype: torch.dtype, device: Any = "cpu") -> Case:
    torch.manual_seed(rows + d)
    given = [drawn(rows, d), 1 + drawn(d, scale=0.3), drawn(d, scale=0.3), drawn(3 * d, d, scale=d**-0.5), drawn(3 * d)]
    dy = [drawn(rows, d), *(drawn(rows, d).to(dtype) for _ in range(3))]
    return Case([x.to(device) for x in given], torch.empty(0), [x.to(device) for x in dy])


def angles(rows: int, pairs: int, device: Any = "cpu") -> Any:
    """Cosines and sines of any angles; none of no pairs."""
    if not pairs:
        return None, None
    angle = drawn(rows, pairs, scale=3.0).to(device)
    return angle.cos(), angle.sin()


def plain_feed_forward(o: Tensor, x: Tensor, *rest: Any, half: torch.dtype | None = None) -> tuple[Tensor]:
    """The layers as PyTorch has them, in the dtype of x; with `half` what they multiply is rounded to it."""
    out, out_bias, gain, shift, up, up_bias, down, down_bias, rate, keys = rest

    def rounded(values: Tensor) -> Tensor:
        return values.to(half).to(values.dtype) if half else values

    z = x + drop(F.linear(rounded(o), rounded(out), out_bias), rate, keys, SITE)
    n = rounded(F.layer_norm(z, z.shape[1:], gain, shift, EPS))
    h = rounded(drop(F.gelu(F.linear(n, rounded(up), up_bias)), rate, keys, SITE + 1))
    return (z + drop(F.linear(h, rounded(down), down_bias), rate, keys, SITE + 2),)


def fused_feed_forward(*arguments: Any) -> tuple[Tensor]:
    o, x, *layers, rate, keys = arguments
    dropped = dropout_threshold(rate)
    return (layer_ops.FeedForwardFunction.apply(o, x, EPS, keep_scale(dropped), dropped, keys, SITE, *layers),)  # type: ignore[return-value]


def plain_project(x: Tensor, *rest: Any, half: torch.dtype | None = None) -> tuple[Tensor, ...]:
    gain, shift, weight, bias, cos, sin = rest

    def rounded(values: Tensor) -> Tensor:
        return values.to(half).to(values.dtype) if half else values

    n = rounded(F.layer_norm(x, x.shape[1:], gain, shift, EPS))
    parts = F.linear(n, rounded(weight), bias).chunk(3, 1)
    if cos is not None:
        heads = [part.unflatten(1, (-1, 2 * cos.shape[1])) for part in parts[:2]]
        # in any dtype; `rotate` itself is in fp32
        turned = [torch.cat((a * c - b * s, a * s + b * c), -1).flatten(1) for a, b, c, s in (
            (*head.chunk(2, -1), cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)) for head in heads
        )]  # fmt: skip
        parts = *turned, parts[2]
    return x, *parts


def fused_project(dtype: torch.dtype) -> Any:
    return lambda *given: layer_ops.ProjectFunction.apply(*given, EPS, dtype)


def results(function: Any, given: list[Tensor], dy: list[Tensor], *rest: Any, **more: Any) -> list[Tensor]:
    """What a function returns, and the gradients of its arguments."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    with poisoned_empty():
        found = function(*leaves, *rest, **more)
        gradients = torch.autograd.grad(found, leaves, [each.to(y.dtype) for each, y in zip(dy, found, strict=True)])
    return [*(y.detach() for y in found), *gradients]


def assert_within_budget(case: Case, fused: Any, plain: Any, dtype: torch.dtype, *rest: Any) -> None:
    """Each result and gradient of `fused`, against `plain` in float64 and with operands rounded to `dtype`."""
    actual = results(fused, case.given, case.dy, *rest)
    exact = results(plain, [x.double() for x in case.given], case.dy, *rest)
    rounded = results(plain, [x.float() for x in case.given], case.dy, *rest, half=dtype)
    for i, (a, e, r) in enumerate(zip(actual, exact, rounded, strict=True)):
        assert a.shape == e.shape and a.is_contiguous(), f"{i}: a sum of all gradients would take a launch for each"
        error = measure_error(a.to(dtype), e, r.to(dtype))
        assert error.ok, f"result {i}: error {error.error:.3g}, budget {error.budget:.3g}"


@dataclasses.dataclass
class Sequences:
    """Rows of sequences, the gradient of their means, a norm, and where they are."""

    x: Tensor
    dy: Tensor
    norm: list[Tensor]
    start: Tensor
    length: Tensor
    padded_length: int


def sequences(lengths: tuple[int, ...], d: int, padded: bool, device: Any = "cpu") -> Sequences:
    torch.manual_seed(sum(lengths) + d)
    length, longest = torch.tensor(lengths, dtype=torch.int32), max(lengths)
    start = torch.arange(len(lengths), dtype=torch.int32) * longest if padded else length.cumsum(0).int() - length
    rows = len(lengths) * longest if padded else sum(lengths)
    norm = [1 + drawn(d, scale=0.3).to(device), drawn(d).to(device)]
    placed = [each.to(device) for each in (start.clamp(max=max(rows - 1, 0)), length)]
    return Sequences(drawn(rows, d).to(device), drawn(len(lengths), d).to(device), norm, *placed, longest * padded)


def embedding_case(rows: int, d: int, placed: bool, rate: float, device: Any = "cpu") -> tuple[Any, ...]:
    """Arguments of `embed`."""
    dropped = dropout_threshold(rate)
    ids, place = torch.randint(9, (rows,), dtype=torch.int32), torch.randint(70, (rows,))
    keys = torch.randint(-(2**31), 2**31 - 1, (rows,)).to(torch.int32)
    given = drawn(9, d), ids, drawn(70, d) if placed else None, place if placed else None
    moved = (None if each is None else each.to(device) for each in (*given, keys if rate else None))
    *given, keys = moved
    return *given, keep_scale(dropped), dropped, keys, 0


def table_case(
    lengths: tuple[int, ...], d: int, vocabulary: int, half: torch.dtype, padded: bool | None, rate: float,
    device: Any = "cpu",
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of `table_gradient`; of tokens alone where `padded` is None. Nothing comes back past a length."""
    given = sequences(lengths, d, bool(padded), device)
    rows, dropped = len(given.x), dropout_threshold(rate)
    ids = torch.randint(vocabulary, (rows,), dtype=torch.int32).to(device)
    keys = torch.randint(-(2**31), 2**31 - 1, (rows,)).to(torch.int32).to(device) if rate else None
    if padded:
        past = torch.arange(given.padded_length, device=device) >= given.length[:, None]
        given.x[past.flatten()] = 0
    places = (None, None, 0) if padded is None else (given.start, given.length, max(lengths) + 90)
    return given.x, ids, vocabulary, half, *places, dropped, keys, 0


def pooled_case(given: Sequences, f: int, dtype: torch.dtype) -> Case:
    """Of a feed-forward of these rows, with the final norm's gain and shift."""
    case = feed_forward_case(*given.x.shape, f, dtype, given.x.device)
    return Case([*case.given, *given.norm], case.keys, [given.dy])


def fused_mean(given: Sequences) -> Any:
    def mean(o: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor]:
        *parameters, rate, keys = rest
        out, norm, up, down, final = (
            SimpleNamespace(weight=weight, bias=bias, eps=EPS)
            for weight, bias in zip(parameters[::2], parameters[1::2], strict=True)
        )
        dropped = dropout_threshold(rate)
        dropout: Any = dict(scale=keep_scale(dropped), threshold=dropped, keys=keys, site=SITE)
        where = given.start, given.length, given.padded_length
        return (pooled_feed_forward(o, x, out, norm, up, down, final, *where, **dropout),)

    return mean


def plain_mean(given: Sequences) -> Any:
    def mean(*arguments: Any, half: torch.dtype | None = None) -> tuple[Tensor]:
        *layers, gain, shift, rate, keys = arguments
        (y,) = plain_feed_forward(*layers, rate, keys, half=half)
        unit = F.layer_norm(y, y.shape[1:], gain, shift, EPS)
        places = zip(given.start.tolist(), given.length.tolist(), strict=True)
        return (torch.stack([unit[i : i + n].sum(0) / max(n, 1) for i, n in places]),)

    return mean


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], approximation: float = 0.0) -> None:
    """But for the order of sums, what that rounds differently in 16 bits, and an approximation's relative error."""
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape and a.dtype == e.dtype
        error = (a.float() - e.float()).norm() / e.float().norm().clamp(min=1e-6)
        bound = 2e-4 if a.dtype == HALF else 2e-5 if i == 0 else 1e-4
        assert error < bound + approximation, f"result {i}: {error:.2g}"


def dropout(rate: float, keys: Tensor) -> Any:
    """The numbers of dropout, as the launchers take them."""
    return keep_scale(dropout_threshold(rate)), dropout_threshold(rate), keys if rate else None, SITE


def launch_case(case: dict[str, Any]) -> None:
    """Launches the kernels around attention of a case with dtype, rate, d, f and pairs, for `compiling.compiled`."""
    from lra.kernels.layers import launch_layers
    from tests.kernels.aot import choose

    choose(90, hopper=True)
    dtype, rows, d = getattr(torch, case["dtype"]), 256, case["d"]
    x, *norm, weight, bias = project_case(rows, d, dtype).given
    cos, sin = angles(rows, case["pairs"])
    q, k, v, *kept = launch_layers.launch_project(x, *norm, weight, bias, cos, sin, EPS, dtype)
    o, x, *layers = feed_forward_case(rows, d, case["f"], dtype).given
    numbers = dropout(case["rate"], torch.zeros(rows, dtype=torch.int32))
    _, *of_forward = launch_layers.launch_feed_forward(o, x, *layers, EPS, *numbers)
    launch_layers.launch_feed_forward_backward(x, o, *of_forward, *layers[2:5], *numbers)
    given = sequences((rows - 7, 7), d, False)
    pooling = given.start, given.length, 0, EPS, EPS
    _, *of_pooled = launch_layers.launch_pooled_feed_forward(o, x, *layers, *pooling, *numbers)
    launch_layers.launch_pooled_feed_forward_backward(given.dy, o, *of_pooled, *layers[2:5], *numbers)
    launch_layers.launch_project_backward(q, k, v, x, *kept, *norm, weight, cos, sin)
    launch_layers.launch_embed(*embedding_case(rows, d, bool(case["pairs"]), case["rate"]))
    for vocabulary, places in ((256, 0), (18, rows)):
        ids, where = torch.zeros(rows, dtype=torch.int32), (given.start, given.length, places)
        launch_layers.launch_table_gradient(drawn(rows, d), ids, vocabulary, dtype, *where, *numbers[1:])
