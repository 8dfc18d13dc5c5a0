"""Exact attention in linear memory (FlashAttention, arXiv 2205.14135).

`reference.py` defines the result in plain PyTorch. `dispatch.py` chooses a kernel and its tile, and says why; nothing
else decides it. `launch_attention.py` launches that kernel. `flash_ops.py` makes operators of both passes, so that
torch.compile takes each as one node. One set of kernels serves packed and padded rows.

There are two families. The plain Triton kernels (`forward.py`, `backward.py`, `tiles.py`) run everywhere, also in
Triton's interpreter, and take all strides, head dimensions to 128, causal masks and fp32. The Gluon kernels for Hopper
GPUs are in `hopper/`. Triton's interpreter does not run those; tests run them on NumPy
(`tests/kernels/gluon_on_cpu.py`).

Both backwards add dQ to memory in any order. With `deterministic=True`, and in fp32, a kernel of its own computes dQ,
and every result is bitwise the same again. In fp32 rounding decides: weights are divided by their sum, sums over tiles
are in fp64, and a score is up to four shorter sums. In every dtype a query that sees a single key gets no gradient.
"""

from lra.kernels.flash.dense_attention import flash_attention

__all__ = ["flash_attention"]
