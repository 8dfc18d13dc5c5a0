"""Options of `lra bench attention`: what is measured, and what is refused in one line."""

from __future__ import annotations

import pytest
import torch

from lra.bench.attention import configure_attention, measure_cases
from lra.errors import UsageError


def test_every_combination_is_a_cell_and_attentions_vary_fastest():
    options = configure_attention(
        ["attns=flash,standard", "lengths=128,256", "dropout=0,0.1", "head_dims=32", "tokens=512"]
    )
    cells = [(cell.attention, cell.dropout, cell.lengths) for cell in options.cases()]
    assert len(cells) == 8
    assert cells[:3] == [("flash", 0.0, (128,) * 4), ("standard", 0.0, (128,) * 4), ("flash", 0.0, (256,) * 2)]


@pytest.mark.parametrize(
    ("args", "message"),
    {
        ("lenghts=1",): "unknown field 'lenghts': did you mean 'lengths'",
        ("attns=flahs",): "unknown attention 'flahs': did you mean 'flash'",
        ("attns=flash:imlp=sdpa",): "attns=flash: unknown field 'imlp': did you mean 'impl'",
        ("attns=flash:impl=cuda",): "attns=flash: impl=cuda: write auto, triton or sdpa",
        ("attns=standard:impl=sdpa",): "attns=standard: unknown field 'impl': it has none",
        ("attns=flash:impl",): "attns=flash: 'impl' is not of the form field=value",
        ("lengths=0",): "lengths= must be at least 1",
        ("lengths=16,1",): "lengths=1: the softmax over one token has no gradients to check, use at least 2",
        ("batch=0",): "batch= must be at least 1",
        ("batch=99999999999999",): "^batch=99999999999999 is too large: use at most 1048576",
        ("tokens=99999999999999",): "^tokens=99999999999999 is too large: use at most 16777216",
        ("heads=99999999999999999999",): "^heads=99999999999999999999 is too large: use at most 9223372036854775807",
        ("lengths=16,9999999999",): "^lengths=9999999999 is too large: use at most 1048576",
        ("attns=s4d",): "^s4d is a mixer, .*: use lra bench step task=… attn=s4d$",
        ("attn=gla",): "^gla is a mixer",
        ("head_dims=16,9999999999",): "^head_dims=9999999999 is too large: use at most 16384",
        ("lengths=1K",): "lengths=1K: write \\[integer,…\\]",
        ("dropout=1",): "dropout= must be at least 0 and below 1",
        ("dropout=nan",): "dropout=nan: write a finite number",
        ("dropout=0.1,0.001",): "dropout=0.001 is 0 in steps of 1/256: use 0, or at least 0.002",
        ("dropout=0.999",): "dropout=0.999 is 1 in steps of 1/256: use at most 0.998",
        ("dtypes=bf16,int8",): "dtypes=int8 is unknown: choose from bf16, fp16, fp32",
        ("passes=sideways",): "passes=sideways is unknown: choose from forward, backward, both",
        ("table=8",): "table=8: write 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21 or null",
        ("ragged=imdb", "lengths=128"): "lengths= does not go with ragged=imdb",
        ("ragged=imdb", "batch=1000"): "batch=1000: ragged=imdb has 128 lengths",
        ("batch=4", "tokens=64"): "tokens= does not go with batch=",
        ("table=18", "tokens=64"): "tokens= does not go with table=18: give batch=",
        ("dtypes=fp32,bf16,fp32",): "dtypes=fp32,bf16,fp32 names one twice",
        ("lengths=64,64",): "lengths=64,64 names one twice",
        ("heads=2", "heads=4"): "heads= is given twice",
        ("heads",): "'heads' is not of the form field=value",
    }.items(),
)
def test_bad_options_name_the_mend(args, message):
    with pytest.raises(UsageError, match=message):
        configure_attention(args)


def test_tables_are_other_defaults():
    seven, twenty_one = configure_attention(["table=7"]), configure_attention(["table=21", "lengths=128"])
    assert (seven.lengths, seven.batch, seven.heads, seven.dropout) == ((128, 256, 512), 64, 16, (0.1,))
    assert (twenty_one.lengths, twenty_one.batch, twenty_one.heads, twenty_one.head_dims) == ((128,), 16, 8, (64,))
    assert configure_attention(["table=21"]).lengths[-1] == 65536


def test_the_smallest_and_largest_that_are_taken():
    options = configure_attention(["dropout=0,0.002,0.998", "lengths=2,1048576", "tokens=16777216", "batch=null"])
    assert options.dropout == (0.0, 0.002, 0.998) and options.batch is None


@pytest.mark.parametrize("ragged", ["false", "mask"])
def test_two_tokens_can_be_checked(ragged):
    options = configure_attention(
        ["attns=standard", "lengths=2", "batch=1", "dtypes=fp32", "head_dims=16", f"ragged={ragged}"]
    )
    [records] = measure_cases(options, torch.device("cpu"))
    assert {record.status for record in records} == {"ok"}
