"""Attention's kernels for Hopper, on a CPU: what they compute, and where they read and write."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton.language as tl

from lra.kernels import device, flash_attention
from lra.kernels.block_sparse.layouts import butterfly
from lra.kernels.device import Gpu
from lra.kernels.flash import tiles, tuning
from lra.kernels.testing import INPUT_KINDS, Case, check_case, make_inputs, run_with_gradients
from tests.kernels.cases import with_inputs
from tests.kernels.gluon_on_cpu import Emulated

HALF = torch.float16


@pytest.fixture
def hopper(monkeypatch):
    """The kernels take what they can; the names of those that did."""
    from lra.kernels.flash.hopper import backward, forward, forward_shared

    launched: list[str] = []

    class Noted(Emulated):
        def __getitem__(self, grid: Any) -> Any:
            launched.append(self.kernel.fn.__name__)
            return super().__getitem__(grid)

    monkeypatch.setattr(device, "describe_gpu", lambda device: Gpu((9, 0), 2, None))
    for module, name in (
        (forward, "hopper_forward_kernel"),
        (forward_shared, "hopper_shared_kernel"),
        (forward_shared, "hopper_rescan_kernel"),
        (backward, "hopper_backward_kernel"),
        (backward, "hopper_specialized_kernel"),
    ):
        monkeypatch.setattr(module, name, Noted(getattr(module, name)))
    return launched


CASES = [
    Case((130, 0, 65), dtype=HALF, dropout=0.1),
    Case((130, 1, 64), dtype=HALF, dropout=0.5, strides="fused", layout="padded", slack=70),
    Case((70, 193), dtype=HALF, head_dim=64, heads=3, dropout=0.1, spread=4.0),
    Case((300, 5), dtype=HALF, head_dim=64, strides="fused"),
    Case((130, 1, 0, 64, 450), dtype=HALF, head_dim=64, layout="padded", slack=70, spread=4.0),
    Case((500, 70), dtype=HALF, dropout=0.1, spread=20.0),  # weights far above the first tile's: the second sweep
    Case((129, 257), dtype=HALF, head_dim=128, dropout=0.3, layout="padded"),
    Case((128, 1, 0, 65, 100), dtype=HALF, dropout=0.1, spread=20.0),  # one tile of keys
    Case((128, 64), dtype=HALF, head_dim=64, heads=3, strides="fused", layout="padded"),
    Case((64, 30), dtype=HALF, head_dim=128, dropout=0.3),
    Case((500,), dtype=HALF, heads=1, dropout=0.1, sparse=butterfly(512, (64, 64))),
    Case((300, 100), dtype=HALF, head_dim=64, sparse=butterfly(384, (128, 64), factors=1)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_budget(case, hopper):
    for name, error in check_case(case, torch.device("cpu"), "triton").items():
        assert error.ok, f"{name} of {case}: error {error.error:.3g}, budget {error.budget:.3g}"
    specialized = case.head_dim == 64 and not case.dropout and not case.sparse
    assert hopper == ["hopper_forward_kernel", f"hopper_{'specialized' if specialized else 'backward'}_kernel"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities and NaN on their way
@pytest.mark.parametrize("inputs", [name for name in INPUT_KINDS if name != "normal"])
@pytest.mark.parametrize(("head_dim", "dropout", "shared"), [
    (32, 0.3, True), *(pytest.param(d, 0.0, False, marks=pytest.mark.slow) for d in (32, 64))
])  # fmt: skip
@pytest.mark.parametrize("longest", [150, pytest.param(120, marks=pytest.mark.slow)])  # two tiles of keys, and one
def test_special_inputs(inputs, longest, head_dim, dropout, shared, hopper, monkeypatch):
    """Of fp16, whose hidden keys are not extreme by themselves, those are counted as such."""
    monkeypatch.setattr(tiles, "EXTREME", tl.constexpr(256.0))
    lengths = (20, 33, longest, 9, 1)
    case = with_inputs(Case(lengths, heads=1, head_dim=head_dim, dtype=HALF, dropout=dropout, seed=1), inputs)
    forced = tuning.force_tile("hopper_shared", tuning.Tile(128, 64, 8, 2)) if shared else nullcontext()
    with forced:
        for name, error in check_case(case, torch.device("cpu"), "triton").items():
            assert error.ok, f"{name} of {case}: error {error.error:.3g}, budget {error.budget:.3g}"
    assert any(name.startswith("hopper") for name in hopper)


@pytest.mark.parametrize(
    ("head_dim", "dropout", "layout"),
    [(32, 0.1, "packed"), (64, 0.1, "padded"), (64, 0.0, "packed"), (128, 0.1, "packed")],
)
def test_the_score_of_a_key_alone_has_no_gradient(head_dim, dropout, layout, hopper):
    """Exactly 0: what rounding the result of dropout leaves of dP may be more than a long sequence's budget."""
    lengths = (1, 1, 150, 1)
    case = Case(lengths, heads=4, head_dim=head_dim, dtype=HALF, dropout=dropout, layout=layout)
    inputs = make_inputs(case, "cpu")
    options = {**inputs.sequences, "dropout": dropout, "seed": inputs.seed, "max_length": 150, "impl": "triton"}
    _, dq, dk, dv = run_with_gradients(flash_attention, inputs, HALF, **options)
    for first, length in zip(inputs.sequences["start"].tolist(), lengths, strict=True):
        zero = length == 1
        assert [bool(g[first : first + length].any()) for g in (dq, dk, dv)] == [not zero, not zero, True]
    assert hopper[-1] == ("hopper_backward_kernel" if dropout else "hopper_specialized_kernel")


@pytest.mark.parametrize("stages", [2, 3])
def test_specialized_warps_with_every_number_of_stages(stages, hopper):
    case = Case((200, 130, 1), dtype=HALF, head_dim=64)
    with tuning.force_tile("hopper_specialized", tuning.Tile(64, 128, 4, stages)):
        for name, error in check_case(case, torch.device("cpu"), "triton").items():
            assert error.ok, f"{name}: error {error.error:.3g}, budget {error.budget:.3g}"
    assert hopper[-1] == "hopper_specialized_kernel"


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("stages", [2, 3])
def test_every_shape_of_tiles(columns, stages, hopper):
    """Dropout is the same whatever they are."""
    case = Case((200, 130), dtype=HALF, head_dim=32, dropout=0.3, strides="fused")
    for kernel in ("hopper_forward", "hopper_backward"):
        with tuning.force_tile(kernel, tuning.Tile(64, columns, 4, stages)):
            for name, error in check_case(case, torch.device("cpu"), "triton").items():
                assert error.ok, f"{kernel}, {name}: error {error.error:.3g}, budget {error.budget:.3g}"


@pytest.mark.parametrize("rows", [64, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (128, 192)), 256])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_every_number_of_groups_that_share_keys(rows, layout, hopper):
    """With tiles in which groups have no queries, whole and partial tiles of keys, and rows that are swept again."""
    case = Case((500, 0, 130, 1), dtype=HALF, dropout=0.3, layout=layout, slack=200, spread=20.0)
    with tuning.force_tile("hopper_shared", tuning.Tile(rows, 64, rows // 16, 2)):
        for name, error in check_case(case, torch.device("cpu"), "triton").items():
            assert error.ok, f"{name}: error {error.error:.3g}, budget {error.budget:.3g}"
    assert hopper[:2] == ["hopper_shared_kernel", "hopper_rescan_kernel"]


@pytest.mark.parametrize(("threshold", "taken"), [(248, True), (249, False)])
def test_dropout_up_to_what_fp16_can_compare(threshold, taken, hopper):
    """Above it thresholds would be NaN: the plain kernels take those."""
    case = Case((70, 130), dtype=HALF, dropout=threshold / 256)
    for name, error in check_case(case, torch.device("cpu"), "triton").items():
        assert error.ok, f"{name} of {case}: error {error.error:.3g}, budget {error.budget:.3g}"
    assert bool(hopper) == taken
