"""reformer and smyrf: their definitions written out token by token, limits that are exact, and hashes that are kept."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch.nn import functional as F

from lra.batch import Batch
from lra.bench.cases import make_batch
from lra.config.compose import compose
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS, lsh, reformer
from lra.models.attention.base import AttentionSpec
from lra.tasks import TASKS
from tests.sampling import sampled

CPU = torch.device("cpu")
N, LENGTHS = 45, (45, 0, 31, 1, 8, 2)
NAMES = ("reformer", "smyrf")
SIZE = {"reformer": "bucket", "smyrf": "cluster"}
CASES = [(name, size, hashes) for name in NAMES for size, hashes in ((4, 1), (4, 2), (7, 3), (1, 2), (50, 2))]


def build(name: str, size: int, hashes: int, *, n: int = N, seed: int = 0, dropout: float = 0.0) -> Any:
    torch.manual_seed(seed)
    cls = ATTENTIONS.get(name)
    return cls(cls.Config(hashes=hashes, **{SIZE[name]: size}), AttentionSpec(2, 16, n, dropout))


def qkv(total: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(scale * torch.randn(total, 2, 16, generator=generator)).requires_grad_() for _ in range(3)]


def places(hashes: Tensor) -> list[int]:
    """The place of each token in the order of hashes, of positions where these are equal."""
    order = sorted(range(len(hashes)), key=lambda i: (hashes[i].item(), i))
    return [order.index(i) for i in range(len(order))]


def seen_by_reformer(attention: Any, q: Tensor, k: Tensor) -> list[list[list[int]]]:
    """For each round and token the tokens that it sees: those of its chunk and of the one before."""
    rounds, size = [], attention.config.bucket
    for w in attention.rotations.double().unbind(1):
        rotated = q @ w[:, : -(-len(q) // (2 * size))]
        chunk = [place // size for place in places(torch.cat([rotated, -rotated], 1).argmax(1))]
        rounds.append([[j for j in range(len(q)) if chunk[i] - chunk[j] in (0, 1)] for i in range(len(q))])
    return rounds


def seen_by_smyrf(attention: Any, q: Tensor, k: Tensor) -> list[list[list[int]]]:
    """For each round and query the keys that it sees: those of its cluster."""
    rounds, size = [], attention.config.cluster
    zeros, longest = torch.zeros(len(q), 1), q.norm(dim=1).max() ** 2 + k.norm(dim=1).max() ** 2
    transformed_q = torch.cat([q, zeros, (longest - q.norm(dim=1, keepdim=True) ** 2).clamp(min=0).sqrt()], 1)
    transformed_k = torch.cat([k, (longest - k.norm(dim=1, keepdim=True) ** 2).clamp(min=0).sqrt(), zeros], 1)
    for a in attention.projections.double().unbind(1):
        q_place, k_place = places(transformed_q @ a), places(transformed_k @ a)
        rounds.append([[j for j in range(len(q)) if q_place[i] // size == k_place[j] // size] for i in range(len(q))])
    return rounds


def naive(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head of one sequence, `[n, D]`: each query's softmax over the keys of all rounds, repeated ones too."""
    shared = attention.name == "reformer"
    k = q / q.norm(dim=1, keepdim=True) if shared else k
    rounds = (seen_by_reformer if shared else seen_by_smyrf)(attention, q.detach(), k.detach())
    out = []
    for i in range(len(q)):
        keys = list(itertools.chain.from_iterable(seen[i] for seen in rounds))
        scores = [torch.tensor(-5e4).double() if shared and j == i else q[i] @ k[j] / 4 for j in keys]
        out.append(torch.stack(scores).softmax(0) @ v[keys])
    return torch.stack(out)


def expected_of(attention: Any, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`naive` of every head and sequence, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True):
        rows = slice(start, start + length)
        for head in range(2 if length else 0):
            out[rows, head] = naive(attention, *(x[rows, head].double() for x in (q, k, v)))
    return out


def exact_of(name: str, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to all keys: softmax attention; for reformer that of q to its own directions, but for itself."""
    q_BHND, k_BHND, v_BHND = (batch.pad(x).transpose(1, 2) for x in (q, k, v))
    k_BHND = F.normalize(q_BHND, dim=-1) if name == "reformer" else k_BHND
    scores = q_BHND @ k_BHND.mT / 4
    if name == "reformer":
        scores = scores.masked_fill(torch.eye(batch.max_length).bool(), -5e4)
    scores = scores.masked_fill(~batch.mask()[:, None, None], -1e30)
    out = (scores.softmax(-1) @ v_BHND).transpose(1, 2)
    return batch.unpad(out.masked_fill(~batch.mask()[..., None, None], 0))


def assert_same(out: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Results and gradients; reformer's do not depend on k."""
    torch.testing.assert_close(out, expected.to(out.dtype), atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), inputs, materialize_grads=True)
    exact = torch.autograd.grad((expected * weights).sum(), inputs, materialize_grads=True)
    for grad, grad_exact in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad, grad_exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "size", "hashes"), CASES)
def test_result_and_gradients_are_the_definition(name, size, hashes, padded):
    attention, batch = build(name, size, hashes), make_batch(LENGTHS, padded, CPU)
    q, k, v = qkv(batch.tokens.numel())
    assert_same(attention(q, k, v, batch), expected_of(attention, batch, q, k, v), [q, k, v])


@pytest.mark.parametrize("size", [N, 1 << 16])
@pytest.mark.parametrize("name", NAMES)
def test_one_chunk_of_all_is_exact_attention(name, size):
    attention, batch = build(name, size, 1), make_batch(LENGTHS, False, CPU)
    q, k, v = qkv(batch.tokens.numel())
    assert_same(attention(q, k, v, batch), exact_of(name, batch, q, k, v), [q, k, v])


@pytest.mark.parametrize("name", NAMES)
def test_of_random_vectors_more_hashes_come_nearer_to_exact_attention(name):
    batch = make_batch((256, 131), True, CPU)
    q, k, v = (x.detach() for x in qkv(2 * 256, 1.5))
    exact = exact_of(name, batch, q, k, v)

    def error(hashes: int) -> float:
        modules = [build(name, 16, hashes, n=256, seed=seed) for seed in range(4)]
        return torch.stack([module(q, k, v, batch) - exact for module in modules]).square().mean().sqrt().item()

    errors = [error(hashes) for hashes in (1, 4, 16)]
    for coarse, fine in itertools.pairwise(errors):
        assert fine < coarse / 1.3


@pytest.mark.parametrize("name", NAMES)
def test_hashing_finds_larger_products_than_chance(name):
    batch = make_batch((512,), True, CPU)
    q, k, v = (x.detach() for x in qkv(512, 2.0))
    attention = build(name, 16, 1, n=512)
    if name == "reformer":
        k = F.normalize(q, dim=-1)
        rounds = [seen_by_reformer(attention, q[:, h].double(), k[:, h].double())[0] for h in range(2)]
    else:
        rounds = [seen_by_smyrf(attention, q[:, h].double(), k[:, h].double())[0] for h in range(2)]
    for head, seen in enumerate(rounds):
        products = q[:, head] @ k[:, head].T
        found = torch.stack([products[i, [j for j in seen[i] if j != i]].mean() for i in range(512)]).mean()
        assert found > products.fill_diagonal_(0).mean() + 0.1 * products.std()
    torch.testing.assert_close(attention(q, k, v, batch), expected_of(attention, batch, q, k, v).float())


@pytest.mark.parametrize("name", NAMES)
def test_order_and_rows_of_a_batch_do_not_matter(name):
    attention, batch = build(name, 4, 2), make_batch((45, 0, 31, 1), True, CPU)
    parts = [x.detach().view(4, N, 2, 16) for x in qkv(4 * N)]
    out = attention(*(x.flatten(0, 1) for x in parts), batch).view(4, N, 2, 16)
    order = torch.tensor([2, 3, 0, 1])
    moved = dataclasses.replace(batch, length=batch.length[order])
    again = attention(*(x[order].flatten(0, 1) for x in parts), moved).view(4, N, 2, 16)
    torch.testing.assert_close(again, out[order], atol=1e-6, rtol=1e-6)
    narrow = make_batch((33, 0, 31, 1), True, CPU)  # in 33 rows, not 45
    rows = attention(*(x[:, :33].flatten(0, 1) for x in parts), narrow).view(4, 33, 2, 16)
    torch.testing.assert_close(rows[1:], out[1:, :33], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_past_a_length_may_even_be_nan(name):
    attention, batch = build(name, 4, 2), make_batch(LENGTHS, True, CPU)
    real = batch.mask().flatten()[:, None, None]
    inputs = qkv(batch.tokens.numel())
    other = [x.detach().where(real, torch.nan).requires_grad_() for x in inputs]
    out, out_other = attention(*inputs, batch), attention(*other, batch)
    assert torch.equal(out, out_other)
    grads = torch.autograd.grad(out.square().sum(), inputs, materialize_grads=True)
    grads_other = torch.autograd.grad(out_other.square().sum(), other, materialize_grads=True)
    assert all(map(torch.equal, grads, grads_other))
    assert not any(grad.where(~real, 0).any() for grad in grads)


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_stay_finite_and_right(name):
    attention, batch = build(name, 4, 2), make_batch(LENGTHS, False, CPU)
    q, k, v = qkv(batch.tokens.numel(), 30.0)
    out = attention(q, k, v, batch)
    torch.testing.assert_close(out.double(), expected_of(attention, batch, q, k, v), atol=1e-2, rtol=1e-3)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v), materialize_grads=True))


@pytest.mark.parametrize("name", NAMES)
def test_zeros_are_finite(name):
    attention, batch = build(name, 4, 2), make_batch(LENGTHS, False, CPU)
    q, k, v = (x.detach().mul(0).requires_grad_() for x in qkv(batch.tokens.numel()))
    out = attention(q, k, v, batch)
    grads = torch.autograd.grad(out.sum(), (q, k, v), materialize_grads=True)
    assert not out.any() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_costs_no_more_than_rounding(name):
    """Hashes, exponents and merging are in fp32: nothing is sorted otherwise, and 16-bit products round as ever."""
    attention, batch = build(name, 4, 2), make_batch(LENGTHS, False, CPU)
    q, k, v = (x.bfloat16() for x in qkv(batch.tokens.numel()))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, batch)
    assert out.dtype == torch.bfloat16
    expected = attention(q.float(), k.float(), v.float(), batch)
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_hashes_are_all_that_is_saved(name):
    attention, other = build(name, 4, 2), build(name, 4, 2, seed=9)
    assert list(attention.state_dict()) == [{"reformer": "rotations", "smyrf": "projections"}[name]]
    assert not list(attention.parameters())
    batch = make_batch(LENGTHS, False, CPU)
    q, k, v = qkv(batch.tokens.numel())
    out = attention(q, k, v, batch)
    assert not torch.equal(other(q, k, v, batch), out)
    other.load_state_dict(attention.state_dict())
    torch.manual_seed(7)  # of the process: it has no part in it
    assert torch.equal(other.eval()(q, k, v, dataclasses.replace(batch, seed=None)), out)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_keeps_the_mean(name):
    attention, batch = build(name, 4, 2, dropout=0.25), make_batch((N,), False, CPU)
    q, k, v = (x.detach() for x in qkv(N))
    mean = torch.stack([attention.train()(q, k, v, batch) for _ in range(1000)]).mean(0)
    torch.testing.assert_close(mean, attention.eval()(q, k, v, batch), atol=0.15, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_memory_grows_with_the_length(name):
    def saved(n: int) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        attention, batch, inputs = build(name, 64, 2, n=n), make_batch((n,), False, CPU), qkv(n)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attention(*inputs, batch)
        grads = torch.autograd.grad(out.sum(), inputs, materialize_grads=True)
        assert out.isfinite().all() and all(grad.isfinite().all() for grad in grads)
        return sum(sizes.values())

    assert saved(4096) <= 2.01 * saved(2048)


def test_rows_are_hashed_in_parts(monkeypatch):
    attention, batch = build("reformer", 4, 2), make_batch(LENGTHS, False, CPU)
    q, k, v = qkv(batch.tokens.numel())
    whole = attention(q, k, v, batch)
    monkeypatch.setattr(reformer, "HASHED_ROWS", 7)
    assert torch.equal(attention(q, k, v, batch), whole)


def test_sorting_is_an_op_that_compilers_leave_alone():
    x = torch.randint(5, (2, 3, 7, 4), generator=torch.Generator().manual_seed(0)).float().transpose(2, 3)
    library.opcheck(lsh.stable_order, (x,))
    assert torch.equal(lsh.stable_order(x), x.argsort(stable=True))


@pytest.mark.parametrize("padded", sampled([True, False]))  # test_attention.py compiles the packed form
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles(name, padded):
    attention, batch = build(name, 4, 2).train(), make_batch(LENGTHS, padded, CPU)
    q, k, v = qkv(batch.tokens.numel())
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=padded)  # a packed batch's slots are cached
    torch.testing.assert_close(compiled(q, k, v, batch), attention(q, k, v, batch))


def package() -> Any:
    reason = "pip install reformer-pytorch to compare with it"
    return pytest.importorskip("reformer_pytorch.reformer_pytorch", reason=reason, exc_type=ImportError)


def hashed_alike(attention: Any, q: Tensor, rows: int) -> Any:
    """The package's attention to one sequence of so many rows with the hashes of ours, padding in the last bucket."""
    size, hashes = attention.config.bucket, attention.config.hashes
    theirs, buckets = package().LSHAttention(bucket_size=size, n_hashes=hashes), rows // size
    ours = attention._hash(q.detach().transpose(0, 1)[None], make_batch((len(q),), True, CPU))[0].long()
    padded = F.pad(ours, (0, rows - len(q)), value=buckets - 1) + buckets * torch.arange(hashes)[:, None]
    theirs.hash_vectors = lambda *_, **__: padded.flatten(1)
    return theirs


@pytest.mark.parametrize("n", [N, 40, 2])  # of one token alone, log-sum-exps of -5e4 cost theirs three digits
@pytest.mark.parametrize("hashes", [1, 2, 3])
def test_reformer_is_that_of_the_package(hashes, n):
    """There the first chunk sees the last of the round before, so this one is made of padding."""
    attention = build("reformer", 4, hashes)
    q, k, v = qkv(n)
    rows = -(-(n + 4) // 8) * 8
    x, y = (F.pad(x.transpose(0, 1), (0, 0, 0, rows - n)) for x in (q, v))
    real = (torch.arange(rows) < n).expand(2, rows)
    theirs = hashed_alike(attention, q, rows)(x, y, input_mask=real)[0][:, :n].transpose(0, 1)
    assert_same(attention(q, k, v, make_batch((n,), False, CPU)), theirs, [q, v])


def test_reformer_is_that_of_the_package_but_for_the_first_chunk():
    """Without padding there, what differs is what the first chunk sees."""
    n = 40
    attention = build("reformer", 4, 1)
    q, k, v = qkv(n)
    theirs = hashed_alike(attention, q, n)(q.transpose(0, 1), v.transpose(0, 1))[0].transpose(0, 1)
    same = torch.isclose(attention(q, k, v, make_batch((n,), False, CPU)), theirs, atol=1e-5, rtol=1e-5).all(-1)
    assert same.sum(0).tolist() == [n - 4, n - 4]


def test_reformer_hashes_as_the_package_does(monkeypatch):
    n, size, hashes = 64, 4, 3
    attention = build("reformer", size, hashes, n=2 * n)  # the longest sequence has more buckets
    rows = qkv(n)[0].detach().transpose(0, 1)
    theirs = package().LSHAttention(bucket_size=size, n_hashes=hashes)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", lambda shape, **_: attention.rotations[None, ..., : shape[-1]])
        expected = theirs.hash_vectors(n // size, rows, set_cache=False).unflatten(1, (hashes, n))
    ours = attention._hash(rows[None], make_batch((n,), True, CPU))[0]
    assert torch.equal(ours.long() + n // size * torch.arange(hashes)[:, None], expected)


@pytest.mark.parametrize(("name", "seen"), [("reformer", 2), ("smyrf", 1)])
def test_budget_is_what_a_query_sees_in_all_rounds(name, seen):
    cls = ATTENTIONS.get(name)
    for keys in (4, 128, 256):
        options = cls.budget(keys)
        cls.Config(**options)
        assert seen * options[SIZE[name]] * options["hashes"] == keys
    assert cls.budget(1)[SIZE[name]] == 1


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in NAMES for field in (SIZE[name], "hashes")])
def test_bad_values_are_refused_by_name(name, field):
    fields = ["task=listops", f"attn={name}", "recipe=demo", f"attn.{field}=0"]
    with pytest.raises(UsageError, match=f"attn.{field}=0 must be at least 1") as caught:
        compose(RunConfig, {"task": TASKS, "attn": ATTENTIONS}, fields)
    assert "\n" not in str(caught.value)


def test_resolve_says_what_was_built():
    assert build("reformer", 4, 2).resolve(CPU, "fp32") == "reformer of 2 hashes into buckets of 4"
    assert build("smyrf", 5, 1).resolve(CPU, "bf16") == "smyrf of 1 hashes into clusters of 5"
