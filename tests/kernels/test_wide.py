"""The layers around attention of wide models: kernels against the operators' definition."""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import pytest

from lra.kernels.layers import reference
from lra.kernels.testing import poisoned_empty
from tests.kernels.compiling import compiled
from tests.kernels.layers import (
    EPS,
    HALF,
    angles,
    assert_compiled,
    assert_same,
    dropout,
    feed_forward_case,
    launch_block,
    pooled_case,
    project_case,
    sequences,
)

GELU = 1.2e-4  # what the kernels' approximation makes of results and gradients
SLOW = pytest.mark.slow
FEED_FORWARDS = [
    pytest.param(30, 256, 256, 0.3),
    pytest.param(70, 256, 512, 0.3, marks=SLOW),
    pytest.param(64, 256, 256, 0.0, marks=SLOW),
    pytest.param(130, 256, 768, 0.3, marks=SLOW),
    pytest.param(70, 512, 512, 0.3, marks=SLOW),
]


@pytest.fixture
def launchers(device, monkeypatch):
    """The launchers. Few programs sum a weight's gradient, because each takes long here."""
    from lra.kernels.layers import launch_layers

    for name, value in dict(SUM_PROGRAMS=15, FOLD_ROWS=64, UNFOLD_ROWS=32).items():
        monkeypatch.setattr(launch_layers, name, value)
    return launch_layers


@pytest.mark.parametrize(("rows", "d", "f", "rate"), FEED_FORWARDS)
def test_feed_forward_kernels_compute_the_definition(rows, d, f, rate, launchers, device):
    case = feed_forward_case(rows, d, f, HALF, device)
    o, x, *layers = case.given
    numbers = dropout(rate, case.keys)
    with poisoned_empty():
        actual = launchers.launch_feed_forward(o, x, *layers, EPS, *numbers)
    _, *kept = expected = reference.feed_forward(o, x, *layers, EPS, *numbers)
    assert_same(actual, expected, GELU)
    backward = (case.dy[0], o, *kept, *layers[2:5], *numbers)
    with poisoned_empty():
        actual = launchers.launch_feed_forward_backward(*backward)
    assert_same(actual, reference.feed_forward_backward(*backward), GELU)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_pooled_kernels_compute_the_definition(padded, launchers, device):
    """And of a sequence past its length nothing."""
    given = sequences((40, 3, 0, 30), 256, padded, device)
    case = pooled_case(given, 256, HALF)
    o, x, *layers = case.given[:-2]
    numbers = dropout(0.3, case.keys)
    where: Any = (given.start, given.length, given.padded_length)
    with poisoned_empty():
        actual = launchers.launch_pooled_feed_forward(o, x, *layers, *where, EPS, 1e-3, *numbers)
    _, *final = expected = reference.pooled_feed_forward(o, x, *layers, *where, EPS, 1e-3, *numbers)
    assert_same(actual, expected, GELU)
    backward = (given.dy, o, *final, *layers[2:5], *numbers)
    with poisoned_empty():
        actual = launchers.launch_pooled_feed_forward_backward(*backward)
    assert_same(actual, reference.pooled_feed_forward_backward(*backward), GELU)


@pytest.mark.parametrize(
    ("rows", "d", "pairs"),
    [(30, 256, 16), *(pytest.param(*given, marks=SLOW) for given in ((70, 256, 0), (70, 256, 32), (70, 512, 16)))],
)
def test_projection_kernels_compute_the_definition(rows, d, pairs, launchers, device):
    case = project_case(rows, d, HALF, device)
    x, gain, shift, weight, bias = case.given
    cos, sin = angles(rows, pairs, device)
    forward = (x, gain, shift, weight, bias, cos, sin, EPS, HALF)
    with poisoned_empty():
        actual = launchers.launch_project(*forward)
    _, _, _, *kept = expected = reference.project(*forward)
    assert_same(actual, expected)
    dy, dq, dk, dv = case.dy
    backward = (dq, dk, dv, dy, *kept, gain, shift, weight, cos, sin)
    with poisoned_empty():
        assert_same(launchers.launch_project_backward(*backward), reference.project_backward(*backward))


@pytest.mark.slow
def test_no_rows(launchers, device):
    case = feed_forward_case(0, 256, 256, HALF, device)
    o, x, *layers = case.given
    numbers = dropout(0.3, case.keys)
    y, *kept = launchers.launch_feed_forward(o, x, *layers, EPS, *numbers)
    found = launchers.launch_feed_forward_backward(case.dy[0], o, *kept, *layers[2:5], *numbers)
    assert len(y) == 0 and not any(each.any() for each in found)


COMPILED = [
    dict(dtype=dtype, rate=rate, d=d, f=f, pairs=pairs)
    for dtype, rate, d, f, pairs in (
        ("bfloat16", 0.1, 256, 512, 32),
        ("bfloat16", 0.1, 512, 1024, 32),
    )
]
GRADIENTS = ["sum_kernel", "unfold_kernel"]
FORWARD = ["out_kernel", "up_kernel", "down_kernel"]
BACKWARD = ["hidden_backward_kernel", "out_backward_kernel", *GRADIENTS]
ORDER = [
    "fold_kernel", "project_kernel", "fold_kernel", *FORWARD, *BACKWARD,
    "fold_kernel", *FORWARD, "pool_kernel", "pooled_gradient_kernel", *BACKWARD,
    "rotate_back_kernel", "project_backward_kernel", *GRADIENTS,
]  # fmt: skip


@pytest.mark.slow
def test_kernels_compile():
    """With the products on tensor cores, and no register spilt beyond a few."""
    for case, kernels in compiled(COMPILED, "tests.kernels.test_wide"):
        expected = [name for name in ORDER if case["pairs"] or name != "rotate_back_kernel"]
        assert_compiled(kernels, expected, 160, "fold|pool|rotate", case)


launch_case = launch_block  # of `compiled`
