"""The program on docs/kernels.md that shows FlashAttention in one kernel."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float16, 2e-3), (torch.float32, 4e-3)])
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_the_program_of_the_page_computes_softmax_attention(tmp_path, device, tokens, dtype, allowed):
    """A GPU multiplies fp32 as TF32 in this program."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "program.py"  # a kernel is compiled from its file
    file.write_text(program, encoding="utf-8")
    attention = runpy.run_path(str(file))["attention"]
    q, k, v = torch.randn(3, 1, 2, tokens, 32, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    expected = torch.softmax(q.double() @ k.double().mT * 32**-0.5, -1) @ v.double()
    assert (attention(q, k, v) - expected).abs().max() < allowed
