"""The layers around attention, fused: one kernel a pass for what precedes attention, and one for what follows it.

The kernels run in 16 bits on a Hopper GPU whose ptxas is known not to miscompile, for models 64 or 128 wide. Elsewhere
the same layers are PyTorch's. Both compute the same, with the same dropout, and keep the residual in fp32.

- `fused_layers.py`: the functions that a model calls, and which calls the kernels take.
- `layer_ops.py`, `launch_layers.py`, `reference.py`: the operators, their launches, and their definition in plain
  PyTorch.
- `rows.py`: how a program holds its weights in shared memory and takes one tile of rows after another.
- `projection.py`: norm, projections and rotation. It also returns the residual, so that its gradient is added here.
- `feed_forward.py`: projection, residual, norm, feed-forward and residual. In the last block of a model that takes the
  mean over a sequence, the last norm too; `pooling.py` sums its rows, and its backward makes each row's gradient of its
  sequence's, which is never written.
- `weights.py`: gradients of weights and biases, sums over all rows that are added in a fixed order.
- `embedding.py`: the vectors of tokens and places, and the gradients of their tables.

The norm's weights are folded into the layer behind it, so that the gradients of both follow from one product.
"""
