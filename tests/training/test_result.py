"""What a result says of its scores."""

import pytest

from lra.training.result import sampling_bound


@pytest.mark.parametrize(
    ("accuracy", "n", "bound"), [(0.5, 2000, 0.0219), (0.376, 50_000, 0.0042), (0.0, 10, 0.2775), (1.0, 2000, 0.0019)]
)
def test_sampling_bound(accuracy, n, bound):
    """Also of a test set that a run has all right, or all wrong."""
    assert sampling_bound(accuracy, n) == bound
