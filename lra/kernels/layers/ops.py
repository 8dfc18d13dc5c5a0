"""The kernels as PyTorch operators, and derivatives: of `lra::project`, `lra::feed_forward` and the pooled one.

What an operator returns beside its result its backward is given: rows normalised and the inverse of what they were
divided by, weights in 16 bits with the norm's gain and shift and dropout's scale in them, and the bias that goes with
the gain. On a CPU the operators are their definition, reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lra.kernels.layers import reference
from lra.kernels.library import define, note_kernel, once


class Project(torch.autograd.Function):
    """(x, q, k, v): the residual passes through, so that its gradient and the projections' are added in the kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor,
        cos: Tensor | None, sin: Tensor | None, eps: float, half: torch.dtype,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        q, k, v, *kept = project(x, gain, shift, weight, bias, cos, sin, eps, half)
        ctx.save_for_backward(*kept, gain, shift, weight, cos, sin, x)
        return x.view_as(x), q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, x = ctx.saved_tensors
        with torch.no_grad():
            dy, dq, dk, dv = (grad.contiguous() for grad in grads)
            dx, dweight, dbias, dnorm = project_backward(dq, dk, dv, dy, *saved)
        return *once((dx, *dnorm.unbind(), dweight, dbias), *grads, x, saved[5]), None, None, None, None


class FeedForward(torch.autograd.Function):
    """Of o, x, weight and bias of out, norm, up and down in fp32, and numbers."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, x: Tensor, *rest: Any) -> Tensor:
        *layers, eps, scale, threshold, keys, site = rest
        ctx.numbers = numbers = 1.0 if keys is None else scale, threshold
        y, *kept = feed_forward(o, x, *layers, eps, *numbers, keys, site)
        gain, shift, up = layers[2:5]
        ctx.save_for_backward(o, *kept, gain, shift, up, x, keys)
        ctx.site = site
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (*saved, x, keys) = grads, ctx.saved_tensors
        with torch.no_grad():
            found = feed_forward_backward(dy.contiguous(), *saved, *ctx.numbers, keys, ctx.site)
        return *once(in_order(found), dy, saved[0], x, saved[-1]), *(None,) * 5


class PooledFeedForward(torch.autograd.Function):
    """Likewise, with the sequences' starts and lengths and the rows that each owns at least in front of the numbers."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, x: Tensor, *rest: Any) -> Tensor:
        *layers, start, length, padded_length, eps, final_eps, scale, threshold, keys, site = rest
        ctx.numbers = numbers = 1.0 if keys is None else scale, threshold
        sequences = start, length, padded_length
        sums, *kept = pooled_feed_forward(o, x, *layers, *sequences, eps, final_eps, *numbers, keys, site)
        ctx.save_for_backward(o, *kept, *layers[2:5], x, keys)
        ctx.site = site
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dsums,), (*saved, x, keys) = grads, ctx.saved_tensors
        with torch.no_grad():
            found = pooled_feed_forward_backward(dsums.contiguous(), *saved, *ctx.numbers, keys, ctx.site)
        return *once(in_order(found), dsums, saved[0], x, saved[-1]), *(None,) * 9


def in_order(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of what a feed-forward was given, from what its backward returns."""
    do, dx, dout, dup, ddown, dout_bias, dup_bias, ddown_bias, dnorm = found
    return do, dx, dout, dout_bias, *dnorm.unbind(), dup, dup_bias, ddown, ddown_bias


def computed_by(name: str) -> Callable[..., Any]:
    """An operator's kernels, `launch_<name>`, or on a CPU its definition."""

    def run(*arguments: Any) -> Any:
        if arguments[0].is_cuda:
            from lra.kernels.layers import launch  # which imports Triton: a machine without it can import this

            note_kernel("layers", name)
            return getattr(launch, f"launch_{name}")(*arguments)
        with torch.autocast(arguments[0].device.type, enabled=False):
            return getattr(reference, name)(*arguments)

    return run


# Shapes and dtypes of what they return, all contiguous.
def fake_project(x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    half = rest[-1]
    rows = (x.new_empty(x.shape, dtype=half) for _ in range(4))
    return *rows, x.new_empty(x.shape[0]), weight.new_empty(weight.shape, dtype=half)


def fake_project_backward(*given: Any) -> tuple[Tensor, ...]:
    dy, gain, weight = given[3], given[7], given[9]
    alike = (tensor.new_empty(tensor.shape) for tensor in (dy, weight))
    return *alike, weight.new_empty(weight.shape[0]), gain.new_empty(2, gain.shape[0])


def fake_feed_forward(o: Tensor, x: Tensor, *layers: Any) -> tuple[Tensor, ...]:
    out, _, _, _, up, up_bias, down, *_ = layers
    halves = (weight.new_empty(weight.shape, dtype=o.dtype) for weight in (out, up, down))
    rows = x.new_empty(x.shape), o.new_empty(o.shape), x.new_empty(x.shape[0])
    return *rows, *halves, up_bias.new_empty(up_bias.shape)


def fake_feed_forward_backward(dy: Tensor, o: Tensor, *given: Any) -> tuple[Tensor, ...]:
    halves, gain = given[2:5], given[6]
    weights = (half.new_empty(half.shape, dtype=gain.dtype) for half in halves)
    biases = (gain.new_empty(half.shape[0]) for half in halves)
    return o.new_empty(o.shape), dy.new_empty(o.shape), *weights, *biases, gain.new_empty(2, gain.shape[0])


def fake_pooled_feed_forward(o: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    start = rest[8]
    _, *kept = fake_feed_forward(o, x, *rest[:8])
    sums, of_row = x.new_empty(start.shape[0], x.shape[1]), start.new_empty(x.shape[0])
    return sums, of_row, o.new_empty(o.shape), x.new_empty(x.shape[0]), *kept


def fake_pooled_feed_forward_backward(
    dsums: Tensor, o: Tensor, of_row: Tensor, final: Tensor, final_rstd: Tensor, *kept: Any
) -> tuple[Tensor, ...]:
    return fake_feed_forward_backward(dsums, o, *kept)


def fake_embed(table: Tensor, ids: Tensor, *_: Any) -> Tensor:
    return table.new_empty(ids.shape[0], table.shape[1])


def fake_table_gradient(dy: Tensor, ids: Tensor, vocabulary: int, *given: Any) -> tuple[Tensor, Tensor]:
    places = given[3]
    return dy.new_empty(vocabulary, dy.shape[1]), dy.new_empty(places, dy.shape[1])


NORM, ROTATION = "Tensor gain, Tensor shift", "Tensor? cos, Tensor? sin"
DROPOUT = "int threshold, Tensor? keys, int site"
LAYERS = f"Tensor out, Tensor out_bias, {NORM}, Tensor up, Tensor up_bias, Tensor down, Tensor down_bias"
KEPT = "Tensor unit, Tensor rstd, Tensor half_out, Tensor half_up, Tensor half_down, Tensor folded_bias"
FINAL = "Tensor of_row, Tensor final, Tensor final_rstd"
GRADIENTS = (
    "Tensor do, Tensor dx, Tensor dout, Tensor dup, Tensor ddown, Tensor dout_bias, Tensor dup_bias, "
    "Tensor ddown_bias, Tensor dnorm"
)
project = define(
    "project",
    f"(Tensor x, {NORM}, Tensor weight, Tensor bias, {ROTATION}, float eps, ScalarType half)"
    " -> (Tensor q, Tensor k, Tensor v, Tensor unit, Tensor rstd, Tensor half_weight)",
    computed_by("project"),
    fake_project,
)
project_backward = define(
    "project_backward",
    f"(Tensor dq, Tensor dk, Tensor dv, Tensor dy, Tensor unit, Tensor rstd, Tensor half_weight, {NORM}, "
    f"Tensor weight, {ROTATION}) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dnorm)",
    computed_by("project_backward"),
    fake_project_backward,
)
feed_forward = define(
    "feed_forward",
    f"(Tensor o, Tensor x, {LAYERS}, float eps, float scale, {DROPOUT}) -> (Tensor y, {KEPT})",
    computed_by("feed_forward"),
    fake_feed_forward,
)
feed_forward_backward = define(
    "feed_forward_backward",
    f"(Tensor dy, Tensor o, {KEPT}, {NORM}, Tensor up, float scale, {DROPOUT}) -> ({GRADIENTS})",
    computed_by("feed_forward_backward"),
    fake_feed_forward_backward,
)
pooled_feed_forward = define(
    "pooled_feed_forward",
    f"(Tensor o, Tensor x, {LAYERS}, Tensor start, Tensor length, SymInt padded_length, float eps, float final_eps, "
    f"float scale, {DROPOUT}) -> (Tensor sums, {FINAL}, {KEPT})",
    computed_by("pooled_feed_forward"),
    fake_pooled_feed_forward,
)
pooled_feed_forward_backward = define(
    "pooled_feed_forward_backward",
    f"(Tensor dsums, Tensor o, {FINAL}, {KEPT}, {NORM}, Tensor up, float scale, {DROPOUT}) -> ({GRADIENTS})",
    computed_by("pooled_feed_forward_backward"),
    fake_pooled_feed_forward_backward,
)
embed = define(
    "embed",
    f"(Tensor table, Tensor ids, Tensor? of_places, Tensor? place, float scale, {DROPOUT}) -> Tensor",
    computed_by("embed"),
    fake_embed,
)
table_gradient = define(
    "table_gradient",
    "(Tensor dy, Tensor ids, SymInt vocabulary, ScalarType half, Tensor? start, Tensor? length, SymInt places, "
    f"{DROPOUT}) -> (Tensor table, Tensor of_places)",
    computed_by("table_gradient"),
    fake_table_gradient,
)
