"""Attentions by name, one file each. This module stays light: `lra ls` imports nothing else.

An attention is a module `forward(q, k, v, batch)`, see `base.py`, with the facts of `Capabilities`. The model applies
rotary positions to q and k before, unless the attention `rotates`: then it receives the cosines and sines, which its
heads share or not, and turns its own features with `lra.models.positions.rotate`. Of an attention with `shared_qk` the
model makes no keys. One that is not `ragged` is handed the padded form.

A mixer is the general case: a module `mix(x, batch)` with projections of its own, for which the block makes none. It
registers here, too, with `mixes=True`, and `attn=` chooses it. `s4d`, `gla` and `mega` are such layers.

Patterns of blocks (`local`, `longformer`, `bigbird`, `openai_sparse`, `butterfly`) are layouts on the block-sparse
kernels (`block_sparse.py`). A layout is built once for the longest sequence and is no buffer, so checkpoints fit any
attention. `reformer` and `smyrf` share `lsh.py`. `megatron` has kernels of its own, in `lra/kernels/softmax`. The other
approximate attentions are plain PyTorch: exponentials, norms and hashes in fp32, products in the dtype of v. What an
attention draws at random, features or rotations, is a buffer, so that a checkpoint has it.
"""

from dataclasses import dataclass

from lra.config.registry import Registry


@dataclass(frozen=True)
class Capabilities:
    """The facts an attention registers with. What asks for what it lacks is refused, or done in its stead."""

    exact: bool  # equals softmax attention up to rounding
    paper: str
    cost: str = ""  # how time grows with the sequence length N, in terms of options; memory grows with N, or as said
    dropout: bool = True  # on attention probabilities
    causal: bool = False  # can hide later tokens from each token (model.causal)
    ragged: bool = True  # reads packed batches; otherwise the model hands it the padded form
    rotates: bool = False  # takes the angles of rotary positions and turns its features, not the queries and keys
    shared_qk: bool = False  # its keys are its queries, of one projection; it reads q alone
    mixes: bool = False  # is a mixer, with projections of its own: no queries, keys, probabilities or head dimensions
    reads_residual: bool = False  # a mixer that also takes the rows to which its result is added
    head_dims: tuple[int, ...] = (1, 1024)  # smallest and largest; a mixer has none
    head_dim_multiple: int = 1
    initial: tuple[str, ...] = ()  # options that say what its weights are at first, and nothing else
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    needs_gpu: bool = False

    def __post_init__(self) -> None:
        if self.rotates and not self.ragged:
            raise ValueError("rotates=True needs ragged=True: angles are those of the packed tokens")
        if self.mixes and (self.exact or self.rotates or self.shared_qk):
            raise ValueError(
                "mixes=True has no queries and keys: leave out exact=True, rotates=True and shared_qk=True"
            )
        if not self.mixes and len(self.head_dims) != 2:
            raise ValueError(f"head_dims={self.head_dims}: write the smallest and the largest, as in (1, 64)")
        if self.reads_residual and not self.mixes:
            raise ValueError("reads_residual=True is for mixers: add mixes=True")
        if self.mixes:
            for fact, value in (("dropout", False), ("head_dims", ())):
                object.__setattr__(self, fact, value)

    def fits(self, head_dim: int, dropout: float, causal: bool) -> bool:
        """Whether heads of this dimension, this dropout on probabilities, and causality if asked for, are possible."""
        dimension = self.mixes or self.head_dims[0] <= head_dim <= self.head_dims[1]
        dimension = dimension and head_dim % self.head_dim_multiple == 0
        return dimension and (self.dropout or not dropout) and (self.causal or not causal)


ATTENTIONS = Registry("attention", "lra.models.attention", Capabilities, "lra.attentions", ("Attention", "Mixer"))
