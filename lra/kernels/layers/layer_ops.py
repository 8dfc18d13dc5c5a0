"""The layers around attention as PyTorch operators, with derivatives of `project` and the two feed-forwards.

Besides its result an operator returns tensors for its backward: the normalised rows, the inverse of their deviation,
the 16-bit weights that include the norm's gain and dropout's scale, and the bias that includes the norm's shift. On a
CPU the operators are their definition, reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lra.kernels.layers import reference
from lra.kernels.layers.reference import LayerGradients, LayerParameters, SavedForBackward
from lra.kernels.operators import define_operator, forbid_second_derivative, record_kernel


class ProjectFunction(torch.autograd.Function):
    """(x, q, k, v). The residual x passes through, so that the kernel adds its gradient to that of the projections."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor,
        cos: Tensor | None, sin: Tensor | None, eps: float, half: torch.dtype,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        q, k, v, *kept = project(x, gain, shift, weight, bias, cos, sin, eps, half)
        ctx.save_for_backward(x, *kept, gain, shift, weight, cos, sin)
        return x.view_as(x), q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *kept, gain, shift, weight, cos, sin = ctx.saved_tensors
        with torch.no_grad():
            dy, dq, dk, dv = (grad.contiguous() for grad in grads)
            dx, dweight, dbias, dnorm = project_backward(dq, dk, dv, dy, *kept, gain, shift, weight, cos, sin)
        dgain, dshift = dnorm.unbind()
        return *forbid_second_derivative((dx, dgain, dshift, dweight, dbias), *grads, x, weight), None, None, None, None


class FeedForwardFunction(torch.autograd.Function):
    """The derivative of `feed_forward`. Its arguments are o, x, eps, dropout's, and the fields of `LayerParameters`."""

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, x: Tensor, eps: float, scale: float, threshold: int, keys: Tensor | None, site: int,
        *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        layers = LayerParameters(*parameters)
        y, *kept = feed_forward(o, x, *layers, eps, scale, threshold, keys, site)
        ctx.save_for_backward(o, x, keys, *kept, layers.gain, layers.shift, layers.up)
        ctx.scale, ctx.threshold, ctx.site = scale, threshold, site
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        do, dx, *of_layers = layer_gradients(ctx, feed_forward_backward, dy)
        return do, dx, None, None, None, None, None, *of_layers


class PooledFeedForwardFunction(torch.autograd.Function):
    """As `FeedForwardFunction`, with start, length and padded_length after x, and `final_eps` after eps."""

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, x: Tensor, start: Tensor, length: Tensor, padded_length: int, eps: float,
        final_eps: float, scale: float, threshold: int, keys: Tensor | None, site: int, *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        layers = LayerParameters(*parameters)
        sums, *kept = pooled_feed_forward(
            o, x, *layers, start, length, padded_length, eps, final_eps, scale, threshold, keys, site
        )
        ctx.save_for_backward(o, x, keys, *kept, layers.gain, layers.shift, layers.up)
        ctx.scale, ctx.threshold, ctx.site = scale, threshold, site
        return sums

    @staticmethod
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor | None, ...]:
        do, dx, *of_layers = layer_gradients(ctx, pooled_feed_forward_backward, dsums)
        return do, dx, None, None, None, None, None, None, None, None, None, *of_layers


def layer_gradients(ctx: Any, backward: Callable[..., Any], dy: Tensor) -> tuple[Tensor, ...]:
    """Gradients of o, x and the fields of `LayerParameters`. The operator `backward` computes them from dy."""
    o, x, keys, *kept, up = ctx.saved_tensors
    with torch.no_grad():
        found = LayerGradients(*backward(dy.contiguous(), o, *kept, up, ctx.scale, ctx.threshold, keys, ctx.site))
    dgain, dshift = found.dnorm.unbind()
    of_layers = LayerParameters(
        out=found.dout, out_bias=found.dout_bias, gain=dgain, shift=dshift,
        up=found.dup, up_bias=found.dup_bias, down=found.ddown, down_bias=found.ddown_bias,
    )  # fmt: skip
    return forbid_second_derivative((found.do, found.dx, *of_layers), dy, o, x, up)


def choose_by_device(definition: Callable[..., Any], launcher: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """The function of an operator: on a GPU what `launcher` returns, on other devices the definition."""

    def run(x: Tensor, *rest: Any) -> Any:
        if x.is_cuda:
            record_kernel("layers", definition.__name__)
            return launcher()(x, *rest)
        with torch.autocast(x.device.type, enabled=False):
            return definition(x, *rest)

    return run


def import_launchers():
    """The module of the launchers. It imports Triton, so the first call that needs it imports it."""
    from lra.kernels.layers import launch_layers

    return launch_layers


# Empty tensors with the shapes and dtypes of the results. All are contiguous.
def fake_project(
    x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None,
    eps: float, half: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = (x.new_empty(x.shape, dtype=half) for _ in range(4))
    return *rows, x.new_empty(x.shape[0]), weight.new_empty(weight.shape, dtype=half)


def fake_project_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, dy: Tensor, xhat: Tensor, rstd: Tensor, half_weight: Tensor,
    gain: Tensor, shift: Tensor, weight: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx, dweight = dy.new_empty(dy.shape), weight.new_empty(weight.shape)
    return dx, dweight, weight.new_empty(weight.shape[0]), gain.new_empty(2, gain.shape[0])


def fake_feed_forward(
    o: Tensor, x: Tensor, out: Tensor, out_bias: Tensor, gain: Tensor, shift: Tensor, up: Tensor, up_bias: Tensor,
    down: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    half_out, half_up, half_down = (weight.new_empty(weight.shape, dtype=o.dtype) for weight in (out, up, down))
    xhat, rstd = o.new_empty(o.shape), x.new_empty(x.shape[0])
    return x.new_empty(x.shape), *SavedForBackward(
        xhat, rstd, half_out, half_up, half_down, up_bias.new_empty(up_bias.shape)
    )


def fake_feed_forward_backward(
    dy: Tensor, o: Tensor, xhat: Tensor, rstd: Tensor, half_out: Tensor, half_up: Tensor, half_down: Tensor,
    folded_bias: Tensor, gain: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    halves = half_out, half_up, half_down
    weights = (half.new_empty(half.shape, dtype=gain.dtype) for half in halves)
    biases = (gain.new_empty(half.shape[0]) for half in halves)
    return o.new_empty(o.shape), dy.new_empty(o.shape), *weights, *biases, gain.new_empty(2, gain.shape[0])


def fake_pooled_feed_forward(
    o: Tensor, x: Tensor, out: Tensor, out_bias: Tensor, gain: Tensor, shift: Tensor, up: Tensor, up_bias: Tensor,
    down: Tensor, down_bias: Tensor, start: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _y, *kept = fake_feed_forward(o, x, out, out_bias, gain, shift, up, up_bias, down)
    sums, of_row = x.new_empty(start.shape[0], x.shape[1]), start.new_empty(x.shape[0])
    return sums, of_row, o.new_empty(o.shape), x.new_empty(x.shape[0]), *kept


def fake_pooled_feed_forward_backward(
    dsums: Tensor, o: Tensor, of_row: Tensor, final: Tensor, final_rstd: Tensor, *kept: Any
) -> tuple[Tensor, ...]:
    return fake_feed_forward_backward(dsums, o, *kept)


def fake_embed(table: Tensor, ids: Tensor, *_: Any) -> Tensor:
    return table.new_empty(ids.shape[0], table.shape[1])


def fake_table_gradient(
    dy: Tensor, ids: Tensor, vocabulary: int, half: torch.dtype, start: Tensor | None, length: Tensor | None,
    places: int, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return dy.new_empty(vocabulary, dy.shape[1]), dy.new_empty(places, dy.shape[1])


def tensor_schema(fields: tuple[str, ...]) -> str:
    return ", ".join(f"Tensor {field}" for field in fields)


NORM_SCHEMA, ROTATION_SCHEMA = "Tensor gain, Tensor shift", "Tensor? cos, Tensor? sin"
DROPOUT_SCHEMA = "int threshold, Tensor? keys, int site"
LAYERS_SCHEMA, SAVED_SCHEMA, GRADIENTS_SCHEMA = (
    tensor_schema(group._fields) for group in (LayerParameters, SavedForBackward, LayerGradients)
)
FINAL_SCHEMA = "Tensor of_row, Tensor final, Tensor final_rstd"
project = define_operator(
    "project",
    f"(Tensor x, {NORM_SCHEMA}, Tensor weight, Tensor bias, {ROTATION_SCHEMA}, float eps, ScalarType half)"
    " -> (Tensor q, Tensor k, Tensor v, Tensor xhat, Tensor rstd, Tensor half_weight)",
    choose_by_device(reference.project, lambda: import_launchers().launch_project),
    fake_project,
)
project_backward = define_operator(
    "project_backward",
    f"(Tensor dq, Tensor dk, Tensor dv, Tensor dy, Tensor xhat, Tensor rstd, Tensor half_weight, {NORM_SCHEMA}, "
    f"Tensor weight, {ROTATION_SCHEMA}) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dnorm)",
    choose_by_device(reference.project_backward, lambda: import_launchers().launch_project_backward),
    fake_project_backward,
)
feed_forward = define_operator(
    "feed_forward",
    f"(Tensor o, Tensor x, {LAYERS_SCHEMA}, float eps, float scale, {DROPOUT_SCHEMA}) -> (Tensor y, {SAVED_SCHEMA})",
    choose_by_device(reference.feed_forward, lambda: import_launchers().launch_feed_forward),
    fake_feed_forward,
)
feed_forward_backward = define_operator(
    "feed_forward_backward",
    f"(Tensor dy, Tensor o, {SAVED_SCHEMA}, {NORM_SCHEMA}, Tensor up, float scale, "
    f"{DROPOUT_SCHEMA}) -> ({GRADIENTS_SCHEMA})",
    choose_by_device(reference.feed_forward_backward, lambda: import_launchers().launch_feed_forward_backward),
    fake_feed_forward_backward,
)
pooled_feed_forward = define_operator(
    "pooled_feed_forward",
    f"(Tensor o, Tensor x, {LAYERS_SCHEMA}, Tensor start, Tensor length, SymInt padded_length, float eps, "
    f"float final_eps, float scale, {DROPOUT_SCHEMA}) -> (Tensor sums, {FINAL_SCHEMA}, {SAVED_SCHEMA})",
    choose_by_device(reference.pooled_feed_forward, lambda: import_launchers().launch_pooled_feed_forward),
    fake_pooled_feed_forward,
)
pooled_feed_forward_backward = define_operator(
    "pooled_feed_forward_backward",
    f"(Tensor dsums, Tensor o, {FINAL_SCHEMA}, {SAVED_SCHEMA}, {NORM_SCHEMA}, Tensor up, float scale, "
    f"{DROPOUT_SCHEMA}) -> ({GRADIENTS_SCHEMA})",
    choose_by_device(
        reference.pooled_feed_forward_backward, lambda: import_launchers().launch_pooled_feed_forward_backward
    ),
    fake_pooled_feed_forward_backward,
)
embed = define_operator(
    "embed",
    f"(Tensor table, Tensor ids, Tensor? of_places, Tensor? place, float scale, {DROPOUT_SCHEMA}) -> Tensor",
    choose_by_device(reference.embed, lambda: import_launchers().launch_embed),
    fake_embed,
)
table_gradient = define_operator(
    "table_gradient",
    "(Tensor dy, Tensor ids, SymInt vocabulary, ScalarType half, Tensor? start, Tensor? length, SymInt places, "
    f"{DROPOUT_SCHEMA}) -> (Tensor table, Tensor of_places)",
    choose_by_device(reference.table_gradient, lambda: import_launchers().launch_table_gradient),
    fake_table_gradient,
)
