"""What the public function refuses, and which implementation it takes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from lra.kernels import flash_attention
from lra.kernels.flash.reference import reference_attention
from lra.kernels.impl import resolve_impl


def test_resolve_impl(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_impl("auto", cpu) == "sdpa" and resolve_impl("auto", cuda) == "triton"
    assert resolve_impl("sdpa", cuda) == "sdpa" and resolve_impl("triton", cuda) == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="impl='sdpa'"):
        resolve_impl("triton", cpu)
    with pytest.raises(ValueError, match="'auto', 'triton' or 'sdpa'"):
        resolve_impl("flash", cpu)


I32 = torch.int32


ROWS = torch.zeros(6, 2, 16)


SEQUENCES: dict[str, Any] = dict(
    start=torch.tensor([0, 3], dtype=I32), length=torch.tensor([3, 3], dtype=I32), max_length=3
)


MISTAKES = [
    (dict(k=ROWS[:5]), ValueError, "one shape"),
    (dict(q=ROWS[0], k=ROWS[0], v=ROWS[0]), ValueError, r"\[T, H, D\]"),
    (dict(q=ROWS[..., :0], k=ROWS[..., :0], v=ROWS[..., :0]), ValueError, "head dimension of at least 1"),
    (dict(v=ROWS.half()), TypeError, "one dtype"),
    (dict(q=ROWS.double(), k=ROWS.double(), v=ROWS.double()), TypeError, "float16, bfloat16 or float32"),
    (dict(k=ROWS.to("meta")), ValueError, "one device"),
    (dict(start=None), ValueError, "needs start, length and max_length"),
    (dict(length=torch.tensor([3, 3])), TypeError, "length must be int32"),
    (dict(length=[3, 3]), TypeError, "length must be a tensor, got list"),
    (dict(start=0), TypeError, "start must be a tensor, got int"),
    (dict(q=None), TypeError, "q must be a tensor, got NoneType"),
    (dict(k=ROWS.numpy()), TypeError, "k must be a tensor, got ndarray"),
    (dict(dropout=0.1, seed=torch.tensor(3), index=[0, 1]), TypeError, "index must be a tensor, got list"),
    (dict(max_length=3.5), TypeError, "max_length must be an integer, got 3.5"),
    (dict(max_length=True), TypeError, "max_length must be an integer, got True"),
    (dict(length=torch.tensor([3], dtype=I32)), ValueError, "length must have the shape"),
    (dict(start=torch.zeros(2, 1, dtype=I32)), ValueError, "start must have the shape"),
    (dict(max_length=2), ValueError, "max_length must be max"),
    (dict(scale=float("nan")), ValueError, "scale must be positive"),
    (dict(scale=-0.5), ValueError, "scale must be positive"),
    (dict(dropout=1.5), ValueError, "dropout must be in"),
    (dict(causal="no"), TypeError, "causal must be True or False, got 'no'"),
    (dict(dropout=0.1), ValueError, "needs seed"),
    (dict(dropout=0.1, seed=3), ValueError, "needs seed"),
    (dict(dropout=0.1, seed=torch.tensor(3.0)), TypeError, "seed must be an int64"),
    (dict(dropout=0.1, seed=torch.tensor([3, 4])), TypeError, "seed must be an int64"),
    (dict(dropout=0.1, seed=torch.tensor(3, device="meta")), ValueError, "seed must be on the device"),
    (dict(start=torch.zeros(2, dtype=I32, device="meta")), ValueError, "start must be on the device"),
    (dict(dropout=0.1, seed=torch.tensor(3), index=torch.tensor([0, 1])), TypeError, "index must be int32"),
    (dict(q=ROWS.repeat(1, 1, 9), k=ROWS.repeat(1, 1, 9), v=ROWS.repeat(1, 1, 9)), ValueError, "use impl='sdpa'"),
    (dict(q=ROWS[None], k=ROWS[None], v=ROWS[None]), ValueError, "takes no start"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES)
def test_mistakes(change, error, message, device):
    arguments: dict[str, Any] = {"q": ROWS, "k": ROWS, "v": ROWS, **SEQUENCES, "impl": "triton", **change}
    arguments = {k: v.to(device) if isinstance(v, torch.Tensor) and not v.is_meta else v for k, v in arguments.items()}
    with pytest.raises(error, match=message):
        flash_attention(**arguments)


UNREAD = [row for row in MISTAKES if {"seed", "causal"} & row[0].keys()]  # by a fallback


@pytest.mark.parametrize(("change", "error", "message"), UNREAD)
def test_what_a_fallback_does_not_read_is_checked_too(change, error, message):
    given: dict[str, Any] = SEQUENCES | change
    with pytest.raises(error, match=message):
        flash_attention(ROWS, ROWS, ROWS, **given, impl="sdpa")


@pytest.mark.parametrize("impl", ["triton", "sdpa"])
def test_lengths_that_the_host_can_see_are_checked(impl, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for change, message in (
        ({"length": torch.tensor([3, 4], dtype=I32)}, "0 and the 6 rows"),
        ({"start": torch.tensor([-1, 3], dtype=I32)}, "0 and the 6 rows"),
        ({"length": torch.tensor([4, 1], dtype=I32)}, "lengths must lie between 0 and 3, got 1 to 4"),
        ({"length": torch.tensor([3, -1], dtype=I32)}, "lengths must lie between 0 and 3, got -1 to 3"),
    ):
        given: dict[str, Any] = SEQUENCES | change
        with pytest.raises(ValueError, match=message):
            flash_attention(ROWS, ROWS, ROWS, **given, impl=impl)
    with pytest.raises(ValueError, match="lengths must lie between 0 and 6, got 7 to 7"):
        flash_attention(ROWS[None], ROWS[None], ROWS[None], length=torch.tensor([7], dtype=I32), impl=impl)


@pytest.mark.parametrize(
    ("start", "length", "max_length", "message"),
    [
        ([0, 0], [5, 5], 5, "10 rows of 2 sequences are padded: start must be arange"),
        ([1, 5], [4, 5], 5, "start must be arange"),
        ([0, 4], [3, 0], 5, "start must be arange"),  # its padding would be rows of the other
        ([0, 0], [5, 5], 6, "packed sequences share no rows: start must be length.cumsum"),
        ([0, 3, 5], [4, 2, 4], 6, "share no rows"),  # one in two, another in none
        ([0, 5], [3, 0], 5, None),
        ([5, 0], [5, 5], 5, None),  # in any order
        ([6, 0], [4, 6], 7, None),
        ([4, 7, 0], [6, 0, 4], 6, None),  # an empty one anywhere
    ],
)
def test_sequences_that_share_rows_are_refused(start, length, max_length, message):
    rows = torch.randn(10, 1, 16)
    places: dict[str, Any] = {"start": torch.tensor(start, dtype=I32), "length": torch.tensor(length, dtype=I32)}
    if message:
        with pytest.raises(ValueError, match=message):
            flash_attention(rows, rows, rows, **places, max_length=max_length, impl="sdpa")
    else:
        out = flash_attention(rows, rows, rows, **places, max_length=max_length, impl="sdpa")
        torch.testing.assert_close(out, reference_attention(rows, rows, rows, **places))


def test_triton_on_a_cpu_is_refused_by_the_names_of_the_arguments(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="^impl='triton' needs CUDA tensors, got cpu: use impl='sdpa', or set"):
        flash_attention(ROWS, ROWS, ROWS, **SEQUENCES, impl="triton")


def test_interpreter_refuses_bfloat16(device):
    if device.type == "cuda":
        pytest.skip("compiled kernels multiply bfloat16 correctly")
    rows = ROWS.bfloat16()
    with pytest.raises(TypeError, match="multiplies bfloat16 wrongly"):
        flash_attention(rows, rows, rows, **SEQUENCES, impl="triton")


def test_import_does_not_import_triton():
    """So that a machine without Triton has the SDPA path."""
    program = "import sys, lra.kernels, lra.kernels.softmax.materialized_attention; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
