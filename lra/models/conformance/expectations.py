"""What a check expects of tensors, and how it says that they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lra.batch import Batch
from lra.models.conformance.subject import mask_rows


class Violation(Exception):
    """A component breaks a property: one line that says how, with numbers."""


class NotAsked(Exception):
    """A property that the component does not claim: one line that says why."""


def expect(kept: bool, otherwise: str) -> None:
    """Raises a Violation that says `otherwise`, if it is not kept."""
    if not kept:
        raise Violation(otherwise)


def max_difference(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest absolute difference; 0 for empty tensors."""
    return float((actual.detach().double() - expected.detach().double()).abs().max()) if actual.numel() else 0.0


def expect_equal(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raises a Violation if not all bits are the same."""
    if not torch.equal(actual, expected):
        raise Violation(f"{what} changes by up to {max_difference(actual, expected):.2g}")


def expect_near(actual: Tensor, expected: Tensor, what: str, allowed: float) -> None:
    """Raises a Violation if a difference is above `allowed` times the largest value, or times 1 if that is smaller.

    The gradient of a parameter is a sum over all rows, so each of its elements has a rounding error of that size.
    """
    allowed *= max(1.0, max_difference(expected, torch.zeros_like(expected)))
    found = max_difference(actual, expected)
    expect(found <= allowed, f"{what} differs by up to {found:.2g}, allowed is {allowed:.2g}")


def expect_finite(tensor: Tensor, what: str) -> None:
    """Raises a Violation if there is NaN or infinity."""
    wrong = int((~tensor.isfinite()).sum())
    expect(not wrong, f"{what} has {wrong} values of {tensor.numel()} that are not finite")


def make_weights(like: Tensor) -> Tensor:
    """Returns a random gradient of a result."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like)


def zero_padding(batch: Batch, rows: Tensor) -> Tensor:
    """Returns the rows of a batch, with zeros past each length if it is padded."""
    return rows.where(mask_rows(batch, rows), 0) if batch.padded else rows


def leaves_of(rows: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies of rows that collect gradients."""
    return [x.detach().clone().requires_grad_() for x in rows]


def gradients_of(module: Any, out: Tensor, weights: Tensor, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns the gradients of sum(out * weights) for rows and parameters, by name; zeros for what is not read.

    Where a weight is 0, the result may be anything. A Violation is raised if it has no gradient at all.
    """
    expect(out.requires_grad, "the result has no gradient")
    named = {f"input {number}": x for number, x in enumerate(rows, 1)}
    named |= {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    total = out.where(weights != 0, 0).mul(weights).sum()
    grads = torch.autograd.grad(total, list(named.values()), materialize_grads=True)
    return dict(zip(named, grads, strict=True))
