"""`lra bench attention` on the CPU: checks, records, tables, plots. Times are not looked at."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, ClassVar

import matplotlib
import pytest
import torch
from typer.testing import CliRunner

from lra.bench import attention, plots, timing
from lra.bench.attention import attention_notes, attention_tables, measure_attention
from lra.bench.cases import BenchmarkCase, call_attention, make_batch
from lra.bench.check import check_dropout, check_small, check_timed, reference_head
from lra.bench.output import lock_output
from lra.bench.presets import IMDB_LENGTHS, masked_lengths
from lra.cli import app
from lra.config.registry import Registry
from lra.errors import UsageError
from lra.kernels.flash.reference import reference_attention
from lra.models.attention import ATTENTIONS, Capabilities
from lra.models.attention.base import Attention
from lra.models.attention.standard import StandardAttention
from tests import drawings

CPU = torch.device("cpu")
TINY = {"lengths": "16,32", "head_dims": "16", "dtypes": "fp32", "tokens": "64", "heads": "2"}


pytestmark = pytest.mark.usefixtures("quick")


def test_a_time_counts_once_launching_fits_in_the_pause(monkeypatch):
    """Launching takes 3 million cycles here, and 10 ms longer where the GPU has to wait."""

    def clocked(step, given, flush, pause):
        waited = pause < 3_000_000
        return step(given), lambda: 15.0 if waited else 5.0, waited

    monkeypatch.setattr(timing, "_clocked", clocked)
    pauses = {"forward": timing.FIRST_PAUSE}
    assert timing._repeat(1, {"forward": lambda x: x}, 3, None, pauses) == {"forward": 5.0}
    assert pauses == {"forward": 2 * timing.FIRST_PAUSE}
    pauses = {"forward": timing.LONGEST_PAUSE}
    monkeypatch.setattr(timing, "_clocked", lambda step, given, flush, pause: (given, lambda: 15.0, True))
    assert timing._repeat(1, {"forward": lambda x: x}, 3, None, pauses) == {"forward": 15.0}  # some always wait


def test_a_time_is_the_median(monkeypatch):
    spent = iter((1.0, 9.0, 2.0))

    def clocked(step, given, flush, pause):
        milliseconds = next(spent)
        return given, lambda: milliseconds, False

    monkeypatch.setattr(timing, "_clocked", clocked)
    pauses = {"forward": timing.FIRST_PAUSE}
    assert timing._repeat(1, {"forward": lambda x: x}, 3, None, pauses) == {"forward": 2.0}


def test_the_host_waits_before_each_step_and_not_within(monkeypatch):
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))

    def step(given: int) -> int:
        done.append(given)
        return given + 1

    times = timing._host_times(1, {"forward": step, "backward": step}, 2)
    assert done == 2 * ["wait", 1, "wait", 2] + ["wait"]
    assert times.keys() == {"forward", "backward"} and all(0 < ms < 1000 for ms in times.values())


@pytest.mark.parametrize("peaks", [(30.0, 50.0), (50.0, 30.0)])
def test_both_passes_take_their_sums_and_the_larger_peak(peaks):
    times = {
        name: timing.PassTime(2.0, 7, peak, 0.5) for name, peak in zip(("forward", "backward"), peaks, strict=True)
    }
    assert attention._pass(times, "both") == timing.PassTime(4.0, 7, 50.0, 1.0)


@pytest.fixture
def broken(monkeypatch):
    """Attentions that are wrong, each in one way, registered beside the real ones for one test."""
    shapes = Registry("attention", "lra.models.attention", Capabilities)
    facts: Any = {"exact": True, "ragged": False, "paper": "none"}

    @shapes.register("scaled", **facts)
    class Scaled(StandardAttention):
        def forward(self, q, k, v, batch):
            return super().forward(q, k, v, batch) * 1.01

    @shapes.register("gradient", **facts)
    class Gradient(StandardAttention):
        def forward(self, q, k, v, batch):
            return super().forward(q, k.detach() * 0.9 + k * 0.1, v, batch)

    @shapes.register("long", **facts)
    class Long(StandardAttention):
        """Right for a few hundred rows, and for the first sequence of more."""

        def forward(self, q, k, v, batch):
            out = super().forward(q, k, v, batch)
            return torch.cat((out[:256], out[256:] * 1.5)) if batch.max_length > 200 else out

    @shapes.register("keeps", **facts)
    class Keeps(Attention):
        """Takes dropout and does not drop."""

        def forward(self, q, k, v, batch):
            return reference_attention(q, k, v, start=batch.start, length=batch.length)

    @shapes.register("approximate", **(facts | {"exact": False}))
    class Approximate(Attention):
        gradients: ClassVar[list[torch.Tensor]] = []

        def __init__(self, *args):
            super().__init__(*args)
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.weight.register_hook(self.gradients.append)

        def forward(self, q, k, v, batch):
            return (q + k + v) * self.weight

    @shapes.register("infinite", **(facts | {"exact": False}))
    class Infinite(Attention):
        def forward(self, q, k, v, batch):
            return (q + k + v) / 0

    @shapes.register("crashes", **facts)
    class Crashes(Attention):
        def forward(self, q, k, v, batch):
            raise RuntimeError("no such instruction\nat line 3")

    @shapes.register("backward_too_large", **facts)
    class BackwardTooLarge(StandardAttention):
        def forward(self, q, k, v, batch):
            out = super().forward(q, k, v, batch)
            if batch.max_length == 32 and out.requires_grad:
                out.register_hook(self.fail)
            return out

        def fail(self, grad):
            return torch.empty(1 << 60, dtype=torch.uint8)

    real = ATTENTIONS.get
    monkeypatch.setattr(ATTENTIONS, "get", lambda name: shapes._classes.get(name) or real(name))


def tiny(*args: str) -> list[str]:
    """The arguments, over those of a tiny problem."""
    return [f"{name}={value}" for name, value in (TINY | dict(arg.split("=", 1) for arg in args)).items()]


def records(*args: str) -> list[Any]:
    return measure_attention(tiny(*args)).cells


def test_records_tables_and_json(tmp_path):
    lines: list[str] = []
    out, folder = tmp_path / "new" / "a.json", tmp_path / "plots"
    args = tiny("attns=flash,sdpa,standard,cudnn", f"out={out}", f"plots={folder}")
    result: Any = measure_attention(args, progress=lines.append)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result.saved()))
    assert result.environment["versions"]["torch"] in (torch.__version__, torch.__version__.split("+")[0])
    assert len(lines) == 8 and len(result.cells) == 24
    by_name = {(r.attention, r.length, r.pass_name): r for r in result.cells}
    record = by_name["flash", 32, "both"]
    assert record.status == "ok" and 0 < record.checked <= 1 and record.memory_mb is record.host_ms is None
    assert (record.batch, record.tokens, record.squares) == (2, 64, 2 * 32 * 32)
    assert record.tflops == pytest.approx(3.5 * 4 * 2 * 16 * record.squares / record.ms / 1e9, rel=2e-3)
    assert by_name["cudnn", 16, "forward"].status == "unsupported" and not by_name["cudnn", 16, "forward"].ms

    shown = list(attention_tables(result.cells))
    assert [title for title, _, _ in shown] == [f"{name}: ms (TFLOP/s)" for name in ("forward", "backward", "both")]
    _, header, rows = shown[0]
    assert header == ["dtype", "d", "dropout", "N", "batch", "flash", "sdpa", "standard", "cudnn"]
    assert [row[:5] for row in rows] == [["fp32", "16", "0.0", "16", "4"], ["fp32", "16", "0.0", "32", "2"]]
    assert all(row[8] == "" and "(" in row[5] for row in rows)
    assert (
        len(attention_notes(result.cells)) == 1 and "cudnn: unsupported: attn=cudnn" in attention_notes(result.cells)[0]
    )

    files = sorted(path.name for path in folder.iterdir())  # no memory on a CPU
    assert files == [f"runtime-{name}-fp32-d16-p0.svg" for name in ("backward", "both", "forward")]
    for file in files:
        drawn = drawings.lines((folder / file).read_text())
        assert {name: len(line.points) for name, line in drawn.items()} == {"flash": 2, "sdpa": 2, "standard": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [("out=file/a.json", r"out=file/a.json can't be written \(.*\): name another file"),
     ("out=.", r"out=\. can't be written \(Is a directory\): name another file"),
     ("plots=file", r"plots=file can't be a folder \(.*\): name another")],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_before_it_is_measured(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attention, "measure_cases", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=message):
        measure_attention([given])


def test_a_file_is_replaced_by_the_first_record_and_has_one_writer(tmp_path, monkeypatch):
    out = tmp_path / "a.json"
    out.write_text("measured before")
    monkeypatch.setattr(attention, "measure_cases", lambda *_: pytest.fail("measured"))
    with lock_output(out), pytest.raises(UsageError, match="another process measures for .*a.json: wait for it"):
        measure_attention([f"out={out}"])

    def stopped(*_):
        assert out.read_text() == "measured before"
        raise KeyboardInterrupt

    monkeypatch.setattr(attention, "measure_cases", stopped)
    with pytest.raises(KeyboardInterrupt):
        measure_attention([f"out={out}"])
    assert out.read_text() == "measured before" and list(tmp_path.iterdir()) == [out]


def test_options_of_an_attention_are_part_of_its_name():
    (record,) = records("attns=flash:impl=sdpa", "lengths=16", "passes=forward")
    assert (record.attention, record.status) == ("flash:impl=sdpa", "ok")


def test_dropout_is_checked_and_timed():
    assert {r.status for r in records("attns=flash,sdpa,standard", "dropout=0.25", "lengths=16")} == {"ok"}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precisions_are_checked_in_their_own_budget(dtype):
    assert {r.status for r in records("attns=standard,sdpa", f"dtypes={dtype}", "lengths=16")} == {"ok"}


def test_ragged_batches_have_real_lengths(monkeypatch):
    assert len(IMDB_LENGTHS) == 128 and max(IMDB_LENGTHS) == 4096 and sum(IMDB_LENGTHS[:32]) == 47195
    monkeypatch.setattr(attention, "IMDB_LENGTHS", (7, 0, 40))
    args = ["attns=flash,sdpa,standard", "head_dims=16", "dtypes=fp32", "heads=2", "ragged=imdb", "batch=3"]
    assert {cell.lengths for cell in attention.configure_attention(args).cases()} == {(40, 7, 0)}  # the longest first
    cells = measure_attention(args).cells
    assert {(r.status, r.tokens, r.squares, r.length) for r in cells} == {("ok", 47, 40 * 40 + 7 * 7, 40)}


@pytest.mark.parametrize("name", ["scaled", "gradient", "infinite"])
def test_a_wrong_kernel_is_caught_and_not_timed(broken, name):
    for record in records(f"attns={name}", "lengths=16"):
        assert record.status == "WRONG" and record.ms is None and record.reason


def test_what_is_wrong_only_at_the_timed_size_is_caught(broken):
    first, second = records("attns=long", "lengths=16,256", "tokens=512", "passes=forward")
    assert (first.status, second.status) == ("ok", "WRONG") and "out is off by" in second.reason


def test_dropout_that_does_not_drop_is_caught(broken):
    assert {r.status for r in records("attns=keeps", "lengths=16")} == {"ok"}
    (record,) = records("attns=keeps", "lengths=16", "dropout=0.1", "passes=forward")
    assert record.status == "WRONG" and "dropout 0.1 makes ones 1.000 ± 0.000" in record.reason


def test_a_padding_mask_is_of_n_columns_and_the_same_for_all():
    cells = records("attns=flash,standard,local", "ragged=mask", "lengths=64", "tokens=192", "dropout=0,0.1")
    assert {(r.status, r.length, r.batch, r.ragged) for r in cells} == {("ok", 64, 3, "mask")}
    assert {r.tokens for r in cells} == {sum(masked_lengths(64, 3))}


def test_an_approximate_attention_is_checked_for_finite_output(broken):
    for record in records("attns=approximate", "lengths=16"):
        assert record.status == "ok" and record.checked is None
        assert record.density is None and record.tflops is None  # what it computes instead, nobody knows here


def test_a_backward_pass_has_the_gradients_of_an_attentions_own_parameters(broken):
    (record,) = records("attns=approximate", "lengths=16", "passes=backward")
    gradients = ATTENTIONS.get("approximate").gradients
    assert record.status == "ok" and len(gradients) > record.repetitions  # checked, and timed each time


def test_one_failure_leaves_the_other_cells(broken):
    cells = records("attns=crashes,standard", "lengths=16", "passes=forward")
    assert [r.status for r in cells] == ["failed", "ok"]
    assert cells[0].reason == "RuntimeError: no such instruction"


def test_what_does_not_fit_is_oom_and_the_forward_is_still_timed(broken):
    cells = records("attns=backward_too_large")
    status = {(r.length, r.pass_name): r.status for r in cells}
    assert {status[16, name] for name in attention.PASSES} == {"ok"}
    assert [status[32, name] for name in attention.PASSES] == ["ok", "OOM", "OOM"]
    assert (
        next(iter(attention_tables(cells[3:])))[2][0][-1] != "OOM"
        and list(attention_tables(cells))[2][2][1][-1] == "OOM"
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_head_in_chunks_is_the_reference(monkeypatch, dropout):
    monkeypatch.setattr("lra.bench.check.SCORES_AT_ONCE", 7 * 33)
    lengths, seed = (5, 33), torch.tensor(99)
    batch = make_batch(lengths, False, CPU, seed=seed)
    q, k, v, do = (torch.randn(38, 3, 16, dtype=torch.float64, requires_grad=True) for _ in range(4))
    options: Any = {"start": batch.start, "length": batch.length, "dropout": dropout, "seed": seed}
    out = reference_attention(q, k, v, **options)
    expected = (out, *torch.autograd.grad(out, (q, k, v), do))
    q, k, v, do = (x[5:, 2].detach() for x in (q, k, v, do))
    for actual, exact in zip(reference_head(q, k, v, do, dropout, seed, 1, 2, torch.float64), expected, strict=True):
        torch.testing.assert_close(actual, exact[5:, 2])


def test_verdicts_are_within_the_budget_and_not_zero():
    cell = BenchmarkCase("flash:impl=sdpa", "fp32", 16, 0.0, (64, 64), 2)
    assert 0 < (check_small(cell.small(), CPU).ratio or 0) <= 1
    batch = make_batch(cell.lengths, True, CPU)
    verdict = check_timed(cell, [torch.randn(128, 2, 16) for _ in range(4)], batch)
    assert not verdict.wrong and 0 < (verdict.ratio or 0) <= 1
    assert not check_dropout(BenchmarkCase("standard", "fp32", 16, 0.1, (200, 200), 2), CPU).wrong


def test_the_last_longest_sequence_is_checked(monkeypatch):
    def wrong_in_the_second(*args):
        return call_attention(*args) * (1 + (torch.arange(135) // 64 == 1))[:, None, None]

    cell = BenchmarkCase("flash:impl=sdpa", "fp32", 16, 0.0, (64, 64, 7), 2)
    inputs, batch = [torch.randn(135, 2, 16) for _ in range(4)], make_batch(cell.lengths, False, CPU)
    assert not check_timed(cell, inputs, batch).wrong
    monkeypatch.setattr("lra.bench.check.call_attention", wrong_in_the_second)
    assert check_timed(cell, inputs, batch).wrong


@pytest.mark.parametrize(("heads", "sequences", "what"), [(1, 2, "heads"), (2, 1, "sequences")])
def test_one_mask_for_two_is_wrong(heads, sequences, what, monkeypatch):
    def dropout(p: torch.Tensor, rate: float) -> torch.Tensor:
        return p * torch.nn.functional.dropout(torch.ones_like(p[:sequences, :heads]), rate)

    monkeypatch.setattr("lra.models.attention.standard.F", SimpleNamespace(dropout=dropout))
    verdict = check_dropout(BenchmarkCase("standard", "fp32", 16, 0.1, (200, 200), 2), CPU)
    assert verdict.wrong == f"dropout 0.1 drops the same weights of two {what}"


def chart(**points: list[tuple[float, float]]) -> str:
    return plots.size_chart("a < $b$", "ms", points, {name: i for i, name in enumerate(points)})


def test_axes_have_ticks_within_a_decade_and_at_every_length():
    drawing = chart(flash=[(1024, 0.3), (1500, 0.5)], x=[(1024, 0.4), (65536, 0.6)])
    assert {"a < $b$", "1K", "1500", "64K", "0.3", "0.4", "ms"} <= set(drawings.words(drawing))
    assert [line.dots for line in drawings.lines(drawing).values()] == [2, 2]


def test_one_point_is_a_dot():
    drawing = chart(flash=[(1000, 7.0)])
    [line] = drawings.lines(drawing).values()
    assert (len(line.points), line.dots) == (1, 1) and "1000" in drawings.words(drawing)


def test_a_figure_is_the_same_again_whatever_the_users_settings_are():
    drawn = chart(flash=[(1024, 0.3), (2048, 0.5)])
    with matplotlib.rc_context({"lines.linewidth": 9, "svg.fonttype": "path", "font.size": 20}):
        before = dict(matplotlib.rcParams)
        assert chart(flash=[(1024, 0.3), (2048, 0.5)]) == drawn
        assert dict(matplotlib.rcParams) == before
    assert chart(flash=[(1024, 0.3), (2048, 0.6)]) != drawn


def test_the_command_prints_and_fails_on_wrong(broken):
    done = CliRunner().invoke(app, ["bench", "attention", *tiny("attns=standard,scaled", "passes=forward")])
    assert done.exit_code == 1, done.output
    assert "forward: ms (TFLOP/s)" in done.output and "scaled: WRONG: dq is off by" in done.output


@pytest.mark.gpu
def test_a_gpu_has_times_and_memory():
    cells: Any = measure_attention(
        ["attns=flash,sdpa,standard", "lengths=512", "head_dims=64", "dropout=0,0.1", "tokens=4096"]
    ).cells
    assert {r.status for r in cells} == {"ok"}, attention_notes(cells)
    for r in (r for r in cells if r.pass_name == "both"):
        inputs_and_gradients = 8 * 2 * 4096 * 8 * 64 / 1e6
        assert r.memory_mb >= inputs_and_gradients and r.ms > 0 and r.host_ms > 0
