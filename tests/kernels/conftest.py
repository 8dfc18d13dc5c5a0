"""Without a GPU the Triton kernels run in its interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the Triton kernels run: compiled on a GPU, else interpreted on the CPU."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if isinstance(triton.language.cdiv, triton.JITFunction):  # Triton's own functions were set up for compiling
        pytest.fail(
            "Triton was imported before TRITON_INTERPRET=1 was set: let the root conftest set it, or run tests/kernels alone"
        )
    return torch.device("cpu")
