"""Splits whose tokens lie on a device. Of a batch, only a few numbers per sequence are sent there."""

from __future__ import annotations

import dataclasses
import functools
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lra.data.collated import TORCH_DTYPE_OF
from lra.data.split import Examples, Pairs, Split

MEMORY_SHARE = 1 / 4  # at most this share of a GPU's memory: the rest is for the model
CHUNK = 1 << 24  # elements uploaded at a time, through a buffer of as many


@dataclass(frozen=True, eq=False)
class ResidentSplit(Split):
    """A split on a device. Its batches are bitwise those of the split that it was made of."""

    tokens: Tensor  # uint8 or uint16 [sum of lengths + 1], the last is 0
    positions: Tensor | None = None  # int32 [sum of lengths + 1], the last is 0
    filtered: tuple[int, int, int, float] | None = None  # arguments of Split.cut that chose the tokens

    def cut(self, max_length: int, head: int, threshold: int | None = None, share: float = 0.0) -> Split:
        asked = None if threshold is None else (max_length, head, threshold, share)
        if asked != self.filtered:
            names = "(max_length, prefix, threshold, share)"
            raise ValueError(f"uploaded with {names} {self.filtered}, asked for with {asked}")
        return super().cut(max_length, head)

    def lay(self, begins: np.ndarray, total: int) -> list[np.ndarray]:
        """Where gaps and sequences end, in turn, and how far each row is from its token. Gaps read past the last
        one.
        """
        ends, shifts = np.empty(2 * len(begins), np.int32), np.empty(2 * len(begins) + 1, np.int64)
        ends[::2], ends[1::2] = begins, begins + self.lengths
        shifts[::2], shifts[1::2] = self.tokens.numel(), self.starts - begins  # a store may have more than 2^31 tokens
        return [ends, shifts]

    def read(self, laid: list[Tensor], total: int) -> tuple[Tensor, Tensor | None]:
        ends, shifts = laid
        if ends.device != self.tokens.device:
            raise ValueError(f"the tokens are on {self.tokens.device}, the batch is asked for on {ends.device}")
        rows = _rows(1 << total.bit_length(), ends.device)[:total]
        places = (rows + shifts[torch.bucketize(rows, ends, right=True)]).clamp_(max=len(self.tokens) - 1)
        signed = torch.int16 if self.tokens.dtype == torch.uint16 else self.tokens.dtype  # PyTorch indexes few unsigned
        tokens = self.tokens.view(signed)[places].view(self.tokens.dtype).to(torch.int32)
        return tokens, None if self.positions is None else self.positions[places]


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory; 0 for a device without memory of its own."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def upload_splits(
    splits: Mapping[str, Examples],
    device: torch.device,
    limit: float,
    *,
    max_length: int,
    prefix: int | None = None,
    threshold: int | None = None,
    share: float = 0.0,
) -> dict[str, Examples]:
    """The splits on `device`, or none of them if together they need more than `limit` bytes there.

    What they share is uploaded once. Every later `collate` must have the same `max_length`, `threshold` and `share`,
    and a `prefix` where there is one here.

    Args:
        threshold: with `share`, is applied now: only tokens that pass are uploaded.
    """
    filtered = None if threshold is None else (max_length, int(prefix is not None), threshold, share)
    hosts = {name: split.documents if isinstance(split, Pairs) else split for name, split in splits.items()}
    if filtered is not None:
        hosts = {name: split.cut(*filtered) for name, split in hosts.items()}
    vectors = {_identity(v): v for s in hosts.values() for v in (s.tokens, s.positions) if v is not None}
    if sum(vector.nbytes + vector.itemsize for vector in vectors.values()) > limit:
        return {}
    there = {identity: _copy(vector, device) for identity, vector in vectors.items()}

    def resident(host: Split) -> ResidentSplit:
        positions = None if host.positions is None else there[_identity(host.positions)]
        return ResidentSplit(there[_identity(host.tokens)], host.starts, host.lengths, host.labels, positions, filtered)

    placed: dict[str, Examples] = {}
    for name, split in splits.items():
        held = resident(hosts[name])
        placed[name] = dataclasses.replace(split, documents=held) if isinstance(split, Pairs) else held
    return placed


def _identity(vector: np.ndarray) -> Any:
    """A key that two vectors share if they are the same one, or if each maps the whole of one file."""
    base = vector.base
    if isinstance(base, np.memmap) and isinstance(base.base, mmap.mmap) and base.nbytes == vector.nbytes:
        return base.filename
    return id(vector)


def _copy(vector: np.ndarray, device: torch.device) -> Tensor:
    """The vector on `device`, and a 0 after its last element."""
    dtype = TORCH_DTYPE_OF[vector.dtype.str]
    there = torch.zeros(len(vector) + 1, dtype=dtype, device=device)
    buffer = torch.empty(min(CHUNK, len(vector)), dtype=dtype, pin_memory=device.type == "cuda")
    for first in range(0, len(vector), CHUNK):
        part = vector[first : first + CHUNK]
        buffer.numpy()[: len(part)] = part
        there[first : first + len(part)].copy_(buffer[: len(part)])
    return there


@functools.cache
def _rows(count: int, device: torch.device) -> Tensor:
    """0, 1, ...: int32 `[count]`, cached."""
    return torch.arange(count, dtype=torch.int32, device=device)
