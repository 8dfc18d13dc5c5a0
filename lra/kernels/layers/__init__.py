"""Parts of a pre-norm Transformer block (arXiv 2002.04745): on Hopper GPUs one kernel each way, for width 64."""

from lra.kernels.layers.api import feed_forward, project, project_out, takes
from lra.kernels.layers.reference import drop, mix

__all__ = ["drop", "feed_forward", "mix", "project", "project_out", "takes"]
