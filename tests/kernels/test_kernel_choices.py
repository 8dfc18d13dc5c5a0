"""The table of kernels that people read: every row of it."""

from __future__ import annotations

import itertools

import torch

from lra.kernels import kernel_choices
from lra.kernels.device import Gpu
from lra.kernels.flash.tuning import KERNELS
from lra.kernels.kernel_choices import HOPPER_GPU

OTHER = Gpu((8, 0), 108, "the faster kernels are for compute capability 9.0, not 8.0")
ATTENTION = """
d = 32, no dropout, 1,024 tokens   hopper_shared_short  hopper_backward
d = 32, no dropout, 4,096 tokens   hopper_shared        hopper_backward
d = 32, dropout, 1,024 tokens      hopper_shared_short  hopper_backward
d = 32, dropout, 4,096 tokens      hopper_shared        hopper_backward
d = 64, no dropout, 1,024 tokens   hopper_forward       hopper_specialized
d = 64, no dropout, 4,096 tokens   hopper_forward       hopper_specialized
d = 64, dropout, 1,024 tokens      hopper_forward       hopper_backward
d = 64, dropout, 4,096 tokens      hopper_shared        hopper_backward
d = 128, no dropout, 1,024 tokens  hopper_shared_short  hopper_backward
d = 128, no dropout, 4,096 tokens  hopper_shared        hopper_backward
d = 128, dropout, 1,024 tokens     hopper_shared_short  hopper_backward
d = 128, dropout, 4,096 tokens     hopper_shared        hopper_backward
d = 32, few sequences              hopper_forward       hopper_backward
blocks of 64 x 64                  hopper_forward       hopper_backward
blocks of 32 x 32                  forward              dkdv_dq
blocks with a band                 forward              dkdv_dq
causal                             forward              dkdv_dq
another d                          forward              dkdv_dq
heads not side by side             forward              dkdv_dq
16 bits, deterministic             hopper_forward       dkdv
float32                            forward              dkdv
"""
ELSEWHERE = """
16 bits                 forward  dkdv_dq
16 bits, deterministic  forward  dkdv
float32                 forward  dkdv
"""


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("  ") if cell] for line in text.strip().splitlines()]


def test_every_row_of_attention():
    for gpu, expected in ((HOPPER_GPU, ATTENTION), (OTHER, ELSEWHERE)):
        found = list(kernel_choices.attention_choices(gpu))
        assert [[call, forward.kernel, backward.kernel] for call, forward, backward in found] == rows(expected)
        assert all(choice.reason for _, *choices in found for choice in choices)
    reasons = {choice.reason for _, *choices in kernel_choices.attention_choices(HOPPER_GPU) for choice in choices}
    assert len(reasons) >= 12  # each kind of call says why


def test_every_row_of_the_layers():
    found = dict(kernel_choices.layer_choices(HOPPER_GPU))
    assert [name for name, state in found.items() if "feed_forward" in state.partition("PyTorch: ")[0]] == [
        "layers, width 64",
        "layers, width 128",
    ]
    assert found["layers, another width"] == "PyTorch: the kernels have rows of 64 or 128 features"
    assert found["layers, float32"] == "PyTorch: the kernels multiply in 16 bits"
    assert dict(kernel_choices.layer_choices(OTHER)) == {"layers": f"PyTorch: {OTHER.refusal}"}


def test_tuning_measures_the_kernels_that_some_call_runs_on():
    plain = {"forward", "dkdv", "dq", "dkdv_dq"}
    for head_dim, dropout in itertools.product((16, 32, 64, 128), (False, True)):
        assert kernel_choices.list_kernels(torch.bfloat16, head_dim, dropout, OTHER) == plain
        for gpu in (HOPPER_GPU, OTHER):
            assert kernel_choices.list_kernels(torch.float32, head_dim, dropout, gpu) == plain - {"dkdv_dq"}
    on_hopper = {d: kernel_choices.list_kernels(torch.bfloat16, d, False, HOPPER_GPU) for d in (16, 32, 64, 128)}
    assert on_hopper[16] == plain and on_hopper[32] == on_hopper[128] == set(KERNELS) - {"hopper_specialized"}
    assert on_hopper[64] == plain | {"hopper_forward", "hopper_backward", "hopper_specialized"}
    assert kernel_choices.list_kernels(torch.bfloat16, 64, True, HOPPER_GPU) == plain | {
        "hopper_forward", "hopper_backward", "hopper_shared",
    }  # fmt: skip
