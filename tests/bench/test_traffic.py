"""`lra bench io`: the formulas are what a program that counts every access counts."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from typer.testing import CliRunner

from lra.bench import traffic
from lra.bench.traffic import (
    Traffic,
    flash_traffic,
    kernel_traffic,
    measure_traffic,
    on_chip_elements,
    read_kernels,
    read_traffic,
    standard_traffic,
    traffic_table,
)
from lra.cli import app
from lra.errors import UsageError

NCU = """==PROF== Connected to process 1
some line of the program
==PROF== Disconnected from process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","forward_kernel","dram__bytes_read.sum","byte","1,024"
"0","1","forward_kernel","dram__bytes_write.sum","byte","512"
"1","1","other_kernel","dram__bytes_read.sum","byte","76"
"1","1","other_kernel","dram__bytes_write.sum","byte","0"
"""


class Hbm:
    """Tensors in HBM: every element that is loaded or stored is counted in bytes."""

    def __init__(self, size: int):
        self.size, self.read, self.write = size, 0, 0

    def load(self, *blocks: torch.Tensor) -> list[torch.Tensor]:
        self.read += sum(self.bytes(block) for block in blocks)
        return [block.clone() for block in blocks]

    def store(self, place: torch.Tensor, value: torch.Tensor) -> None:
        self.write += self.bytes(place)
        place.copy_(value)

    def bytes(self, block: torch.Tensor) -> int:
        return block.numel() * (self.size if block.dim() == 2 else traffic.STATISTIC_BYTES)  # a vector is a statistic


def problem(n: int, d: int):
    q, k, v = torch.randn(3, n, d, dtype=torch.float64)
    return q, k, v, (q @ k.T).softmax(-1) @ v


@pytest.mark.parametrize(("n", "d"), [(16, 4), (13, 8)])
def test_standard_attention_moves_what_the_formula_says(n, d):
    hbm, (q, k, v, expected) = Hbm(2), problem(n, d)
    s, p, o = torch.empty(n, n).double(), torch.empty(n, n).double(), torch.empty(n, d).double()
    q_, k_ = hbm.load(q, k)
    hbm.store(s, q_ @ k_.T)
    (s_,) = hbm.load(s)
    hbm.store(p, s_.softmax(-1))
    p_, v_ = hbm.load(p, v)
    hbm.store(o, p_ @ v_)
    torch.testing.assert_close(o, expected)
    assert standard_traffic(n, d, 2) == Traffic(hbm.read, hbm.write)


@pytest.mark.parametrize(("n", "d", "columns", "rows"), [(16, 4, 4, 4), (13, 8, 5, 3), (12, 4, 64, 4)])
def test_algorithm_1_moves_what_the_formula_says(n, d, columns, rows):
    hbm, (q, k, v, expected) = Hbm(2), problem(n, d)
    o, total, top = torch.empty(n, d).double(), torch.empty(n).double(), torch.empty(n).double()
    hbm.store(o, torch.zeros_like(o))
    hbm.store(total, torch.zeros_like(total))
    hbm.store(top, torch.full_like(top, float("-inf")))
    for k_block, v_block in zip(k.split(columns), v.split(columns), strict=True):
        k_, v_ = hbm.load(k_block, v_block)
        for i in torch.arange(n).split(rows):
            place = slice(int(i[0]), int(i[-1]) + 1)
            q_, o_, total_, top_ = hbm.load(q[place], o[place], total[place], top[place])
            s = q_ @ k_.T
            new_top = torch.maximum(top_, s.amax(1))
            p, kept = (s - new_top[:, None]).exp(), (top_ - new_top).exp() * total_
            new_total = kept + p.sum(1)
            hbm.store(o[place], (kept[:, None] * o_ + p @ v_) / new_total[:, None])
            hbm.store(total[place], new_total)
            hbm.store(top[place], new_top)
    torch.testing.assert_close(o, expected)
    assert flash_traffic(n, d, 2, columns) == Traffic(hbm.read, hbm.write)


@pytest.mark.parametrize(("n", "d", "columns", "rows"), [(16, 4, 4, 4), (13, 8, 5, 3), (12, 4, 4, 64)])
def test_our_order_moves_what_the_formula_says(n, d, columns, rows):
    hbm, (q, k, v, expected) = Hbm(4), problem(n, d)
    o, lse = torch.empty(n, d).double(), torch.empty(2, n).double()
    for i in torch.arange(n).split(rows):
        place = slice(int(i[0]), int(i[-1]) + 1)
        (q_,) = hbm.load(q[place])
        blocks = [hbm.load(*pair) for pair in zip(k.split(columns), v.split(columns), strict=True)]
        s = torch.cat([q_ @ k_.T for k_, _ in blocks], 1)
        hbm.store(o[place], s.softmax(-1) @ torch.cat([v_ for _, v_ in blocks]))
        hbm.store(lse[0, place], s.amax(1))
        hbm.store(lse[1, place], (s - s.amax(1, keepdim=True)).logsumexp(1))
    torch.testing.assert_close(o, expected)
    assert kernel_traffic(n, d, 4, rows) == Traffic(hbm.read, hbm.write)


def test_larger_blocks_move_less_and_theorem_2_is_the_leading_term():
    n, d = 2**16, 64
    counts = [flash_traffic(n, d, 2, columns) for columns in (64, 128, 256)]
    assert sorted(counts, reverse=True) == counts
    # Q and O are read, O is written: three times N d for each of the N / B_c = 4 N d / M passes, and statistics
    theorem = 2 * n * n * d * d / on_chip_elements(64, d)
    assert 12 < sum(counts[0]) / theorem < 14
    assert sum(standard_traffic(n, d, 2)) / (2 * n * n) == pytest.approx(4, rel=0.01)


def test_rows_table_and_json(tmp_path):
    out = tmp_path / "new" / "io.json"
    args = ["length=128", "head_dim=16", "heads=2", "batch=3", "blocks=16,64", "counters=false", f"out={out}"]
    result = measure_traffic(args)
    assert json.loads(out.read_text()) == json.loads(json.dumps(asdict(result)))
    assert [row.algorithm for row in result.rows] == [
        traffic.STANDARD_ALGORITHM,
        *[traffic.ALGORITHM_1] * 2,
        *[traffic.KERNEL_ORDER] * 2,
    ]
    row = result.rows[2]
    assert (row.block_columns, row.block_rows, row.on_chip_elements) == (64, 16, 4096)
    assert (row.read, row.write) == tuple(6 * x for x in flash_traffic(128, 16, 2, 64))
    assert row.measured_read is None and result.notes == ["not measured: counters=false"]
    _, header, rows = traffic_table(result)
    assert len(rows) == 5 and all(len(cells) == len(header) and cells[-1] == "" for cells in rows)


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("lenght=1", "unknown field 'lenght': did you mean 'length'"),
        ("blocks=0", "blocks= must be at least 1"),
        ("blocks=16,64,16", "blocks=16,64,16 names one twice"),
        ("dtype=int8", "dtype=int8: write bf16, fp16 or fp32"),
        ("counters=maybe", "counters=maybe: write auto, true or false"),
    ],
)
def test_bad_options_name_the_mend(arg, message):
    with pytest.raises(UsageError, match=message):
        measure_traffic([arg])


def test_counters_that_are_asked_for_and_missing_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="counters=true: PyTorch finds no GPU"):
        measure_traffic(["counters=true"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(traffic.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="counters=true: ncu .* is not on PATH"):
        measure_traffic(["counters=true"])


def test_each_kernel_has_its_counters():
    assert read_kernels(NCU + "a line of the program\n") == [
        ("forward_kernel", {"dram__bytes_read.sum": 1024, "dram__bytes_write.sum": 512}),
        ("other_kernel", {"dram__bytes_read.sum": 76, "dram__bytes_write.sum": 0}),
    ]


def test_a_kernel_that_runs_twice_has_its_counters_twice():
    twice = read_kernels(NCU.replace("other_kernel", "forward_kernel"))
    assert [(name, counted["dram__bytes_read.sum"]) for name, counted in twice] == [
        ("forward_kernel", 1024), ("forward_kernel", 76)
    ]  # fmt: skip


def test_counters_are_summed_over_kernels():
    assert read_traffic(NCU) == {"dram__bytes_read.sum": 1100, "dram__bytes_write.sum": 512}
    assert read_traffic("==ERROR== ERR_NVGPUCTRPERM\n") == {}


@pytest.mark.parametrize(
    ("output", "code", "measured", "notes"),
    [
        (NCU, 0, 1100, []),
        ("==ERROR== no permission\n", 1, None, ["B_r=64 not measured: ==ERROR== no permission"]),
        ("", 0, None, ["B_r=64 not measured: no counter values"]),
    ],
)  # fmt: skip
def test_what_ncu_counts_stands_beside_the_formula(monkeypatch, output, code, measured, notes):
    calls = []

    def run(command, **_):
        calls.append(command)
        return traffic.subprocess.CompletedProcess(command, code, output, "")

    monkeypatch.setattr(traffic, "why_no_counters", lambda: None)
    monkeypatch.setattr(traffic.subprocess, "run", run)
    monkeypatch.setattr(traffic.environment, "describe", dict)
    result = measure_traffic(["blocks=64"])
    assert calls[0][0] == "ncu" and calls[0][-6:] == ["1024", "64", "16", "64", "bf16", "64"]
    assert [row.measured_read for row in result.rows] == [None, None, measured] and result.notes == notes


def test_the_command_prints_the_table():
    done = CliRunner().invoke(app, ["bench", "io", "counters=false", "blocks=64"])
    assert done.exit_code == 0, done.output
    assert "Algorithm 1" in done.output and "counters=false" in done.output
