"""`flash_attention`: the public function. Checks its arguments, brings every form to ragged rows, picks a path."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lra.kernels.dropout import dropout_threshold
from lra.kernels.flash.layout import Layout
from lra.kernels.flash.ops import flash_forward
from lra.kernels.flash.problem import Problem
from lra.kernels.flash.sdpa import sdpa_attention

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 128  # of the Triton kernels: a wider tile does not fit in registers


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    start: Tensor | None = None,
    length: Tensor | None = None,
    max_length: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    index: Tensor | None = None,
    impl: str = "auto",
    deterministic: bool = False,
) -> Tensor:
    """Exact softmax attention of each sequence with itself, `softmax(scale * q k^T) v`, differentiable in q, k and v.

    Ragged form: q, k, v are `[T, H, D]` and sequence `b` owns the rows `start[b] : start[b] + length[b]`. There
    are two layouts: *packed* has no gaps (`T = sum(length)`), *padded* gives every sequence `max_length` rows
    (`start = b * max_length`); the layout is padded exactly when `T == B * max_length`. Rows past a length
    may hold anything, NaN included: they influence nothing, and their output and gradients are zeros. Those of
    rows in a gap or of two sequences, which a GPU's tensors are not searched for, are not defined. No sequence
    influences another one, whatever it holds.

    Batched form: q, k, v are `[B, N, H, D]`, with an optional `length`. It is read as the padded ragged form,
    without a copy where `q.flatten(0, 1)` is a view, as it is for every `[B, N, ...]` tensor and its slices
    along later dimensions, and with a copy for others, such as `[B, H, N, D]` transposed.

    Any strides are read in place, so the three slices of a fused `[T, 3, H, D]` projection need no copy. The
    result and the gradients are contiguous.

    Args:
        start, length: int32 `[B]`, on the device of q; ragged form only, except that the batched form takes `length`.
        max_length: at least `max(length)`, on the host, so that nothing waits for the device.
        causal: row i sees the columns 0 to i of its sequence.
        scale: `D ** -0.5` by default.
        dropout: probability that a softmax weight is dropped. Rounded to a multiple of 1/256; what is kept is
            multiplied by 256 / (256 - round(256 * dropout)).
        seed: int64 tensor with one element on the device of q (it is never read on the host, so a captured graph
            may change it between replays); needed for dropout by the Triton path. The mask is a function of
            (seed, index[b], head, row, column) alone, defined by `reference.keep_mask`.
        index: int32 `[B]`, place of each sequence in the global batch, 0 to B - 1 by default.
        impl: "triton" (CUDA, D up to 128); "sdpa" (any device: PyTorch's attention on the padded form, where
            dropout has the same distribution but draws from PyTorch's generator); "auto", see `resolve_impl`.
        deterministic: gradients are bitwise equal over runs; `torch.use_deterministic_algorithms(True)` implies it.
            The result always is. The Triton path sums dq without atomics then, which takes longer. For "sdpa" on CUDA
            PyTorch's mode decides, and without it an explicit True is an error.

    Returns:
        A tensor of the shape and dtype of q.
    """
    return attention(
        q, k, v, None, sdpa_attention, start=start, length=length, max_length=max_length, causal=causal, scale=scale,
        dropout=dropout, seed=seed, index=index, impl=impl, other="sdpa", deterministic=deterministic,
    )  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | None,
    elsewhere: Callable[[Tensor, Tensor, Tensor, Problem], Tensor],
    *,
    start: Tensor | None,
    length: Tensor | None,
    max_length: int | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    seed: Tensor | None,
    index: Tensor | None,
    impl: str,
    other: str,
    deterministic: bool,
) -> Tensor:
    """Dense attention or, with a layout, block-sparse; `elsewhere` is the path that is called `other`."""
    check_inputs(q, k, v)
    impl = resolve_impl(impl, q.device, deterministic, other)
    q_rows, k_rows, v_rows = (x.flatten(0, 1) if x.dim() == 4 else x for x in (q, k, v))
    start, length, max_length = sequences(q, start, length, max_length)
    if layout is not None and max_length > min(layout.size):
        raise ValueError(f"the layout covers {min(layout.size)} tokens, and max_length is {max_length}")
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    threshold = dropout_threshold(dropout)
    seed, index = randomness(seed, index, len(start), q.device) if threshold and impl == "triton" else (None, None)
    padded = bool(len(q_rows) == len(start) * max_length)  # a bool for the operator, of traced shapes too
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    key = None if layout is None else layout.key
    problem = (start, length, max_length, padded, causal, scale, threshold, seed, index, deterministic, key)

    if impl == other:
        with torch.autocast(q.device.type, enabled=False):  # as in the kernels: the result has the dtype of q
            return elsewhere(q_rows, k_rows, v_rows, Problem(*problem)).view(q.shape)
    _check_triton(q, layout, other)
    out, _ = flash_forward(q_rows, k_rows, v_rows, *problem)
    return out.view(q.shape)


def resolve_impl(
    impl: str, device: torch.device, deterministic: bool = False, other: str = "sdpa", section: str = ""
) -> str:
    """The path that `impl` names on `device`: "triton", or the one for any device, `other`.

    "auto" is Triton on CUDA and the other elsewhere. An explicit "triton" that cannot run, and an explicit other that
    cannot be deterministic, raise a ValueError; nothing falls back. It names arguments as its reader gives them: with
    a `section` before them, "attn.", where they are fields of a configuration.
    """
    if impl == "auto":
        return "triton" if device.type == "cuda" else other
    if impl not in ("triton", other):
        raise ValueError(f"unknown impl {impl!r}: use 'auto', 'triton' or '{other}'")
    if impl == "triton" and device.type != "cuda" and not _interpreted():
        raise ValueError(
            f"{section}impl='triton' needs CUDA tensors, got {device.type}: use {section}impl='{other}', or set "
            "TRITON_INTERPRET=1 before Triton is imported to run the kernels slowly on the CPU"
        )
    if impl == other and deterministic and device.type == "cuda" and not _strictly_deterministic():
        raise ValueError(
            f"{section}impl='{other}' is deterministic on CUDA only in PyTorch's own mode: for "
            f"{section}deterministic=True use {section}impl='triton', or call torch.use_deterministic_algorithms(True)"
        )
    return impl


def _strictly_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _interpreted() -> bool:
    """What Triton decides by, read here so that torch.compile can trace it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
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
    if q.dtype not in DTYPES:
        raise TypeError(f"q, k and v must be float16, bfloat16 or float32, got {q.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")


def _check_triton(q: Tensor, layout: Layout | None, other: str) -> None:
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(
            f"impl='triton' takes head dimensions up to {MAX_HEAD_DIM}, got {q.shape[-1]}: use impl='{other}'"
        )
    if q.dtype == torch.bfloat16 and q.device.type != "cuda":
        raise TypeError(f"Triton's interpreter multiplies bfloat16 wrongly: use float16, float32 or impl='{other}'")
    if layout is not None and any(side % 16 for side in layout.block):
        rows, columns = layout.block
        raise ValueError(f"impl='triton' takes blocks with sides that are multiples of 16, not {rows}x{columns}")


def sequences(
    q: Tensor, start: Tensor | None, length: Tensor | None, max_length: int | None
) -> tuple[Tensor, Tensor, int]:
    """`start`, `length` and `max_length` of the ragged form, checked as far as possible without a synchronisation."""
    if q.dim() == 4:
        size, rows = q.shape[:2]
        if start is not None or max_length not in (None, rows):
            raise ValueError("[B, N, H, D] takes no start and no max_length: use length, or the [T, H, D] form")
        if length is None:
            length = torch.full((size,), rows, dtype=torch.int32, device=q.device)
        _check_per_sequence("length", length, size, q.device)
        if _free_to_read(length):
            _check_lengths(length, rows)
        return torch.arange(size, dtype=torch.int32, device=q.device) * rows, length.contiguous(), rows

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


def randomness(seed: Tensor | None, index: Tensor | None, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if not isinstance(seed, Tensor):
        raise ValueError("dropout > 0 needs seed: an int64 tensor with one element on the device of q")
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise TypeError(f"seed must be an int64 tensor with one element, got {seed.dtype} {list(seed.shape)}")
    if seed.device != device:
        raise ValueError(f"seed must be on the device of q, {device}, got {seed.device}")
    if index is None:
        return seed, torch.arange(size, dtype=torch.int32, device=device)
    _check_per_sequence("index", index, size, device)
    return seed, index.contiguous()


def _free_to_read(values: Tensor) -> bool:
    """Whether the host can look at them at once, and there are some: what is traced has no values."""
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
