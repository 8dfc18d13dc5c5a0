"""Which kernels compute which calls on a GPU, and why: for `lra doctor`, `lra tune` and docs/kernels.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lra.kernels.device import Gpu
from lra.kernels.flash.dispatch import HOPPER_HEAD_DIMS, KernelChoice, choose_backward, choose_forward
from lra.kernels.flash.layout import Layout
from lra.kernels.flash.problem import Problem
from lra.kernels.flash.tuning import SHORT_LENGTH
from lra.kernels.layers.fused_layers import MODEL_WIDTHS, layer_obstacle

LONG_LENGTH = 4 * SHORT_LENGTH
HOPPER_GPU = Gpu((9, 0), 132, None)  # an H100 with a ptxas that compiles for it


class CallKind(NamedTuple):
    """A kind of call of attention. The defaults are those of most calls."""

    name: str
    head_dim: int = 64
    dropout: bool = False
    length: int = LONG_LENGTH  # of each sequence
    dtype: torch.dtype = torch.bfloat16
    many: bool = True  # whether there are enough sequences for every multiprocessor
    causal: bool = False
    deterministic: bool = False
    layout: Layout | None = None
    apart: bool = False  # whether the heads of a row do not lie side by side

    def choices(self, gpu: Gpu) -> tuple[KernelChoice, KernelChoice]:
        """The kernel of the forward and that of the backward."""
        rows = 2048 * gpu.multiprocessors if self.many else self.length
        q = torch.empty(rows, 1, self.head_dim, dtype=self.dtype, device="meta")
        q = q.expand(-1, 2, -1) if self.apart else q
        none = torch.empty(0, dtype=torch.int32)
        problem = Problem(
            none, none, self.length, False, self.causal, 1.0, 26 * self.dropout,
            deterministic=self.deterministic, layout=self.layout and self.layout.key,
        )  # fmt: skip
        return choose_forward(problem, q, q, q, gpu), choose_backward(problem, q, q, q, gpu)


def attention_choices(gpu: Gpu) -> Iterator[tuple[str, KernelChoice, KernelChoice]]:
    """(Kind of call, kernel of the forward, kernel of the backward) for a GPU with these facts."""
    for call in _call_kinds(gpu):
        yield (call.name, *call.choices(gpu))


def layer_choices(gpu: Gpu) -> Iterator[tuple[str, str]]:
    """(Layers around attention, what computes them) for a GPU with these facts."""
    if gpu.refusal:
        yield "layers", f"PyTorch: {gpu.refusal}"
        return
    for width in (*MODEL_WIDTHS, 96):
        name = f"layers, width {width}" if width in MODEL_WIDTHS else "layers, another width"
        why = layer_obstacle(width, torch.float32, torch.bfloat16)
        yield name, f"PyTorch: {why}" if why else "embed, project, feed_forward, table_gradient: in 16 bits on Hopper"
    yield "layers, other norms or post-norm", "embed, table_gradient; PyTorch: the other kernels begin with a LayerNorm"
    yield "layers, no feed-forward", "embed, project, table_gradient; PyTorch: feed_forward has one"
    yield "layers, float32", f"PyTorch: {layer_obstacle(MODEL_WIDTHS[0], torch.float32, torch.float32)}"


def list_kernels(dtype: torch.dtype, head_dim: int, dropout: bool, gpu: Gpu) -> set[str]:
    """Those of `tuning.KERNELS` that run in some call with this dtype, head dimension and dropout."""
    found = set()
    for length, deterministic, layout in itertools.product(
        (SHORT_LENGTH, LONG_LENGTH), (False, True), (None, _blocks(64))
    ):
        call = CallKind("", head_dim, dropout, length, dtype, deterministic=deterministic, layout=layout)
        for each in (call, call._replace(many=False), call._replace(causal=True, layout=None)):
            found |= {choice.kernel for choice in each.choices(gpu)}
    return found | ({"dq"} if "dkdv" in found else set())


def _call_kinds(gpu: Gpu) -> Iterator[CallKind]:
    if gpu.refusal:
        yield CallKind("16 bits")
    else:
        for head_dim, dropout, length in itertools.product(
            HOPPER_HEAD_DIMS, (False, True), (SHORT_LENGTH, LONG_LENGTH)
        ):
            said = f"d = {head_dim}, {'dropout' if dropout else 'no dropout'}, {length:,} tokens"
            yield CallKind(said, head_dim, dropout, length)
        yield CallKind("d = 32, few sequences", head_dim=32, many=False)
        yield CallKind("blocks of 64 x 64", layout=_blocks(64))
        yield CallKind("blocks of 32 x 32", layout=_blocks(32))
        yield CallKind("blocks with a band", layout=_blocks(64, band=8))
        yield CallKind("causal", causal=True)
        yield CallKind("another d", head_dim=48)
        yield CallKind("heads not side by side", apart=True)
    yield CallKind("16 bits, deterministic", deterministic=True)
    yield CallKind("float32", dtype=torch.float32)


def _blocks(side: int, band: int | None = None) -> Layout:
    return Layout(torch.ones(1, 1, 1, dtype=torch.bool), (side, side), band=band)
