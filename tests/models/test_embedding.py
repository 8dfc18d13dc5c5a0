"""The gradient of embeddings as a product."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lra.models import embedding
from lra.models.dropout import drop
from lra.models.embedding import NO_PLACES, Embedding, Places, _Lookup


def gradient(lookup, table, ids, weights):
    return torch.autograd.grad((lookup(table, ids) * weights).sum(), table)[0]


def by_product(table, ids):
    return _Lookup.apply(table, None, ids, 0.0, None, True, *NO_PLACES)


def drawn(device: str = "cpu", dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    table = torch.randn(7, 5, dtype=dtype, device=device, requires_grad=True)
    return table, torch.randint(6, (300,), dtype=torch.int32, device=device), torch.randn(300, 5).to(table)


def test_gradient_is_that_of_pytorch():
    table, ids, weights = drawn()
    ours = gradient(by_product, table, ids, weights)
    torch.testing.assert_close(ours, gradient(lambda t, i: F.embedding(i, t), table, ids, weights))
    assert not ours[6].any()  # an id that does not come


def test_products_are_in_the_dtype_of_autocast():
    table, ids, weights = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = by_product(table, ids)
    assert out.dtype == torch.float32 and torch.equal(out, table[ids])
    ours = torch.autograd.grad((out * weights).sum(), table)[0]
    exact = gradient(lambda t, i: F.embedding(i, t), table, ids, weights)
    error = (ours - exact).abs().max() / exact.abs().max()
    assert ours.dtype == torch.float32 and 1e-5 < error < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_on_a_gpu_is_the_same_every_time(compiled):
    table, ids, weights = drawn("cuda", torch.float32)
    module = Embedding(7, 5, device="cuda")
    module.weight = torch.nn.Parameter(table.detach())
    call = torch.compile(module) if compiled else module
    first, again = (torch.autograd.grad((call(ids) * weights).sum(), module.weight)[0] for _ in range(2))
    assert torch.equal(first, again)
    torch.testing.assert_close(first, gradient(lambda t, i: F.embedding(i, t), table, ids, weights))


def test_dropout_and_what_is_added():
    """Of the sum's elements that are kept, in the result and in both gradients, as PyTorch's operations have it."""
    table, ids, weights = drawn()
    added = torch.randn(300, 5, dtype=torch.float64, requires_grad=True)
    keys = torch.randint(2**31, (300,)).int()
    ours = _Lookup.apply(table, added, ids, 0.3, keys, True, *NO_PLACES)
    plain = drop(F.embedding(ids, table) + added, 0.3, keys, 0)
    assert torch.equal(ours, plain) and 0.2 < float((ours == 0).double().mean()) < 0.4
    for actual, expected in zip(
        *(torch.autograd.grad((y * weights).sum(), (table, added)) for y in (ours, plain)), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_on_a_cpu_places_are_added_too():
    module, table = Embedding(7, 5), torch.randn(11, 5)
    ids, place, nothing = torch.tensor([1, 6, 0]), torch.tensor([0, 10, 3]), torch.zeros(1, dtype=torch.int32)
    found = module(ids, places=Places(table, place, nothing, nothing, 0))
    assert torch.equal(found, module.weight[ids] + table[place])
    assert torch.equal(module(ids, table[place]), found) and torch.equal(module(ids), module.weight[ids])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_places_are_added_and_their_gradients_summed(padded, fused, monkeypatch):
    """By the kernel's definition, and by what is done where it is not taken."""
    monkeypatch.setattr(embedding, "supports_table_gradient", lambda *_: fused)
    monkeypatch.setattr(embedding, "supports_embedding", lambda *_: fused)
    length = torch.tensor([5, 0, 9, 4], dtype=torch.int32)
    start = 9 * torch.arange(4).int() if padded else (length.cumsum(0) - length).int()
    place = torch.arange(9).repeat(4) if padded else torch.cat([torch.arange(n) for n in length.tolist()])
    table, of_places = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (7, 11))
    ids, keys = torch.randint(7, place.shape), torch.randint(2**31, place.shape).int()
    weights = torch.randn(len(place), 6, dtype=torch.float64)
    if padded:
        weights[(torch.arange(9) >= length[:, None]).flatten()] = 0
    places = Places(of_places, place, start, length, 9 * padded)
    ours = _Lookup.apply(table, None, ids, 0.3, keys, True, *places)
    plain = drop(F.embedding(ids, table) + F.embedding(place, of_places), 0.3, keys, 0)
    assert torch.equal(ours, plain)
    found = (torch.autograd.grad((y * weights).sum(), (table, of_places)) for y in (ours, plain))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


@torch._dynamo.config.patch(error_on_recompile=True)  # pyright: ignore[reportPrivateImportUsage]
def test_the_kernel_gives_the_gradient_of_any_number_of_rows(monkeypatch):
    """Its definition, that is, on a CPU; compiled once."""
    monkeypatch.setattr(embedding, "supports_table_gradient", lambda *_: True)
    table, added = torch.randn(7, 6, requires_grad=True), torch.randn(1, 6, requires_grad=True)

    def look(ids, keys):
        return _Lookup.apply(table, added.expand(ids.shape[0], -1), ids, 0.3, keys, True, *NO_PLACES)

    compiled = torch.compile(look, fullgraph=True, backend="aot_eager")
    for rows in (30, 17, 50):
        ids, keys = torch.randint(7, (rows,)), torch.randint(2**31, (rows,)).int()
        torch._dynamo.mark_dynamic(ids, 0)
        torch._dynamo.mark_dynamic(keys, 0)
        weights = torch.randn(rows, 6)
        ours = torch.autograd.grad((compiled(ids, keys) * weights).sum(), (table, added))
        plain = drop(F.embedding(ids, table) + added, 0.3, keys, 0)
        for actual, expected in zip(ours, torch.autograd.grad((plain * weights).sum(), (table, added)), strict=True):
            torch.testing.assert_close(actual, expected)
    torch.compiler.reset()
