"""Plans: what a call computes from shapes alone is computed once, and found again by the facts of its tensors.

A launch through Triton takes 15 to 40 microseconds of the host. Triton looks at every argument, looks for a compiled
kernel and checks descriptors. A plan does that in its first run only. It holds no tensor of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

MOST_PLANS = 1024  # of one kind; packed batches of many lengths need a new plan each time

Plan = TypeVar("Plan")


class Plans(dict[Hashable, Plan]):
    """The plans of one kind, by the facts of their calls."""

    def __init__(self) -> None:
        _kinds.append(self)

    def find(self, facts: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan for these facts. `make` builds it if there is none."""
        found = self.get(facts)
        if found is None:
            if len(self) >= MOST_PLANS:
                self.clear()
            found = self[facts] = make()
        return found


_kinds: list[Plans[Any]] = []


def forget_plans() -> None:
    """Forget all plans. Call it after a change of what they were made from: tables of tiles, settings of Triton."""
    for plans in _kinds:
        plans.clear()


def tensor_facts(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """What the kernels of a call depend on, for each tensor: all but its values and its place in memory.

    Triton compiles another kernel for a pointer that is no multiple of 16 bytes.
    """
    return tuple([x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors])


class RepeatedLaunch:
    """A launch that is repeated with other tensors.

    Triton compiles a kernel for the dtypes of its tensors, for their alignment to 16 bytes, for those that are None,
    and for some of its numbers. Only the tensors differ between calls, and they must agree in these facts. New tensors
    do: PyTorch aligns them. The first call goes through Triton. The others call the kernel that it compiled, on the
    same device.

    Args:
        kernel: a function of `triton.jit` or `gluon.jit`, whose first arguments are tensors or descriptors.
        programs: the number of programs.
        numbers: the arguments that follow the tensors.
        constants: the constants of the kernel by name, and options of the launch.
    """

    def __init__(self, kernel: Any, programs: int, *numbers: float, **constants: Any):
        self.kernel, self.programs, self.numbers, self.constants = kernel, programs, numbers, constants
        self._repeat: Callable[..., None] | None = None

    def __call__(self, *tensors: Any) -> None:
        if self._repeat is not None:
            self._repeat(*tensors)
            return
        compiled = self.kernel[(self.programs,)](*tensors, *self.numbers, **self.constants)
        if compiled is not None:  # an interpreter returns None, and so does what only notes launches
            names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self._repeat = _repeated(compiled, self.programs, *self.numbers, *(self.constants[name] for name in names))


def _repeated(compiled: Any, programs: int, *rest: Any) -> Callable[..., None]:
    """A function of tensors that launches a compiled kernel on the current stream, with the same other arguments.

    `compiled[grid]` is Triton's function for it. It spends a third of its time on the hooks of launches, which are
    empty unless a profiler has set them.
    """
    from triton import knobs
    from triton.runtime import driver

    active: Any = driver.active
    device, current_stream, runtime = active.get_current_device(), active.get_current_stream, knobs.runtime
    with_hooks = compiled[programs, 1, 1]
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def repeat(*tensors: Any) -> None:
        stream = current_stream(device)
        if _has_hook(runtime.launch_enter_hook) or _has_hook(runtime.launch_exit_hook):
            with_hooks(*tensors, *rest, stream=stream)
        else:
            # of a tensor, Triton would ask the driver where it lies
            places = [x.data_ptr() if type(x) is Tensor else x for x in tensors]
            run(programs, 1, 1, stream, function, packed, None, None, None, *places, *rest)

    return repeat


def _has_hook(hook: Any) -> bool:
    """Whether a hook of Triton, a chain of functions or a function, calls anything."""
    return bool(getattr(hook, "calls", hook))
