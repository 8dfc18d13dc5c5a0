"""lsformer: its formulas written out for one sequence at a time, a limit that is exact, and weights that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lra
from lra.bench.cases import make_batch
from lra.config.compose import compose
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.tasks import TASKS
from lra.training.evaluate import test as score
from tests.sampling import sampled
from tests.training.conftest import arguments

CPU = torch.device("cpu")
N, LENGTHS = 21, (21, 0, 13, 1, 8, 7)
OPTIONS = [
    {},
    {"landmarks": 5, "window": 4},
    {"landmarks": 40, "window": 2},  # more than there are tokens
    {"landmarks": 1, "window": 1},
    {"landmarks": 3, "window": 7},  # odd; and a length of one segment
    {"landmarks": 2, "window": 20},
    {"landmarks": 2, "window": 21},
    {"landmarks": 2, "window": 1 << 16},
]


def build(*, n: int = N, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """With norms that are not those of the start."""
    torch.manual_seed(seed)
    cls: Any = ATTENTIONS.get("lsformer")
    attention = cls(cls.Config(**options), AttentionSpec(2, 16, n, dropout))
    for norm in (attention.token_norm, attention.landmark_norm):
        torch.nn.init.normal_(norm.weight, 1, 0.3)
        torch.nn.init.normal_(norm.bias, 0, 0.3)
    return attention


def qkv(total: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    parts = (torch.randn(total, 2, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    return [(scale * part).to(dtype).requires_grad_() for part in parts]


def normal(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    """LayerNorm of `[n, H, D]` over H and D, by its definition."""
    centred = x - x.mean((1, 2), keepdim=True)
    spread = (centred.square().mean((1, 2), keepdim=True) + norm.eps).sqrt()
    return centred / spread * norm.weight + norm.bias


def naive(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence, `[n, H, D]`, query by query."""
    w, n = attention.config.window, len(q)
    p = [(k[:, h] @ attention.projection[h]).softmax(0) for h in range(2)]
    landmark_k, landmark_v = (
        normal(torch.stack([p[h].T @ x[:, h] for h in range(2)], 1), attention.landmark_norm) for x in (k, v)
    )
    token_k, token_v = (normal(x, attention.token_norm) for x in (k, v))
    out = torch.zeros_like(q)
    for i in range(n):
        segment = i // w * w
        near = slice(max(segment - w // 2, 0), min(segment + w + (w + 1) // 2, n))
        for h in range(2):
            keys, values = (
                torch.cat([token[near, h], landmark[:, h]])
                for token, landmark in ((token_k, landmark_k), (token_v, landmark_v))
            )
            out[i, h] = (keys @ q[i, h] / 4).softmax(0) @ values
    return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_result_and_gradients_are_the_formulas(options, padded):
    attention, batch = build(**options).double(), make_batch(LENGTHS, padded, CPU)
    q, k, v = qkv(batch.tokens.numel(), scale=2.0)
    out, expected = attention(q, k, v, batch), torch.zeros_like(q)
    for start, n in zip(batch.start.tolist(), LENGTHS, strict=True):
        rows = slice(start, start + n)
        if n:
            expected[rows] = naive(attention, q[rows], k[rows], v[rows])
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    weights, inputs = torch.randn_like(out), [q, k, v, *attention.parameters()]
    assert len(inputs) == 3 + 1 + 2 * 2
    exact = torch.autograd.grad((expected * weights).sum(), inputs)
    for grad, grad_exact in zip(torch.autograd.grad((out * weights).sum(), inputs), exact, strict=True):
        torch.testing.assert_close(grad, grad_exact, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("options", OPTIONS)
def test_padding_reaches_neither_result_nor_gradients(options):
    attention, batch = build(**options), make_batch(LENGTHS, True, CPU)
    real = batch.mask().flatten()[:, None, None]
    inputs = qkv(len(real), torch.float32)
    others = [x.detach().where(real, 100 + 7 * torch.rand_like(x)).requires_grad_() for x in inputs]
    weights, results = torch.randn_like(inputs[0]), []
    for parts in (inputs, others):
        out = attention(*parts, batch)
        grads = torch.autograd.grad((out * weights).sum(), [*parts, *attention.parameters()])
        assert not out.where(~real, 0).any() and not any(grad.where(~real, 0).any() for grad in grads[:3])
        results.append((out, *grads))
    assert all(map(torch.equal, *results))


def test_more_rows_of_padding_change_nothing():
    attention, lengths = build(window=4), (14, 0, 13, 1)
    wide, narrow = make_batch((*lengths, N), True, CPU), make_batch(lengths, True, CPU)
    inputs = [x.detach().view(5, N, 2, 16) for x in qkv(5 * N)]
    out = attention(*(x.flatten(0, 1) for x in inputs), wide).view(5, N, 2, 16)
    again = attention(*(x[:4, :14].flatten(0, 1) for x in inputs), narrow).view(4, 14, 2, 16)
    torch.testing.assert_close(again, out[:4, :14])


def test_landmarks_that_are_the_tokens_make_it_softmax_attention_of_normalised_keys_and_values():
    """P is the identity where keys are orthogonal and W large; the window then shows every key once more."""
    n, norm = 16, torch.nn.LayerNorm([2, 16])
    attention, batch = build(n=n, landmarks=n, window=n).double(), make_batch((n, n), True, CPU)
    with torch.no_grad():
        attention.projection.copy_(1e4 * torch.eye(n))
        for mine in (attention.token_norm, attention.landmark_norm):
            mine.load_state_dict(norm.state_dict())
    q, _, v = qkv(2 * n)
    k = torch.stack([torch.eye(n), 3 * torch.eye(n)], 1).double().repeat(2, 1, 1)
    standard = ATTENTIONS.get("standard")
    exact = standard(standard.Config(), AttentionSpec(2, 16, n))
    expected = exact(q, *(normal(x, norm) for x in (k, v)), batch)
    torch.testing.assert_close(attention(q, k, v, batch), expected)


def test_dropout_is_of_the_probabilities():
    attention, batch = build(dropout=0.25, landmarks=3, window=4).double().train(), make_batch(LENGTHS, True, CPU)
    for norm in (attention.token_norm, attention.landmark_norm):
        torch.nn.init.zeros_(norm.weight)
        torch.nn.init.ones_(norm.bias)
    q, k, v = qkv(batch.tokens.numel())  # keys and values are ones: equal probabilities, of which some are dropped
    out = attention(q, k, v, batch)[: LENGTHS[0]]
    assert torch.equal(out, out[..., :1].expand_as(out))  # the same weights for all of a value
    kept = out[8:12, :, 0] * 0.75 * (2 * 4 + 3)  # in the middle of a sequence, where 11 are seen
    torch.testing.assert_close(kept, kept.round())
    assert kept.min() < 11 and len(kept.unique()) > 2
    torch.testing.assert_close(attention.eval()(q, k, v, batch)[: LENGTHS[0]], torch.ones_like(out))


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_costs_no_more_than_rounding(autocast):
    attention, batch = build(), make_batch(LENGTHS, False, CPU)
    q, k, v = (x.detach() for x in qkv(batch.tokens.numel(), torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attention(q, k, v, batch)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attention(q.float(), k.float(), v.float(), batch), atol=0.04, rtol=0.04)
    halved = build().bfloat16()(q, k, v, batch)  # its weights, too
    torch.testing.assert_close(halved.float(), out.float(), atol=0.04, rtol=0.04)


def test_weights_survive_a_checkpoint():
    attention, batch, (q, k, v) = build(), make_batch(LENGTHS, False, CPU), qkv(sum(LENGTHS), torch.float32)
    shapes = {name: tuple(x.shape) for name, x in attention.state_dict().items()}
    norms = {f"{norm}_norm.{name}": (2, 16) for norm in ("token", "landmark") for name in ("weight", "bias")}
    assert shapes == {"projection": (2, 16, 32)} | norms
    other = build(seed=9)
    assert not torch.equal(other(q, k, v, batch), attention(q, k, v, batch))
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(q, k, v, batch), attention(q, k, v, batch))


def test_a_run_trains_it_and_its_weights_come_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ("trainer.steps=2", "trainer.eval_every=2", "attn=lsformer", "attn.landmarks=4")
    result = lra.fit(*arguments(*few))
    weights = lra.load(result["directory"]).state_dict()
    assert sum(name.endswith("attention.projection") for name in weights) == 2
    assert score(f"init={result['directory']}")["test"] == result["test"]


def test_memory_grows_with_the_length():
    def saved(n: int) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        attention, batch, inputs = build(n=n), make_batch((n,), False, CPU), qkv(n, torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            kept = attention(*inputs, batch)
        assert kept.shape == (n, 2, 16)
        return sum(sizes.values())

    assert saved(2048) <= 2.01 * saved(1024)


@pytest.mark.parametrize("padded", sampled([True, False]))
def test_it_compiles(padded):
    attention, batch = build().train(), make_batch(LENGTHS, padded, CPU)
    q, k, v = qkv(batch.tokens.numel(), torch.float32)
    inputs = [q, k, v, *attention.parameters()]
    torch.compiler.reset()
    results = []
    for attend in (torch.compile(attention, backend="aot_eager", fullgraph=True), attention):
        out = attend(q, k, v, batch)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_budget_is_half_window_and_half_landmarks():
    cls: Any = ATTENTIONS.get("lsformer")
    assert cls.budget(256) == {"landmarks": 128, "window": 64}
    assert cls.Config(**cls.budget(1)) == cls.Config(landmarks=1, window=1)


def test_resolve_says_what_was_built():
    assert build(window=4).resolve(CPU, "bf16") == "lsformer with 32 landmarks, window 4"


@pytest.mark.parametrize("field", ["landmarks", "window"])
def test_bad_values_are_refused_by_name(field):
    with pytest.raises(UsageError, match=f"attn.{field}=0 must be at least 1"):
        compose(
            RunConfig, {"task": TASKS, "attn": ATTENTIONS},
            ["task=listops", "attn=lsformer", "recipe=demo", f"attn.{field}=0"],
        )  # fmt: skip
