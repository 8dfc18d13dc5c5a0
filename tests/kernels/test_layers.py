"""Layers of the Transformer block: kernels, interpreted or compiled, operators and plain path, against float64."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, library

from lra.kernels import layers
from lra.kernels.layers import reference
from lra.kernels.testing import largest, poisoned_empty

D, HALF, BF16 = 64, torch.float16, torch.bfloat16
NAMES = ("feed_forward", "project", "project_out")
SITE = 5


class Problem:
    """Arguments of one layer, the same for the same numbers: what has gradients, what has none, and dtype."""

    def __init__(self, name: str, rows: int, rate: float, dtype: torch.dtype, device: Any, d_ff: int = 128):
        generator = torch.Generator().manual_seed(rows)

        def draw(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
            return (mean + std * torch.randn(shape, generator=generator)).to(device)

        def linear(out: int, width: int) -> list[Tensor]:
            return [draw(out, width, std=width**-0.5), draw(out, std=0.3)]

        x, norm = draw(rows, D, mean=0.5, std=2.0), [draw(D, mean=1.0, std=0.3), draw(D, std=0.3)]
        self.name, self.dtype = name, dtype
        self.leaves = {
            "feed_forward": lambda: [x, *norm, *linear(d_ff, D), *linear(D, d_ff)],
            "project": lambda: [x, *norm, *linear(3 * D, D)],
            "project_out": lambda: [x, draw(rows, D).to(dtype), *linear(D, D)],
        }[name]()
        keys = torch.randint(-(2**31), 2**31, (rows,), generator=generator).to(torch.int32).to(device)
        self.rest: tuple[Any, ...] = () if name == "project" else (rate, keys if rate else None, SITE)
        self.gradients = [draw(rows, D) for _ in range(3 if name == "project" else 1)]

    def run(self, function: Any, *more: Any, precision: torch.dtype | None = None) -> list[Tensor]:
        """Results and the gradients of all leaves; with `precision` everything is in it."""
        leaves = [leaf.detach().to(precision or leaf.dtype).requires_grad_() for leaf in self.leaves]
        out = function(*leaves, *self.rest, *more)
        out = list(out) if isinstance(out, tuple) else [out]
        gradients = [gradient.to(y.dtype) for gradient, y in zip(self.gradients, out, strict=True)]
        return [*(y.detach() for y in out), *torch.autograd.grad(out, leaves, gradients)]

    def fused(self) -> list[Tensor]:
        """By the operators. What they allocate is filled with NaN first."""
        with poisoned_empty():
            results = self.run(getattr(torch.ops.lra, self.name), self.dtype)
        assert all(result.is_contiguous() for result in results)
        return results

    def plain(self) -> list[Tensor]:
        """As the model does without the kernels."""
        kind = self.leaves[0].device.type
        with torch.autocast(kind, self.dtype, enabled=self.dtype != torch.float32, cache_enabled=False):
            return self.run(getattr(reference, self.name))

    def check(self, actual: list[Tensor]) -> None:
        exact, plain = self.run(getattr(reference, self.name), precision=torch.float64), self.plain()
        for place, (a, e, p) in enumerate(zip(actual, exact, plain, strict=True)):
            assert a.shape == e.shape and a.dtype == p.dtype, f"{place}: {a.shape} {a.dtype}"
            error = largest(a.double() - e)
            budget = 2 * largest(p.double() - e) + 2 * torch.finfo(self.dtype).eps * largest(e)
            assert error <= budget, f"{place} of {self.name}: error {error:.3g}, budget {budget:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 63, 64, 200, 517])
@pytest.mark.parametrize("name", NAMES)
def test_within_budget(name, rows, rate, dtype, device):
    problem = Problem(name, rows, rate, dtype, device)
    problem.check(problem.fused())


def test_narrow_hidden_layer(device):
    problem = Problem("feed_forward", 150, 0.3, torch.float32, device, d_ff=64)
    problem.check(problem.fused())


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name, device):
    """Empty results, and zeros as gradients of the parameters."""
    problem = Problem(name, 0, 0.1, torch.float32, device)
    results = problem.fused()
    assert not any(result.any() for result in results)
    problem.check(results)


@pytest.mark.parametrize("name", NAMES)
def test_two_calls_are_bitwise_equal(name, device):
    problem = Problem(name, 517, 0.1, torch.float32, device)
    assert all(map(torch.equal, problem.fused(), problem.fused()))


@pytest.mark.parametrize("site", [0, 7])
@pytest.mark.parametrize("rate", [0.1, 0.75])
def test_dropout_is_that_of_the_reference(rate, site, device):
    """Bit for bit: the output's elements are 1 or dropped, then those of the hidden layer, one half at a time."""
    rows = 130
    keys = torch.randint(-(2**31), 2**31, (rows,)).to(torch.int32).to(device)
    x, one, norm = torch.zeros(rows, D, device=device), torch.ones(D, device=device), torch.ones(2, D, device=device)
    ones, place = torch.ones(rows, 2 * D, device=device), (rate, keys, site, torch.float32)
    zero = torch.zeros(D, D, device=device)
    assert torch.equal(torch.ops.lra.project_out(x, x, zero, one, *place), reference.drop(ones[:, :D], *place[:3]))

    hidden, both = reference.drop(ones, *place[:3]), torch.ones(2 * D, device=device)
    for half in range(2):
        w2 = torch.zeros(D, 2 * D, device=device)
        w2[:, half * D : (half + 1) * D] = torch.eye(D, device=device)
        y = torch.ops.lra.feed_forward(x, *norm, torch.zeros(2 * D, D, device=device), both, w2, 0 * one, *place)
        expected = reference.drop(hidden[:, half * D : (half + 1) * D], rate, keys, site + 1)
        assert torch.equal(y != 0, expected != 0)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_operators_keep_their_contracts(name, rate, device):
    """Schema, fake implementation (shapes, dtypes, strides), autograd and tracing with dynamic shapes."""
    problem = Problem(name, 70, rate, torch.float32, device)
    more = (*problem.rest, problem.dtype)
    leaves = [leaf.requires_grad_() for leaf in problem.leaves]
    library.opcheck(getattr(torch.ops.lra, name).default, (*leaves, *more))
    saved = [leaf.detach() for leaf in (leaves[1:-1] if name == "project_out" else leaves[:-1])]
    library.opcheck(getattr(torch.ops.lra, f"{name}_backward").default, (*problem.gradients, *saved, *more))


def block(x: Tensor, parameters: list[Tensor], *place: Any) -> Tensor:
    """The three in the order of a block, by the operators."""
    norm, qkv, out, up, down = (parameters[i : i + 2] for i in range(0, 10, 2))
    q, k, v = torch.ops.lra.project(x, *norm, *qkv, torch.float32)
    x = torch.ops.lra.project_out(x, q * k + v, *out, *place, torch.float32)
    return torch.ops.lra.feed_forward(x, *norm, *up, *down, *place, torch.float32)


def test_compiled_equals_eager(device):
    """One graph for any number of rows."""
    torch.compiler.reset()
    compiled: Any = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    norm_qkv, out, wide = (Problem(name, 5, 0.0, torch.float32, device).leaves for name in ("project", *NAMES[::-2]))
    leaves = [leaf.requires_grad_() for leaf in (*norm_qkv[1:], *out[2:], *wide[3:])]
    for rows in (33, 150):
        problem = Problem("project_out", rows, 0.3, torch.float32, device)
        x = problem.leaves[0].requires_grad_()
        eager, traced = (
            [y := function(x, leaves, *problem.rest), *torch.autograd.grad(y.square().sum(), [x, *leaves])]
            for function in (block, compiled)
        )
        assert all(map(torch.equal, eager, traced))


def test_gradients_of_any_strides(device):
    """An expanded gradient, and none at all for k and v."""
    problem = Problem("project", 70, 0.0, torch.float32, device)
    leaves = [leaf.requires_grad_() for leaf in problem.leaves]
    q, k, v = torch.ops.lra.project(*leaves, torch.float32)
    actual = torch.autograd.grad(q.sum(), leaves)
    problem.gradients = [torch.ones_like(q), torch.zeros_like(k), torch.zeros_like(v)]
    assert all(map(torch.equal, actual, problem.fused()[3:]))


@pytest.mark.parametrize("name", NAMES)
def test_plain_path_on_the_cpu(name):
    problem, function = Problem(name, 20, 0.1, BF16, "cpu"), getattr(layers, name)
    torch.compiler.reset()
    compiled: Any = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.autocast("cpu", BF16, cache_enabled=False):
        eager = problem.run(function)
        assert all(map(torch.equal, problem.run(compiled), eager))
        assert not layers.takes(problem.leaves[0], 128)
    problem.check(eager)


def arguments(name: str, **changes: Any) -> tuple[Any, ...]:
    problem = Problem(name, 6, 0.1, torch.float32, "cpu")
    fields = {
        "feed_forward": ["x", "gain", "shift", "w1", "b1", "w2", "b2", "rate", "keys", "site"],
        "project": ["x", "gain", "shift", "w", "b"],
        "project_out": ["x", "o", "w", "b", "rate", "keys", "site"],
    }[name]
    return tuple((dict(zip(fields, (*problem.leaves, *problem.rest), strict=True)) | changes).values())


MISTAKES = [
    ("project", dict(x=torch.zeros(2, 3, D)), r"x must be \[T, D\]"),
    ("project", dict(w=torch.zeros(D, D)), r"w must be \[192, 64\], got \[64, 64\]"),
    ("project", dict(b=torch.zeros(100)), r"w must be \[64, 64\], got \[192, 64\]"),
    ("project_out", dict(o=torch.zeros(5, D)), r"o must be \[6, 64\]"),
    ("project_out", dict(rate=1.0), "rate must be at least 0 and below 1"),
    ("feed_forward", dict(w2=torch.zeros(128, D)), r"w2 must be \[64, 128\]"),
    ("feed_forward", dict(keys=torch.zeros(6)), r"keys must be int32 \[6\]"),
    ("feed_forward", dict(keys=torch.zeros(5, dtype=torch.int32)), r"keys must be int32 \[6\]"),
]


@pytest.mark.parametrize(("name", "changes", "message"), MISTAKES)
def test_mistakes(name, changes, message):
    with pytest.raises(ValueError, match=message):
        getattr(layers, name)(*arguments(name, **changes))


def test_import_does_not_import_triton():
    program = "import sys, lra.kernels.layers; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_many_rows(name, rate):
    problem = Problem(name, 33_000, rate, BF16, "cuda")
    first = problem.fused()
    problem.check(first)
    for _ in range(5):
        assert all(map(torch.equal, problem.fused(), first))


@pytest.mark.gpu
def test_what_the_kernels_take():
    x = torch.zeros(3, D, device="cuda")
    assert not layers.takes(x, 128)
    with torch.autocast("cuda", BF16):
        assert layers.takes(x, 128) and layers.takes(x, 64)
        assert not (layers.takes(x, 96) or layers.takes(x.bfloat16(), 128) or layers.takes(x[:, :32], 128))
    with torch.autocast("cuda", HALF):
        assert not layers.takes(x, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_compiled_in_a_cuda_graph(name):
    """The public function, with an o that is not contiguous: what the replays give is what the eager call gives."""
    from torch._dynamo.utils import counters  # here, because it imports the whole compiler

    counters.clear()
    torch.compiler.reset()
    problem, function = Problem(name, 33_000, 0.1, BF16, "cuda"), getattr(layers, name)
    if name == "project_out":
        problem.leaves[1] = torch.cat([problem.leaves[1]] * 2, 1)[:, :D]
    graphed = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    with torch.autocast("cuda", BF16, cache_enabled=False):
        eager = problem.run(function)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert all(map(torch.equal, problem.run(graphed), eager))
    assert not counters["inductor"]["cudagraph_skips"]
