"""Plans of launches: they launch what Triton would launch, and are found by all that it depends on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lra.kernels import flash_attention
from lra.kernels.plans import MOST_PLANS, Plans, RepeatedLaunch, forget_plans, tensor_facts
from lra.kernels.testing import Case, make_inputs
from tests.kernels.compiling import ROOT


class FakeKernel:
    """Notes how it is launched. It stands for a kernel of Triton, and for what Triton compiles of it."""

    arg_names = ("a_ptr", "b_ptr", "n", "SIZE", "num_warps")
    function, packed_metadata = "function", "packed"

    def __init__(self, compiles: bool = True):
        self.noted: list[Any] = []
        self.compiles = compiles

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.noted.append((grid, arguments, options))
            return self if self.compiles else None

        return launch

    def run(self, *arguments: Any) -> None:
        self.noted.append(arguments)


@pytest.fixture
def stream_9(device, monkeypatch) -> None:
    """The current stream of Triton's current device, which is 3."""
    from triton.runtime import driver

    fake = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 3 * device)
    monkeypatch.setattr(type(driver), "active", fake)


def test_a_launch_runs_the_compiled_kernel_from_the_second_time_on(stream_9):
    """With constants in the order of the kernel's arguments, and without options that are none."""
    kernel = FakeKernel()
    launch = RepeatedLaunch(kernel, 7, 3, num_warps=4, SIZE=16, maxnreg=None)
    for tensor in ("first", "second", "third"):
        launch(tensor, None)
    grid = 7, 1, 1
    assert kernel.noted == [
        ((7,), ("first", None, 3), {"num_warps": 4, "SIZE": 16, "maxnreg": None}),
        (*grid, 9, "function", "packed", None, None, None, "second", None, 3, 16, 4),
        (*grid, 9, "function", "packed", None, None, None, "third", None, 3, 16, 4),
    ]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_launch_with_hooks_is_one_of_triton(name, stream_9):
    from triton import knobs

    def profile(metadata: Any) -> None: ...

    kernel = FakeKernel()
    launch = RepeatedLaunch(kernel, 7, 3, SIZE=16, num_warps=4)
    launch("first", None)
    hooks: Any = getattr(knobs.runtime, name)
    hooks.add(profile)
    try:
        launch("second", None)
    finally:
        hooks.remove(profile)
    assert kernel.noted[1] == ((7, 1, 1), ("second", None, 3, 16, 4), {"stream": 9})


def test_a_launch_that_only_was_noted_goes_through_triton_again():
    """As in an interpreter, or where a step's kernels are compiled in advance."""
    kernel = FakeKernel(compiles=False)
    launch = RepeatedLaunch(kernel, 7, 3, SIZE=16, num_warps=4)
    for _ in range(2):
        launch("tensor", None)
    assert [grid for grid, *_ in kernel.noted] == [(7,)] * 2


def test_facts_are_all_that_kernels_depend_on_but_the_place():
    x = torch.zeros(8, 2, 16)
    assert tensor_facts(x, None) == tensor_facts(torch.ones(8, 2, 16), None)
    base = torch.zeros(8 * 2 * 32)
    others = (
        None, x.half(), x[:4], x.to("meta"), x.transpose(0, 1).contiguous().transpose(0, 1),
        base[1 : 1 + x.numel()].view_as(x), base.view(8, 2, 32)[..., ::2],
    )  # fmt: skip
    assert len({tensor_facts(each) for each in (x, *others)}) == 1 + len(others)


def test_plans_are_found_forgotten_and_bounded():
    plans = Plans[int]()
    assert plans.find("facts", lambda: 1) == plans.find("facts", lambda: 2) == 1
    forget_plans()
    assert plans.find("facts", lambda: 2) == 2
    for i in range(2 * MOST_PLANS):
        plans.find(i, lambda: 3)
    assert len(plans) <= MOST_PLANS


def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, impl="triton", deterministic=True, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-1))


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """But for rounding: for other strides Triton compiles another kernel."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-4)


@pytest.fixture
def qkv(device) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 2, 19, 2, 16, device=device)


def test_every_form_of_a_batch_has_its_own_plan(qkv, device):
    """Equal numbers under other strides: a plan that was found by mistake would read other elements."""
    expected = flash(*qkv)
    transposed = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)  # is copied
    fused = qkv.permute(1, 2, 0, 3, 4).contiguous().unbind(2)
    memory = torch.zeros(qkv.numel() + 1, device=device)
    memory[1:] = qkv.flatten()
    wide = torch.cat([qkv, qkv], -1)[..., :16]
    for form in (transposed, fused, memory[1:].view_as(qkv), wide, qkv):
        assert_same(flash(*form), expected)
    length = torch.full((2,), 19, dtype=torch.int32, device=device)
    rows = flash(*qkv.flatten(1, 2), start=length.cumsum(0).int() - length, length=length, max_length=19)
    assert_same(rows, [x.flatten(0, 1) for x in expected])
    assert_same(flash(*qkv, length=length), expected)


def test_saved_tensors_may_come_back_in_another_form(qkv):
    """Hooks of autograd, such as `save_on_cpu`, return tensors with other strides than they were given."""
    fused = qkv.permute(1, 2, 0, 3, 4).contiguous().unbind(2)
    expected = flash(*fused)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format)
    ):
        assert all(map(torch.equal, flash(*fused), expected))


@pytest.mark.parametrize("form", ["expanded", "transposed", "negated", "unaligned"])
def test_the_gradient_of_the_result_may_have_any_form(form, qkv):
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = flash_attention(*leaves, impl="triton", deterministic=True)
    do = torch.randn_like(out)
    if form == "expanded":
        do = do[:, :, :1, :1].expand_as(do)
    expected = torch.autograd.grad(out, leaves, do.contiguous().clone(), retain_graph=True)
    given = {
        "expanded": lambda: do,
        "transposed": lambda: do.transpose(1, 2).contiguous().transpose(1, 2),
        "negated": lambda: torch._neg_view(-do),  # pyright: ignore[reportPrivateImportUsage]
        "unaligned": lambda: torch.cat([do.new_zeros(1), do.flatten()])[1:].view_as(do),
    }[form]()
    assert_same(torch.autograd.grad(out, leaves, given), expected)


def test_batches_of_an_inference_serve_training_later(qkv):
    """The starts and lengths that a batch without lengths gets are kept for the next one."""
    with torch.inference_mode():
        out = flash_attention(*qkv, impl="triton")
    assert_same([out], flash(*qkv)[:1])


class SeenOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_modes_and_subclasses_see_the_operators(qkv):
    with SeenOperators() as seen:
        flash(*qkv)
    assert {"lra.flash_forward.default", "lra.flash_backward.default"} <= set(seen.names)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = flash_attention(*leaves, impl="triton", deterministic=True)
    with SeenOperators() as seen:
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-1))
    assert "lra.flash_backward.default" in seen.names
    assert_same(gradients, flash(*qkv)[1:])
    mapped = torch.func.vmap(lambda q, k, v: flash_attention(q, k, v, impl="triton"))(*(x[:, None] for x in qkv))
    assert_same([mapped[:, 0]], flash(*qkv)[:1])


def test_a_tensor_that_is_overwritten_too_early_is_noticed(device):
    case = Case((9, 3))
    inputs = make_inputs(case, device)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    for overwritten in ("start", "length"):
        sequences: dict[str, Any] = {name: x.clone() for name, x in inputs.sequences.items()}
        out = flash_attention(q, k, v, **sequences, max_length=9, impl="triton")
        sequences[overwritten].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.slow
def test_plans_launch_what_triton_would_launch():
    """Compiled for a Hopper GPU. A driver notes the launches, so that no GPU is needed."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), str(ROOT)])
    environment["CUDA_VISIBLE_DEVICES"] = ""
    program = "from tests.kernels.launching import list_cases, main; main(list_cases())"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    kernels, family = [], len(cases) // 2
    for case in cases:
        first, second, third = case["runs"]
        assert first and first == second == third == case["fresh"]
        assert len(case["hooked"]) == len(first)
        kernels.append({launch[0] for launch in first})
    assert all(kernels[i] != kernels[i - i % family] for i in range(len(kernels)) if i % family)
