"""The layers around attention: `embed` before all, `project` and `feed_forward` of a block, pooled of the last one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lra.kernels import device
from lra.kernels.dropout import MAX_DROP_THRESHOLD
from lra.kernels.layers import layer_ops
from lra.kernels.layers.layer_ops import FeedForwardFunction, PooledFeedForwardFunction, ProjectFunction

MODEL_WIDTHS = (64, 128)  # of the model: a row of it is in registers whole
ROTARY_HEAD_DIMS = (32, 64)  # dimensions of heads that rotary positions turn: both halves of a pair are in one thread
MAX_WEIGHT_ELEMENTS = 96 * 1024  # elements of the weights around a feed-forward that shared memory holds


def supports_projection(x: Tensor, qkv: nn.Linear, head_dim: int, rotary: object) -> bool:
    """Whether `project` computes this."""
    rotates = rotary is None or head_dim in ROTARY_HEAD_DIMS
    return qkv.out_features == 3 * qkv.in_features and rotates and _supports(x, product_dtype(x), qkv.in_features)


def supports_feed_forward(o: Tensor, x: Tensor, up: nn.Linear, threshold: int = 0) -> bool:
    """Whether `feed_forward` and `pooled_feed_forward` compute this."""
    d, f = up.in_features, up.out_features
    return (
        f % d == 0
        and d * (d + 2 * f) <= MAX_WEIGHT_ELEMENTS
        and threshold <= MAX_DROP_THRESHOLD
        and _supports(x, o.dtype, d)
    )


def supports_table_gradient(dy: Tensor, half: torch.dtype, threshold: int = 0) -> bool:
    """Whether `table_gradient` computes this."""
    return threshold <= MAX_DROP_THRESHOLD and _supports(dy, half, dy.shape[1])


def supports_embedding(table: Tensor, threshold: int = 0) -> bool:
    """Whether `embed` computes this."""
    return threshold <= MAX_DROP_THRESHOLD and _supports(table, None, table.shape[1])


def layer_obstacle(width: int, rows: torch.dtype, products: torch.dtype | None) -> str | None:
    """Why rows of this width and dtype, and products in that one, are PyTorch's also on Hopper; None if they are not.

    Without products there is only a look-up.
    """
    if width not in MODEL_WIDTHS:
        return f"the kernels have rows of {' or '.join(map(str, MODEL_WIDTHS))} features"
    if rows != torch.float32:
        return "the kernels take a residual in float32"
    return None if products in (torch.float16, torch.bfloat16, None) else "the kernels multiply in 16 bits"


def _supports(x: Tensor, products: torch.dtype | None, width: int) -> bool:
    return x.is_cuda and layer_obstacle(width, x.dtype, products) is None and on_hopper()


def product_dtype(x: Tensor) -> torch.dtype:
    """What the products of x are in: autocast's dtype, or without it its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@torch.compiler.assume_constant_result
def on_hopper() -> bool:
    """Whether this is a Hopper GPU, on which they were measured, and a ptxas that compiles its products rightly."""
    return device.hopper_refusal(device.compute_capability()) is None


def _list_parameters(*modules: nn.Linear | nn.LayerNorm) -> list[Tensor]:
    return [each for module in modules for each in (module.weight, module.bias)]


def project(
    x: Tensor, norm: nn.LayerNorm, qkv: nn.Linear, heads: int, rotary: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x as it was, and q, k and v of `qkv(norm(x))`, `[T, H, D]` each in autocast's dtype; differentiable once.

    Args:
        x: what the block was given, `[T, H * D]` in fp32. Whatever else uses it takes it from the result: the gradients
            of both are added in the kernel then.
        rotary: cosines and sines, `[T, D // 2]`, by which q and k are turned.
    """
    cos, sin = rotary or (None, None)
    layers = _list_parameters(norm, qkv)
    x, *parts = ProjectFunction.apply(x.contiguous(), *layers, cos, sin, norm.eps, product_dtype(x))  # type: ignore[misc]
    q, k, v = (part.unflatten(1, (heads, -1)) for part in parts)
    return x, q, k, v


def feed_forward(
    o: Tensor,
    x: Tensor,
    out: nn.Linear,
    norm: nn.LayerNorm,
    up: nn.Linear,
    down: nn.Linear,
    *,
    scale: float = 1.0,
    threshold: int = 0,
    keys: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """`z + drop(down(drop(gelu(up(norm(z))))))` with `z = x + drop(out(o))`, `[T, D]` in fp32; differentiable once.

    Args:
        o: what attention returns, `[T, D]` of 16 bits, the dtype of the matrix products.
        x: what the block was given, `[T, D]` in fp32.
        scale, threshold, keys: what is kept is multiplied by, how many of 256 elements are dropped, and a key for each
            row, int32 `[T]`; nothing is dropped without keys. See `lra.models.dropout`, whose sites are `site`
            to `site` + 2 here.
    """
    dropout = (1.0 if keys is None else scale), threshold, keys, site
    layers = _list_parameters(out, norm, up, down)
    return FeedForwardFunction.apply(o.contiguous(), x.contiguous(), norm.eps, *dropout, *layers)  # type: ignore[no-any-return]


def pooled_feed_forward(
    o: Tensor,
    x: Tensor,
    out: nn.Linear,
    norm: nn.LayerNorm,
    up: nn.Linear,
    down: nn.Linear,
    final: nn.LayerNorm,
    start: Tensor,
    length: Tensor,
    padded_length: int,
    *,
    scale: float = 1.0,
    threshold: int = 0,
    keys: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """The mean of `final(feed_forward(o, x, ...))` over each sequence's rows, `[B, D]`; zeros of one without rows.

    The mean is taken before the gain and the shift, which it leaves in place: so their gradients are sums over
    sequences, not over rows. What is summed is rounded to the dtype of o. Differentiable once.

    Args:
        start, length: of the sequences, int32 `[B]`.
        padded_length: rows that each owns at least; 0 where sequences lie end to end.
    """
    dropout = (1.0 if keys is None else scale), threshold, keys, site
    sequences, layers = (start, length, padded_length), _list_parameters(out, norm, up, down)
    total = PooledFeedForwardFunction.apply(
        o.contiguous(), x.contiguous(), *sequences, norm.eps, final.eps, *dropout, *layers
    )
    mean = total / length.clamp(min=1)[:, None] * final.weight + final.bias  # type: ignore[operator]
    return mean.where(length[:, None] > 0, 0)


def embed(
    table: Tensor,
    ids: Tensor,
    of_places: Tensor | None = None,
    place: Tensor | None = None,
    *,
    scale: float = 1.0,
    threshold: int = 0,
    keys: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """`drop(table[ids] + of_places[place])`, `[T, D]` in fp32; without keys nothing is dropped. Not differentiable.

    Args:
        table, ids: `[V, D]` in fp32, and `[T]`. On a GPU the row of an id that the table lacks is NaN.
        of_places, place: likewise, added where they are given.
    """
    rows = [None if each is None else each.contiguous() for each in (table, ids, of_places, place)]
    return layer_ops.embed(*rows, 1.0 if keys is None else scale, threshold, keys, site)  # type: ignore[no-any-return]


def table_gradient(
    dy: Tensor,
    ids: Tensor,
    vocabulary: int,
    half: torch.dtype,
    start: Tensor | None = None,
    length: Tensor | None = None,
    places: int = 0,
    *,
    threshold: int = 0,
    keys: Tensor | None = None,
    site: int = 0,
) -> tuple[Tensor, Tensor]:
    """In fp32, for each id the sum of the rows of `dy`, `[vocabulary, D]`, and for each place, `[places, D]`.

    With keys, of what dropout keeps, as in `feed_forward`.

    Args:
        dy, ids: `[T, D]` in fp32, and `[T]`.
        half: what dy is rounded to for the sums of ids, which are products.
        start, length, places: of the sequences, int32 `[B]`, and how many places a sequence has at most, its rows in
            their order. What no sequence owns is left out then.
    """
    return layer_ops.table_gradient(
        dy.contiguous(), ids.contiguous(), vocabulary, half, start, length, places, threshold, keys, site
    )
