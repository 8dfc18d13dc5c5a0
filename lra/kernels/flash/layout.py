"""Block-sparse layouts: which keys a query sees, and the lists of tiles that the kernels read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

NONE, PARTIAL, FULL = 0, 1, 2
LIST_END = 2**30  # fills the ends of the lists of visits; it lies past every tile


class Visits(NamedTuple):
    """For each head, and each tile of queries or of keys, the tiles of the other side that it visits."""

    entries: Tensor | None  # int32 [H or 1, tiles, max_visits]: 2 * tile + (is its block set), ascending, then END
    layouts: int  # H or 1
    tiles: int
    max_visits: int  # a power of two; 0: there is no layout, and every tile is visited


@dataclass(frozen=True, eq=False)
class Layout:
    """Query i of head h sees key j if `blocks[h, i // R, j // C]` is set or a rule shows it; if causal, never j > i.

    Positions count from the start of a sequence, whose length is at most `size`. Blocks `[1, rows, columns]` serve all
    heads; with H of them, head h of a call uses number h % H. `|` unites layouts of one size.

    Raises:
        ValueError: a query sees no key at all, or an argument is out of range.
    """

    blocks: Tensor  # bool [H or 1, rows, columns], on the CPU
    block: tuple[int, int]  # R queries by C keys
    band: int | None = None  # query i sees key j if |i - j| <= band
    globals: int = 0  # the first `globals` tokens see all and are seen by all
    causal: bool = False
    key: int = field(init=False)  # a hash of the content; operators find the layout by it

    def __post_init__(self) -> None:
        if self.blocks.dim() != 3 or self.blocks.dtype != torch.bool or self.blocks.device.type != "cpu":
            raise ValueError("blocks must be a bool tensor [H or 1, rows, columns] on the CPU")
        object.__setattr__(self, "blocks", self.blocks.clone())  # a copy: the key is a hash of it
        if min(self.block) < 1 or self.globals < 0 or (self.band is not None and self.band < 0):
            raise ValueError("block sizes must be positive, band and globals not negative")
        if not self.blocks.numel():
            raise ValueError(f"blocks must have a head, a row and a column at least, got {list(self.blocks.shape)}")
        if self.band is None and not self.globals:  # either shows a key to every query
            # the first query of a row of blocks sees the first key of some block, or no key at all
            first = (torch.arange(0, size, side) for size, side in zip(self.size, self.block, strict=True))
            blind = ~self.token_mask(*first).any(2)
            if bool(blind.any()):
                head, row = (int(x) for x in blind.nonzero()[0])
                raise ValueError(f"block row {row} of head {head} sees no block: every query must see a key")
        facts = (tuple(self.blocks.shape), self.block, self.band, self.globals, self.causal)
        content = repr(facts).encode() + self.blocks.contiguous().numpy().tobytes()
        key = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
        object.__setattr__(self, "key", key)
        _known.setdefault(key, self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register a copy, which may come from another process."""
        self.__dict__.update(state)
        _known.setdefault(self.key, self)

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of queries and keys that it covers. Sequences may be shorter."""
        return self.blocks.shape[1] * self.block[0], self.blocks.shape[2] * self.block[1]

    @property
    def ruled(self) -> bool:
        """Whether a block may be visible in part."""
        return self.causal or self.band is not None or self.globals > 0

    def __or__(self, other: Layout) -> Layout:
        if (self.block, self.blocks.shape[1:], self.causal) != (other.block, other.blocks.shape[1:], other.causal):
            raise ValueError("a union needs layouts of one size, one block and one causality")
        if len(self.blocks) != len(other.blocks) and 1 not in (len(self.blocks), len(other.blocks)):
            raise ValueError(f"a union needs one number of heads, got {len(self.blocks)} and {len(other.blocks)}")
        bands = [x.band for x in (self, other) if x.band is not None]
        return dataclasses.replace(
            self,
            blocks=self.blocks | other.blocks,
            band=max(bands, default=None),
            globals=max(self.globals, other.globals),
        )

    def token_mask(self, rows: Tensor, columns: Tensor) -> Tensor:
        """bool `[H or 1, rows, columns]`: whether the queries `rows` see the keys `columns`. It defines the layout."""
        i, j = rows.cpu()[:, None], columns.cpu()[None, :]
        seen = self.blocks[:, i // self.block[0], j // self.block[1]]
        if self.band is not None:
            seen = seen | ((i - j).abs() <= self.band)
        if self.globals:
            seen = seen | (i < self.globals) | (j < self.globals)
        return seen & (j <= i) if self.causal else seen

    def kinds(self, rows: int, columns: int) -> Tensor:
        """int8 `[H or 1, ceil, ceil]`: whether tiles of `rows` by `columns` tokens are NONE, PARTIAL or FULL.

        The method looks at one rule at a time. So a PARTIAL tile may be fully visible by several rules together, or
        hidden by causality.
        """
        some = _coarse(self.blocks, self.block, (rows, columns), torch.any)
        every = _coarse(self.blocks, self.block, (rows, columns), torch.all)
        last_row, last_column = (side - 1 for side in self.size)
        i = torch.arange(0, last_row + 1, rows)[:, None]
        j = torch.arange(0, last_column + 1, columns)[None, :]
        last_i, last_j = (i + rows - 1).clamp(max=last_row), (j + columns - 1).clamp(max=last_column)
        if self.band is not None:
            some = some | ((j - last_i <= self.band) & (i - last_j <= self.band))
            every = every | ((last_j - i <= self.band) & (last_i - j <= self.band))
        if self.globals:
            some = some | (i < self.globals) | (j < self.globals)
            every = every | (last_i < self.globals) | (last_j < self.globals)
        if self.causal:
            some, every = some & (j <= last_i), every & (last_j <= i)
        return torch.where(every, FULL, torch.where(some, PARTIAL, NONE)).to(torch.int8)

    def density(self, n: int | None = None) -> float:
        """The visible share of the n^2 pairs of a sequence of n tokens. n is the full size by default."""
        n = min(self.size) if n is None else n
        if not 1 <= n <= min(self.size):
            raise ValueError(f"the layout covers 1 to {min(self.size)} tokens, not {n}")
        i = torch.arange(n)
        row, side = i // self.block[0], self.block[1]
        keys_before, is_set = pad(self.blocks.cumsum(2) * side, (1, 0)), pad(self.blocks, (0, 1))

        def shown(end: Tensor) -> Tensor:  # [H or 1, n]: the keys before `end` that blocks show to each query
            return keys_before[:, row, end // side] + is_set[:, row, end // side] * (end % side)

        end = i + 1 if self.causal else torch.full_like(i, n)
        first = torch.where(i < self.globals, end, end.clamp(max=self.globals))  # globals show the keys 0 to `first`
        low = high = first  # the band shows the keys `low` to `high`
        if self.band is not None:
            low = first.maximum(i - self.band)
            high = low.maximum(end.minimum(i + self.band + 1))
        seen = first + (high - low) + shown(end) - shown(high) + shown(low) - shown(first)
        return int(seen.sum()) / (len(self.blocks) * n * n)

    def visits(self, rows: int, columns: int, device: torch.device, by_key: bool = False) -> Visits:
        """The tiles of `columns` keys that each tile of `rows` queries visits, or by key the other way round.

        Tiles must divide blocks. The lists are built once and stay on the device.
        """
        place = (self.key, rows, columns, device, by_key)
        if place not in _visits:
            _visits[place] = self._list(rows, columns, device, by_key)
        return _visits[place]

    def _list(self, rows: int, columns: int, device: torch.device, by_key: bool) -> Visits:
        if self.block[0] % rows or self.block[1] % columns:
            raise ValueError(f"tiles of {rows} by {columns} do not divide blocks of {self.block[0]} by {self.block[1]}")
        seen = self.kinds(rows, columns) != NONE
        is_set = self.blocks.repeat_interleave(self.block[0] // rows, 1).repeat_interleave(self.block[1] // columns, 2)
        if by_key:
            seen, is_set = seen.transpose(1, 2), is_set.transpose(1, 2)
        entries = torch.where(seen, 2 * torch.arange(seen.shape[2]) + is_set, LIST_END)
        count = max(1, int(seen.sum(2).max()))
        max_visits = 1 << (count - 1).bit_length()
        entries = pad(
            entries.sort(2).values[:, :, :max_visits], (0, max(0, max_visits - entries.shape[2])), value=LIST_END
        )
        return Visits(entries.to(device, torch.int32).contiguous(), *entries.shape)


ALL_TILES = Visits(None, 0, 0, 0)

# Layouts and lists by content: layers with equal layouts share the lists. They stay until the process ends, because a
# captured graph or a later backward knows only the key of a layout.
_known: dict[int, Layout] = {}
_visits: dict[tuple[int, int, int, torch.device, bool], Visits] = {}


def find_layout(key: int) -> Layout:
    """The layout with this `key`."""
    return _known[key]


def _coarse(blocks: Tensor, block: tuple[int, int], tile: tuple[int, int], combine: Callable[..., Tensor]) -> Tensor:
    """Whether any, or all, of the blocks that a tile overlaps are set, for each tile."""
    for dim in (1, 2):
        length = blocks.shape[dim] * block[dim - 1]
        starts = torch.arange(0, length, tile[dim - 1])
        first, last = starts // block[dim - 1], (starts + tile[dim - 1] - 1).clamp(max=length - 1) // block[dim - 1]
        reach = int((last - first).max()) + 1
        which = (first[:, None] + torch.arange(reach)).minimum(last[:, None])
        blocks = combine(blocks.index_select(dim, which.flatten()).unflatten(dim, which.shape), dim=dim + 1)
    return blocks
