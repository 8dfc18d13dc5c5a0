"""Attentions by name, one file each. This module stays light: `lra ls` imports nothing else."""

from dataclasses import dataclass

from lra.config.registry import Registry


@dataclass(frozen=True)
class Capabilities:
    """The facts an attention registers with. What asks for what it lacks is refused, or done in its stead."""

    exact: bool  # equals softmax attention up to rounding
    paper: str
    cost: str = ""  # how time grows with the sequence length N, in terms of options; memory grows with N, or as said
    dropout: bool = True  # on attention probabilities
    ragged: bool = True  # reads packed batches; otherwise the model hands it the padded form
    rotates: bool = False  # takes the angles of rotary positions and turns its features, not the queries and keys
    shared_qk: bool = False  # its keys are its queries, of one projection; it reads q alone
    head_dims: tuple[int, int] = (1, 1024)  # smallest and largest
    head_dim_multiple: int = 1
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    needs_gpu: bool = False

    def __post_init__(self) -> None:
        if self.rotates and not self.ragged:
            raise ValueError("rotates=True needs ragged=True: angles are those of the packed tokens")

    def fits(self, head_dim: int, dropout: float) -> bool:
        """Whether heads of this dimension, and this dropout on probabilities, are possible."""
        low, high = self.head_dims
        return low <= head_dim <= high and head_dim % self.head_dim_multiple == 0 and (self.dropout or not dropout)


ATTENTIONS = Registry("attention", "lra.models.attention", Capabilities, entry_points="lra.attentions")
