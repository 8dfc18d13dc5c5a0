"""Random attention problems, for tests and for the study of exactness."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lra.kernels.flash.layout import Layout
from lra.kernels.testing import HIDING_INPUTS, INPUT_KINDS, ROW_LAYOUTS, STRIDES, Case


def random_case(
    rng: random.Random,
    dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16, torch.float32),
    max_length: int = 2048,
    head_dims: Sequence[int] = (8, 16, 24, 32, 40, 48, 64, 80, 96, 128),
) -> Case:
    """A case with lengths from 0 to `max_length`, some of them on either side of a tile's edge."""
    top = rng.choice((max_length, rng.randint(2, max_length), min(max_length, 64 * rng.randint(1, 8))))
    lengths = [rng.choice((0, 1, top - 1, top, rng.randint(0, top))) for _ in range(rng.randint(0, 4))]
    lengths.insert(rng.randint(0, len(lengths)), top)  # 2 or more: softmax over one column has no gradient to compare
    case = Case(
        lengths=tuple(lengths),
        heads=rng.randint(1, 4),
        head_dim=rng.choice(head_dims),
        dtype=rng.choice(dtypes),
        layout=rng.choice(ROW_LAYOUTS),
        strides=rng.choice(STRIDES),
        causal=rng.random() < 0.3,
        deterministic=rng.random() < 0.3,
        dropout=rng.choice((0.0, 0.1, 0.5)),
        slack=rng.choice((0, 0, 1, 37)),
        spread=rng.choice((1.0, 1.0, 4.0)),
        seed=rng.randint(0, 2**31),
    )
    return with_inputs(case, rng.choice(("normal", rng.choice(INPUT_KINDS))))


def with_inputs(case: Case, inputs: str) -> Case:
    """The case with such inputs, or with normal ones where they have no answer within the budget.

    A row that sees only scores of -inf has no softmax, which a causal or sparse one may. NaN needs a neighbour. Where
    few keys share a row's weight, 16-bit kernels differ from plain PyTorch by more with dropout, and fp32 in the dK of
    a key that dominates every row (docs/kernels.md).
    """
    rounded = case.dropout > 0 and case.dtype != torch.float32
    impossible = {
        "overflow": case.causal or case.sparse is not None or case.dtype == torch.float16,
        "nan_neighbour": not case.lengths[0] or not any(case.lengths[1:]),
        "dominant": rounded or case.dtype == torch.float32,
        "same": rounded,
    } | dict.fromkeys(HIDING_INPUTS, rounded and (case.sparse is not None or case.causal))
    if inputs == "normal" or impossible.get(inputs):
        return replace(case, inputs="normal")
    return replace(case, inputs=inputs, spread=1.0)


def random_hopper_case(rng: random.Random, *choices: Any) -> Case:
    """As `random_case`, of what Hopper's kernels take; in every third many sequences, or scores that lie far apart."""
    case = random_case(rng, *choices, head_dims=(32, 64, 128))
    lengths, spread = case.lengths * rng.choice((1, 1, 4)), rng.choice((case.spread, case.spread, 60.0))
    spread = spread if case.inputs == "normal" else 1.0
    return replace(case, lengths=lengths, spread=spread, strides="fused", causal=False, deterministic=False)


BLOCKS = ((16, 256), (256, 16), (32, 32), (64, 64), (128, 128), (64, 128), (128, 64), (128, 32))


def random_sparse_case(
    rng: random.Random, *choices: Any, blocks: Sequence[tuple[int, int]] = BLOCKS, **more: Any
) -> Case:
    """As `random_case`, with a layout: blocks at random, for each head or for all, and rules in every other one.

    Two in five are what the kernels for Hopper take, if they have 16 bits.
    """
    case = random_case(rng, *choices, **more)
    simple = rng.random() < 0.4
    block = rng.choice([block for block in blocks if not simple or min(block) >= 64])
    rows, columns = (-(-case.max_length // side) + rng.choice((0, 0, 1)) for side in block)
    generator = torch.Generator().manual_seed(case.seed)
    chosen = torch.rand(rng.choice((1, 1, 2)), rows, columns, generator=generator) < rng.choice((0.05, 0.2, 0.5))
    row = torch.arange(rows)
    chosen[:, row, row * block[0] // block[1] % columns] = True  # every query sees a key
    rules: dict[str, Any] = {}
    if simple:
        case = replace(case, strides="fused", deterministic=False, head_dim=rng.choice((32, 64, 128)))
    elif rng.random() < 0.8:
        rules = {"band": rng.choice((None, 0, 5, 100)), "globals": rng.choice((0, 1, 40)), "causal": rng.random() < 0.3}
    return with_inputs(replace(case, causal=False, sparse=Layout(chosen, block, **rules)), case.inputs)
