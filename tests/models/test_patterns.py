"""Attentions that are a pattern of blocks: what they see is the paper's definition, written anew here by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import lra
from lra.bench.cases import has_reference_dropout, make_batch
from lra.config.compose import compose, restore
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.kernels.flash.reference import reference_attention
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.models.attention.block_sparse import BlockSparseAttention
from lra.tasks import TASKS
from lra.training.evaluate import test as score
from tests.training.conftest import arguments

REGISTRIES = {"task": TASKS, "attn": ATTENTIONS}
CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAMES = ("bigbird", "butterfly", "local", "longformer", "openai_sparse")
FIXED = {"block": "4", "stride": 12, "summary": 4}


def build(name: str, n: int, layer: int = 0, heads: int = 2, **options: Any) -> BlockSparseAttention:
    cls = ATTENTIONS.get(name)
    return cls(cls.Config(**options), AttentionSpec(heads, head_dim=16, max_length=n, layer=layer))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here, and these tensors are on the CPU")
@pytest.mark.parametrize("name", ["flash", *NAMES])
def test_triton_drops_what_the_reference_drops(name):
    """The layer's seed, the places in the global batch and the rate reach the kernels."""
    pytest.importorskip("triton")
    block = {"block": "16"}
    options: dict[str, Any] = {
        "flash": {}, "local": {"window": 4}, "longformer": {"window": 4}, "openai_sparse": block | {"stride": 16},
    }  # fmt: skip
    cls = ATTENTIONS.get(name)
    config = cls.Config(impl="triton", **options.get(name, block))
    attention = cls(config, AttentionSpec(2, 16, 21, dropout=0.3, layer=4))
    batch = make_batch((21, 0, 13, 1), False, CPU, index=torch.tensor([3, 9, 1, 0], dtype=torch.int32))
    assert batch.seed is not None
    expected = reference_attention(
        *qkv(35), start=batch.start, length=batch.length, index=batch.index, dropout=0.3, seed=batch.seed + 4,
        layout=attention.layout,
    )  # fmt: skip
    torch.testing.assert_close(attention.train()(*qkv(35), batch), expected, atol=1e-5, rtol=1e-5)


def qkv(total: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(total, 2, 16, generator=generator).requires_grad_() for _ in range(3)]


def seen(attention: BlockSparseAttention, n: int) -> Tensor:
    """bool `[H or 1, n, n]`, whether i sees j."""
    return attention.layout.token_mask(torch.arange(n), torch.arange(n))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, starts: list[int], lengths: list[int], mask: Tensor) -> Tensor:
    """Of each sequence under its corner of the mask, `[H or 1, N, N]`, by the textbook."""
    out = torch.zeros_like(q)
    for start, n in zip(starts, lengths, strict=True):
        rows = slice(start, start + n)
        scores = torch.einsum("ihd,jhd->hij", q[rows], k[rows]) / 4
        p = scores.masked_fill(~mask[:, :n, :n], -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hij,jhd->ihd", p, v[rows])
    return out


# Name, options, number of tokens and definition: whether token i sees token j
DEFINED = [
    ("local", {"window": 9}, 45, lambda i, j: (j - i >= -4) & (j - i < 5)),  # as fly has it, where it is odd
    ("local", {"window": 8}, 300, lambda i, j: (i - j).abs() <= 4),
    ("local", {"window": 1}, 20, lambda i, j: i == j),
    ("local", {"window": 7, "pattern": "blocks"}, 45, lambda i, j: i // 7 == j // 7),
    ("local", {"window": 64, "pattern": "blocks"}, 300, lambda i, j: i // 64 == j // 64),
    ("local", {"window": 500, "pattern": "blocks"}, 140, lambda i, j: i == i),
    ("longformer", {"window": 16, "globals": 0}, 45, lambda i, j: (i - j).abs() <= 8),
    ("longformer", {"window": 6}, 300, lambda i, j: ((i - j).abs() <= 3) | (i == 0) | (j == 0)),
    ("longformer", {"window": 130, "globals": 5}, 300, lambda i, j: ((i - j).abs() <= 65) | (i < 5) | (j < 5)),
    ("longformer", {"globals": 99, "window": 4}, 20, lambda i, j: i == i),
    (
        "bigbird",
        {"block": "8", "random": 0},
        93,
        lambda i, j: ((i // 8 - j // 8).abs() <= 1) | (i < 16) | (j < 16),
    ),
    ("bigbird", {"block": "4", "random": 0, "window": 5, "globals": 0}, 45, lambda i, j: (i // 4 - j // 4).abs() <= 2),
    ("openai_sparse", FIXED, 45, lambda i, j: (i // 12 == j // 12) | (j % 12 >= 12 - 4)),
    ("openai_sparse", FIXED | {"summary": 8}, 64, lambda i, j: (i // 12 == j // 12) | (j % 12 >= 12 - 8)),
    ("openai_sparse", FIXED | {"summary": None}, 50, lambda i, j: (i // 12 == j // 12) | (j % 12 >= 12 - 4)),
    (
        "openai_sparse",
        {"block": "1", "stride": 7, "pattern": "strided"},
        45,
        lambda i, j: ((i - j).abs() <= 7) | ((i - j) % 7 == 0),
    ),
    (
        "openai_sparse",
        {"block": "2x4", "stride": 12, "pattern": "strided"},  # of squares of 4, three to a stride
        45,
        lambda i, j: ((i // 4 - j // 4).abs() <= 3) | ((i // 4 - j // 4) % 3 == 0),
    ),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "options", "n", "definition"), DEFINED)
def test_each_query_sees_what_the_definition_says(name, options, n, definition, padded):
    attention, lengths = build(name, n, **options).eval(), [n, 0, n // 2 + 1, 1]
    mask = definition(torch.arange(n)[:, None], torch.arange(n)[None, :]).expand(1, n, n)
    batch = make_batch(lengths, padded, CPU)
    q, k, v = qkv(batch.tokens.numel())
    out = attention(q, k, v, batch)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
    by_definition = softmax_attention(q, k, v, batch.start.tolist(), lengths, mask)
    by_layout = reference_attention(q, k, v, start=batch.start, length=batch.length, layout=attention.layout)
    for expected in (by_definition, by_layout):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        for grad, exact in zip(grads, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True):
            torch.testing.assert_close(grad, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local", {"window": 2 * 45}),
        ("local", {"window": 45, "pattern": "blocks"}),
        ("longformer", {"window": 2 * 45, "globals": 0}),
        ("longformer", {"window": 1 << 16}),
        ("bigbird", {"block": "4", "window": 2 * 12 - 1, "globals": 0, "random": 0}),
        ("bigbird", {"block": "4", "random": 12}),
        ("openai_sparse", {"block": "4", "stride": 48}),
        ("openai_sparse", {"block": "4", "stride": 44, "pattern": "strided"}),
    ],
)
def test_what_reaches_all_is_exact_attention(name, options):
    batch = make_batch((45, 0, 31), False, CPU)
    q, k, v = qkv(batch.tokens.numel())
    flash = ATTENTIONS.get("flash")
    exact = flash(flash.Config(), AttentionSpec(heads=2, head_dim=16, max_length=45))(q, k, v, batch)
    torch.testing.assert_close(build(name, 45, **options)(q, k, v, batch), exact, atol=1e-5, rtol=1e-5)


def test_bigbird_draws_blocks_beside_window_and_globals():
    n, side, random = 93, 4, 3
    attention = build("bigbird", n, block="4", random=random).eval()
    block = torch.arange(n) // side
    a, b = block[:, None], block[None, :]
    certain = ((a - b).abs() <= 1) | (a < 2) | (b < 2)
    mask = seen(attention, n)
    drawn = mask & ~certain
    assert mask[:, certain].all()
    for head in drawn:
        for row in range(2 * side, n):
            assert torch.equal(head[row], head[row // side * side])  # all tokens of a block see the same
            blocks = head[row].new_zeros(24).index_fill(0, block[head[row]], True)
            assert blocks.sum() == random and torch.equal(blocks[block], head[row])  # whole ones
    assert not torch.equal(drawn[0], drawn[1])  # each head draws its own

    batch = make_batch((n, 0, 50), False, CPU)
    q, k, v = qkv(batch.tokens.numel())
    expected = softmax_attention(q, k, v, batch.start.tolist(), [n, 0, 50], mask)
    torch.testing.assert_close(attention(q, k, v, batch), expected, atol=1e-5, rtol=1e-5)


def test_bigbird_is_a_function_of_seed_layer_heads_and_length():
    def key(**changes: Any) -> int:
        return build("bigbird", **({"n": 256, "block": "8"} | changes)).layout.key

    keys = [key(), key(seed=1), key(layer=1), key(seed=1, layer=1), key(seed=2), key(heads=4), key(n=264)]
    assert len(set(keys)) == len(keys)
    torch.manual_seed(5)  # of the process: it has no part in it
    assert key() == keys[0] and key(layer=1) == keys[2]
    assert copy.deepcopy(build("bigbird", 256, block="8")).layout.key == keys[0]


@pytest.mark.parametrize("name", sorted({*NAMES} - {"bigbird"}))
def test_other_layers_share_one_layout(name):
    assert build(name, 64).layout is build(name, 64, layer=3).layout


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_pattern_is_a_weight(name):
    attention = build(name, 64)
    assert not attention.state_dict() and not list(attention.buffers())


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("local", {}, "sliding, window 64 in blocks of 128x128"),
        ("local", {"pattern": "blocks"}, "blocks, window 64 in blocks of 64x64"),
        ("longformer", {"window": 64}, "window 64, globals 1 in blocks of 128x128"),
        ("bigbird", {}, "window 3, globals 2, random 3 in blocks of 64x64"),
        ("openai_sparse", {}, "fixed, stride 128, summary 32 in blocks of 32x32"),
        ("openai_sparse", {"pattern": "strided", "block": "16x64"}, "strided, stride 128 in blocks of 16x64"),
    ],
)
def test_resolve_says_what_was_built(name, options, said):
    attention, n = build(name, 1024, **options), 1024
    share = seen(attention, n).float().mean().item()
    assert 0.05 < share < 0.7
    assert attention.resolve(CPU, "fp32") == f"{name} by gather, {said}, density {share:.4f}"
    assert attention.resolve(GPU, "bf16") == f"{name} by triton, {said}, density {share:.4f}"


@pytest.mark.parametrize("name", NAMES)
def test_its_dropout_on_a_gpu_is_that_of_the_reference(name):
    assert has_reference_dropout(build(name, 64), GPU) and not has_reference_dropout(build(name, 64), CPU)
    assert not has_reference_dropout(build(name, 64, impl="gather"), GPU)


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_run_is_refused(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match=r"attn.impl='triton' needs CUDA tensors, got cpu: use attn\.impl='gather'"):
        build(name, 64, impl="triton").resolve(CPU, "fp32")
    with pytest.raises(
        UsageError, match=r"attn.impl='gather' is .*: for attn.deterministic=True use attn.impl='triton'"
    ):
        build(name, 64, impl="gather", deterministic=True).resolve(GPU, "bf16")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("local", {"window": 50, "pattern": "blocks"}, "attn.window=50: Triton takes multiples of 16"),
        ("bigbird", {"block": "24"}, "attn.block=24: Triton takes multiples of 16"),
        ("openai_sparse", {"block": "8"}, "attn.block=8: Triton takes multiples of 16"),
    ],
)
def test_triton_takes_multiples_of_16(name, options, message):
    with pytest.raises(UsageError, match=f"{message}; give one, or attn.impl=gather"):
        build(name, 200, **options).resolve(GPU, "bf16")
    assert "by gather" in build(name, 200, **options, impl="gather").resolve(GPU, "bf16")
    assert "by gather" in build(name, 200, **options).resolve(CPU, "fp32")


def configure(name: str, *fields: str) -> Any:
    return compose(RunConfig, REGISTRIES, ["task=listops", f"attn={name}", "recipe=demo", *fields]).config


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("local", ["window=0"], "attn.window=0 must be at least 1"),
        ("local", ["pattern=cubes"], "attn.pattern=cubes: write sliding or blocks$"),
        ("local", ["block=64"], "unknown.*block"),
        ("longformer", ["window=0"], "attn.window=0 must be at least 1"),
        ("longformer", ["globals=-1"], "attn.globals=-1 must be at least 0"),
        ("longformer", ["impl=sdpa"], "attn.impl=sdpa: write auto, triton or gather$"),
        ("bigbird", ["block=16x24"], "attn.block=16x24: one side must divide the other"),
        ("bigbird", ["window=4"], "attn.window=4 must be odd"),
        ("bigbird", ["window=0"], "attn.window=0 must be at least 1"),
        ("bigbird", ["globals=-1"], "attn.globals=-1 must be at least 0"),
        ("bigbird", ["random=-1"], "attn.random=-1 must be at least 0"),
        ("bigbird", ["seed=-1"], "attn.seed=-1 must be at least 0"),
        ("openai_sparse", ["pattern=local"], "attn.pattern=local: write fixed or strided$"),
        ("openai_sparse", ["block=no"], "attn.block=no is no block"),
        ("openai_sparse", ["stride=0"], "attn.stride=0 must be at least 1"),
        ("openai_sparse", ["stride=100"], "attn.stride=100 must be a multiple of 32, as attn.block=32"),
        ("openai_sparse", ["block=16x256"], "attn.stride=128 must be a multiple of 256, as attn.block=16x256"),
        ("openai_sparse", ["summary=0"], "attn.summary=0 must be at least 1"),
        ("openai_sparse", ["summary=20"], "attn.summary=20 must be a multiple of 32, as attn.block=32"),
        ("openai_sparse", ["summary=160"], "attn.summary=160 must be at most attn.stride=128"),
        ("openai_sparse", ["pattern=strided", "summary=32"], "attn.summary is an option of attn.pattern=fixed"),
    ],
)
def test_bad_values_are_refused_by_name(name, fields, message):
    with pytest.raises(UsageError, match=message) as caught:
        configure(name, *(f"attn.{field}" for field in fields))
    assert "\n" not in str(caught.value)


def test_options_survive_a_run_file():
    run = configure("bigbird", "attn.block=16x32", "attn.seed=7")
    assert run.attn.sides == (16, 32) and restore(RunConfig, REGISTRIES, run.to_saved_dict()) == run


def test_bigbird_of_a_checkpoint_is_the_one_that_was_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ("trainer.steps=2", "trainer.eval_every=2", "attn=bigbird", "attn.block=2", "attn.globals=0", "attn.random=1")
    result = lra.fit(*arguments(*few, "attn.seed=3"))
    module = lra.load(result["directory"])
    first, second = (module.get_submodule(f"model.encoder.blocks.{layer}.attention") for layer in range(2))
    assert isinstance(first, BlockSparseAttention) and isinstance(second, BlockSparseAttention)
    assert first.layout.key != second.layout.key
    assert score(f"init={result['directory']}")["test"] == result["test"]
    assert score(f"init={result['directory']}", "attn.seed=4")["test"] != result["test"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"window": 8, "pattern": "blocks"}, {"window_size": 8, "look_backward": 0, "look_forward": 0}),
        ({"window": 16}, {"window_size": 8, "look_backward": 1, "look_forward": 1, "exact_windowsize": True}),
    ],
)
def test_local_is_that_of_another_library(ours, theirs):
    library: Any = pytest.importorskip("local_attention", reason="pip install local-attention to compare with it")
    n = 45
    q, k, v = qkv(2 * n)
    out = build("local", n, **ours).eval()(q, k, v, make_batch((n, n), True, CPU))
    other = library.LocalAttention(**theirs, autopad=True, use_rotary_pos_emb=False)
    real = torch.ones(2, n, dtype=torch.bool)
    expected = other(*(x.unflatten(0, (2, n)).transpose(1, 2) for x in (q, k, v)), mask=real)
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(0, 1), atol=1e-5, rtol=1e-5)


def test_blocks_that_are_too_many_are_refused_before_they_are_made():
    with pytest.raises(UsageError, match="attn.window=2: 65536 tokens would be 32768 x 32768 blocks, choose larger"):
        build("local", 65536, window=2, pattern="blocks")
    assert build("local", 4096, window=2, pattern="sliding").layout.band == 1
