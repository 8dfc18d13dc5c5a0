"""What torch.compile makes of a step's functions."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from lra.models.dropout import mix_keys, row_keys
from lra.training.compiling import compile_batched
from tests.models.test_fused_blocks import drawn_batch


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_hashes_are_compiled_into_the_kernel_around_them(device):
    batch = drawn_batch(device=device)
    compiled = compile_batched(lambda batch: mix_keys(row_keys(batch) - 1) & 0xFF, False)
    found, code = run_and_get_code(compiled, batch)
    assert torch.equal(found, mix_keys(row_keys(batch) - 1) & 0xFF)
    calls = [line for text in code for line in text.splitlines() if "ops.lra." in line and not line.startswith("#")]
    assert not calls, "the operator itself would launch a dozen kernels"
    torch.compiler.reset()
