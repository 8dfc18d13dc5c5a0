"""A batch in host memory, in the form that one transfer brings to a device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lra.batch import Batch

TORCH_DTYPE_OF = {"|u1": torch.uint8, "<u2": torch.uint16, "<i4": torch.int32, "<i8": torch.int64}


@dataclass(frozen=True, eq=False)
class CollatedBatch:
    """A batch that is not on a device yet: a few numbers per sequence, and the source of its tokens.

    `pack` puts everything into one vector, so that one transfer sends it. `unpack` makes the batch of that vector on
    the device. Batches of one split with the same `shape` and the same options have vectors of one form, so any of them
    can unpack the vectors of all. A captured step relies on that.
    """

    read: Callable[[list[Tensor], int], tuple[Tensor, Tensor | None]]  # `Split.read`, which knows where its tokens lie
    start: np.ndarray  # int32 [B]
    length: np.ndarray  # int32 [B]
    index: np.ndarray  # int32 [B]
    label: np.ndarray  # int64 [examples]
    laid: list[np.ndarray]  # arguments of `read`
    rows: int
    max_length: int
    prefix: int | None  # token id before each sequence
    prefixed: int  # sequences that get the prefix: not those that fill the batch up

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, sequences and `max_length`."""
        return self.rows, len(self.start), self.max_length

    def to(self, device: torch.device | str) -> Batch:
        """The batch on `device`, by one transfer that the host does not wait for."""
        on_gpu = torch.device(device).type == "cuda"
        return self.unpack(self.pack(pinned=on_gpu).to(device, non_blocking=on_gpu))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed vector."""
        return self._places[-1].stop

    def pack(self, *, pinned: bool = False) -> Tensor:
        """The packed vector in host memory, uint8 `[nbytes]`.

        Args:
            pinned: for a GPU, as the host need not wait for a transfer from pinned memory.
        """
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        target = buffer.numpy()
        for place, vector in zip(self._places, self._vectors, strict=True):
            target[place] = vector.view(np.uint8)
        return buffer

    def unpack(self, packed: Tensor) -> Batch:
        """The batch of a vector of `pack`, on the device of that vector."""
        vectors = zip(self._places, self._vectors, strict=True)
        start, length, index, label, *laid = (packed[place].view(TORCH_DTYPE_OF[v.dtype.str]) for place, v in vectors)
        tokens, positions = self.read(laid, self.rows)
        if self.prefix is not None:
            tokens.index_fill_(0, start[: self.prefixed].long(), self.prefix)
        return Batch(tokens, start, length, self.max_length, label, index, positions)

    @functools.cached_property
    def _vectors(self) -> list[np.ndarray]:
        return [self.start, self.length, self.index, self.label, *self.laid]

    @functools.cached_property
    def _places(self) -> list[slice]:
        """Where each vector lies. It begins at a multiple of 16 bytes, as Triton compiles a kernel anew for other
        pointers.
        """
        ends = itertools.accumulate((-(-vector.nbytes // 16) * 16 for vector in self._vectors), initial=0)
        return [slice(end, end + vector.nbytes) for end, vector in zip(ends, self._vectors, strict=False)]
