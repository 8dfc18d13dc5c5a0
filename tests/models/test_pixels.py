"""Pixels as numbers: what the linear layer sees, and that the rest of an embedding stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lra.models.dropout import drop
from lra.models.embedding import Places, _PlaceLookup
from lra.models.pixels import PixelEmbedding, grey_values, nearest_ids

CLS, MASK = 256, 257


def embedding(prefix: int | None = CLS, mask: int | None = MASK, d_model: int = 6) -> PixelEmbedding:
    torch.manual_seed(0)
    return PixelEmbedding(256, d_model, 0.5, prefix, mask)


def drawn(rows: int) -> tuple[Tensor, Tensor]:
    """Ids of pixels, CLS and MASK, and keys of dropout."""
    ids = torch.randint(256, (rows,), dtype=torch.int32)
    ids[::5], ids[::7] = MASK, CLS
    return ids, torch.randint(2**31, (rows,)).int()


def test_grey_values_are_those_of_the_paper_and_back():
    ids = torch.arange(256, dtype=torch.int32)
    grey = grey_values(ids, 256)
    assert grey.tolist() == pytest.approx([(each / 255 - 0.5) / 0.5 for each in range(256)], abs=1e-6)
    assert (grey[0], grey[-1]) == (-1, 1) and torch.equal(grey_values(torch.tensor([0, 1]), 2), torch.tensor([-1.0, 1]))
    for apart in (-0.49, 0.49):
        assert torch.equal(nearest_ids(grey + apart * 2 / 255, 256), ids.long())
    assert nearest_ids(torch.tensor([-3.0, 5.0]), 256).tolist() == [0, 255]


def test_a_row_is_linear_in_its_grey_value_and_says_whether_it_is_hidden():
    module = embedding()
    ids = torch.tensor([0, 255, 51, MASK, CLS], dtype=torch.int32)
    inputs = torch.tensor([[-1, 0], [1, 0], [-0.6, 0], [0, 1]])
    out = module(ids)
    torch.testing.assert_close(out[:4], F.linear(inputs, module.weight, module.bias))
    assert module.cls is not None and torch.equal(out[4], module.cls)
    plain = embedding(mask=None, prefix=None)
    assert plain.weight.shape == (6, 1) and plain.cls is None
    torch.testing.assert_close(plain(ids[:3]), F.linear(inputs[:3, :1], plain.weight, plain.bias))


def test_it_begins_as_a_linear_layer_of_pytorch_and_the_bias_lets_a_norm_see_the_grey_value():
    """A norm of weight * grey alone would be the same for all grey values of one sign."""
    module = embedding(d_model=4096)
    for parameter in (module.weight, module.bias):
        assert parameter.detach().abs().max() < 2**-0.5 and float(parameter.detach().std()) == pytest.approx(
            6**-0.5, rel=0.05
        )
    assert module.cls is not None and float(module.cls.detach().std()) == pytest.approx(0.5, rel=0.05)
    normed = F.layer_norm(module(torch.tensor([140, 160, 250])), (4096,)).detach()
    assert min(float((normed[0] - each).abs().mean()) for each in normed[1:]) > 0.05


def test_positions_and_dropout_are_those_of_a_table():
    module, (ids, keys) = embedding(), drawn(300)
    added = torch.randn(300, 6, requires_grad=True)
    out = module(ids, added, 0.3, keys)
    assert torch.equal(out, drop(module(ids) + added, 0.3, keys, 0)) and 0.2 < float((out == 0).float().mean()) < 0.4
    gradients = torch.autograd.grad(out.square().sum(), [*module.parameters(), added])
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    table, place, nothing = torch.randn(11, 6), torch.randint(11, (300,)), torch.zeros(1, dtype=torch.int32)
    places = Places(table, place, nothing, nothing, 0)
    assert torch.equal(module(ids, None, 0.3, keys, places), module(ids, table[place], 0.3, keys))


def test_rows_stay_in_fp32_under_autocast():
    module, (ids, _) = embedding(), drawn(50)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(ids), embedding()(ids)) and module(ids).dtype == torch.float32


@pytest.mark.parametrize("padded", [False, True])
def test_the_gradient_of_places_is_that_of_pytorch(padded):
    length = torch.tensor([5, 0, 9, 4], dtype=torch.int32)
    start = 9 * torch.arange(4).int() if padded else (length.cumsum(0) - length).int()
    place = torch.arange(9).repeat(4) if padded else torch.cat([torch.arange(n) for n in length.tolist()])
    table = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(place), 6, dtype=torch.float64)
    if padded:
        weights[(torch.arange(9) >= length[:, None]).flatten()] = 0
    ours, plain = _PlaceLookup.apply(table, place, start, length, 9 * padded), F.embedding(place, table)
    assert torch.equal(ours, plain)  # type: ignore[arg-type]
    found = (torch.autograd.grad((y * weights).sum(), table)[0] for y in (ours, plain))  # type: ignore[operator]
    torch.testing.assert_close(*found)


@torch._dynamo.config.patch(error_on_recompile=True)  # pyright: ignore[reportPrivateImportUsage]
def test_it_is_compiled_once_for_any_number_of_rows():
    module, table = embedding(), torch.randn(50, 6, requires_grad=True)
    start, length = torch.zeros(1, dtype=torch.int32), torch.full((1,), 17, dtype=torch.int32)

    def look(ids, keys):
        return module(ids, _PlaceLookup.apply(table, ids % 50, start, length, 0), 0.3, keys)

    compiled = torch.compile(look, fullgraph=True, backend="aot_eager")
    for rows in (30, 17, 50):
        ids, keys = drawn(rows)
        for each in (ids, keys):
            torch._dynamo.mark_dynamic(each, 0)
        assert torch.equal(compiled(ids, keys), look(ids, keys))
        grads = [torch.autograd.grad(f(ids, keys).square().sum(), module.weight)[0] for f in (compiled, look)]
        torch.testing.assert_close(*grads)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_on_a_gpu_are_the_same_every_time(compiled):
    module, table = embedding().cuda(), torch.randn(1025, 6, device="cuda", requires_grad=True)
    ids, keys = (each.cuda() for each in drawn(64 * 1025))
    start = 1025 * torch.arange(64, device="cuda", dtype=torch.int32)
    places = Places(table, torch.arange(1025, device="cuda").repeat(64), start, torch.full_like(start, 1025), 1025)
    weights, parameters = torch.randn(len(ids), 6, device="cuda"), [*module.parameters(), table]

    def look(ids, keys):
        return module(ids, None, 0.1, keys, places)

    call = torch.compile(look) if compiled else look
    first, again = (torch.autograd.grad((call(ids, keys) * weights).sum(), parameters) for _ in range(2))
    assert all(map(torch.equal, first, again))
    dropped = drop(module(ids) + F.embedding(places.place_T, table), 0.1, keys, 0)
    torch.testing.assert_close(first, torch.autograd.grad((dropped * weights).sum(), parameters), rtol=1e-3, atol=1e-2)
