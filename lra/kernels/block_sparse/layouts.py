"""Patterns of block-sparse attention. Each function returns a `Layout` of n tokens, and `|` unites layouts.

    python -m lra.kernels.block_sparse.layouts butterfly n=64                             # draws butterfly-64.png
    python -m lra.kernels.block_sparse.layouts butterfly+local n=4096 block=128 width=2   # and both united

A block is a number, the side of a square, or a pair (queries, keys) of which one divides the other. The pattern of a
pair consists of squares with the longer side. The number of tokens is rounded up to a multiple of the block. Every
pattern also has the rules of `Layout` as options: `band`, `globals` and `causal`. A number out of range raises a
ValueError.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from lra.errors import UsageError
from lra.kernels.flash.layout import Layout

Block = int | tuple[int, int]


def butterfly(n: int, block: Block = 128, factors: int | None = None, **rules: Any) -> Layout:
    """Block a sees b = a and b = a xor 2^i for i < factors. All factors are used by default.

    This is the flat block butterfly of Pixelated Butterfly (Dao et al. 2022, arXiv 2112.00029). If the number of blocks
    is no power of two, the pattern is a part of that of the next power of two.
    """
    most = count_factors(n, block)
    factors = most if factors is None else factors
    _check_range("factors", factors, 0, most)
    a, b = _pairs(n, block)
    difference = a ^ b
    # true for 0 and for a power of two: nothing is left without the lowest bit
    return _layout((difference & (difference - 1) == 0) & (difference < 2**factors), block, **rules)


def count_factors(n: int, block: Block = 128) -> int:
    """The factors of the complete butterfly: the logarithm to base 2 of the number of blocks, rounded up."""
    return (_count(n, block) - 1).bit_length()


def fit_factors(n: int, block: Block, density: float, rest: Layout | None = None) -> int:
    """The most factors with which the butterfly, united with `rest`, shows at most `density` of the n^2 pairs.

    Raises:
        ValueError: the butterfly without factors already shows more pairs. The message gives its density.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density must be more than 0 and at most 1, got {density}")

    def reached(factors: int) -> float:
        layout = butterfly(n, block, factors, causal=rest is not None and rest.causal)
        return (layout if rest is None else layout | rest).density(n)

    most = count_factors(n, block)
    fitting = next((factors for factors in range(most, -1, -1) if reached(factors) <= density), None)
    if fitting is None:
        raise ValueError(f"density {density} cannot be reached: without any butterfly factor it is {reached(0)}")
    return fitting


def local(n: int, block: Block = 128, width: int = 1, **rules: Any) -> Layout:
    """Block a sees a - width to a + width."""
    _check_range("width", width, 0)
    a, b = _pairs(n, block)
    return _layout((a - b).abs() <= width, block, **rules)


def window(n: int, block: Block = 128, band: int = 128, **rules: Any) -> Layout:
    """Token i sees i - band to i + band: the sliding window of Longformer (Beltagy et al. 2020, arXiv 2004.05150)."""
    a, _ = _pairs(n, block)
    return _layout(torch.zeros(len(a), len(a), dtype=torch.bool), block, band=band, **rules)


def fixed(n: int, block: Block = 128, stride: int = 4, summary: int = 1, **rules: Any) -> Layout:
    """Block a sees the `stride` blocks of its own segment and the last `summary` of every segment.

    Child et al. 2019 (arXiv 1904.10509), equation 4, where it is causal.
    """
    _check_range("stride", stride, 1)
    _check_range("summary", summary, 0, stride)
    a, b = _pairs(n, block)
    return _layout((a // stride == b // stride) | (b % stride >= stride - summary), block, **rules)


def strided(n: int, block: Block = 128, stride: int = 4, **rules: Any) -> Layout:
    """Block a sees the `stride` blocks to either side, and every `stride`-th.

    Child et al. 2019 (arXiv 1904.10509), equation 3, where it is causal.
    """
    _check_range("stride", stride, 1)
    a, b = _pairs(n, block)
    distance = (a - b).abs()
    return _layout((distance <= stride) | (distance % stride == 0), block, **rules)


def bigbird(
    n: int, block: Block = 128, width: int = 1, first: int = 1, random: int = 3,
    heads: int = 1, seed: int = 0, **rules: Any,
) -> Layout:  # fmt: skip
    """Block a sees a - width to a + width, and `random` others that differ between heads.

    The first `first` blocks see all and are seen by all. BigBird (Zaheer et al. 2020, arXiv 2007.14062).
    """
    for name, value, least in (("width", width, 0), ("first", first, 0), ("random", random, 0), ("heads", heads, 1)):
        _check_range(name, value, least)
    a, b = _pairs(n, block)
    blocks = ((a - b).abs() <= width) | (a < first) | (b < first)
    blocks = blocks.expand(heads, -1, -1)
    noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(seed))
    chosen = noise.masked_fill(blocks, -1.0).argsort(2, descending=True)[:, :, :random]
    return _layout(blocks.scatter(2, chosen, True), block, **rules)


PATTERNS: dict[str, Callable[..., Layout]] = {
    f.__name__: f for f in (butterfly, local, window, fixed, strided, bigbird)
}
RULE_NAMES = ("band", "globals", "causal")


def _sides(block: Block) -> tuple[int, int]:
    rows, columns = (block, block) if isinstance(block, int) else block
    if min(rows, columns) < 1 or max(rows, columns) % min(rows, columns):
        raise ValueError(f"the sides of a block must be positive and one divide the other, got {rows}x{columns}")
    return rows, columns


def _count(n: int, block: Block) -> int:
    """The number of squares along a side of a pattern."""
    _check_range("n", n, 1)
    return -(-n // max(_sides(block)))


def _pairs(n: int, block: Block) -> tuple[Tensor, Tensor]:
    """The numbers of the squares of queries, as a column, and those of keys, as a row."""
    a = torch.arange(_count(n, block))
    return a[:, None], a


def _layout(squares: Tensor, block: Block, **rules: Any) -> Layout:
    """A layout from a pattern of squares, `[count, count]` or `[H, count, count]`, which are divided into blocks."""
    rows, columns = _sides(block)
    blocks = squares if squares.dim() == 3 else squares[None]
    blocks = blocks.repeat_interleave(max(1, columns // rows), 1).repeat_interleave(max(1, rows // columns), 2)
    return Layout(blocks, (rows, columns), **rules)


def _check_range(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} must be {f'at least {least}' if most is None else f'{least} to {most}'}, got {value}")


def save_picture(layout: Layout, path: str, pixels: int = 512) -> None:
    """Write a PNG picture of the blocks of each head. Full blocks are dark, partial blocks are lighter.

    Queries go down and keys go right. The longer side has about `pixels` pixels.
    """
    from PIL import Image

    shades = torch.tensor([235, 150, 40], dtype=torch.uint8)[layout.kinds(*layout.block).long()]
    unit = math.gcd(*layout.block)
    scale = max(1, pixels * unit // max(layout.size))
    for dim, side in enumerate(layout.block, 1):
        shades = shades.repeat_interleave(side // unit * scale, dim)
    gap = shades.new_full((shades.shape[1], 8), 255)
    side_by_side = torch.cat([part for head in shades for part in (gap, head)][1:], 1)
    Image.fromarray(side_by_side.numpy()).save(path, format="PNG")


def _parse(arguments: Sequence[str]) -> tuple[Layout, int, str]:
    """(Layout, its tokens, the file of its picture) from the arguments of the command line."""
    names, given = (arguments[0] if arguments else "").split("+"), dict[str, str]()
    for name in names:
        if name not in PATTERNS:
            raise UsageError(f"unknown pattern '{name}': choose from {', '.join(PATTERNS)}, or several joined by +")
    takes = {name: {*inspect.signature(PATTERNS[name]).parameters, *RULE_NAMES} - {"rules"} for name in names}
    known = sorted({"out"}.union(*takes.values()))
    for argument in arguments[1:]:
        option, equals, value = argument.partition("=")
        if not equals:
            raise UsageError(f"'{argument}' is not of the form option=value")
        if option not in known:
            raise UsageError(f"unknown option {option}=: {arguments[0]} takes {'=, '.join(known)}=")
        if option in given:
            raise UsageError(f"{option}= is given twice")
        given[option] = value
    out = given.pop("out", None)
    options: dict[str, Any] = {"n": 64, "block": 1} | {option: _value(option, text) for option, text in given.items()}
    out = f"{'+'.join(names)}-{options['n']}.png" if out is None else out
    if not out.lower().endswith(".png"):
        raise UsageError(f"out={out} does not end in .png: pictures are PNG files")
    smallest = options["block"] if isinstance(options["block"], int) else min(options["block"])
    if options.get("heads", 1) * (options["n"] // max(1, smallest)) ** 2 > 2**22:
        raise UsageError(f"n={options['n']} has too many blocks for a picture: set a larger block=")
    try:
        parts = (PATTERNS[name](**{k: v for k, v in options.items() if k in takes[name]}) for name in names)
        return reduce(or_, parts), options["n"], out
    except ValueError as error:
        raise UsageError(f"{error}") from None


def _value(option: str, text: str) -> int | bool | tuple[int, int]:
    if option == "causal":
        if text not in ("true", "false"):
            raise UsageError(f"{option}={text} is neither true nor false")
        return text == "true"
    numbers = text.split("x") if option == "block" else [text]
    if len(numbers) > 2 or not all(re.fullmatch(r"[0-9]{1,6}", number) for number in numbers):
        pair = ", nor two of them as in 16x256" if option == "block" else ""
        raise UsageError(f"{option}={text} is not a whole number of at most 6 digits{pair}")
    return int(text) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]))


def main(arguments: Sequence[str]) -> int:
    """`PATTERN[+PATTERN] [n=TOKENS] [block=ROWSxCOLUMNS] [option=…] [out=FILE]`. By default n=64 and block=1."""
    try:
        layout, n, out = _parse(arguments)
        try:
            save_picture(layout, out)
        except OSError as error:
            raise UsageError(f"cannot write {out} ({error.strerror}): name a .png in a folder of yours") from None
    except UsageError as error:
        print(f"layouts: {error}", file=sys.stderr)
        return 2
    print(f"{out}: density {layout.density(n):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
