"""Where the Triton kernels run. The root conftest chooses the interpreter, before anything imports Triton."""

from __future__ import annotations

import pytest
import torch

from lra.kernels.plans import forget_plans


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Compiled on a GPU, else interpreted on the CPU."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if isinstance(triton.language.cdiv, triton.JITFunction):  # Triton's own functions were set up for compiling
        pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set in tests/conftest.py")
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def own_plans() -> None:
    """A plan of an earlier test may hold what that test put in place of a kernel."""
    forget_plans()
