"""What the Gluon kernels for Hopper share: tiles by TMA, tiles with rows to blank out, dropout in tensor-core layouts.

Shape suffixes as in tiles.py. A thread holds of a tile of scores what the accumulator of `wgmma` gives it: of the rows
r and r + 8, for r = lane / 4, the columns 8 j + 2 c and 8 j + 2 c + 1 for c = lane % 4 and all j.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lra.kernels.flash import tiles
from lra.kernels.flash.problem import MOST_DROPPED, Problem
from lra.kernels.flash.tuning import use_hopper

HEAD_DIMS = (32, 64, 128)
GLUON = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
# Names of newer Tritons, or of 3.6.
load_tile = getattr(tma, "async_load", tma.async_copy_global_to_shared)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
sequence_tile, dropout_key = gluon.jit(tiles.sequence_tile.fn), gluon.jit(tiles.dropout_key.fn)
is_extreme = gluon.jit(tiles.is_extreme.fn)
draw, draw_down = gluon.jit(tiles.draw.fn), gluon.jit(tiles.draw_down.fn)


def takes(problem: Problem, *tensors: Tensor) -> bool:
    """Whether the Gluon kernels take the problem with these `[T, H, D]` tensors."""
    head_dim, layout = tensors[0].shape[2], problem.pattern
    return (
        not problem.causal
        and problem.threshold <= MOST_DROPPED
        and (layout is None or not (layout.ruled or any(side % 64 for side in layout.block)))
        and head_dim in HEAD_DIMS
        and use_hopper(tensors[0])
        and tensors[0].numel() > 0
        and all(map(contiguous_heads, tensors))
    )


def contiguous_heads(x: Tensor) -> bool:
    """Whether TMA can read `[T, H, D]` as `[T, H * D]`: a row's heads side by side, rows at multiples of 16 bytes."""
    apart = x.stride(0) > 0 and x.stride(0) % 8 == 0  # 0: one row, expanded, as a sum's gradient is
    return x.stride()[1:] == (x.shape[2], 1) and apart and x.data_ptr() % 16 == 0


def describe(x: Tensor, rows: int) -> TensorDescriptor:
    """What TMA needs to know of `[T, H, D]` to copy tiles of `rows` rows of a head."""
    total, heads, d = x.shape
    return TensorDescriptor(x, [total, heads * d], [x.stride(0), 1], [rows, d], shared_layout(rows, d, x.dtype))


@functools.cache
def shared_layout(rows: int, d: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, d], GLUON[dtype])


@builtin
def add_tile(descriptor, coordinates, source, _semantic=None):
    """Add a tile in shared memory to one in global memory, by TMA. Gluon has it under a name since Triton 3.7 only."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, arrivals: gl.constexpr = 1):
    """COUNT barriers, each complete with so many arrivals, and the bytes that these announce."""
    ready = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(ready.index(i), count=arrivals)
    return ready


@gluon.jit
def keep_barriers(buffer):
    """Where they are done with: no other data may share the memory of these barriers before.

    A convert_layout that used it after the last wait found eight bytes changed now and then.
    """
    STAGES: gl.constexpr = buffer.shape[0]
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(buffer.index(i))


@gluon.constexpr_function
def list_layout(longest, num_warps):
    """Every warp has all of a list: then its sum needs no shared memory."""
    lanes = min(longest, 32)
    return gl.DistributedLinearLayout(
        [[lanes * 2**i] for i in range((longest // lanes).bit_length() - 1)],
        [[2**i if 2**i < longest else 0] for i in range(5)],
        [[0]] * (num_warps.bit_length() - 1), [], [longest],
    )  # fmt: skip


@gluon.jit
def visit_list(visits_ptr, layouts, tiles, head, tile, limit, LONGEST: gl.constexpr, num_warps: gl.constexpr):
    """(a tile's list of `layout.Visits`, how many of the first `limit` tiles are in it)."""
    visits_ptr += (head % layouts * tiles + tile) * LONGEST
    entries = gl.load(visits_ptr + gl.arange(0, LONGEST, list_layout(LONGEST, num_warps)))
    return visits_ptr, gl.sum((entries < 2 * limit).to(gl.int32), 0)


@gluon.jit
def visited(list_ptr, i, n, SIZE: gl.constexpr, LONGEST: gl.constexpr):
    """Where the tile of SIZE begins that is number `i` of the n in the list; anywhere for an `i` that is not in it."""
    if LONGEST:
        i = gl.load(list_ptr + gl.maximum(gl.minimum(i, n - 1), 0)) // 2
    return i * SIZE


@gluon.jit
def shift_of(first_column, n, max_length, BLOCK_N: gl.constexpr):
    """The `shift` of `place_of`. All tiles of keys of a head add to the same dQ: so each begins elsewhere."""
    return first_column // BLOCK_N * (n - 1) // gl.cdiv(max_length, BLOCK_N)


@gluon.jit
def place_of(t, n, shift):
    """Which of its n tiles of queries a tile of keys visits as number `t`: the last one, then from `shift` on.

    Only the last may be partial.
    """
    place = t - 1 + shift
    place = gl.where(place < n - 1, place, place - (n - 1))
    return gl.where(t == 0, n - 1, place)


@gluon.jit
def load_statistics(stats_ptr, heads, total, rows, length):
    """Of a tile's rows the two of `prepare_kernel`; past the length they make every weight 0."""
    real = rows < length
    lse = gl.load(stats_ptr + rows, mask=real, other=float("inf"))
    return lse, gl.load(stats_ptr + heads.to(gl.int64) * total + rows, mask=real, other=0.0)


@gluon.constexpr_function
def row_layout(d, num_warps):
    """Of a tile `[.., d]`: each thread has eight neighbours in a row, and a warp some whole rows."""
    return gl.BlockedLayout([1, 8], [256 // d, d // 8], [num_warps, 1], [1, 0])


@gluon.jit
def zero_past(tile, count, num_warps: gl.constexpr):
    """Zero the rows of a tile in shared memory from `count` on: they belong to others, and 0 * NaN is NaN."""
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = row_layout(D, num_warps)
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    values = tile.load(layout)
    tile.store(gl.where((row < count)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def without_others(x, count):
    """A product's accumulator with zeros in the rows from `count` on: they belong to others, and 0 * NaN is NaN."""
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    return gl.where((row < count)[:, None], x, 0.0)


@gluon.jit
def scored_keys(length):
    """How many keys of a sequence have scores with a gradient. The weight of one alone is 1 whatever its score."""
    return gl.where(length == 1, 0, length)


@gluon.jit
def store_tile(pointer, tile, first, start, length, owned, heads, head, dtype: gl.constexpr, num_warps: gl.constexpr):
    """Store the rows from `first` on that the sequence owns; those past its length become zeros."""
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = row_layout(D, num_warps)
    values = gl.convert_layout(tile.to(dtype), layout)
    rows = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    values = gl.where((rows < length)[:, None], values, gl.zeros_like(values))
    offset = (start + rows).to(gl.int64) * (heads * D)
    gl.store(pointer + offset[:, None] + (head * D + d)[None, :], values, mask=(rows < owned)[:, None])


@gluon.constexpr_function
def product_layout(n, num_warps):
    """Of a product's accumulator `[.., n]`: each warp has 16 rows of every 16 * num_warps."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, n, 16])


@gluon.jit
def following(slot, phase, STAGES: gl.constexpr):
    """The slot of a ring of STAGES after this one, and the phase of its barrier."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


# Programs that stay: one warp, or four, take tiles of rows and put their numbers in a ring of buffers; the others do
# what is in it. `taken_ptr` counts what was taken beside the first of each program.


@gluon.jit
def take_tile(taken_ptr):
    """A tile that no program has taken; past the last one where there are no more."""
    return gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")


@gluon.jit
def leave_head(taken_ptr, tile, max_length, ROWS: gl.constexpr):
    """Where a tile is empty, so are its head's tiles behind it: nobody need take them."""
    of_head = gl.cdiv(max_length, ROWS)
    gl.atomic_max(taken_ptr, (tile // of_head + 1) * of_head - gl.num_programs(0), sem="relaxed")


@gluon.jit
def pass_on(tile, buffer, num_warps: gl.constexpr):
    """Put a tile's number into its buffer, -1 where there are no more."""
    buffer.store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [num_warps], [0])))
    barrier()


@gluon.jit
def next_tile(buffers, ready, buffer, phase, num_warps: gl.constexpr):
    """The tile that is in this buffer now, or will be; -1 where there are no more."""
    mbarrier.wait(ready.index(buffer), phase)
    return gl.max(buffers.index(buffer).load(gl.BlockedLayout([1], [32], [num_warps], [0])), 0)


@gluon.constexpr_function
def draw_layout(rows, columns, row_warps, column_warps):
    """Layout of the draws `[rows, columns]` of a tile of scores: lane % 4 is the column, lane / 4 the row."""
    registers = [[8 * row_warps * 2**i, 0] for i in range((rows // (8 * row_warps)).bit_length() - 1)]
    registers += [[0, 4 * column_warps * 2**i] for i in range((columns // (4 * column_warps)).bit_length() - 1)]
    warps = [[8 * 2**i, 0] for i in range(row_warps.bit_length() - 1)]
    warps += [[0, 4 * 2**i] for i in range(column_warps.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.jit
def draw_forward(
    key, first_row, first_column, scores: gl.constexpr, M: gl.constexpr, N: gl.constexpr, num_warps: gl.constexpr
):
    """int32 `[M, N]` in the layout `scores`: the word of a draw that decides on a weight and three others."""
    layout: gl.constexpr = draw_layout(M // 2, N // 8, num_warps, 1)
    rows = first_row // 2 + gl.arange(0, M // 2, gl.SliceLayout(1, layout))
    columns = first_column // 4 + 2 * gl.arange(0, N // 8, gl.SliceLayout(0, layout))
    w0, w1, w2, w3 = draw(key, rows[:, None], columns[None, :])
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3)).to(gl.int32, bitcast=True)  # for the four columns 8 j
    words = gl.join(gl.join(words, words), gl.join(words, words))  # for two neighbouring columns and the row 8 below
    words = words.reshape(M // 16, 8, N // 32, 4, 4, 2, 2).permute(0, 5, 1, 2, 4, 3, 6).reshape(M, N)
    return gl.convert_layout(words, scores)


@gluon.jit
def draw_backward(key, first_row, first_column, M: gl.constexpr, N: gl.constexpr, num_warps: gl.constexpr):
    """int32 `[M, N / 4]` for `spread_backward`, M / 2 rows for the keys 0 to 7 of each 16 and M / 2 for the others.

    Of a draw two warps, which have 16 keys each, want two words each: so both make it, as the forward pass has it. To
    make one half each and exchange them through shared memory takes longer. Then a warp transposes its 8 x 8 blocks, of
    which a thread has two weights, and those of the rows 8 below, in a word.
    """
    layout: gl.constexpr = draw_layout(M // 2, N // 4, 1, num_warps)
    rows = first_row // 2 + gl.arange(0, M // 2, gl.SliceLayout(1, layout))
    i = gl.arange(0, N // 4, gl.SliceLayout(0, layout))
    columns = first_column // 4 + 2 * (i // 8 * 4 + i % 4)
    w0, w1, w2, w3 = draw_down(key, rows[:, None], columns[None, :])
    second = (i // 4 % 2 == 1)[None, :]  # of the two warps
    words = gl.join(gl.where(second, w2, w0), gl.where(second, w3, w1)).to(gl.int32, bitcast=True)
    words = words.permute(2, 0, 1).reshape(M, N // 4)
    return transpose_blocks(gl.convert_layout(words, draw_layout(M, N // 4, 1, num_warps), assert_trivial=True))


@gluon.jit
def spread_backward(drawn, scores: gl.constexpr):
    """int32 `[N, M]` in the layout `scores` of the transposed tile, as `draw_forward`."""
    M: gl.constexpr = drawn.shape[0]
    N: gl.constexpr = 4 * drawn.shape[1]
    words = gl.join(gl.join(drawn, drawn), gl.join(drawn, drawn))
    words = words.reshape(2, M // 16, 8, N // 16, 4, 2, 2).permute(3, 0, 2, 1, 5, 4, 6).reshape(N, M)
    return gl.convert_layout(words, scores)


@gluon.jit
def transpose_blocks(words):
    """Transpose each warp's 8 x 8 matrices of 16 bits, of which a thread has two neighbours of a row in a word."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
    )


# A half of a word stands for a column of a draw, of the transposed tile likewise. As an fp16 magnitude it is at least
# `limit(threshold)` where the row 8 below is kept, and with its bytes swapped where the row itself is. Two comparisons
# are one instruction; NaN, which is above all thresholds up to MOST_DROPPED, is kept as unordered.

DROP_FORWARD = gl.constexpr("""{
.reg .b32 x, kept;
prmt.b32 x, $4, 0, 0x2301;
abs.f16x2 x, x;   set.geu.u32.f16x2 kept, x, $8;  and.b32 $0, $2, kept;
abs.f16x2 x, $4;  set.geu.u32.f16x2 kept, x, $8;  and.b32 $1, $3, kept;
}""")

DROP_BACKWARD = gl.constexpr("""{
.reg .b32 x, kept;
prmt.b32 x, $8, 0, 0x2301;
abs.f16x2 x, x;    set.geu.u32.f16x2 kept, x, $16;  and.b32 $0, $4, kept;
abs.f16x2 x, $8;   set.geu.u32.f16x2 kept, x, $16;  and.b32 $2, $6, kept;
prmt.b32 x, $10, 0, 0x2301;
abs.f16x2 x, x;    set.geu.u32.f16x2 kept, x, $16;  and.b32 $1, $5, kept;
abs.f16x2 x, $10;  set.geu.u32.f16x2 kept, x, $16;  and.b32 $3, $7, kept;
}""")


@gluon.jit
def limit(threshold):
    """For both halves of a word."""
    return (threshold << 7) * 0x00010001


@gluon.jit
def drop_forward(p, words, threshold):
    """Weights `[M, N]`, 16-bit: zeros where dropout does not keep them."""
    return gl.inline_asm_elementwise(
        DROP_FORWARD, "=r,=r,r,r,r,r,r,r,r,r,r,r", [p, words, limit(threshold)], dtype=p.dtype, is_pure=True, pack=4
    )


@gluon.jit
def drop_backward(p, words, threshold):
    """Weights `[N, M]`, 16-bit, likewise."""
    return gl.inline_asm_elementwise(
        DROP_BACKWARD, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [p, words, limit(threshold)],
        dtype=p.dtype, is_pure=True, pack=8,
    )  # fmt: skip


@gluon.constexpr_function
def packed(dtype, assembly):
    """Assembly for two 16-bit elements in an instruction; `KIND` in it stands for their type."""
    return assembly.replace("KIND", "bf16x2" if dtype == gl.bfloat16 else "f16x2")


# dS = P * (dP - delta), two 16-bit elements in an instruction. Where a key has nearly all of the weight, dP and delta
# are nearly equal. Each rounded to 16 bits, they would leave more error than difference. So without dropout they are
# fp32 until one is taken from the other. With dropout that costs 3 to 8% of the pass (docs/kernels.md): there both are
# rounded first, as plain PyTorch rounds dP.


@gluon.jit
def score_gradient(p, difference):
    """dS of P and dP - delta in fp32."""
    return gl.inline_asm_elementwise(
        packed(p.dtype, "mul.rn.KIND $0, $1, $2;"), "=r,r,r", [p, difference.to(p.dtype)],
        dtype=p.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def dropped_score_gradient(kept, p, dp, minus_delta):
    """dS = kept * dP - p * delta, where `kept` is p with zeros where dropout drops it; -delta has 16 bits."""
    return gl.inline_asm_elementwise(
        packed(p.dtype, "{ .reg .b32 x;  mul.rn.KIND x, $2, $4;  fma.rn.KIND $0, $1, $3, x; }"), "=r,r,r,r,r",
        [kept, p, dp.to(p.dtype), minus_delta], dtype=p.dtype, is_pure=True, pack=2,
    )  # fmt: skip


# fp32 tiles for TMA have 128 bytes a row and the 16 bytes of index i of row r at i ^ r % 8. Of a product's accumulator,
# whose threads store 8 bytes in 8 rows, always two rows meet in the same banks: 0 and 1, 2 and 3, ... unless odd rows
# store what is 16 columns further.


@gluon.constexpr_function
def swapped_layout(rows, d):
    """Where the elements of a swapped tile lie in shared memory: TMA finds the tile's own in their places."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4 ^ 16], [2, 8], [4, 16]]
    bases += [[8 * 2**i, 0] for i in range((rows // 8).bit_length() - 1)]
    bases += [[0, 32 * 2**i] for i in range((d // 32).bit_length() - 1)]
    return gl.SharedLinearLayout(bases, alignment=1024)


@gluon.jit
def store_accumulator(buffer, x):
    """Store fp32 `[M, D]`, a product's accumulator, to shared memory from where TMA takes it."""
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    left, right = gl.split(x.reshape(M, D // 32, 2, 16).permute(0, 1, 3, 2))
    swapped = gl.join(right, left).permute(0, 1, 3, 2).reshape(M, D)
    odd = gl.arange(0, M, gl.SliceLayout(1, x.type.layout)) % 2 == 1
    x = gl.where(odd[:, None], gl.convert_layout(swapped, x.type.layout), x)
    reinterpret(buffer, gl.float32, [M, D], swapped_layout(M, D)).store(x)
