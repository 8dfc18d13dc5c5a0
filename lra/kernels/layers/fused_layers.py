"""The fused layers around attention: `embed`, a block's `project` and `feed_forward`, the last block's pooled one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lra.kernels import device
from lra.kernels.dropout import MAX_DROP_THRESHOLD
from lra.kernels.layers import layer_ops
from lra.kernels.layers.layer_ops import FeedForwardFunction, PooledFeedForwardFunction, ProjectFunction

MODEL_WIDTHS = (64, 128)  # features of a row; registers hold an entire row
ROTARY_HEAD_DIMS = (32, 64)  # head dimensions for rotary positions: one thread has both halves of a pair
MAX_WEIGHT_ELEMENTS = 96 * 1024  # of the weights around a feed-forward: more do not fit in shared memory


def supports_projection(x: Tensor, qkv: nn.Linear, head_dim: int, rotary: object) -> bool:
    """Whether `project` supports these arguments on this machine."""
    rotates = rotary is None or head_dim in ROTARY_HEAD_DIMS
    return qkv.out_features == 3 * qkv.in_features and rotates and _supports(x, product_dtype(x), qkv.in_features)


def supports_feed_forward(o: Tensor, x: Tensor, up: nn.Linear, threshold: int = 0) -> bool:
    """Whether `feed_forward` and `pooled_feed_forward` support these arguments on this machine."""
    d, f = up.in_features, up.out_features
    return (
        f % d == 0
        and d * (d + 2 * f) <= MAX_WEIGHT_ELEMENTS
        and threshold <= MAX_DROP_THRESHOLD
        and _supports(x, o.dtype, d)
    )


def supports_table_gradient(dy: Tensor, half: torch.dtype, threshold: int = 0) -> bool:
    """Whether `table_gradient` supports these arguments on this machine."""
    return threshold <= MAX_DROP_THRESHOLD and _supports(dy, half, dy.shape[1])


def supports_embedding(table: Tensor, threshold: int = 0) -> bool:
    """Whether `embed` supports these arguments on this machine."""
    return threshold <= MAX_DROP_THRESHOLD and _supports(table, None, table.shape[1])


def layer_obstacle(width: int, rows: torch.dtype, products: torch.dtype | None) -> str | None:
    """Why PyTorch computes such layers even on Hopper; None if the kernels do.

    Args:
        width: features of a row.
        rows: the dtype of the rows.
        products: the dtype of the matrix products; None if the layer has none, as a look-up.
    """
    if width not in MODEL_WIDTHS:
        return f"the kernels have rows of {' or '.join(map(str, MODEL_WIDTHS))} features"
    if rows != torch.float32:
        return "the kernels take a residual in float32"
    return None if products in (torch.float16, torch.bfloat16, None) else "the kernels multiply in 16 bits"


def _supports(x: Tensor, products: torch.dtype | None, width: int) -> bool:
    return x.is_cuda and layer_obstacle(width, x.dtype, products) is None and on_hopper()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: autocast's, or without autocast the dtype of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@torch.compiler.assume_constant_result
def on_hopper() -> bool:
    """Whether this is a Hopper GPU, on which the kernels were measured, with a ptxas that compiles them correctly."""
    return device.hopper_refusal(device.compute_capability()) is None


def _list_parameters(*modules: nn.Linear | nn.LayerNorm) -> list[Tensor]:
    return [each for module in modules for each in (module.weight, module.bias)]


def project(
    x: Tensor, norm: nn.LayerNorm, qkv: nn.Linear, heads: int, rotary: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x unchanged, q, k, v) of `qkv(norm(x))`. q, k and v are `[T, H, D]` in autocast's dtype. Differentiable once.

    Args:
        x: the input of the block, fp32 `[T, H * D]`. Other users of x must take it from the result: the kernel then
            adds their gradients to its own.
        norm: the LayerNorm before the projections.
        qkv: the three projections as one layer, H * D to 3 * H * D features.
        heads: H.
        rotary: cosines and sines, each `[T, D // 2]`, that rotate q and k (RoFormer, arXiv 2104.09864); None by
            default.
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
    """`z + drop(down(drop(gelu(up(norm(z))))))` with `z = x + drop(out(o))`, fp32 `[T, D]`. Differentiable once.

    Args:
        o: the result of attention, `[T, D]` in 16 bits, the dtype of the matrix products.
        x: the input of the block, fp32 `[T, D]`.
        out: the projection after attention, D to D features.
        norm: the LayerNorm before the feed-forward.
        up: D to F features.
        down: F to D features.
        scale: the factor of kept elements, 1 by default.
        threshold: of 256 elements, how many dropout drops; 0 by default.
        keys: int32 `[T]`, a key of dropout for each row. Without keys nothing is dropped.
        site: the first of three sites of `lra.models.dropout`, `site` to `site` + 2.
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
    """The mean of `final(feed_forward(o, x, ...))` over each sequence's rows, `[B, D]`. Differentiable once.

    A sequence without rows gives zeros. The mean is taken before the gain and the shift of `final`. So their gradients
    are sums over sequences, not over rows. The summed rows are rounded to the dtype of o.

    Args:
        final: the LayerNorm after the last block.
        start: int32 `[B]`, the first row of each sequence.
        length: int32 `[B]`, the rows of each sequence.
        padded_length: the rows that each sequence owns at least; 0 where sequences lie end to end.

    All other arguments are those of `feed_forward`.
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
    """`drop(table[ids] + of_places[place])`, fp32 `[T, D]`. Not differentiable.

    Args:
        table: fp32 `[V, D]`, a vector for each token.
        ids: `[T]`, the tokens. On a GPU the row of an id that the table lacks is NaN.
        of_places: fp32 `[P, D]`, a vector for each place; None by default.
        place: `[T]`, the place of each row; with `of_places` only.

    The dropout arguments are those of `feed_forward`, with the single site `site`.
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
    """(Sum of the rows of `dy` for each id, fp32 `[vocabulary, D]`; for each place, fp32 `[places, D]`).

    With keys the sums are of the elements that dropout keeps.

    Args:
        dy: fp32 `[T, D]`.
        ids: `[T]`, the token of each row.
        vocabulary: the number of ids.
        half: the 16-bit dtype to which dy is rounded for the sums of ids, which are matrix products.
        start: int32 `[B]`, the first row of each sequence; None without places.
        length: int32 `[B]`, the rows of each sequence; None without places.
        places: the largest number of places in a sequence, whose rows are in their order. With places, rows that
            no sequence owns are left out.

    The dropout arguments are those of `feed_forward`, with the single site `site`.
    """
    return layer_ops.table_gradient(
        dy.contiguous(), ids.contiguous(), vocabulary, half, start, length, places, threshold, keys, site
    )
