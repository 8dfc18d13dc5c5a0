"""Runs Gluon kernels on a CPU, which Triton's interpreter does not: tiles are NumPy arrays, layouts mean nothing.

Programs run one after another, each line at once: copies and products are there when they are begun. Warps that
specialise are threads. What a layout or a missing barrier gets wrong is not seen here; what is computed, where it is
read and written, and a wait that would never end, is.
"""

from __future__ import annotations

import builtins
import threading
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lra.kernels.flash import reference

DTYPES = {
    getattr(gl, name): getattr(np, name) for name in ("float16", "float32", "uint32", "int32", "uint64", "int64")
}  # fmt: skip


class Tile(np.ndarray):
    """A tensor in registers or in shared memory; a number has no dimension."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else self.astype(dtype)

    def broadcast_to(self, shape: Any) -> Tile:
        return tile(np.broadcast_to(self, shape))

    def permute(self, *order: Any) -> Tile:
        return self.transpose(*order)

    def index(self, i: Any) -> Tile:
        return self[int(i)]

    def store(self, values: Any) -> None:
        self[...] = values

    def load(self, layout: Any) -> Tile:
        return self.copy()

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


def tile(values: Any, dtype: Any = None) -> Tile:
    return np.asarray(values, dtype).view(Tile)


CHANGED = threading.Condition()  # a barrier has


class Pointer:
    """Into the elements of a tensor: where they begin, and offsets."""

    def __init__(self, memory: np.ndarray, offset: Any = 0):
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype.type)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + np.asarray(offset).astype(np.int64))

    def at(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and whether they count; IndexError where one that does lies outside."""
        offset, real = np.broadcast_arrays(self.offset, True if mask is None else mask)
        if ((offset < 0) | (offset >= self.memory.size))[real].any():
            raise IndexError(f"outside of a tensor of {self.memory.size} elements")
        return np.where(real, offset, 0), real


class Descriptor:
    """What TMA copies from and to: what lies outside is read as zeros, and not written."""

    layout = None

    def __init__(self, descriptor: TensorDescriptor):
        memory, size = descriptor.base.numpy(), descriptor.base.element_size()
        strides = [size * stride for stride in descriptor.strides]
        self.memory = np.lib.stride_tricks.as_strided(memory, descriptor.shape, strides)
        self.dtype = memory.dtype.type

    def rows(self, coordinates: Any, buffer: Tile) -> tuple[slice, slice]:
        (row, column), (rows, columns) = map(int, coordinates), buffer.shape
        return slice(row, min(row + rows, len(self.memory))), slice(column, column + columns)

    def load(self, coordinates: Any, barrier: Any, buffer: Tile, pred: Any = True) -> None:
        if pred:
            found = self.memory[self.rows(coordinates, buffer)]
            buffer[...] = 0
            buffer[: len(found)] = found
            Barriers.count(barrier, bytes=-buffer.nbytes)

    def add(self, coordinates: Any, buffer: Tile) -> None:
        with CHANGED:
            found = self.memory[self.rows(coordinates, buffer)]
            found += buffer[: len(found)]


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tile:
    offset, real = pointer.at(mask)
    return tile(np.where(real, pointer.memory[offset], pointer.memory.dtype.type(other)))


def store(pointer: Pointer, values: Any, mask: Any = None) -> None:
    offset, real = pointer.at(mask)
    values = np.broadcast_to(values, offset.shape).astype(pointer.memory.dtype)
    pointer.memory[offset[real]] = values[real]


def atomic(operation: Any) -> Callable[..., Tile]:
    def change(pointer: Pointer, value: Any, sem: str | None = None) -> Tile:
        with CHANGED:
            before = load(pointer)
            store(pointer, operation(before, value))
        return before

    return change


def product(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Tile:
    """In float64, rounded once: closer than tensor cores, whose sums are in fp32."""
    found = (np.asarray(a, np.float64) @ np.asarray(b, np.float64)).astype(np.float32)
    return tile(found + acc if use_acc else found)


def kept(words: Tile, row: Any, column: Any, threshold: Any) -> np.ndarray:
    """A half of a word for a column, that rotated by one bit, and of it a byte for a row, the lower one 8 above."""
    half = words >> 16 * (column % 2) & 0xFFFF
    return ((half << 1 | half >> 15) >> 8 * (row // 8 % 2)) & 0xFF >= threshold


def keep(x: Tile, words: Tile, threshold: Any) -> Tile:
    """Of rows: the lower byte is for the first two of four neighbours."""
    _, columns = np.indices(x.shape)
    return tile(np.where(kept(words, columns // 2 * 8, columns, threshold), x, 0))


def drop_forward(p: Tile, words: Tile, threshold: Any) -> Tile:
    rows, columns = np.indices(p.shape)
    return tile(np.where(kept(words, rows, columns, threshold), p, 0))


def drop_backward(p: Tile, words: Tile, threshold: Any) -> Tile:
    _, rows = np.indices(p.shape)  # of queries, whose tile is transposed
    return tile(np.where(kept(words, rows, rows, threshold), p, 0))


def score_gradient(p: Tile, difference: Tile) -> Tile:
    """The difference is rounded, and the result."""
    return tile((p.astype(np.float32) * difference.astype(p.dtype)).astype(p.dtype))


def dropped_score_gradient(kept: Tile, p: Tile, dp: Tile, minus_delta: Tile) -> Tile:
    """Rounded three times: dP, the product that is added, and the result."""
    added = (p.astype(np.float32) * minus_delta).astype(p.dtype)
    return tile((kept.astype(np.float64) * dp.astype(p.dtype) + added).astype(p.dtype))


def equal(a: Tile, b: Tile) -> Tile:
    return tile((a == b).astype(a.dtype))


def transpose_blocks(words: Tile) -> Tile:
    """8 rows of 4 words, each two elements of 16 bits, are a matrix."""
    rows, columns = words.shape
    blocks = np.ascontiguousarray(words).view(np.uint16).reshape(rows // 8, 8, columns // 4, 8)
    return tile(np.ascontiguousarray(blocks.transpose(0, 3, 2, 1)).reshape(rows, -1).view(np.int32))


def philox(seed: Any, *counter: Any) -> tuple[Tile, ...]:
    """`tl.philox` with the number of rounds last."""
    *words, rounds = (torch.tensor(int(x)) for x in counter)
    key = tuple(torch.tensor(int(seed) >> shift & reference.LOW_32_BITS) for shift in (0, 32))
    return tuple(tile(int(word), np.uint32) for word in reference.philox(tuple(words), key, int(rounds)))


class Nothing:
    """A layout."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None

    get_default_for = __call__


class Barriers:
    """Of Hopper, by their address: a phase is complete with its arrivals and the bytes they announced."""

    MBarrierLayout = Nothing()
    states: ClassVar[dict[int, dict[str, int]]] = {}

    @classmethod
    def of(cls, barrier: Tile) -> dict[str, int]:
        return cls.states[barrier.ctypes.data]

    @classmethod
    def init(cls, barrier: Tile, count: int) -> None:
        cls.states[barrier.ctypes.data] = {"arrivals": count, "missing": count, "bytes": 0, "phase": 0}

    @classmethod
    def count(cls, barrier: Tile, arrivals: int = 0, bytes: int = 0) -> None:
        with CHANGED:
            state = cls.of(barrier)
            state["missing"] -= arrivals
            state["bytes"] += bytes
            assert state["missing"] >= 0 and state["bytes"] >= 0, "more than a barrier waits for"
            if state["missing"] == state["bytes"] == 0:
                state |= {"missing": state["arrivals"], "phase": state["phase"] ^ 1}
                CHANGED.notify_all()

    @classmethod
    def expect(cls, barrier: Tile, bytes: int, pred: Any = True) -> None:
        if pred:
            cls.count(barrier, 1, bytes)

    @classmethod
    def wait(cls, barrier: Tile, phase: Any, pred: Any = True) -> None:
        with CHANGED:
            done = not pred or CHANGED.wait_for(lambda: cls.of(barrier)["phase"] != phase, timeout=20)
        assert done, "a wait without end"

    @classmethod
    def arrive(cls, barrier: Tile, count: int = 1, pred: Any = True) -> None:
        if pred:
            cls.count(barrier, count)

    @classmethod
    def invalidate(cls, barrier: Tile) -> None:
        del cls.states[barrier.ctypes.data]


def warp_specialize(partitions: Any, warps: Any, registers: Any) -> None:
    """Each partition in a thread of its own."""
    failures: list[BaseException] = []

    def guarded(function: Any, arguments: Any) -> None:
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                function(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# what kernels call by name: hardware, and what is written in its assembler or knows where a thread has an element
NAMES = {
    "warpgroup_mma": product, "warpgroup_mma_wait": lambda outstanding, deps: deps[0] if len(deps) == 1 else deps,
    "fence_async_shared": lambda: None, "barrier": lambda: None, "prefetch_rows": lambda *_: None,
    "mbarrier": Barriers, "tma": types.SimpleNamespace(store_wait=lambda pendings: None),
    "load_tile_async": Descriptor.load, "add_tile_async": Descriptor.add, "store_accumulator": Tile.store,
    "zero_dropped": keep, "drop_forward": drop_forward, "drop_backward": drop_backward,
    "packed_score_gradient": score_gradient, "packed_dropped_score_gradient": dropped_score_gradient,
    "transpose_blocks": transpose_blocks, "equal_mask": equal,
    "range": lambda *bounds: (tile(i, np.int32) for i in builtins.range(*map(int, bounds))),
}  # fmt: skip


class Language:
    """What kernels call `gl`, and `tl`."""

    def __init__(self, program: int, programs: int):
        self.program, self.programs = tile(program, np.int32), tile(programs, np.int32)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return Nothing()
        return DTYPES[getattr(gl, name)]

    constexpr = staticmethod(lambda value: value)
    static_assert = staticmethod(lambda *_: None)
    static_range = staticmethod(range)
    warp_specialize = staticmethod(warp_specialize)
    load, store = staticmethod(load), staticmethod(store)
    atomic_add, atomic_max = staticmethod(atomic(np.add)), staticmethod(atomic(np.maximum))
    cdiv = staticmethod(lambda a, b: -(-int(a) // int(b)))
    to_tensor = staticmethod(tile)
    arange = staticmethod(lambda start, end, layout=None: tile(np.arange(start, end, dtype=np.int32)))
    zeros = staticmethod(lambda shape, dtype, layout=None: tile(np.zeros(shape, dtype)))
    full = staticmethod(lambda shape, value, dtype, layout=None: tile(np.full(shape, value, dtype)))
    zeros_like = staticmethod(lambda x: tile(np.zeros_like(x)))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    sum = staticmethod(lambda x, axis: tile(np.sum(x, axis, dtype=x.dtype)))
    max = staticmethod(lambda x, axis: tile(np.max(x, axis)))
    join = staticmethod(lambda a, b: tile(np.stack((a, b), -1)))
    split = staticmethod(lambda x: (x[..., 0], x[..., 1]))
    where = staticmethod(lambda condition, a, b: tile(np.where(condition, a, b)))
    rsqrt = staticmethod(lambda x: tile(1 / np.sqrt(x)))
    abs, exp2, log2 = staticmethod(np.abs), staticmethod(np.exp2), staticmethod(np.log2)
    philox = staticmethod(philox)
    maximum, minimum = (staticmethod(lambda a, b, f=f: tile(f(a, b))) for f in (np.maximum, np.minimum))

    def program_id(self, axis: int) -> Tile:
        return self.program

    def num_programs(self, axis: int) -> Tile:
        return self.programs

    def allocate_shared_memory(self, dtype: Any, shape: Any, layout: Any) -> Tile:
        return tile(np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else 0, dtype))


def run(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """`kernel[(programs,)](*arguments, **constants)` with tensors on the CPU."""
    given = [_argument(x) for x in arguments]
    constants = {name: DTYPES.get(x, x) for name, x in constants.items()}
    with np.errstate(over="ignore", invalid="ignore"):
        for program in range(programs):
            translated(kernel, Language(program, programs), {})(*given, **constants)


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        assert x.is_contiguous() or x.numel() == 0, "a pointer to what is strided"
        return Pointer(x.numpy().reshape(-1))
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    return tile(x, np.int32) if type(x) is int else np.float32(x) if type(x) is float else x


def translated(function: Any, language: Language, done: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """A jitted function as plain Python, and what it calls."""
    plain = function.fn
    if plain in done:
        return done[plain]
    scope = dict(plain.__globals__)
    done[plain] = translation = types.FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__)
    for name, value in plain.__globals__.items():
        if isinstance(getattr(value, "fn", None), types.FunctionType):
            scope[name] = translated(value, language, done)
        elif isinstance(value, gl.constexpr):
            scope[name] = value.value
    scope |= {"gl": language, "tl": language, **NAMES}
    return translation


class Emulated:
    """A kernel to be launched as on a GPU; how many registers it may take is of no matter here."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, maxnreg: int | None = None, **constants: Any) -> None:
            run(self.kernel, *grid, *arguments, **constants)

        return launch
