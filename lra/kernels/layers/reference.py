"""The definition of the layers' operators in plain PyTorch. Tests compare every kernel with this file.

Arguments and results are those of layer_ops.py. Arithmetic is in the dtype of the residual. What the kernels hold in 16
bits is rounded to 16 bits. With float64 throughout nothing is rounded.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SITE_STRIDE = 0x3C6EF372  # the distance of sites for `draw_feature_words`; even, and otherwise arbitrary


class LayerParameters(NamedTuple):
    """The fp32 parameters of the layers after attention: `out`, the norm, `up` and `down` with F hidden features."""

    out: Tensor  # [D, D]
    out_bias: Tensor
    gain: Tensor
    shift: Tensor
    up: Tensor  # [F, D]
    up_bias: Tensor
    down: Tensor  # [D, F]
    down_bias: Tensor


class SavedForBackward(NamedTuple):
    """The tensors that the forward of these layers saves for the backward. Weights have 16 bits."""

    xhat: Tensor  # [T, D]: the normalised rows
    rstd: Tensor  # [T]: the inverse of the deviation
    half_out: Tensor  # includes dropout's scale
    half_up: Tensor  # includes the norm's gain
    half_down: Tensor  # includes dropout's scale twice
    folded_bias: Tensor  # [F]: of `up`; includes the norm's shift


# The results of the backward of these layers. dnorm, `[2, D]`, has the gradients of gain and shift.
LayerGradients = namedtuple("LayerGradients", "do dx dout dup ddown dout_bias dup_bias ddown_bias dnorm")


def feed_forward(
    o: Tensor, x: Tensor, out: Tensor, out_bias: Tensor, gain: Tensor, shift: Tensor, up: Tensor, up_bias: Tensor,
    down: Tensor, down_bias: Tensor, eps: float, scale: float, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    half, wide = o.dtype, x.dtype
    halves = half_out, half_up, half_down = [
        (w * by).to(half) for w, by in ((out, scale), (up, gain), (down, scale**2))
    ]
    folded = up_bias + (up * shift).sum(1)
    z = x + drop_features(F.linear(o.to(wide), half_out.to(wide), out_bias * scale), keys, site, threshold)
    xhat, rstd = normalise(z, eps, half)
    h = drop_features(F.gelu(F.linear(xhat.to(wide), half_up.to(wide), folded)), keys, site + 1, threshold).to(half)
    down_h = drop_features(F.linear(h.to(wide), half_down.to(wide), down_bias * scale), keys, site + 2, threshold)
    return z + down_h, xhat, rstd, *halves, folded


def feed_forward_backward(
    dy: Tensor, o: Tensor, xhat: Tensor, rstd: Tensor, half_out: Tensor, half_up: Tensor, half_down: Tensor,
    folded_bias: Tensor, gain: Tensor, shift: Tensor, up: Tensor,
    scale: float, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    half, wide = o.dtype, dy.dtype
    ddown = drop_features(dy, keys, site + 2, threshold).to(half)
    u = F.linear(xhat.to(wide), half_up.to(wide), folded_bias)
    cdf, pdf = torch.special.ndtr(u), torch.exp(-u * u / 2) * (2 * torch.pi) ** -0.5
    h = drop_features(u * cdf, keys, site + 1, threshold).to(half)
    dh = drop_features(ddown.to(wide) @ half_down.to(wide), keys, site + 1, threshold)
    du = (dh * (cdf + u * pdf)).to(half)
    dx = dy + normalise_backward(du.to(wide) @ half_up.to(wide), xhat, rstd)
    dout = drop_features(dx, keys, site, threshold).to(half)
    do = (dout.to(wide) @ half_out.to(wide)).to(half)
    by_out, by_xhat, by_h = (a.to(wide).T @ b.to(wide) for a, b in ((dout, o), (du, xhat), (ddown, h)))
    dout_bias, dup_bias, ddown_bias = (each.to(wide).sum(0) for each in (dout, du, ddown))
    dup, dnorm = norm_gradients(by_xhat, dup_bias, up, gain, shift)
    weights = scale * by_out, dup, scale**2 * by_h
    return do, dx, *weights, scale * dout_bias, dup_bias, scale * ddown_bias, dnorm


def pooled_feed_forward(
    o: Tensor, x: Tensor, out: Tensor, out_bias: Tensor, gain: Tensor, shift: Tensor, up: Tensor, up_bias: Tensor,
    down: Tensor, down_bias: Tensor, start: Tensor, length: Tensor, padded_length: int, eps: float, final_eps: float,
    scale: float, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(Sum of the normalised rows of y for each sequence, tensors for the backward)."""
    layers = (out, out_bias, gain, shift, up, up_bias, down, down_bias)
    y, *kept = feed_forward(o, x, *layers, eps, scale, threshold, keys, site)
    final, final_rstd = normalise(y, final_eps, o.dtype)
    return *pool_rows(final, start, length, x.dtype), final, final_rstd, *kept


def pool_rows(x: Tensor, start: Tensor, length: Tensor, wide: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(Sum of the rows of each sequence; sequence of each row, -1 past its length)."""
    of_row, sums = start.new_full((len(x),), -1), x.new_zeros(len(start), x.shape[1], dtype=wide)
    for b, rows in enumerate(_rows(start, length)):
        of_row[rows], sums[b] = b, x[rows].to(wide).sum(0)
    return sums, of_row


def pooled_feed_forward_backward(
    dsums: Tensor, o: Tensor, of_row: Tensor, final: Tensor, final_rstd: Tensor, *kept: Any
) -> tuple[Tensor, ...]:
    dxhat = dsums.index_select(0, of_row.clamp(min=0)).where(of_row[:, None] >= 0, 0)
    return feed_forward_backward(normalise_backward(dxhat, final, final_rstd), o, *kept)


def project(
    x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None,
    eps: float, half: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    half_weight = (weight * gain).to(half)
    xhat, rstd = normalise(x, eps, half)
    parts = F.linear(xhat.to(x.dtype), half_weight.to(x.dtype), bias + (weight * shift).sum(1)).chunk(3, 1)
    q, k, v = (apply_rotary(part, cos, sin) if i < 2 else part for i, part in enumerate(parts))
    q, k, v = (part.to(half).clone(memory_format=torch.contiguous_format) for part in (q, k, v))
    return q, k, v, xhat, rstd, half_weight


def project_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, dy: Tensor, xhat: Tensor, rstd: Tensor, half_weight: Tensor,
    gain: Tensor, shift: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide = dy.dtype
    if cos is not None and sin is not None:
        dq, dk = (apply_rotary(part.to(wide), cos, -sin).to(part.dtype) for part in (dq, dk))
    dqkv = torch.cat((dq, dk, dv), 1).to(wide)
    dx = dy + normalise_backward(dqkv @ half_weight.to(wide), xhat, rstd)
    dbias = dqkv.sum(0)
    dweight, dnorm = norm_gradients(dqkv.T @ xhat.to(wide), dbias, weight, gain, shift)
    return dx, dweight, dbias, dnorm


def norm_gradients(
    by_xhat: Tensor, dbias: Tensor, weight: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of a layer's weight and of the norm before it, gain and shift, from that of xhat for its input."""
    dnorm = torch.stack(((weight * by_xhat).sum(0), (weight * dbias[:, None]).sum(0)))
    return by_xhat * gain + dbias[:, None] * shift, dnorm


def embed(
    table: Tensor, ids: Tensor, of_places: Tensor | None, place: Tensor | None,
    scale: float, threshold: int, keys: Tensor | None, site: int,
) -> Tensor:  # fmt: skip
    x = F.embedding(ids, table)
    if of_places is not None and place is not None:
        x = x + F.embedding(place, of_places)
    return drop_features(x * scale, keys, site, threshold)


def table_gradient(
    dy: Tensor, ids: Tensor, vocabulary: int, half: torch.dtype, start: Tensor | None, length: Tensor | None,
    places: int, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(Sum of the kept, rounded rows of dy for each id; sum of the kept rows for each place, not rounded)."""
    dy = drop_features(dy, keys, site, threshold)
    one_hot = (ids[:, None] == torch.arange(vocabulary, device=ids.device)).to(dy.dtype)
    of_places = dy.new_zeros(places, dy.shape[1])
    for rows in () if start is None or length is None else _rows(start, length):
        of_places[: rows.stop - rows.start] += dy[rows]
    return one_hot.T @ dy.to(half).to(dy.dtype), of_places


def _rows(start: Tensor, length: Tensor) -> list[slice]:
    return [slice(first, first + count) for first, count in zip(start.tolist(), length.tolist(), strict=True)]


def normalise(x: Tensor, eps: float, half: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x minus its mean, divided by its deviation; the inverse of the deviation)."""
    centred = x - x.mean(1, keepdim=True)
    rstd = (centred.square().mean(1) + eps).rsqrt()
    return (centred * rstd[:, None]).to(half), rstd


def normalise_backward(dxhat: Tensor, xhat: Tensor, rstd: Tensor) -> Tensor:
    xhat = xhat.to(dxhat.dtype)
    along = (dxhat * xhat).mean(1, keepdim=True)
    return (dxhat - dxhat.mean(1, keepdim=True) - xhat * along) * rstd[:, None]


def apply_rotary(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Rotate each pair `(x[p], x[p + P])` of each head by its angle, `[T, P]`, as `lra.models.positions.rotate`."""
    if cos is None or sin is None:
        return x
    a, b = x.unflatten(1, (-1, 2, cos.shape[1])).unbind(2)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), 2).flatten(1)


def drop_features(x: Tensor, keys: Tensor | None, site: int, threshold: int) -> Tensor:
    """`x`, `[T, D]`, with zeros where dropout drops. The mask depends on the row's key, the site and the feature.

    Four neighbouring features, two pairs, share a word. The first feature of each pair has the lower half of the word.
    That half, rotated by one bit, has a byte for each of the two pairs. So kernels compare two fp16 magnitudes at once,
    as for the mask of attention. An element is dropped when its byte is below `threshold`.
    """
    if keys is None or not threshold:
        return x
    feature = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)
    half = draw_feature_words(keys, site, feature >> 2) >> 16 * (feature & 1) & 0xFFFF
    byte = (half << 1 | half >> 15) >> 8 * (feature >> 1 & 1) & 0xFF
    return torch.where(byte >= threshold, x, 0.0)


def draw_feature_words(keys: Tensor, site: int, column: Tensor) -> Tensor:
    """Random words, int32 `[T, columns]`: a hash of the row's key plus a multiple of that key with its halves swapped.

    The site and the column give the multiple. If the distance between places were equal in all rows, the words of one
    row could repeat those of another, some columns on. An even multiple loses no information of the summand.
    `benchmarks/studies/randomness` applies the tests of TestU01 to the words.
    """
    place = (site * SITE_STRIDE + (1 << 31)) % (1 << 32) - (1 << 31) + 2 * column  # as int32 wraps
    return mix_bits(keys[:, None] + (keys << 16 | _shift(keys, 16))[:, None] * place)


def mix_bits(x: Tensor) -> Tensor:
    """A bijection of int32 by xor-shifts and odd factors. Every output bit depends on every input bit."""
    x = (x ^ _shift(x, 16)) * 0x7FEB352D
    x = (x ^ _shift(x, 15)) * -0x7B935975  # 0x846CA68B
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right by `by` bits, with zeros from the left. PyTorch's own shift copies the sign."""
    return (x >> by) & (1 << 32 - by) - 1
