"""Runs Gluon kernels on a CPU, which Triton's interpreter does not: tiles are NumPy arrays, layouts mean nothing.

For kernels whose warps meet only at barriers: programs run one after another, each line at once. What a layout, a fence
or a missing barrier gets wrong is not seen here; what is computed, and where it is read and written, is.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITCallable

DTYPES = {
    gl.float16: np.float16, gl.float32: np.float32, gl.uint32: np.uint32, gl.int32: np.int32, gl.int64: np.int64,
}  # fmt: skip


class Tile(np.ndarray):
    """A tensor in registers or, filled by `store`, in shared memory; a number has no dimension."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        dtype = DTYPES.get(dtype, dtype)
        return self.view(dtype) if bitcast else self.astype(dtype)

    def permute(self, *order: Any) -> Tile:
        return self.transpose(*order)

    def index(self, i: Any) -> Tile:
        return self[int(i)]

    def store(self, values: Any) -> None:
        self[...] = values

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


def tile(values: Any, dtype: Any = None) -> Tile:
    return np.asarray(values, dtype).view(Tile)


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


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tile:
    offset, real = pointer.at(mask)
    return tile(np.where(real, pointer.memory[offset], pointer.memory.dtype.type(other)))


def store(pointer: Pointer, values: Any, mask: Any = None) -> None:
    offset, real = pointer.at(mask)
    values = np.broadcast_to(values, offset.shape).astype(pointer.memory.dtype)
    pointer.memory[offset[real]] = values[real]


def product(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Tile:
    """In float64, rounded once: closer than tensor cores, whose sums are in fp32."""
    found = (np.asarray(a, np.float64) @ np.asarray(b, np.float64)).astype(np.float32)
    return tile(found + acc if use_acc else found)


def language(program: int, programs: int) -> Any:
    """What kernels call `gl`."""
    known = {
        "float16": gl.float16, "float32": gl.float32, "uint32": gl.uint32, "int32": gl.int32, "int64": gl.int64,
        "program_id": lambda axis: tile(program, np.int32), "num_programs": lambda axis: tile(programs, np.int32),
        "cdiv": lambda a, b: -(-int(a) // int(b)), "static_range": range,
        "arange": lambda start, end, layout=None: tile(np.arange(start, end, dtype=np.int32)),
        "zeros": lambda shape, dtype, layout=None: tile(np.zeros(shape, DTYPES[dtype])),
        "zeros_like": lambda x: tile(np.zeros_like(x)), "load": load, "store": store,
        "allocate_shared_memory": lambda dtype, shape, layout: tile(np.full(shape, np.nan, DTYPES.get(dtype, dtype))),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "sum": lambda x, axis: tile(np.sum(x, axis, dtype=x.dtype)), "join": lambda a, b: tile(np.stack((a, b), -1)),
        "split": lambda x: (x[..., 0], x[..., 1]),
        "where": lambda c, a, b: tile(np.where(c, a, b)), "abs": np.abs, "exp2": np.exp2,
        "rsqrt": lambda x: tile(1 / np.sqrt(x)),
    }  # fmt: skip
    nothing = types.SimpleNamespace(get_default_for=lambda *_: None)
    return types.SimpleNamespace(**known, NVMMASharedLayout=nothing, **{
        name: lambda *_, **__: None for name in ("BlockedLayout", "DotOperandLayout", "SliceLayout")
    })  # fmt: skip


def run(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """`kernel[(programs,)](*arguments, **constants)` with tensors on the CPU, which must be contiguous."""
    given = [Pointer(x.numpy().reshape(-1)) if isinstance(x, Tensor) else x for x in arguments]
    given = [tile(x, np.int32) if type(x) is int else np.float32(x) if type(x) is float else x for x in given]
    with np.errstate(over="ignore"):
        for program in range(programs):
            translated(kernel, language(program, programs), {})(*given, **constants)


def translated(function: Any, names: Any, done: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """A jitted function as plain Python, and what it calls."""
    if function in done:
        return done[function]
    plain = function.fn
    scope = dict(plain.__globals__)
    done[function] = translation = types.FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__)
    for name, value in plain.__globals__.items():
        if isinstance(value, JITCallable):
            scope[name] = translated(value, names, done)
    scope |= {
        "gl": names,
        "warpgroup_mma": product,
        "warpgroup_mma_wait": lambda outstanding, deps: deps[0] if len(deps) == 1 else deps,
        "fence_async_shared": lambda: None,
        "prefetch_rows": lambda *_: None,
        "barrier": lambda: None,
    }
    scope["range"] = lambda *bounds: (tile(i, np.int32) for i in builtins.range(*map(int, bounds)))
    for name in ("row_layout", "pair_layout", "product_layout"):
        scope[name] = lambda *_: None
    return translation


class Emulated:
    """A kernel to be launched as on a GPU; how many registers it may take is of no matter here."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, maxnreg: int, **constants: Any) -> None:
            run(self.kernel, *grid, *arguments, **constants)

        return launch
