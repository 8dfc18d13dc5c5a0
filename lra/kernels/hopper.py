"""Device functions that the Gluon kernels for Hopper share: TMA copies, barriers, rings of buffers, layouts, dropout.

A thread holds the elements of a tile of scores that the accumulator of `wgmma` gives it. With r = lane / 4 and
c = lane % 4 these are, in the rows r and r + 8, the columns 8 j + 2 c and 8 j + 2 c + 1 for all j.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
# Newer versions of Triton have other names than 3.6.
load_tile_async = getattr(tma, "async_load", tma.async_copy_global_to_shared)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
reinterpret_memory = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)


def make_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """The TMA descriptor of `[T, H, D]`, for copies of tiles of `rows` rows of one head."""
    total, heads, d = x.shape
    return TensorDescriptor(x, [total, heads * d], [x.stride(0), 1], [rows, d], shared_layout(rows, d, x.dtype))


class CheckedDescriptor(TensorDescriptor):
    """The TMA descriptor of a tensor like one that `make_descriptor` took: it checks nothing."""

    def __post_init__(self) -> None:
        pass


def describe_tiles(x: Tensor, rows: int) -> Callable[[Tensor], TensorDescriptor]:
    """`make_descriptor` for tensors with the shape, strides, dtype and alignment of `x`."""
    like = make_descriptor(x, rows)
    facts = like.shape, like.strides, like.block_shape, like.layout
    return lambda x: CheckedDescriptor(x, *facts)


@functools.cache
def shared_layout(rows: int, d: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, d], GLUON_DTYPES[dtype])


@builtin
def add_tile_async(descriptor, coordinates, source, _semantic=None):
    """Add a tile in shared memory to one in global memory, by TMA. Gluon has a function for it since Triton 3.7."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, arrivals: gl.constexpr = 1):
    """COUNT barriers. Each completes after `arrivals` arrivals and the bytes that they announce."""
    ready = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(ready.index(i), count=arrivals)
    return ready


@gluon.jit
def invalidate_barriers(buffer):
    """End the use of these barriers. Up to here no other data may share their memory.

    Without it, a convert_layout used the memory after the last wait, and sometimes found eight bytes changed.
    """
    STAGES: gl.constexpr = buffer.shape[0]
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(buffer.index(i))


@gluon.constexpr_function
def coalesced_layout(d, num_warps):
    """The layout of a tile `[.., d]` in which a thread has eight neighbours of a row, and a warp has entire rows."""
    return gl.BlockedLayout([1, 8], [256 // d, d // 8], [num_warps, 1], [1, 0])


@gluon.jit
def zero_tile_past(tile, count, num_warps: gl.constexpr):
    """Set the rows of a tile in shared memory from `count` on to zero.

    They belong to other sequences and may hold NaN, and 0 * NaN is NaN.
    """
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = coalesced_layout(D, num_warps)
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    values = tile.load(layout)
    tile.store(gl.where((row < count)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def zero_rows_past(x, count):
    """A product's accumulator with zeros in the rows from `count` on, which belong to other sequences."""
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    return gl.where((row < count)[:, None], x, 0.0)


@gluon.constexpr_function
def product_layout(n, num_warps):
    """The layout of a product's accumulator `[.., n]`: each warp has 16 of every 16 * num_warps rows."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, n, 16])


@gluon.jit
def advance_slot(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring of STAGES slots, and the phase of its barrier."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


# Persistent programs: one warp, or four, claim tiles of rows and put their numbers into a ring of buffers. The other
# warps work on the tiles in the ring. `taken_ptr` counts the claimed tiles; each program's first tile does not count.


@gluon.jit
def claim_tile(taken_ptr):
    """Claim a tile that no program has claimed. The number lies past the last tile if there are no more."""
    return gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")


@gluon.jit
def skip_head(taken_ptr, tile, max_length, ROWS: gl.constexpr):
    """Claim all remaining tiles of a head whose `tile` is empty: the tiles behind it are empty too."""
    of_head = gl.cdiv(max_length, ROWS)
    gl.atomic_max(taken_ptr, (tile // of_head + 1) * of_head - gl.num_programs(0), sem="relaxed")


@gluon.jit
def publish_tile(tile, buffer, num_warps: gl.constexpr):
    """Put a tile's number into its buffer; -1 means that there are no more tiles."""
    buffer.store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [num_warps], [0])))
    barrier()


@gluon.jit
def await_tile(buffers, ready, buffer, phase, num_warps: gl.constexpr):
    """Wait until this buffer has a tile, and return its number; -1 means that there are no more tiles."""
    mbarrier.wait(ready.index(buffer), phase)
    return gl.max(buffers.index(buffer).load(gl.BlockedLayout([1], [32], [num_warps], [0])), 0)


# Half of a word decides on one column of a draw; so it does in the transposed tile. The half, read as the magnitude of
# an fp16 number, is at least `threshold_words(threshold)` where the row 8 below is kept. With the bytes of the half
# swapped, the same holds for the row itself. Two comparisons are one instruction. NaN lies above all thresholds up to
# MAX_DROP_THRESHOLD; the unordered comparison keeps it.

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
def threshold_words(threshold):
    """The threshold in the place of an fp16 magnitude, in both halves of a word."""
    return (threshold << 7) * 0x00010001


@gluon.jit
def drop_forward(p, words, threshold):
    """16-bit weights `[M, N]`, with zeros where dropout drops them."""
    return gl.inline_asm_elementwise(
        DROP_FORWARD,
        "=r,=r,r,r,r,r,r,r,r,r,r,r",
        [p, words, threshold_words(threshold)],
        dtype=p.dtype,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def drop_backward(p, words, threshold):
    """16-bit weights `[N, M]`, with zeros where dropout drops them."""
    return gl.inline_asm_elementwise(
        DROP_BACKWARD, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [p, words, threshold_words(threshold)],
        dtype=p.dtype, is_pure=True, pack=8,
    )  # fmt: skip


# An fp32 tile for TMA has 128 bytes a row. The 16 bytes with index i of row r lie at i ^ r % 8. The threads of a
# product's accumulator store 8 bytes in 8 rows, and two rows each (0 and 1, 2 and 3, ...) would meet in the same banks.
# So odd rows store the elements that are 16 columns further.


@gluon.constexpr_function
def swapped_layout(rows, d):
    """The shared-memory layout of a tile whose odd rows are swapped. TMA then finds every element in its place."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4 ^ 16], [2, 8], [4, 16]]
    bases += [[8 * 2**i, 0] for i in range((rows // 8).bit_length() - 1)]
    bases += [[0, 32 * 2**i] for i in range((d // 32).bit_length() - 1)]
    return gl.SharedLinearLayout(bases, alignment=1024)


@gluon.jit
def store_accumulator(buffer, x):
    """Store a product's accumulator, fp32 `[M, D]`, to shared memory, in the layout that TMA reads."""
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    left, right = gl.split(x.reshape(M, D // 32, 2, 16).permute(0, 1, 3, 2))
    swapped = gl.join(right, left).permute(0, 1, 3, 2).reshape(M, D)
    odd = gl.arange(0, M, gl.SliceLayout(1, x.type.layout)) % 2 == 1
    x = gl.where(odd[:, None], gl.convert_layout(swapped, x.type.layout), x)
    reinterpret_memory(buffer, gl.float32, [M, D], swapped_layout(M, D)).store(x)
