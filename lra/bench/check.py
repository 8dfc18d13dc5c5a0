"""Checks what is timed: result and gradients against float64, within the budget of `lra.kernels.testing`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lra.batch import Batch
from lra.bench.cases import TORCH_DTYPES, BenchmarkCase, call_attention, has_reference_dropout, make_batch
from lra.kernels.dropout import dropout_threshold
from lra.kernels.flash.layout import NONE, Layout
from lra.kernels.flash.reference import keep_mask, reference_attention
from lra.kernels.testing import RESULT_NAMES, Case, make_inputs, measure_error, run_with_gradients
from lra.models.attention.base import Attention

SCORES_AT_ONCE = 2**23  # scores in memory at a time


class Verdict(NamedTuple):
    """How near a kernel is to the reference."""

    ratio: float | None  # largest error / budget of result and gradients; None if only finite output was asked for
    wrong: str = ""  # why it is wrong; empty if it is right

    def worse(self, other: Verdict) -> Verdict:
        """The verdict that is wrong, or nearer to being wrong."""
        return max(self, other, key=lambda verdict: (bool(verdict.wrong), verdict.ratio or 0.0))


def check_small(case: BenchmarkCase, device: torch.device) -> Verdict:
    """Checks all heads and sequences of a small case."""
    known, attention, case = _checkable(case, device)
    problem = Case(case.lengths, case.heads, case.head_dim, TORCH_DTYPES[case.dtype], dropout=case.dropout)
    inputs = make_inputs(problem, device)
    batch = make_batch(case.lengths, False, device, inputs.sequences["index"], inputs.seed)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call_attention(attention, q, k, v, batch, case.full)

    actual = run_with_gradients(forward, inputs, problem.dtype)
    if not known:
        return _finite(actual)
    options: dict[str, Any] = {**inputs.sequences, "dropout": problem.dropout, "seed": inputs.seed}
    options["layout"] = attention.layout
    expected = run_with_gradients(reference_attention, inputs, torch.float64, **options)
    plain = run_with_gradients(reference_attention, inputs, problem.dtype, **options)
    return _judge(actual, expected, plain)


def check_timed(case: BenchmarkCase, inputs: Sequence[Tensor], batch: Batch, backward: bool = True) -> Verdict:
    """Checks the last head of the last longest sequence, where offsets are largest, at the size that is timed.

    Args:
        inputs: q, k, v and the gradient of the result.
    """
    device = inputs[0].device
    known, attention, case = _checkable(case, device)
    q, k, v, do = (x.detach() for x in inputs)
    for x in (q, k, v):
        x.requires_grad_(backward)
    out = call_attention(attention, q, k, v, batch, case.full)
    learned = tuple(attention.parameters())
    grads = torch.autograd.grad(out, (q, k, v, *learned), do, materialize_grads=True) if backward else ()
    if not known:
        return _finite((out, *grads))
    b = max(range(batch.size), key=lambda b: (case.lengths[b], b))
    first = int(batch.start[b])
    rows = slice(first, first + case.lengths[b])
    q, k, v, do, *actual = (x.detach()[rows, -1].clone() for x in (q, k, v, do, out, *grads[:3]))
    del out, grads
    dropout = (case.dropout, batch.seed, int(batch.index[b]), case.heads - 1)
    given = q, k, v, do, *dropout
    expected, plain = (reference_head(*given, dtype, attention.layout) for dtype in (torch.float64, q.dtype))
    return _judge(actual, expected[: len(actual)], plain)


def reference_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dropout: float,
    seed: Any,
    index: int,
    head: int,
    dtype: torch.dtype,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, dq, dk, dv) of one sequence and head, `[N, D]` each, computed in `dtype` from a few rows at a time.

    Section 3.1 and appendix B.2 of FlashAttention (arXiv 2205.14135), with sums over the chunks in float64. With a
    layout, only the columns of blocks that a row of the chunk sees are computed.
    """
    q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
    count, scale, threshold = len(q), q.shape[-1] ** -0.5, dropout_threshold(dropout)
    position = torch.arange(count, device=q.device)
    out, dq = torch.empty_like(q, dtype=torch.float64), torch.empty_like(q, dtype=torch.float64)
    dk, dv = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(q, dtype=torch.float64)
    for rows, columns, seen in _chunks(count, head, layout):
        at = columns.to(q.device) if isinstance(columns, Tensor) else columns
        s = q[rows] @ k[at].T * scale
        if seen is None:
            p = s.softmax(-1)
        else:
            seen = seen.to(q.device)
            sees = seen.any(-1, keepdim=True)  # a query that sees nothing gives zeros
            p = s.masked_fill(~seen, float("-inf")).masked_fill(~sees, 0.0).softmax(-1) * sees
        keep: Any = 1.0
        if threshold:
            head_id = torch.tensor(head, device=q.device)
            keep = keep_mask(seed, index, head_id, position[rows, None], position[at], threshold)
            keep = (keep * (256 / (256 - threshold))).to(dtype)
        o = (p * keep) @ v[at]
        out[rows] = o.double()
        ds = p * ((do[rows] @ v[at].T) * keep - (do[rows] * o).sum(-1, keepdim=True)) * scale
        dq[rows] = (ds @ k[at]).double()
        dk[at] += (ds.T @ q[rows]).double()
        dv[at] += ((p * keep).T @ do[rows]).double()
    return out, dq, dk, dv


def _chunks(count: int, head: int, layout: Layout | None) -> Iterator[tuple[slice, slice | Tensor, Tensor | None]]:
    """Rows, the columns of the blocks that they see, and a mask of what each row sees, bool; on the CPU."""
    step = max(1, SCORES_AT_ONCE // count)
    if layout is None:
        yield from ((slice(first, first + step), slice(None), None) for first in range(0, count, step))
        return
    step, side = min(step, max(layout.block)), layout.block[1]
    tiles = layout.kinds(step, side)[head % len(layout.blocks)] != NONE
    position = torch.arange(count)
    for tile, row in zip(tiles, position.split(step), strict=False):
        column = position[tile.repeat_interleave(side)[:count]]
        mask = layout.token_mask(row, column)
        yield slice(int(row[0]), int(row[-1]) + 1), column, mask[head % len(mask)]


def check_dropout(case: BenchmarkCase, device: torch.device) -> Verdict:
    """Checks a dropout mask that the reference does not know.

    Weights must be dropped, and the kept ones scaled to the same sum. Two heads, and two of the longest sequences, must
    drop different weights.
    """
    attention = case.build(device)
    if not case.dropout or has_reference_dropout(attention, device) or not has_reference(attention):
        return Verdict(None)
    longest = max(case.lengths)
    visible = torch.tensor(float(longest))
    if attention.layout is not None:
        visible = attention.layout.token_mask(torch.arange(longest), torch.arange(longest)).sum(-1).clamp(min=1)
    ones = torch.ones(sum(case.lengths), case.heads, case.head_dim, dtype=TORCH_DTYPES[case.dtype], device=device)
    made = call_attention(attention, ones, ones, ones, make_batch(case.lengths, False, device), case.full).float()
    out, *others = made.split([n for n in case.lengths if n])
    # each row of the first sequence, the longest, is the mean of the ones that it sees, of which a share is dropped
    mean, spread = float(out.mean()), float(out.std())
    expected = (case.dropout / (1 - case.dropout) * float((1 / visible).mean())) ** 0.5
    if not (abs(mean - 1) < 0.5 * expected and 0.5 * expected < spread < 2 * expected):
        return Verdict(None, f"dropout {case.dropout} makes ones {mean:.3f} ± {spread:.3f}")
    alike = {
        "heads": case.heads > 1 and torch.equal(out[:, 0], out[:, 1]),
        "sequences": any(torch.equal(each, out) for each in others),
    }
    what = " and of two ".join(name for name, same in alike.items() if same)
    return Verdict(None, what and f"dropout {case.dropout} drops the same weights of two {what}")


def _checkable(case: BenchmarkCase, device: torch.device) -> tuple[bool, Attention, BenchmarkCase]:
    """Whether the result is known, the attention, and the case: without dropout if the mask is its own."""
    attention = case.build(device)
    if case.dropout and not has_reference_dropout(attention, device):
        case = replace(case, dropout=0.0)
        attention = case.build(device)
    return has_reference(attention), attention, case


def has_reference(attention: Attention) -> bool:
    """Whether the reference computes the same as this attention."""
    return attention.facts.exact or attention.layout is not None


def _judge(actual: Sequence[Tensor], expected: Sequence[Tensor], plain: Sequence[Tensor]) -> Verdict:
    verdict = Verdict(0.0)
    for name, a, e, p in zip(RESULT_NAMES[: len(actual)], actual, expected, plain, strict=False):
        found = measure_error(a, e, p)
        wrong = "" if found.ok else f"{name} is off by {found.error:.2g}, its budget is {found.budget:.2g}"
        verdict = verdict.worse(Verdict(found.error / found.budget if found.budget else float(not found.ok), wrong))
    return verdict


def _finite(results: Sequence[Tensor]) -> Verdict:
    return Verdict(None, "" if all(bool(x.isfinite().all()) for x in results) else "not finite")
