"""Which keys a query sees, in blocks: the patterns of block-sparse attention, and what kernels read of them.

    python -m lra.kernels.block_sparse.layouts butterfly n=64        # draws butterfly-64.png

A pattern is a mask of blocks of queries by blocks of keys, 1 for blocks that are seen whole, and rules about tokens
that are seen besides. Patterns of one size are united with `|`. Positions count within the sequence.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lra.kernels.flash.layout import Layout


def butterfly(n: int, block: int | tuple[int, int] = 128, factors: int | None = None, **rules: Any) -> Layout:
    """Block a sees a and a xor 2^i, i < factors: the flat block butterfly of Pixelated Butterfly (Dao et al. 2022).

    All factors by default. A number of blocks that is no power of two is cut from the next one.
    """
    count = grid(n, block)
    most = count_factors(n, block)
    factors = most if factors is None else factors
    if not 0 <= factors <= most:
        raise ValueError(f"factors must be 0 to {most} for {count} blocks, got {factors}")
    a = torch.arange(count)
    difference = a[:, None] ^ a[None, :]
    return _layout(sum(difference == 2**i for i in range(factors)) + (difference == 0) > 0, n, block, **rules)


def count_factors(n: int, block: int | tuple[int, int]) -> int:
    """Factors of the whole butterfly: the logarithm of the number of blocks."""
    return (grid(n, block) - 1).bit_length()


def local(n: int, block: int | tuple[int, int] = 128, width: int = 1, **rules: Any) -> Layout:
    """Block a sees a - width to a + width."""
    a = torch.arange(grid(n, block))
    return _layout((a[:, None] - a[None, :]).abs() <= width, n, block, **rules)


def window(n: int, block: int | tuple[int, int] = 128, band: int = 128, **rules: Any) -> Layout:
    """Token i sees i - band to i + band: the sliding window of Longformer (Beltagy et al. 2020)."""
    count = grid(n, block)
    return _layout(torch.zeros(count, count, dtype=torch.bool), n, block, band=band, **rules)


def fixed(n: int, block: int | tuple[int, int] = 128, stride: int = 4, summary: int = 1, **rules: Any) -> Layout:
    """Block a sees the `stride` blocks of its own segment and the last `summary` of every one (Child et al. 2019)."""
    a = torch.arange(grid(n, block))
    own = a[:, None] // stride == a[None, :] // stride
    return _layout(own | (a % stride >= stride - summary)[None, :], n, block, **rules)


def strided(n: int, block: int | tuple[int, int] = 128, stride: int = 4, **rules: Any) -> Layout:
    """Block a sees the `stride` - 1 blocks to either side, and every `stride`-th (Child et al. 2019)."""
    a = torch.arange(grid(n, block))
    distance = (a[:, None] - a[None, :]).abs()
    return _layout((distance < stride) | (distance % stride == 0), n, block, **rules)


def bigbird(
    n: int, block: int | tuple[int, int] = 128, width: int = 1, first: int = 1, random: int = 3,
    heads: int = 1, seed: int = 0, **rules: Any,
) -> Layout:  # fmt: skip
    """A local window, `first` blocks that see all and are seen by all, and `random` others for each block and head
    (Zaheer et al. 2020)."""
    count = grid(n, block)
    a = torch.arange(count)
    blocks = (a[:, None] - a[None, :]).abs() <= width
    blocks = (blocks | (a < first)[:, None] | (a < first)[None, :]).expand(heads, count, count).clone()
    noise = torch.rand(heads, count, count, generator=torch.Generator().manual_seed(seed))
    chosen = noise.masked_fill(blocks, -1.0).argsort(2, descending=True)[:, :, : min(random, count)]
    return _layout(blocks.scatter(2, chosen, True), n, block, **rules)


PATTERNS: dict[str, Callable[..., Layout]] = {
    f.__name__: f for f in (butterfly, local, window, fixed, strided, bigbird)
}


def grid(n: int, block: int | tuple[int, int]) -> int:
    """Number of square blocks that patterns are made of: a rectangular block divides the square of its longer side."""
    rows, columns = (block, block) if isinstance(block, int) else block
    if max(rows, columns) % min(rows, columns):
        raise ValueError(f"of the sides of a block one must divide the other, got {rows} and {columns}")
    return math.ceil(n / max(rows, columns))


def _layout(blocks: Tensor, n: int, block: int | tuple[int, int], **rules: Any) -> Layout:
    """A pattern of square blocks, `[count, count]` or `[H, count, count]`, divided into the blocks asked for."""
    rows, columns = (block, block) if isinstance(block, int) else block
    side = max(rows, columns)
    blocks = blocks if blocks.dim() == 3 else blocks[None]
    blocks = blocks.repeat_interleave(side // rows, 1).repeat_interleave(side // columns, 2)
    return Layout(blocks.contiguous(), (rows, columns), **rules)


def draw(layout: Layout, path: str, head: int = 0, pixels: int = 512) -> None:
    """A picture of the blocks: dark where a block is seen whole, lighter where a part of it is."""
    from PIL import Image

    kinds = layout.kinds(*layout.block)[head % layout.blocks.shape[0]]
    shades = torch.tensor([255, 150, 40], dtype=torch.uint8)[kinds.long()]
    scale = max(1, pixels // max(kinds.shape))
    image = Image.fromarray(shades.numpy())
    image.resize((kinds.shape[1] * scale, kinds.shape[0] * scale), Image.Resampling.NEAREST).save(path)


def main(arguments: Sequence[str]) -> int:
    """`PATTERN n=TOKENS [block=...] [option=...] [out=FILE]`; n counts tokens, and one is a block by default."""
    if not arguments or arguments[0] not in PATTERNS:
        print(f"choose a pattern: {', '.join(PATTERNS)}; then n=64 and its options", file=sys.stderr)
        return 2
    name, *rest = arguments
    options: dict[str, Any] = {"n": 64, "block": 1}
    out = None
    for text in rest:
        field, _, value = text.partition("=")
        if field == "out":
            out = value
        else:
            try:
                options[field] = tuple(map(int, value.split("x"))) if "x" in value else int(value)
            except ValueError:
                print(f"'{text}' is not of the form option=number", file=sys.stderr)
                return 2
    try:
        layout = PATTERNS[name](**options)
    except (TypeError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    path = out or f"{name}-{options['n']}.png"
    draw(layout, path)
    print(f"{path}: density {layout.density():.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
