"""Block-sparse attentions in `lra bench attention`: checked under their layout, counted by it, compared with peers."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.pages import kernels
from lra.bench.attention import attention_notes, attention_tables, configure_attention, measure_attention
from lra.bench.cases import BenchmarkCase, make_batch
from lra.bench.check import check_dropout, check_small, check_timed, reference_head
from lra.bench.sparse import PEERS, block_mask, with_peers
from lra.config.registry import Registry
from lra.errors import UsageError
from lra.kernels.block_sparse import layouts
from lra.kernels.flash.layout import NONE, Layout
from lra.kernels.flash.reference import reference_attention
from lra.models.attention import ATTENTIONS, Capabilities
from lra.models.attention.base import AttentionSpec
from lra.models.attention.butterfly import ButterflyAttention

CPU = torch.device("cpu")
BUTTERFLY = "butterfly:block=16:impl=gather"
TINY = {"lengths": "128", "head_dims": "16", "dtypes": "fp32", "tokens": "256", "heads": "2"}


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def broken(monkeypatch):
    """Block-sparse attentions that are wrong, each in one way."""
    wrong = Registry("attention", "lra.models.attention", Capabilities)
    facts: Any = {"exact": False, "paper": "none"}

    @wrong.register("dense", **facts)
    class Dense(ButterflyAttention):
        """Sees everything; `long` only in sequences of the size that is timed."""

        least = 0

        def forward(self, q, k, v, batch):
            if batch.max_length <= self.least:
                return super().forward(q, k, v, batch)
            return reference_attention(q, k, v, start=batch.start, length=batch.length)

    @wrong.register("long", **facts)
    class Long(Dense):
        least = 150

    @wrong.register("keeps", **facts)
    class Keeps(ButterflyAttention):
        """Takes dropout and does not drop."""

        def dropout_seed(self, batch):
            return None

    real = ATTENTIONS.get
    monkeypatch.setattr(ATTENTIONS, "get", lambda name: wrong._classes.get(name) or real(name))


def records(*args: str) -> list[Any]:
    fields = TINY | dict(arg.split("=", 1) for arg in args)
    return measure_attention([f"{name}={value}" for name, value in fields.items()]).cells


def peer(name: str, n: int, **options: Any) -> Any:
    cls = PEERS.get(f"butterfly@{name}")
    return cls(cls.Config(**options), AttentionSpec(2, 16, n))


def known(cell: BenchmarkCase) -> Layout:
    layout = cell.build(CPU).layout
    assert layout is not None
    return layout


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Of `[B, N, H, D]`."""
    batch = make_batch((q.shape[1],) * len(q), True, CPU)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    return reference_attention(*rows, start=batch.start, length=batch.length, layout=layout).view(q.shape)


def test_it_is_checked_and_counted_by_what_its_layout_shows():
    dense, sparse = records(f"attns=flash,{BUTTERFLY}", "passes=forward")
    assert (dense.density, dense.block, dense.status) == (1.0, None, "ok")
    assert (sparse.density, sparse.block, sparse.status) == (0.5, "16x16", "ok")
    assert 0 < sparse.checked <= 1
    flops = 4 * 2 * 16 * sparse.squares
    assert sparse.tflops == pytest.approx(0.5 * flops / sparse.ms / 1e9, rel=2e-3)
    assert dense.tflops == pytest.approx(flops / dense.ms / 1e9, rel=2e-3)


@pytest.mark.parametrize("lengths", [(2048, 2048), (2048, 700, 0)])
@pytest.mark.parametrize("options", ["block=128", "block=16x256", "block=64:factors=3", "block=64:globals=8"])
def test_a_small_cell_is_sparse_and_right(options, lengths):
    cell = BenchmarkCase(f"butterfly:impl=gather:{options}", "fp32", 16, 0.0, lengths, 8)
    layout = known(cell)
    small = cell.small(layout)
    assert small.heads == 2 and max(small.lengths) < 1100 and 0.3 < small.density(layout) < 0.85
    assert known(small).density(small.lengths[0]) == layout.density(small.lengths[0])
    verdict = check_small(small, CPU)
    assert not verdict.wrong and 0 < (verdict.ratio or 0) <= 1


def test_ragged_batches_count_the_pairs_of_each_sequence():
    cell = BenchmarkCase(BUTTERFLY, "fp32", 16, 0.0, (40, 0, 128), 2)
    layout = known(cell)
    pairs = sum(int(layout.token_mask(torch.arange(n), torch.arange(n)).sum()) for n in cell.lengths)
    assert cell.density(layout) == pytest.approx(pairs / (40 * 40 + 128 * 128))


@pytest.mark.parametrize("name", ["dense", "long"])
def test_what_sees_other_keys_is_wrong(broken, name):
    (record,) = records(f"attns={name}:block=16", "passes=forward", "lengths=256")
    assert record.status == "WRONG" and " is off by " in record.reason and record.ms is None


def test_dropout_is_checked(broken):
    args = ("dropout=0.25", "passes=forward")
    assert [r.status for r in records(f"attns={BUTTERFLY}", *args)] == ["ok"]
    (record,) = records("attns=keeps:block=16:impl=gather", *args)
    assert record.status == "WRONG" and "dropout 0.25 makes ones 1.000" in record.reason
    assert not check_dropout(BenchmarkCase("butterfly:block=16:globals=3", "fp32", 16, 0.1, (136, 136), 2), CPU).wrong


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "layout",
    [
        layouts.butterfly(64, 8),
        layouts.butterfly(64, (4, 16), factors=1, globals=3),
        layouts.window(64, 16, band=5, causal=True),
        layouts.bigbird(64, 8, random=1, heads=2),
        layouts.strided(64, 8, stride=3) | layouts.window(64, 8, band=11),
        Layout(torch.tensor([[[False, True], [True, True]]]), (32, 32)),  # rows 0 to 31 see nothing of 32 tokens
    ],
    ids=["butterfly", "rectangles", "window", "heads", "union", "blind"],
)
@pytest.mark.parametrize("chunk", [7 * 50, 2**20])
def test_one_head_of_a_layout_is_the_reference(monkeypatch, layout, dropout, chunk):
    monkeypatch.setattr("lra.bench.check.SCORES_AT_ONCE", chunk)
    for n in (50, 32):
        batch = make_batch((5, n), False, CPU, seed=torch.tensor(99))
        q, k, v, do = (torch.randn(5 + n, 3, 16, dtype=torch.float64, requires_grad=True) for _ in range(4))
        options: Any = {"start": batch.start, "length": batch.length, "dropout": dropout, "seed": batch.seed}
        out = reference_attention(q, k, v, **options, layout=layout)
        expected = (out, *torch.autograd.grad(out, (q, k, v), do))
        q, k, v, do = (x[5:, 1].detach() for x in (q, k, v, do))
        actual = reference_head(q, k, v, do, dropout, batch.seed, 1, 1, torch.float64, layout)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e[5:, 1])


def test_a_long_sequence_is_checked_in_blocks():
    """Not in N x N: that would be 2^32 pairs here, of which one in thirty is seen."""
    n = 16384
    cell = BenchmarkCase("butterfly:impl=gather:block=64", "fp32", 16, 0.0, (n,), 1)
    inputs = [torch.randn(n, 1, 16) for _ in range(4)]
    verdict = check_timed(cell, inputs, make_batch(cell.lengths, True, CPU))
    assert not verdict.wrong and 0 < (verdict.ratio or 0) <= 1


def test_the_short_form_is_what_one_would_compare():
    assert with_peers("flash:impl=sdpa") == ("flash:impl=sdpa",) and with_peers("butterfly@flex") == ("butterfly@flex",)
    assert with_peers("butterfly") == ("butterfly", "flash", "butterfly@flex", "butterfly@fa4")
    assert configure_attention(["attn=butterfly:block=64:impl=gather:local=1"]).attns == (
        "butterfly:block=64:impl=gather:local=1", "flash", "butterfly@flex:block=64:local=1",
        "butterfly@fa4:block=64:local=1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    {
        ("attn=flash", "attns=flash"): "attn= does not go with attns=",
        ("attn=butterfly:blok=16",): "unknown field 'blok': did you mean 'block'",
        ("attn=butterly",): "unknown attention 'butterly': did you mean 'butterfly'",
        ("attns=butterfly@flx",): "unknown attention 'butterfly@flx': did you mean 'butterfly@flex'",
        ("attns=butterfly@flex:impl=gather",): "impl= is an option of butterfly's own kernels",
        ("attns=butterfly@fa4:deterministic=true",): "deterministic= is an option of butterfly's own kernels",
        ("attns=butterfly@fa4:mode=default",): "unknown field 'mode'",
        ("attn=butterfly:block=16x24",): "one side must divide the other",
    }.items(),
)
def test_bad_options_name_the_mend(args, message):
    with pytest.raises(UsageError, match=message):
        configure_attention(args)


def test_tables_show_density_and_the_time_beside_dense_attention():
    cells = records(f"attn={BUTTERFLY}", "lengths=128,256", "passes=forward")
    (title, header, rows) = next(iter(attention_tables(cells)))
    assert title == "forward: ms (TFLOP/s), density, time / (density x time of flash)"
    assert header[5:] == [BUTTERFLY, "flash", "butterfly@flex:block=16", "butterfly@fa4:block=16"]
    ours, flash = cells[0], cells[1]
    assert rows[0][5].endswith(f", 0.5, {ours.ms / (0.5 * flash.ms):.2f}") and "," not in rows[0][6]
    assert [row[7:] for row in rows] == [["", ""], ["", ""]] and len(attention_notes(cells)) == 2
    alone = next(iter(attention_tables([r for r in cells if r.block])))
    assert alone[0] == "forward: ms (TFLOP/s), density" and alone[2][0][5].endswith(", 0.5")


def test_peers_say_what_they_lack():
    assert "GPUs only" in records("attns=butterfly@flex", "dtypes=bf16")[0].reason
    assert "no dropout" in records("attns=butterfly@flex", "dropout=0.1")[0].reason
    gpu = torch.device("cuda")
    assert peer("flex", 512, block="64").resolve(gpu, "bf16") == "butterfly@flex"
    for options, message in (
        ({"block": "16x256"}, "blocks of multiples of 64, not 16x256"),
        ({"block": "64", "mode": "default"}, "blocks of multiples of 128, not 64"),
    ):
        with pytest.raises(UsageError, match=message):
            peer("flex", 512, **options).resolve(gpu, "bf16")
    for options in ({"block": "64"}, {"globals": 3}):
        with pytest.raises(UsageError, match="blocks of 128x128 without globals"):
            peer("fa4", 512, **options).resolve(gpu, "bf16")
    for name in ("flex", "fa4"):
        q = torch.zeros(8, 2, 16)
        with pytest.raises(UsageError, match="sequences of one length, no ragged batches"):
            peer(name, 5)(q, q, q, make_batch((5, 3), False, CPU))


@pytest.mark.parametrize(
    "options", [{}, {"factors": 1}, {"globals": 5}, {"local": 1}, {"block": "32x64", "globals": 70}], ids=str
)
@pytest.mark.parametrize("n", [256, 200])
def test_flex_has_the_same_layout(options, n):
    flex = peer("flex", 256, **({"block": "32"} | options))
    layout, (rows, columns) = flex.layout, flex.config.sides
    mask = block_mask(layout, n, CPU)
    shape = (-(-n // rows), -(-n // columns))
    visited = layout.kinds(rows, columns)[:, : shape[0], : shape[1]] != NONE
    assert torch.equal(mask.to_dense()[0].bool(), visited)
    assert layout.ruled or not bool(mask.kv_num_blocks.any())  # without rules each block is whole
    b, h, i, j = (x.flatten() for x in torch.meshgrid(*(torch.arange(s) for s in (1, 2, n, n)), indexing="ij"))
    seen = layout.token_mask(torch.arange(n), torch.arange(n)).expand(2, n, n)
    assert torch.equal(mask.mask_mod(b, h, i, j).view(2, n, n), seen)

    q, k, v = (torch.randn(2, n, 2, 16) for _ in range(3))
    torch.testing.assert_close(flex.dense(q, k, v), reference(q, k, v, layout), atol=1e-5, rtol=1e-5)


def test_flash_attention_4_is_given_the_blocks_that_are_seen(monkeypatch):
    """A stand-in for the package: it computes what the lists of the forward pass say."""
    with pytest.raises(UsageError, match=r"needs flash_attn\.cute"):
        peer("fa4", 600).resolve(torch.device("cuda"), "bf16")
    package, sparsity = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.block_sparsity")

    def old(q, k, v):
        raise AssertionError

    def flash_attn_func(q, k, v, block_sparse_tensors, block_sparse_tensors_bwd):
        blocks, by_key = (
            torch.zeros(5, 5, dtype=torch.bool).scatter(1, x.idx[0, 0].long(), torch.arange(5) < x.cnt[0, 0][:, None])
            for x in (block_sparse_tensors, block_sparse_tensors_bwd)
        )
        assert torch.equal(blocks, by_key.T) and not bool(blocks.all())
        return reference(q, k, v, Layout(blocks[None], (128, 128))), None

    def lists(partial, _, cnt, idx, *, block_size):
        assert not bool(partial.any()) and block_size == (128, 128)
        assert {cnt.dtype, idx.dtype} == {torch.int32} and cnt.shape == (1, 1, 5) and idx.shape == (1, 1, 5, 5)
        return SimpleNamespace(cnt=cnt, idx=idx)

    vars(package).update(flash_attn_func=old, __path__=[])
    vars(sparsity)["BlockSparseTensorsTorch"] = lists
    for module in (ModuleType("flash_attn"), package, sparsity):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    attention = peer("fa4", 600)
    with pytest.raises(UsageError, match="a block-sparse backward"):
        attention.resolve(torch.device("cuda"), "bf16")
    vars(package)["flash_attn_func"] = flash_attn_func
    assert attention.resolve(torch.device("cuda"), "bf16") == "butterfly@fa4"
    q, k, v = (torch.randn(1, 600, 2, 16) for _ in range(3))
    torch.testing.assert_close(attention.dense(q, k, v), reference(q, k, v, attention.layout))


def test_the_page_of_kernels_has_a_table_of_them(tmp_path):
    assert kernels.sparse(tmp_path) == ""
    result = measure_attention(
        [f"{k}={v}" for k, v in (TINY | {"attn": BUTTERFLY, "dropout": "0,0.1"}).items()]
    ).saved()
    flex = [dict(r) for r in result["cells"] if r["attention"] == BUTTERFLY and not r["dropout"]]
    for record in flex:
        record.update(attention="butterfly@flex:block=16", ms=7.0)
    result["cells"] += flex
    folder = tmp_path / "results/attention/h100"
    folder.mkdir(parents=True)
    (folder / "butterfly-x.json").write_text(json.dumps(result))
    header, _, plain, dropped, *_ = (line.split(" | ") for line in kernels.sparse(tmp_path).splitlines())
    assert header[1:5] == ["N", "block", "density", "dropout"]
    assert plain[1:5] == ["128", "16x16 `impl=gather`", "0.5", "0"] and plain[7] == "7.000 / 7.000"
    ours, flash = result["cells"][0]["ms"], next(r for r in result["cells"] if r["attention"] == "flash")["ms"]
    assert plain[5].startswith(f"{ours:.3f} / ") and plain[6].startswith(f"{flash:.3f} / ")
    assert plain[8].startswith(f"{ours / (0.5 * flash):.2f} / ")
    own, dense = (
        sum(
            cell["ms"]
            for cell in result["cells"]
            if (cell["attention"], cell["dropout"]) == (name, 0) and cell["pass"] in ("forward", "backward")
        )
        for name in (BUTTERFLY, "flash")
    )
    assert plain[9].startswith(f"{own / (0.5 * dense):.2f}")
    alone = result | {"cells": [cell for cell in result["cells"] if cell["pass"] == "forward"]}
    (folder / "butterfly-x.json").write_text(json.dumps(alone))
    *_, ratio, both = kernels.sparse(tmp_path).splitlines()[2].split(" | ")
    assert ratio.startswith(f"{ours / (0.5 * flash):.2f}") and both.strip(" |") == ""
    assert dropped[4] == "0.1" and dropped[7] == "" and dropped[8]
    assert "butterfly" not in kernels.speed(tmp_path)
