"""linear, linformer and performer: their formulas written out, limits that are exact, and features that are kept."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lra
from lra.batch import Batch
from lra.bench.cases import make_batch
from lra.config.compose import compose
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.models.attention.performer import orthogonal_features
from lra.tasks import TASKS
from tests.sampling import sampled
from tests.training.conftest import arguments
from tests.training.test_fit import interrupt_at

CPU = torch.device("cpu")
N, LENGTHS = 20, (20, 0, 13, 1)
NAMES = ("linear", "linformer", "performer")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("linformer", {"k": 5}),
    ("linformer", {"k": 5, "share": "kv"}),
    ("linformer", {"k": 32}),  # more than there are tokens
    ("performer", {}),
    ("performer", {"features": 3}),
    ("performer", {"features": 32}),
]


def build(name: str, *, n: int = N, dropout: float = 0.0, layer: int = 0, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    cls = ATTENTIONS.get(name)
    return cls(cls.Config(**options), AttentionSpec(2, 16, n, dropout, layer))


def qkv(total: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(scale * torch.randn(total, 2, 16, generator=generator)).requires_grad_() for _ in range(3)]


def elu_features(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def random_features(x: Tensor, w: Tensor) -> Tensor:
    """The paper's equation 5, positive features of the softmax kernel, without the factor that cancels."""
    x = x / 2  # 16 ** -0.25
    return (x @ w.T - x.square().sum(-1, keepdim=True) / 2).exp()


def naive(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head of one sequence, `[n, D]`, with all its weights in memory."""
    if attention.name == "linformer":
        keys, values = (
            torch.einsum("nk,nd->kd", p[: len(x)].double(), x)
            for p, x in ((attention.projections[0], k), (attention.projections[-1], v))
        )
        return (q @ keys.T / 4).softmax(-1) @ values
    if attention.name == "linear":
        weights = elu_features(q) @ elu_features(k).T
    else:
        w = attention.projection.double()
        weights = random_features(q, w) @ random_features(k, w).T
    return weights / weights.sum(1, keepdim=True) @ v


def expected_of(attention: Any, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`naive` of every head and sequence, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for start, length in zip(batch.start.tolist(), batch.length.tolist(), strict=True):
        rows = slice(start, start + length)
        for head in range(2 if length else 0):
            out[rows, head] = naive(attention, *(x[rows, head].double() for x in (q, k, v)))
    return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_result_and_gradients_are_the_formulas(name, options, padded):
    attention, batch = build(name, **options), make_batch(LENGTHS, padded, CPU)
    q, k, v = qkv(batch.tokens.numel())
    out, expected = attention(q, k, v, batch), expected_of(attention, batch, q, k, v)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    weights, inputs = torch.randn_like(out), [q, k, v, *attention.parameters()]
    exact = torch.autograd.grad((expected * weights).sum(), inputs)
    for grad, grad_exact in zip(torch.autograd.grad((out * weights).sum(), inputs), exact, strict=True):
        torch.testing.assert_close(grad, grad_exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_order_and_rows_of_a_batch_do_not_matter(name):
    attention, batch = build(name), make_batch(LENGTHS, True, CPU)
    parts = [x.detach().view(4, N, 2, 16) for x in qkv(4 * N)]
    out = attention(*(x.flatten(0, 1) for x in parts), batch).view(4, N, 2, 16)
    order = torch.tensor([2, 3, 0, 1])
    moved = dataclasses.replace(batch, length=batch.length[order])
    again = attention(*(x[order].flatten(0, 1) for x in parts), moved).view(4, N, 2, 16)
    torch.testing.assert_close(again, out[order], atol=1e-6, rtol=1e-6)
    narrow = make_batch((17, 0, 13, 1), True, CPU)  # in 17 rows, not 20
    rows = attention(*(x[:, :17].flatten(0, 1) for x in parts), narrow).view(4, 17, 2, 16)
    torch.testing.assert_close(rows[1:], out[1:, :17], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_stay_finite_and_right(name):
    attention, batch = build(name), make_batch(LENGTHS, False, CPU)
    q, k, v = qkv(batch.tokens.numel(), 30.0)
    out = attention(q, k, v, batch)
    if name == "linear":  # the others' weights are one-hot here, beyond what the naive formula can compute
        torch.testing.assert_close(out.double(), expected_of(attention, batch, q, k, v), atol=1e-3, rtol=1e-4)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_linear_features_do_not_vanish_where_elu_plus_one_does():
    attention, batch = build("linear"), make_batch((N,), False, CPU)
    q, k, v = qkv(N)
    q, k = q - 5, k - 22
    assert not (F.elu(k.detach()) + 1).gt(1e-7).any()
    k = torch.cat([k[:-1], k[-1:] + 22])  # keeps the normaliser above its floor
    torch.testing.assert_close(
        attention(q, k, v, batch).double(), expected_of(attention, batch, q, k, v), atol=1e-5, rtol=1e-5
    )
    far = attention(q - 200, k, v, batch)
    assert not far.any() and all(g.isfinite().all() for g in torch.autograd.grad(far.sum(), v))


@pytest.mark.parametrize(("name", "scale"), [("linear", 1.0), ("linformer", 1.0), ("performer", 1.0), ("performer", 4)])
def test_autocast_costs_no_more_than_rounding(name, scale):
    """Exponents and normalisers are in fp32: the error is that of 16-bit inputs and averages of v, at any scale."""
    attention, batch = build(name), make_batch(LENGTHS, False, CPU)
    q, k, v = (x.bfloat16() for x in qkv(batch.tokens.numel()))
    q, k = q * scale, k * scale
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, batch)
    assert out.dtype == torch.bfloat16
    expected = attention(q.float(), k.float(), v.float(), batch)
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)


def test_linformer_with_the_identity_is_softmax_attention():
    attention, batch = build("linformer", k=N), make_batch((N, N), False, CPU)
    for projection in attention.projections:
        torch.nn.init.eye_(projection)
    q, k, v = qkv(2 * N)
    torch.testing.assert_close(attention(q, k, v, batch), build("standard")(q, k, v, batch.to_padded()))


@pytest.mark.parametrize("share", ["headwise", "kv"])
def test_linformer_projects_a_token_by_its_place_in_the_image(share):
    """Tokens that were left out are tokens whose keys and values are zeros."""
    attention, kept = build("linformer", k=7, share=share), torch.tensor([3, 4, 11, 19])
    few = dataclasses.replace(make_batch((4, 4), True, CPU), positions=kept.int().repeat(2))
    q, k, v = (x.detach() for x in qkv(8))
    whole, rows = make_batch((N, N), True, CPU), torch.cat((kept, N + kept))
    spread = [torch.zeros(2 * N, 2, 16).index_copy(0, rows, x) for x in (q, k, v)]
    for batch in (few, few.to_padded()):
        torch.testing.assert_close(attention(q, k, v, batch), attention(*spread, whole)[rows])


def test_performer_tends_to_softmax_attention():
    batch = make_batch((N, 13), True, CPU)
    q, k, v = (x.detach() for x in qkv(2 * N, 0.5))
    exact = build("standard")(q, k, v, batch)

    def error(features: int) -> float:
        modules = [build("performer", features=features, seed=seed) for seed in range(8)]
        return torch.stack([module(q, k, v, batch) - exact for module in modules]).square().mean().sqrt().item()

    errors = [error(features) for features in (16, 256, 4096)]
    for coarse, fine in itertools.pairwise(errors):
        assert fine < coarse / 2.5  # 4 in the limit
    assert errors[-1] < 0.01


def test_random_features_are_orthogonal_and_as_long_as_gaussian_ones():
    torch.manual_seed(0)
    w = orthogonal_features(40, 16)
    assert w.shape == (40, 16)
    for block in w.split(16):
        assert torch.allclose(block @ block.T, block.square().sum(1).diag(), atol=1e-4)
    many = orthogonal_features(16 * 2000, 16)
    assert many.square().sum(1).mean().item() == pytest.approx(16, rel=0.02)
    assert many.norm(dim=1).std() > 0.5  # not all of one length
    assert many.mean(0).abs().max() < 0.03 and torch.allclose(many.T @ many / len(many), torch.eye(16), atol=0.04)


def test_two_draws_of_features_differ_in_everything_but_their_law():
    assert build("performer").projection.shape == (44, 16)  # 16 ln 16
    generator = torch.Generator().manual_seed(3)
    one, other = orthogonal_features(44, 16, generator), orthogonal_features(44, 16, generator)
    assert not torch.isclose(one, other).any()


def train_steps(attention: Any, steps: range) -> list[Tensor]:
    """The projection of each step, of two micro-batches and an evaluation."""
    batch, seen = make_batch((5,), False, CPU), []
    q, k, v = qkv(5)
    for step in steps:
        seeded = batch.with_seed(torch.tensor(1000 + 7 * step))
        attention.train()
        attention(q, k, v, seeded).sum().backward()
        first = attention.projection.clone()
        attention(q, k, v, seeded)
        attention.eval()
        attention(q, k, v, batch)
        assert torch.equal(first, attention.projection)  # micro-batches share it, evaluation changes nothing
        seen.append(first)
    return seen


def test_features_are_redrawn_by_the_step_and_survive_a_checkpoint():
    attention = build("performer", redraw=2)
    seen = train_steps(attention, range(7))
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [False, True, False, True, False, True]

    broken = build("performer", redraw=2)
    train_steps(broken, range(3))
    resumed = build("performer", redraw=2, seed=9)
    resumed.load_state_dict(broken.state_dict())
    assert all(map(torch.equal, train_steps(resumed, range(3, 7)), seen[3:]))
    deeper = train_steps(build("performer", redraw=2, layer=1), range(3))
    assert torch.equal(deeper[0], seen[0]) and not torch.equal(deeper[2], seen[2])


def test_features_that_stay_are_all_that_is_saved():
    attention = build("performer")
    assert list(attention.state_dict()) == ["projection"] and not list(attention.parameters())
    assert len({x.sum().item() for x in train_steps(attention, range(3))}) == 1
    other = build("performer", seed=9)
    batch, (q, k, v) = make_batch((5,), False, CPU), qkv(5)
    assert not torch.equal(other(q, k, v, batch), attention(q, k, v, batch))
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(q, k, v, batch), attention(q, k, v, batch))


def test_linformer_learns_a_projection_of_keys_and_one_of_values():
    separate, shared = build("linformer", n=4000, k=64), build("linformer", n=4000, k=64, share="kv")
    assert [tuple(p.shape) for p in separate.parameters()] == [(4000, 64)] * 2
    assert [tuple(p.shape) for p in shared.parameters()] == [(4000, 64)]
    assert all(p.std().item() == pytest.approx(64**-0.5, rel=0.01) for p in separate.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_memory_grows_with_the_length(name):
    def saved(n: int) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        attention, batch, inputs = build(name, n=n), make_batch((n,), False, CPU), qkv(n)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            kept = attention(*inputs, batch)
        assert kept.shape == (n, 2, 16)
        return sum(sizes.values())

    assert saved(2048) <= 2.01 * saved(1024)


@pytest.mark.parametrize("padded", sampled([True, False]))  # test_attention.py compiles the packed form
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles(name, padded):
    attention, batch = build(name).train(), make_batch(LENGTHS, padded, CPU)
    q, k, v = qkv(batch.tokens.numel())
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=padded)  # a packed batch's slots are cached
    torch.testing.assert_close(compiled(q, k, v, batch), attention(q, k, v, batch))


def test_redrawing_compiles():
    attention = build("performer", redraw=1)
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(attention), backend="aot_eager")
    for step in range(3):
        batch, (q, k, v) = make_batch((5,), False, CPU).with_seed(torch.tensor(step)), qkv(5)
        torch.testing.assert_close(compiled(q, k, v, batch), attention(q, k, v, batch))


def pypi(module: str) -> Any:
    return pytest.importorskip(module, reason=f"compares with the package {module}", exc_type=ImportError)


@pytest.mark.parametrize("length", [N, 13])
@pytest.mark.parametrize("share", ["headwise", "kv"])
def test_linformer_is_that_of_the_package(share, length):
    torch.manual_seed(0)
    theirs = pypi("linformer").LinformerSelfAttention(32, N, k=7, heads=2, share_kv=share == "kv")
    ours = build("linformer", k=7, share=share)
    ours.projections[0].data.copy_(theirs.proj_k)
    if share == "headwise":
        ours.projections[1].data.copy_(theirs.proj_v)
    x = torch.randn(3, length, 32)
    values = theirs.to_k if share == "kv" else theirs.to_v  # there the values are then the keys, too
    q, k, v = (f(x).view(3 * length, 2, 16) for f in (theirs.to_q, theirs.to_k, values))
    out = ours(q, k, v, make_batch((length,) * 3, False, CPU)).view(3, length, 32)
    torch.testing.assert_close(theirs.to_out(out), theirs(x), atol=1e-5, rtol=1e-5)


def test_performer_is_that_of_the_package():
    package = pypi("performer_pytorch.performer_pytorch")
    ours, batch = build("performer"), make_batch((N, N, N), True, CPU)
    q, k, v = qkv(3 * N)
    q_BHND, k_BHND, v_BHND = (batch.pad(x).transpose(1, 2) for x in (q, k, v))

    def theirs(eps: float) -> Tensor:
        options = {"projection_matrix": ours.projection, "eps": eps}
        features = (package.softmax_kernel(x, is_query=x is q_BHND, **options) for x in (q_BHND, k_BHND))
        return package.linear_attention(*features, v_BHND).transpose(1, 2).flatten(0, 1)

    out = ours(q, k, v, batch)
    torch.testing.assert_close(out, theirs(0.0), atol=1e-5, rtol=1e-5)
    bias = [(out - theirs(eps)).abs().mean() for eps in (1e-4, 1e-6, 1e-8)]  # 1e-4, its default, is no small constant
    assert bias[0] > 5 * bias[1] > 25 * bias[2]


def test_linear_is_that_of_the_package():
    package = pypi("performer_pytorch.performer_pytorch")
    batch = make_batch((N, N), True, CPU)
    q, k, v = qkv(2 * N)
    q_BHND, k_BHND, v_BHND = (batch.pad(x).transpose(1, 2) for x in (q, k, v))
    theirs = package.linear_attention(F.elu(q_BHND) + 1, F.elu(k_BHND) + 1, v_BHND).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(build("linear")(q, k, v, batch), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        ("linformer", "k=0", "attn.k=0 must be at least 1"),
        ("linformer", "share=layerwise", "attn.share=layerwise: write headwise or kv$"),
        ("performer", "features=0", "attn.features=0 must be at least 1"),
        ("performer", "features=-1", "attn.features=-1 must be at least 1"),
        ("performer", "redraw=0", "attn.redraw=0 must be at least 1"),
        ("linear", "features=8", "attn.features"),
    ],
)
def test_bad_values_are_refused_by_name(name, field, message):
    with pytest.raises(UsageError, match=message) as caught:
        compose(
            RunConfig, {"task": TASKS, "attn": ATTENTIONS},
            ["task=listops", f"attn={name}", "recipe=demo", f"attn.{field}"],
        )  # fmt: skip
    assert "\n" not in str(caught.value)


def test_resolve_says_what_was_built():
    assert build("linear").resolve(CPU, "bf16") == "linear"
    assert build("linformer", k=5).resolve(CPU, "fp32") == "linformer of 20 tokens projected to 5"
    assert build("performer").resolve(CPU, "fp32") == "performer with 44 features"


@pytest.mark.parametrize("name", ["linear", "performer"])
def test_dropout_of_weights_that_do_not_exist_is_refused(name):
    with pytest.raises(UsageError, match=f"attn={name} supports no dropout on its probabilities"):
        build(name, dropout=0.1)


@pytest.mark.slow
def test_a_run_that_redraws_resumes_as_if_unbroken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ("trainer.steps=6", "trainer.eval_every=3", "trainer.log_every=3", "batch.eval=20")
    fields = ("attn=performer", "attn.redraw=2", "model.attn_dropout=0", *few)
    result = lra.fit(*arguments(*fields, "name=unbroken"))
    assert result["status"] == "finished"
    with monkeypatch.context() as patch:
        interrupt_at(4, patch)
        with pytest.raises(RuntimeError, match="power cut"):
            lra.fit(*arguments(*fields, "name=broken"))
    resumed = lra.fit(*arguments(*fields, "name=broken", "resume=auto"))
    assert all(resumed[split] == result[split] for split in ("val", "test", "fresh"))
    module = lra.load(result["directory"])
    projections = [b.detach() for name, b in module.named_buffers() if name.endswith("projection")]
    assert len(projections) == 2 and not torch.equal(*projections)


@pytest.mark.parametrize("recipe", ["xiong2021", "tay2021", "rotary", "demo"])
@pytest.mark.parametrize("name", ["linear", "performer"])
def test_recipes_drop_no_probabilities_where_there_are_none(name, recipe):
    from lra.training.fit import configure

    assert configure(["task=image", f"attn={name}", f"recipe={recipe}"]).config.model.attn_dropout == 0
