"""FlashAttention in Gluon for Hopper GPUs (compute capability 9.0).

The kernels take 16-bit inputs of head dimension 32, 64 and 128 whose heads lie side by side, without a causal mask,
where ptxas is known not to miscompile them. No forward here follows a row's running maximum: it takes the maximum of
the first tile, and sweeps over the keys again in the rare case that weights left their range. The main pass of the
backward leaves rows with extreme scores out, and `extreme_rows.py` adds what they contribute.
"""
