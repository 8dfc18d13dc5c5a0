"""Randomness is a function of seed, purpose and step, whatever was drawn before."""

import pytest
import torch

from lra.training import assembly, fit
from lra.training.seeding import derive_seed, seed_generators

TINY = ("task=listops", "attn=flash", "recipe=demo", "model.d_model=32", "model.d_ff=32", "task.max_length=32")


def weights(*args: str) -> dict[str, torch.Tensor]:
    """The initial weights of a run."""
    return assembly.build_modules(fit.configure([*TINY, *args]).config)[1].model.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_seed_decides_the_initial_weights():
    first = weights("seed=1")
    torch.manual_seed(7)  # whatever was drawn before
    assert same(weights("seed=1"), first)
    other = weights("seed=2")
    drawn = [name for name, value in first.items() if value.dim() > 1]
    assert drawn and not any(torch.equal(first[name], other[name]) for name in drawn)


def test_the_initial_weights_are_those_of_their_purpose():
    run = fit.configure([*TINY, "seed=3"]).config
    torch.manual_seed(derive_seed(3, "weights"))
    drawn = torch.nn.Embedding(15, 32).weight.detach()  # the model's first parameter, which is then drawn again
    expected = torch.nn.init.normal_(drawn, std=run.model.embedding_std)
    assert torch.equal(weights("seed=3")["encoder.embedding.weight"], expected)


def test_the_parts_of_a_seed_are_told_apart():
    seeds = [
        derive_seed(1, "a", 12),
        derive_seed(11, "a", 2),
        derive_seed(1, "a", 1, 2),
        derive_seed(1, "a1", 2),
        derive_seed(1, "a"),
        derive_seed(1, "b", 12),
    ]
    assert len({*seeds}) == len(seeds)


@pytest.mark.parametrize("purpose", ["dropout", "attention", "weights"])
def test_a_seed_takes_62_bits(purpose):
    """So that a layer's number can be added to it."""
    bits = [derive_seed(seed, purpose, step) for seed in range(5) for step in range(50)]
    assert max(bits) < 1 << 62 and max(bits) > 1 << 61 and len({seed % 64 for seed in bits}) > 50


def test_generators_are_seeded():
    seed_generators(5)
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
