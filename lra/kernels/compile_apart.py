"""Compiles kernels of Triton in another process, which needs no GPU, for the cache on disk.

Triton's front end is Python, so threads of one process take turns in it, with each other and with torch.compile. What
another process needs of a launch is packed: the kernel's name, and of each tensor its dtype and alignment.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Launch = tuple[Any, Sequence[Any], Mapping[str, Any]]  # a kernel, and the arguments of its `run`


@dataclass
class TensorStandIn:
    """What Triton asks of a tensor when it compiles."""

    dtype: torch.dtype
    pointer: int

    def data_ptr(self) -> int:
        return self.pointer


@dataclass
class TargetDriver:
    """What Triton asks of its driver when it compiles."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class LaunchPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        from triton.runtime.jit import JITFunction

        if isinstance(obj, JITFunction):
            return find_kernel, (obj.fn.__module__, obj.fn.__qualname__, obj.cache_key)
        if isinstance(obj, Tensor):
            return TensorStandIn, (obj.dtype, obj.data_ptr() % 16)  # 16 bytes are the alignment that Triton asks for
        return NotImplemented


class NotCached(Exception):
    """A kernel is in no cache."""


_threads = threading.local()  # `cached_only`: whether a thread compiles nothing


@contextmanager
def cached_only() -> Iterator[None]:
    """Inside, this thread gets NotCached from Triton where it would compile a kernel."""
    _threads.cached_only = True
    try:
        yield
    finally:
        _threads.cached_only = False


@functools.cache
def let_threads_refuse() -> None:
    """Lets Triton heed `cached_only`, once it has found no kernel in its cache. It has no public way to ask."""
    from triton.compiler.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    def refusing(make_ir: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make_ir)
        def refuse(*args: Any, **options: Any) -> Any:
            if getattr(_threads, "cached_only", False):
                raise NotCached
            return make_ir(*args, **options)

        return refuse

    for source in (ASTSource, GluonASTSource):
        source.make_ir = refusing(source.make_ir)  # type: ignore[method-assign]


def pack_launches(launches: Iterable[Launch]) -> bytes:
    """Returns launches, with `warmup=True`, as bytes for `compile_packed`. Kernels are attributes of their modules."""
    packed = io.BytesIO()
    LaunchPickler(packed).dump([*launches])
    return packed.getvalue()


def compile_packed(packed: bytes, target: Any) -> dict[str, float]:
    """Compiles launches. Returns the seconds for each kernel that the cache had not.

    Args:
        packed: from `pack_launches`, made by this program.
        target: Triton's description of the GPU, `driver.active.get_current_target()` where there is one.
    """
    from triton import knobs
    from triton.runtime import driver

    seconds: Counter[str] = Counter()

    def listen(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            seconds[metadata["name"]] += times.total / 1e6

    driver.set_active(TargetDriver(target))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    knobs.compilation.listener = listen
    try:
        for kernel, args, options in pickle.loads(packed):
            kernel.run(*args, **options)
    finally:
        knobs.compilation.listener = None
    return dict(seconds)


def find_kernel(module: str, name: str, key: str) -> Any:
    """Returns a kernel, and gives it the hash that it has in another process.

    Triton's hash of a function depends on what was hashed before it: the constants of a function that it calls are part
    of it only if that one was hashed already.
    """
    from triton.runtime.jit import JITFunction

    kernel = getattr(importlib.import_module(module), name)
    while not isinstance(kernel, JITFunction):  # an autotuner around it
        kernel = kernel.fn
    kernel.hash = key
    return kernel
