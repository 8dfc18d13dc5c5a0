"""Which kernel computes a pass of attention."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lra.kernels import device, operators
from lra.kernels.block_sparse.layouts import butterfly
from lra.kernels.device import Gpu, Ptxas
from lra.kernels.flash import tuning
from lra.kernels.flash.dispatch import choose_backward, choose_forward
from lra.kernels.flash.problem import Problem
from lra.kernels.flash.tuning import Tile

HOPPER, OTHER = Gpu((9, 0), 132, None), Gpu((8, 0), 108, "the faster kernels are for compute capability 9.0, not 8.0")
BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
MANY = 132 * 8 * 256  # rows of all heads
BLOCKS = {side: butterfly(4096, (side, side)) for side in (32, 64)} | {"rules": butterfly(4096, (64, 64), globals=3)}


def chosen(
    d: int = 64, dropped: int = 0, length: int = 4096, rows: int = MANY, dtype: torch.dtype = BF16, gpu: Gpu = HOPPER,
    block: Any = None, strides: tuple[int, ...] = (), **rules: Any,
) -> tuple[str, str]:  # fmt: skip
    """The kernels of forward and backward; `rows` of one head."""
    q = torch.empty(rows, 1, d, dtype=dtype, device="meta")
    q = q if not strides else torch.empty_strided(q.shape, strides, dtype=dtype, device="meta")
    none = torch.empty(0, dtype=torch.int32)
    layout = BLOCKS[block].key if block else None
    rules = {"causal": False, "scale": 1.0, "threshold": dropped, "layout": layout} | rules
    problem = Problem(none, none, length, False, **rules)
    choices = choose_forward(problem, q, q, q, gpu), choose_backward(problem, q, q, q, gpu)
    assert all(choice.reason and "\n" not in choice.reason and choice.kernel in tuning.KERNELS for choice in choices)
    assert choices[1].kernel == "dkdv" or choices[0].kernel == "forward" or choices[1].kernel.startswith("hopper")
    return choices[0].kernel, choices[1].kernel


@pytest.fixture(autouse=True)
def default_tiles(monkeypatch):
    """Whatever this machine's tables say: how large tiles are decides where groups share keys."""
    monkeypatch.setattr(tuning, "load_tables", lambda: [])
    monkeypatch.setattr(device, "compute_capability", lambda device=None: (9, 0))
    tuning.forget_tables()
    yield
    tuning.forget_tables()


PLAIN = "forward", "dkdv_dq"
SHARED, SHORT, ALONE = "hopper_shared", "hopper_shared_short", "hopper_forward"
CASES = [
    # on Hopper: head dimension, dropout, lengths
    *((dict(d=d, dropped=p), (SHARED, "hopper_backward")) for d in (32, 128) for p in (0, 26)),
    *((dict(d=d, dropped=p, length=1024), (SHORT, "hopper_backward")) for d in (32, 128) for p in (0, 26)),
    (dict(), (ALONE, "hopper_specialized")),
    (dict(length=1024), (ALONE, "hopper_specialized")),
    (dict(dropped=26), (SHARED, "hopper_backward")),
    (dict(dropped=26, length=1160), (ALONE, "hopper_backward")),  # its last tile would be nearly empty
    (dict(dropped=26, length=1024), (ALONE, "hopper_backward")),
    (dict(d=32, dtype=HALF), (SHARED, "hopper_backward")),
    (dict(d=32, length=100), (ALONE, "hopper_backward")),
    (dict(d=32, rows=MANY - 1), (ALONE, "hopper_backward")),
    (dict(d=32, gpu=HOPPER._replace(multiprocessors=133)), (ALONE, "hopper_backward")),
    # what Hopper's kernels do not take
    *((dict(d=d), PLAIN) for d in (16, 24, 48, 96, 100)),
    (dict(causal=True), PLAIN),
    (dict(dropped=248), (SHARED, "hopper_backward")),
    (dict(dropped=249), PLAIN),
    (dict(rows=0), PLAIN),
    (dict(strides=(128, 128, 2)), PLAIN),
    (dict(strides=(68, 64, 1)), PLAIN),
    (dict(strides=(0, 64, 1)), PLAIN),
    (dict(strides=(192, 64, 1)), (ALONE, "hopper_specialized")),  # of a fused projection
    (dict(dtype=FP32), ("forward", "dkdv")),
    # layouts
    (dict(block=64), (ALONE, "hopper_backward")),
    (dict(block=64, d=32, dropped=26), (ALONE, "hopper_backward")),
    (dict(block=32), PLAIN),
    (dict(block="rules"), PLAIN),
    # deterministic: two kernels for the gradients
    (dict(deterministic=True), (ALONE, "dkdv")),
    (dict(deterministic=True, d=32, dropped=26), (SHARED, "dkdv")),
    (dict(deterministic=True, causal=True), ("forward", "dkdv")),
    # elsewhere
    *((dict(gpu=OTHER, d=d, dropped=p, length=n), PLAIN) for d in (16, 64, 128) for p in (0, 26) for n in (128, 4096)),
    (dict(gpu=OTHER, deterministic=True), ("forward", "dkdv")),
    (dict(gpu=OTHER, dtype=FP32), ("forward", "dkdv")),
    (dict(gpu=OTHER, block=64), PLAIN),
    (dict(gpu=Gpu((9, 0), 132, "ptxas 12.8 is known to miscompile")), PLAIN),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kernels"), CASES, ids=str)
def test_the_kernels_of_each_call(call, kernels):
    assert chosen(**call) == kernels


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)], ids=str)
def test_a_gpu_that_is_no_hopper_has_the_plain_kernels_alone(capability):
    gpu = Gpu(capability, 84, device.hopper_refusal(capability))
    for d, dropped, block in itertools.product((1, 16, 32, 64, 100, 128), (0, 26), (None, 32, 64, "rules")):
        assert chosen(d=d, dropped=dropped, block=block, gpu=gpu) == PLAIN


@pytest.mark.parametrize(
    ("forced", "kernels"),
    [
        ("forward", PLAIN),
        ("dkdv_dq", PLAIN),
        ("hopper_forward", (ALONE, "hopper_backward")),
        ("hopper_shared", (SHARED, "hopper_backward")),
        ("hopper_shared_short", (SHORT, "hopper_backward")),
        ("hopper_backward", (ALONE, "hopper_backward")),
        ("hopper_specialized", (ALONE, "hopper_specialized")),
    ],
)
def test_a_forced_tile_forces_its_family_on_any_gpu(forced, kernels):
    tile = Tile(64, 64, 4, 2)
    with tuning.force_tile(forced, tile) as launched:
        assert chosen(gpu=OTHER, length=1000) == kernels
        assert launched == {forced}
    assert chosen(gpu=OTHER) == PLAIN


@pytest.fixture
def ptxas(monkeypatch):
    """As on a Hopper GPU whose ptxas has this version; capability and version may be changed."""
    pytest.importorskip("lra.kernels.flash.launch_attention")  # before Triton is told that it does not interpret
    fake = SimpleNamespace(capability=(9, 0), version=(13, 4))
    monkeypatch.setattr(device, "compute_capability", lambda device=None: fake.capability)
    monkeypatch.setattr(device, "find_ptxas", lambda capability: Ptxas("/ptxas", fake.version, "TRITON_PTXAS_PATH"))
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    return fake


def test_hopper_kernels_need_their_gpu_and_a_good_ptxas(ptxas):
    def on_hopper(**call: Any) -> bool:
        tuning.forget_tables()
        return chosen(gpu=device.describe_gpu(torch.device("cpu")), **call)[0] != "forward"

    for ptxas.version in ((13, 4), (13, 3)):  # 13.3 is the first good one
        assert on_hopper() and not on_hopper(dtype=FP32)
    ptxas.version = 13, 2
    assert not on_hopper()
    ptxas.version, ptxas.capability = (13, 4), (10, 0)
    assert not on_hopper()


def plan_nothing(*_: Any) -> Any:
    return lambda *_: ()


def test_a_ptxas_that_keeps_hopper_kernels_away_is_warned_of_once(ptxas, monkeypatch):
    from lra.kernels.flash import launch_attention

    monkeypatch.setitem(launch_attention.FORWARD_PLANNERS, "forward", plan_nothing)
    monkeypatch.setitem(launch_attention.BACKWARD_PLANNERS, "dkdv_dq", plan_nothing)
    launch_attention._warn.cache_clear()
    ptxas.version = 12, 8
    tuning.forget_tables()
    x, none = torch.zeros(8, 1, 64, dtype=HALF), torch.empty(0, dtype=torch.int32)
    problem = Problem(none, none, 8, False, False, 1.0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # they would not run with another ptxas either
        launch_attention.launch_flash_forward(x, x, x, dataclasses.replace(problem, causal=True))
    with pytest.warns(UserWarning, match=r"ptxas 12\.8 .*nvidia-cuda-nvcc>=13\.4.*TRITON_PTXAS_PATH=/") as caught:
        launch_attention.launch_flash_forward(x, x, x, problem)
        launch_attention.launch_flash_backward(x, x, x, x, x, x, problem)
    assert len(caught) == 1
    ptxas.capability = 10, 0
    tuning.forget_tables()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing to mend there
        launch_attention.launch_flash_forward(x, x, x, problem)


def test_what_ran_is_noted_by_its_name(monkeypatch):
    from lra.kernels.flash import launch_attention

    operators.clear_kernels_run()
    monkeypatch.setattr(device, "hopper_refusal", lambda capability: None)
    monkeypatch.setitem(launch_attention.FORWARD_PLANNERS, "hopper_forward", plan_nothing)
    monkeypatch.setitem(launch_attention.BACKWARD_PLANNERS, "hopper_backward", plan_nothing)
    x, none = torch.zeros(8, 1, 32, dtype=HALF), torch.empty(0, dtype=torch.int32)
    problem = Problem(none, none, 8, False, False, 1.0, 0)
    for _ in range(2):
        launch_attention.launch_flash_forward(x, x, x, problem)
        launch_attention.launch_flash_backward(x, x, x, x, x, x, problem)
    assert operators.kernels_run == {"forward": {"hopper_forward"}, "backward": {"hopper_backward"}, "layers": set()}
    operators.clear_kernels_run()
    assert not any(operators.kernels_run.values())
