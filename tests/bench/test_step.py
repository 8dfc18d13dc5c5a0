"""`lra bench step`: the loops take the same steps, and kernels are grouped by name. Times are not looked at."""

from __future__ import annotations

import ast
import json
import math
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lra
from lra.bench import loops, step
from lra.bench.breakdown import GAPS, KERNEL_GROUPS, LONGEST_KERNELS, OTHER, KernelLaunch, breakdown, kernel_group
from lra.bench.loops import IDLE_STARTS, TIMED_BLOCKS, DenseAttention, Stopwatch, fill_lengths
from lra.bench.step import PROFILED_STEPS, measure_step, parse_step_fields, step_notes, step_tables
from lra.cli import app
from lra.data.split import Split
from lra.errors import UsageError
from lra.kernels.flash.reference import reference_attention
from lra.models import transformer
from lra.tasks.base import TaskModule
from lra.training import step as step_module
from lra.training.step import Step
from tests.fixtures import write_aan_papers
from tests.training.conftest import arguments

PLAIN = ("model.dropout=0", "model.attn_dropout=0")
# what is logged is the mean of the steps that the other loops take, too
TINY = ("trainer.steps=40", "trainer.eval_every=20", "trainer.log_every=20", "warmup=2", "steps=8")

BY_TASK = re.compile(r"task=|task\.(train|val|test|fresh)=")  # what the small run says of ListOps

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(*args: str) -> list[str]:
    return arguments(*TINY, *PLAIN, *args)


@pytest.fixture
def without_graphs(monkeypatch):
    """Captured steps on a CPU, neither compiled nor in graphs."""
    monkeypatch.setattr(Step, "captures", lambda self, *_: self.run.engine != "eager")
    monkeypatch.setattr(step_module.torch, "compile", lambda function, **options: function)


def test_loops_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "step", *tiny("out=new/step.json")])
    assert done.exit_code == 0, done.output
    assert "captured: unsupported" in done.output and "Lightning: fit takes " in done.output
    assert "a step of task=listops attn=flash recipe=demo" in done.output and "where the time" not in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["new"]  # a run leaves nothing

    result = json.loads(Path("new/step.json").read_text(encoding="utf-8"))
    assert result["environment"]["versions"]["torch"] and result["run"]["trainer"]["steps"] == 40
    assert result["options"] == {"loops": list(step.LOOPS), "steps": 8, "warmup": 2, "profile": True}
    records = {record["loop"]: record for record in result["loops"]}
    assert list(records) == ["fit", "captured", "eager", "bare"]
    for name in ("captured", "bare"):
        assert records[name]["status"] == "unsupported" and "there is no GPU" in records[name]["reason"]
        assert all(records[name][key] is None for key in ("ms", "tokens_per_second", "where"))
    fit, eager = records["fit"], records["eager"]
    for record in (fit, eager):
        assert record["status"] == "ok" and record["engine"] == "eager" and not record["reason"]
        assert (
            len(record["blocks_ms"]) == TIMED_BLOCKS and record["ms"] == sorted(record["blocks_ms"])[TIMED_BLOCKS // 2]
        )
        assert record["steady"] == [True] * TIMED_BLOCKS
        assert record["host_ms"] > 0 and record["first_seconds"] > 0 and record["memory_mb"] is None
        assert 8 * 8 < record["tokens"] == record["rows"] <= 8 * 32
        assert record["tokens_per_second"] == pytest.approx(1e3 * record["tokens"] / record["ms"], rel=2e-3)
    assert fit["loss"] == pytest.approx(eager["loss"], rel=1e-3) and fit["tokens"] == eager["tokens"]
    assert result["lightning"] == pytest.approx(fit["ms"] / eager["ms"] - 1, abs=1e-3)


def test_loops_of_the_captured_step(without_graphs, monkeypatch):
    """All four, with kernels that a profiler might have seen."""
    taken = []

    def recorded(steps, count, _):
        taken.append(sum(1 for _ in zip(range(count), steps, strict=False)))
        return [KernelLaunch("forward_kernel", 0, 30), KernelLaunch("nvjet_tst", 40, 50)]

    monkeypatch.setattr(step, "record_kernels", recorded)
    monkeypatch.setattr(
        Stopwatch, "steady", lambda _: [True] * TIMED_BLOCKS
    )  # which shapes come anew is no matter here
    result: Any = measure_step(tiny("batch.micro=4"))
    assert [record.status for record in result.loops] == ["ok"] * 4 and taken == [PROFILED_STEPS] * 2
    fit, captured, eager, bare = result.loops
    assert [record.engine for record in result.loops] == ["captured", "captured", "eager", "captured"]
    assert fit.loss == pytest.approx(captured.loss, rel=1e-3) == pytest.approx(eager.loss, rel=1e-3)
    assert eager.tokens == captured.tokens == fit.tokens < captured.rows == fit.rows
    assert captured.rows_per_second == pytest.approx(1e3 * captured.rows / captured.ms, rel=2e-3)
    assert bare.tokens == bare.rows == 8 * 32 and bare.shapes == 1 and captured.shapes >= 1
    assert bare.loss == pytest.approx(captured.loss, rel=0.5)
    assert captured.where["groups"]["attention"] == bare.where["groups"]["attention"] == 0.003
    assert fit.where is eager.where is None
    (_, header, rows), (_, groups, shares) = step_tables(result)
    assert all(len(row) == len(header) for row in rows) and groups == ["group", "captured", "bare"]
    assert [row[0] for row in shares] == [*KERNEL_GROUPS, OTHER, GAPS] and shares[1][1].startswith("0.003 (")
    assert len(step_notes(result)) == 1


def test_blocks_in_which_shapes_are_captured_do_not_count(without_graphs, monkeypatch):
    """Unless there are no others, of which the user is told."""
    found: Iterator[tuple[int, int]] = iter(())
    monkeypatch.setattr(loops, "count_shapes", lambda _: next(found))
    monkeypatch.setattr(Stopwatch, "block_ms", lambda _: [9.0, 1.0, 3.0, 2.0, 8.0])
    # at the bounds of 5 blocks, and in the end
    for came, ms, note in (
        ("1 2 2 2 2 3 3", 2.0, "captured: in 2 of 5 blocks shapes of batches were captured, which do not"),
        ("1 2 3 4 5 6 6", 3.0, "captured: in 5 of 5 blocks shapes of batches were captured: raise warmup="),
        ("5 5 5 5 5 5 5", 3.0, None),
    ):
        found = iter([(int(count), 1) for count in came.split()])
        result: Any = measure_step(tiny("loops=captured", "steps=10", "profile=false"))
        assert result.loops[0].ms == ms
        assert [text[: len(note or "")] for text in step_notes(result)] == [note] * bool(note)


@pytest.mark.parametrize("loop", ["captured", "eager"])
def test_a_loop_by_hand_does_all_that_a_step_does(without_graphs, loop):
    """Without what judges its gradients an eager step would cost less, and Lightning seem to cost more."""
    run, watch = parse_step_fields(tiny())[1].config, Stopwatch(2, 8, torch.device("cpu"))
    module = loops.time_by_hand(loop, run, watch).module
    assert cast(Step, module.step).tally.read().taken == watch.done == 2 + 8 + IDLE_STARTS  # type: ignore[union-attr]


def test_two_sequences_with_one_label(without_graphs, tmp_path):
    kinds = {f"P{i}": "ab" * (10 + i) for i in range(20)}
    pairs = [(i % 2, f"P{i}", f"P{(7 * i + 3) % 20}") for i in range(20)]
    source = write_aan_papers(tmp_path / "aan", kinds, train=pairs, val=pairs[:5], test=pairs[5:9])
    fields = [field for field in tiny("profile=false", "task.max_length=30") if not BY_TASK.match(field)]
    result: Any = measure_step(
        [*fields, "task=retrieval", "task.dataset=scisumm", "model.pooling=cls", f"task.source={source}"]
    )
    fit, captured, eager, bare = result.loops
    assert [record.status for record in result.loops] == ["ok"] * 4
    assert fit.tokens == captured.tokens == eager.tokens > 2 * 8 * 21
    assert bare.tokens == 2 * 8 * 31 and bare.loss == pytest.approx(captured.loss, rel=0.5)


def test_the_bare_loop_has_pytorchs_layers(without_graphs, monkeypatch):
    """What surrounds attention is computed by our kernels in the others, where these take it."""
    asked: list[str] = []
    names = "supports_projection", "supports_feed_forward"
    for name in names:
        monkeypatch.setattr(transformer, name, lambda *_, name=name: asked.append(name))
    (bare,) = measure_step(tiny("loops=bare", "profile=false")).loops
    assert bare.status == "ok" and not asked
    measure_step(tiny("loops=eager"))
    assert {*asked} == {*names}


@pytest.mark.slow
def test_pixels_with_positions_of_their_own(without_graphs):
    fields = [field for field in tiny("loops=captured,bare", "profile=false") if not BY_TASK.match(field)]
    few = ("task.train=24", "task.val=6", "task.test=12", "task.tokens=lit", "batch.size=2")
    fields = [field for field in fields if not field.startswith(("batch.size", "task.max_length"))]
    result: Any = measure_step([*fields, "task=pathfinder", *few])
    captured, bare = result.loops
    assert (captured.status, bare.status, bare.tokens) == ("ok", "ok", 2 * 1024) and captured.tokens < 2048


def test_lightnings_loop_takes_steps_and_no_more(monkeypatch):
    """Nothing is scored between them, and SIGTERM is what it was: it ends the process."""
    handlers, forward = set(), TaskModule.forward

    def watched(self, batch):
        handlers.add(signal.getsignal(signal.SIGTERM))
        assert self.training
        return forward(self, batch)

    monkeypatch.setattr(TaskModule, "forward", watched)
    (record,) = measure_step(tiny("loops=fit", "steps=30", "trainer.steps=80")).loops
    assert record.status == "ok" and handlers == {signal.getsignal(signal.SIGTERM)}


def test_a_loop_that_fails_leaves_the_others(monkeypatch):
    def broken(*_):
        raise RuntimeError("a compiler\nsays much")

    monkeypatch.setattr(step.loops, "time_fit", broken)
    result: Any = measure_step(tiny("loops=fit,eager"))
    assert [record.status for record in result.loops] == ["failed", "ok"] and result.lightning is None
    assert step_notes(result) == ["fit: failed: RuntimeError: a compiler"]


def test_a_loop_that_does_not_fit_is_oom(monkeypatch):
    monkeypatch.setattr(step.loops, "time_fit", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    (record,) = measure_step(tiny("loops=fit")).loops
    assert record.status == "OOM" and record.reason.endswith("does not fit: halve it")


def test_a_measurement_without_a_profile_keeps_its_times(without_graphs, monkeypatch):
    monkeypatch.setattr(step, "record_kernels", lambda *_: [])
    (record,) = measure_step(tiny("loops=captured")).loops
    assert record.status == "ok" and record.ms and record.reason.startswith("not profiled: the profiler saw")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["steps=0"], "steps= and warmup= must be at least 1"),
        (["warmup=0"], "steps= and warmup= must be at least 1"),
        (["steps=few"], "steps=few: write an integer"),
        (["loops=fit,capture"], "loops=: unknown loop 'capture': did you mean 'captured'"),
        (["loops=fit,eager,fit"], "loops=fit,eager,fit names one twice"),
        (["loops=fit", "profile=true"], "profile=true needs loops=captured or bare"),
        (["steps=100"], "trainer.steps=40, but 122 are needed: raise it, or lower steps= and warmup="),
        (["init=somewhere"], "init=, name=, resume=, draws= and predictions= mean nothing"),
        (["trainer.devices=2"], "measures one device"),
        (["trainer.stesp=1"], "unknown field 'trainer.stesp': did you mean 'trainer.steps'"),
        (["attn=cudnn"], "attn=cudnn supports GPUs only"),
    ],
)
def test_bad_options_name_the_mend(args, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", [__file__])  # a worker of xdist is no file
    with pytest.raises(UsageError, match=message):
        measure_step(tiny(*args))


@pytest.mark.parametrize("fields", [(), ("task.tokens=lit",)])  # the latter scales positions, which needs init=
def test_a_recipe_that_starts_from_another_run_is_measured_from_nothing(fields):
    options, composed = parse_step_fields(
        ["task=path64", "attn=flash", "recipe=curriculum", "steps=5", "warmup=1", *fields]
    )
    assert composed.start and composed.config.init is None and composed.config.trainer.steps >= options.total


def test_what_cannot_be_written_is_refused_before_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "measure_loop", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"out=.*file/step.json can't be written \(.*\): name another file"):
        measure_step(tiny(f"out={tmp_path / 'file' / 'step.json'}"))


def test_own_options_are_none_of_the_run():
    options, composed = parse_step_fields(tiny("steps=7", "loops=bare"))
    assert (options.steps, options.warmup, options.loops) == (7, 2, ("bare",)) and composed.config.trainer.steps == 40


@pytest.mark.parametrize("steps", [3, 12])
def test_a_stopwatch_times_blocks_and_steps_alone(steps, monkeypatch):
    now = 0.0
    monkeypatch.setattr("lra.bench.loops.time.perf_counter", lambda: now)
    watch, ticks = Stopwatch(2, steps, torch.device("cpu")), 0
    watch.start()
    done = False
    while not done:
        now += 5.0 if ticks == 0 else 0.5
        ticks, done = ticks + 1, watch.tick()
    assert ticks == 2 + steps + IDLE_STARTS and watch.measured == range(2, 2 + steps)
    assert watch.first_seconds == 5.0 and watch.host_ms() == 500.0
    assert watch.block_ms() == [500.0] * min(TIMED_BLOCKS, steps)


NAMES = {
    "layers": ["triton_poi_fused_add_native_layer_norm_3", "triton_red_fused__scaled_dot_product_flash_attention_1"],
    "attention": [
        "hopper_forward_kernel", "hopper_backward_kernel", "hopper_specialized_kernel",
        "convert_dq_kernel", "extreme_rows_kernel", "forward_rescan_kernel",
        "triton_tem_fused_flex_attention_0",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<32, 128, cutlass::bfloat16_t>>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0",
    ],
    "matrix products": [
        "nvjet_tst_128x64_64x8_2x1_v_bz_coopA_bias_TNN", "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16>",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "triton_tem_fused_mm_5", "void gemv2T_kernel_val<int, float>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
    ],
    "optimiser": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata"
        "<4>, at::native::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::(anonymous namespace)::"
        "OpaqueType<4u>, unsigned int, 1, 128, 1>",
    ],
    "data": [
        "Memcpy HtoD (Pinned -> Device)", "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::index_elementwise_kernel<128, 4, at::native::index_fill_kernel_impl<at::native::OpaqueType>>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>",
    ],
    OTHER: ["void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "void at_cuda_detail::cub::Scan"],
}  # fmt: skip


@pytest.mark.parametrize(("label", "name"), [(label, name) for label, names in NAMES.items() for name in names])
def test_kernels_are_grouped_by_name(label, name):
    assert kernel_group(name) == label


def test_our_kernels_are_attention_or_layers():
    folder = Path(lra.__file__).parent / "kernels"
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in folder.rglob("*.py"))
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    jitted = [node.name for node in functions if any("jit" in ast.unparse(each) for each in node.decorator_list)]
    ours = [name for name in jitted if name.endswith("_kernel")]
    fused = {
        "project_kernel", "project_backward_kernel", "feed_forward_kernel", "feed_forward_backward_kernel",
        "fold_kernel", "sum_kernel", "unfold_kernel", "embed_kernel", "table_gradient_kernel", "pool_kernel",
        "chunk_state_kernel", "average_kernel", "coefficient_gradient_kernel",
    }  # fmt: skip
    assert len(ours) >= 17 and {name for name in ours if kernel_group(name) == "layers"} == fused
    assert {kernel_group(name) for name in ours} == {"attention", "layers"}


def test_a_breakdown_sums_kernels_and_leaves_gaps():
    kernels = [
        KernelLaunch("forward_kernel", 0, 1000), KernelLaunch("nvjet_a", 900, 2000),
        KernelLaunch("forward_kernel", 3000, 3500), KernelLaunch("Memset (Device)", 1200, 1300),
        *(KernelLaunch(f"some_{i}", 4000 + i, 4001 + i) for i in range(20)),
    ]  # fmt: skip
    where = breakdown(kernels, 2, 3.0)
    assert where is not None and list(where["groups"]) == [*KERNEL_GROUPS, OTHER, GAPS]
    expected = {"attention": 0.75, "matrix products": 0.55, "data": 0.05, OTHER: 0.01, GAPS: 3.0 - 1.26}
    for label, spent in where["groups"].items():
        assert math.isclose(spent, expected.get(label, 0.0), abs_tol=1e-9)
    assert len(where["kernels"]) == LONGEST_KERNELS and where["kernels"][1]["name"] == "nvjet_a"
    assert where["kernels"][0] == {"name": "forward_kernel", "group": "attention", "ms": 0.75, "calls": 1.0}
    assert breakdown([], 2, 3.0) is None


def test_bare_attention_is_attention():
    q, k, v = torch.randn(3, 2 * 5, 2, 8)
    split = Split.from_offsets(np.arange(8, dtype=np.uint8), np.array([0, 3, 8]))
    batch = split.collate([0, 1], max_length=5, layout="padded", threshold=0)
    filled = fill_lengths(batch, torch.randint(7, (12,), dtype=torch.int32)).to("cpu")
    assert len(batch.laid) == 2 and filled.length.tolist() == [5, 5] and filled.positions is None and filled.padded
    assert int(filled.tokens.max()) < 7 and filled.tokens.dtype == torch.int32
    for causal in (False, True):
        expected = reference_attention(q, k, v, start=filled.start, length=filled.length, causal=causal)
        torch.testing.assert_close(DenseAttention(0.5, causal).eval()(q, k, v, filled), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_captured_and_bare_agree_on_a_gpu():
    gpu = ("trainer.accelerator=gpu", "trainer.precision=bf16", "model.heads=2")
    result: Any = measure_step(tiny(*gpu))
    assert [record.status for record in result.loops] == ["ok"] * 4, step_notes(result)
    fit, captured, eager, bare = result.loops
    assert fit.engine == "captured" and captured.captured >= 1 and bare.captured == bare.shapes == 1
    assert fit.loss == pytest.approx(captured.loss, rel=0.01) == pytest.approx(eager.loss, rel=0.01)
    assert bare.loss == pytest.approx(captured.loss, rel=0.5)
    for record in (captured, bare):
        groups = record.where["groups"]
        assert all(groups[label] > 0 for label in ("layers", "attention", "matrix products", "optimiser"))
        assert record.memory_mb > 0 and groups[OTHER] < record.ms and len(record.where["kernels"]) == LONGEST_KERNELS
