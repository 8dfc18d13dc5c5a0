"""The tables of the FlashAttention paper as presets of `lra bench attention`: settings, equal compression, lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from lra.bench.attention import attention_notes, attention_tables, configure_attention, measure_attention
from lra.bench.cases import BenchmarkCase, call_attention, make_batch
from lra.bench.presets import RUNTIME_TABLES, masked_lengths, with_budget
from lra.cli import app
from lra.models.attention import ATTENTIONS

CPU = torch.device("cpu")
TINY = ["lengths=128", "batch=2", "heads=2", "head_dims=16"]
CATALOGUE = ATTENTIONS.catalogue()
ALL = tuple(name for name, entry in CATALOGUE.items() if not ATTENTIONS.facts_of(entry).mixes)
HERE = [name for name in ALL if not CATALOGUE[name].missing]
BUILT = [name for name in HERE if not ATTENTIONS.facts_of(CATALOGUE[name]).needs_gpu]
PATTERNS = ("bigbird", "butterfly", "local", "longformer", "openai_sparse")


pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("number", range(9, 21))
def test_a_table_of_runtime_is_one_pass_in_one_setting(number):
    options = configure_attention([f"table={number}"])
    assert options.passes == (("forward", "backward", "both")[number % 3],)
    assert options.dropout == ((0.1,) if number in (9, 10, 11, 15, 16, 17) else (0.0,))
    assert options.ragged == ("mask" if number < 15 else "false")
    assert options.lengths == tuple(2**i for i in range(7, 17)) and options.head_dims == (64,)
    assert (options.batch, options.heads, options.dtypes) == (16, 8, ("bf16",))
    assert options.attns == ALL
    cells = [cell for cell in options.cases() if cell.attention.startswith("linformer")]
    assert [cell.attention for cell in cells[:5]] == [f"linformer:k={k}" for k in (16, 32, 64, 128, 256)]
    assert {cell.attention for cell in cells[5:]} == {"linformer:k=256"}


def test_the_other_tables():
    seven, memory = configure_attention(["table=7"]), configure_attention(["table=21"])
    assert seven.attns == ("flash",) and [cell.attention for cell in seven.cases()] == ["flash"] * 3
    assert memory.attns == ALL and memory.passes == ("forward", "both") and memory.ragged == "false"
    assert any(cell.attention == "linformer:k=16" for cell in memory.cases())


def test_what_the_user_names_keeps_its_fields_and_its_name():
    options = configure_attention(["table=11", "lengths=256", "attns=linformer,linformer:k=5,flash"])
    facts = [options.facts(cell) for cell in options.cases()]
    assert [(f["attention"], f["options"]) for f in facts] == [
        ("linformer", "k=32"), ("linformer:k=5", ""), ("flash", "")
    ]  # fmt: skip
    assert {f["ragged"] for f in facts} == {"mask"}
    assert with_budget("butterfly@flex", 512) == "butterfly@flex:block=32:factors=1"
    assert with_budget("none_of_these", 512) == "none_of_these"
    without = configure_attention(["attns=linformer", "lengths=256"])
    assert [without.facts(cell)["options"] for cell in without.cases() if cell.dropout == 0][:1] == [""]


@pytest.mark.parametrize("name", BUILT)
def test_what_is_as_cheap_as_16_keys_runs(name):
    cell = BenchmarkCase(with_budget(name, 128), "fp32", 16, 0.0, (128, 111), 2, span=128)
    attention = cell.build(CPU)
    q, k, v = (torch.randn(239, 2, 16, requires_grad=True) for _ in range(3))
    out = call_attention(attention, q, k, v, make_batch(cell.lengths, False, CPU), False)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v), materialize_grads=True)
    assert out.shape == q.shape and all(bool(x.isfinite().all()) for x in (out, *grads))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("n", [128, 256, 512, 1024, 2048, 8192])
def test_patterns_see_about_the_keys_of_their_budget(name, n):
    """Of blocks of 16 tokens at least there are two or three in a row, however few keys are wanted."""
    keys = min(256, n // 8)
    attention = BenchmarkCase(with_budget(name, n), "bf16", 64, 0.0, (n,), 8).build(CPU)
    assert attention.resolve(torch.device("cuda"), "bf16")  # Triton takes its blocks
    assert attention.layout is not None
    per_query = attention.layout.density(n) * n
    segment = max(64, keys)
    ends = n // segment * max(16, keys // 8)  # they grow with n
    most = {"bigbird": max(64, 1.25 * keys), "butterfly": max(32, keys), "openai_sparse": segment + ends}
    assert keys / 2 <= per_query <= most.get(name, 1.1 * keys + 2)


def test_the_longest_sequences_have_a_layout():
    for name in ("butterfly", "local", "longformer"):
        layout = BenchmarkCase(with_budget(name, 65536), "bf16", 64, 0.0, (65536,), 8).build(CPU).layout
        assert layout is not None and 0.003 < layout.density(65536) < 0.0045


def test_a_padding_mask_hides_up_to_20_tokens():
    lengths = masked_lengths(1024, 200)
    assert len(lengths) == 200 and {1024 - n for n in lengths} == set(range(21))
    assert (
        masked_lengths(1024, 200) == lengths != masked_lengths(2048, 200)[:200]
        and masked_lengths(1024, 16) != lengths[:16]
    )
    assert set(masked_lengths(5, 200)) == {2, 3, 4, 5}


def test_one_table_is_printed_with_what_it_left_out():
    result = measure_attention([*TINY, "table=11", "attns=flash,linformer,cudnn"])
    records = result.cells
    assert [r.status for r in records] == ["ok", "ok", "unsupported"]
    assert [(r.attention, r.options) for r in records[:2]] == [("flash", ""), ("linformer", "k=16")]
    ((title, header, rows),) = attention_tables(records, "11")
    assert title == "Table 11, both: ms" and header[5:] == ["flash", "linformer"]
    assert rows == [["bf16", "16", "0.1", "128", "2", f"{records[0].ms:g}", f"{records[1].ms:g}"]]
    assert len(attention_notes(records)) == 1
    memory = [replace(record, memory_mb=3.0, pass_name="both") for record in records[:1]]
    assert len(list(attention_tables(memory, "11"))) == 1 and list(attention_tables(memory, "21"))[-1][2][0][-1] == "3"
    host = [replace(record, host_ms=0.25, pass_name="forward") for record in records[:1]]
    title, _, rows = list(attention_tables([*host, replace(host[0], length=7, host_ms=None)], "21"))[-1]
    assert title.endswith("forward: ms of the host on an idle GPU") and [row[-1] for row in rows] == ["0.25", ""]
    assert set(RUNTIME_TABLES) == {str(n) for n in range(9, 21)}


def test_the_command_prints_the_table():
    done = CliRunner().invoke(app, ["bench", "attention", *TINY, "table=18", "attns=flash,linear"])
    assert done.exit_code == 0, done.output
    assert "Table 18, forward: ms" in done.output and "TFLOP" not in done.output.partition("Table 18")[2]
