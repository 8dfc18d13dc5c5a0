"""Checks of the arguments of attention. None of them waits for a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lra.kernels.operators import runs_eagerly

INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise a TypeError or ValueError unless q, k and v have one supported shape, dtype and device."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, value)
    if not q.shape == k.shape == v.shape:
        raise ValueError(f"q, k and v must have one shape, got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}")
    if q.dim() not in (3, 4):
        raise ValueError(f"q, k and v must be [T, H, D] or [B, N, H, D], got {list(q.shape)}")
    if not q.shape[-1]:
        raise ValueError(f"q, k and v must have a head dimension of at least 1, got {list(q.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}: cast them to one")
    if q.dtype not in INPUT_DTYPES:
        raise TypeError(f"q, k and v must be float16, bfloat16 or float32, got {q.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")


def check_sequences(
    q: Tensor, start: Tensor | None, length: Tensor | None, max_length: int | None
) -> tuple[Tensor, Tensor, int]:
    """(`start`, `length`, `max_length`) of the ragged form, from the arguments of either form.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape or device. On the CPU the values are checked, too: lengths out of
            range, rows out of range, gaps, rows that two sequences share.
    """
    if q.dim() == 4:
        size, rows = q.shape[:2]
        if start is not None or max_length not in (None, rows):
            raise ValueError("[B, N, H, D] takes no start and no max_length: use length, or the [T, H, D] form")
        starts = _for_batch(_starts, size, rows, q.device)
        if length is None:
            return starts, _for_batch(_lengths, size, rows, q.device), rows
        _check_per_sequence("length", length, size, q.device)
        if _free_to_read(length):
            _check_lengths(length, rows)
        return starts, length.contiguous(), rows

    if start is None or length is None or max_length is None:
        raise ValueError("[T, H, D] needs start, length and max_length; without them use the [B, N, H, D] form")
    if isinstance(max_length, bool) or not isinstance(max_length, int | np.integer | torch.SymInt):
        raise TypeError(f"max_length must be an integer, got {max_length!r}")
    _check_tensor("start", start)
    _check_per_sequence("start", start, start.numel(), q.device)
    _check_per_sequence("length", length, start.numel(), q.device)
    if len(q) > start.numel() * max_length:
        raise ValueError(
            f"{len(q)} rows do not fit {start.numel()} sequences of at most {max_length}: "
            "max_length must be max(length) or more"
        )
    if _free_to_read(start) and _free_to_read(length):
        _check_places(start.long(), length.long(), max_length, len(q))
    return start.contiguous(), length.contiguous(), int(max_length)


def check_randomness(
    seed: Tensor | None, index: Tensor | None, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    if not isinstance(seed, Tensor):
        raise ValueError("dropout > 0 needs seed: an int64 tensor with one element on the device of q")
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise TypeError(f"seed must be an int64 tensor with one element, got {seed.dtype} {list(seed.shape)}")
    if seed.device != device:
        raise ValueError(f"seed must be on the device of q, {device}, got {seed.device}")
    if index is None:
        return seed, _for_batch(_places, size, 0, device)
    _check_per_sequence("index", index, size, device)
    return seed, index.contiguous()


def _for_batch(make: Callable[..., Tensor], size: int, rows: int, device: torch.device) -> Tensor:
    """`make(size, rows, device)`, which depends on nothing else.

    It is made once for each stream, because another stream would have to wait for it. A CUDA graph makes its own, which
    lives as long as the graph.
    """
    if not runs_eagerly() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return make(size, rows, device)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    return _made_before(make, size, rows, device, stream)


@functools.lru_cache(maxsize=512)
def _made_before(make: Callable[..., Tensor], size: int, rows: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):  # autograd saves no tensor of an inference
        return make(size, rows, device)


def _places(size: int, rows: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device)


def _starts(size: int, rows: int, device: torch.device) -> Tensor:
    return _places(size, rows, device) * rows


def _lengths(size: int, rows: int, device: torch.device) -> Tensor:
    return torch.full((size,), rows, dtype=torch.int32, device=device)


def _free_to_read(values: Tensor) -> bool:
    """Whether the host can read the values at once, and there are some. A traced tensor has no values."""
    plain = type(values) is Tensor and values.device.type == "cpu"
    return plain and values.numel() > 0 and not torch.compiler.is_compiling()


def _check_places(start: Tensor, length: Tensor, max_length: int, rows: int) -> None:
    if int(start.min()) < 0 or int((start + length).max()) > rows:
        raise ValueError(f"start and start + length must lie between 0 and the {rows} rows of q")
    padded, total = rows == len(start) * max_length, int(length.sum())
    if not padded and total != rows:
        raise ValueError(f"packed rows have no gaps: the lengths sum to {total}, q has {rows} rows")
    _check_lengths(length, max_length)
    if padded and torch.equal(start, torch.arange(len(start)) * max_length):
        return
    order = start.argsort()
    order = order[length[order] > 0]  # an empty sequence may begin anywhere
    if total != rows or not torch.equal(start[order], length[order].cumsum(0) - length[order]):
        if padded:
            raise ValueError(f"{rows} rows of {len(start)} sequences are padded: start must be arange(B) * max_length")
        raise ValueError("packed sequences share no rows: start must be length.cumsum(0) - length, in any order")


def _check_lengths(length: Tensor, most: int) -> None:
    if int(length.min()) < 0 or int(length.max()) > most:
        raise ValueError(f"lengths must lie between 0 and {most}, got {int(length.min())} to {int(length.max())}")


def _check_per_sequence(name: str, values: Tensor, size: int, device: torch.device) -> None:
    _check_tensor(name, values)
    if values.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {values.dtype}")
    if values.shape != (size,):
        raise ValueError(f"{name} must have the shape [{size}], one entry for each sequence, got {list(values.shape)}")
    if values.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}, got {values.device}")
