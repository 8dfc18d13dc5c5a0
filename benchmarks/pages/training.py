"""docs/training.md, of results/step, results/start and the studies learning, kinks, soak and scaling."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages.measured import BENCHMARKS, ROOT, Measured, from_docs, link, mark, read, table
from lra.bench.step import LOOPS
from lra.experiments.reproduction import format_mean_std

PAGE = ROOT / "docs" / "training.md"
HEAD = """# Training: speed, and what does not depend on it

<!-- made by benchmarks/pages/training.py of benchmarks: make docs -->

For people who want to know how fast `lra fit` trains, whether its engines learn the same, and what a long run \
leaves behind.

A step is forward, backward and update of one batch, in steady state. `lra bench step` measures it in four loops:

- *fit* is `lra fit`.
- *captured* takes the same steps without Lightning, compiled and in CUDA graphs.
- *eager* takes them neither compiled nor captured.
- *bare* is what one would write by hand for sequences of the full length: PyTorch's `scaled_dot_product_attention`, \
compiled and captured.

*first step* is the time until the first step of *fit* is done. It includes capturing, and compiling what no cache \
had. In rows named *warm* the caches were full. Other names say what differs. *gpu2* and *gpu3* are other GPUs of \
the kind. *dropout0* has no dropout in attention. *profile*, *bare* and *captured* are of another commit. They have a \
profile or a loop that the row without the name lacks.

Kernels are those of the day and commit in the row. Those of attention and of the layers became faster on 2026-11-27 \
and 28 ([lab-log.md](lab-log.md)). An H100's memory is slower than an H200's. On H100s Text reads every second \
review, and Image the first 3,000 pictures."""
BARE = """## Against the bare loop

*fit* has the recipe's dropout. The bare loop has no dropout in attention, because PyTorch's is slower with it. Both \
ran on a GPU of the same kind."""
GROUPS = """Where the time of *captured* goes, in milliseconds of a step: kernels by name, and the gaps between \
them. The profiler slows kernels a little."""
WHOLE = """## A whole run

Where the seconds of one `lra fit` go, from the start of its process to its end (`lra bench start`). All caches were \
empty, so *first steps* includes compiling. *validation* and *test* have all of the run's. The machine has 16 cores."""
EXACT = """## Equal learning

Do engines, layouts and numbers of devices learn the same? The table has 200 steps in fp32 without dropout. A \
difference is the largest of any step's loss, relative to the eager engine on packed batches and one device. *eager, \
halves* adds the gradients of two halves of a batch, so it differs by rounding alone."""
KINKS = """Rounding decides where Image goes. A hidden value of the classifier may be 0 within rounding. Its sign is \
then chance, and the derivative of its ReLU is 0 or 1. From one such value on, the losses of two runs part. `kinks` \
in benchmarks/studies finds, for each seed, the first value that parts halves from whole batches. When both runs \
take that derivative alike, they stay together. So it is chance in which seeds a variant above stays with its \
reference:"""
NOISE = """The next table has test accuracy in % after training in bf16 with the recipe's dropout: the mean ± \
standard deviation over seeds, then each seed. A slash stands between runs of the same arguments, the earliest \
first. Runs of 2026-11-21 drop other elements than later ones. Between layers, runs before 2026-11-27 dropped 0.1 of \
the elements, and later ones 26/256. *failed*: other programs on that GPU left no memory. ListOps' seed 2 may or may \
not leave the plateau of this recipe before it ends; that is chance."""
LONG = """## Long runs

Does a run leave memory, files or threads behind? benchmarks/studies/soak samples one `lra fit` from outside every \
five seconds. The columns after the first half's most are of the second half; growth per hour is the slope of a \
line. Memory on a CPU goes up and down by tens of MB, because the C allocator keeps freed blocks: compare the most \
of both halves. Disk grows by the curves, a row for each logged loss. Tests ran beside the run *listops-shared*."""
SCALING = """## Several GPUs

The same global batch on more GPUs, in steps per second of `lra fit`, beside the mean of all runs on one GPU of the \
same kind and commit. On H200s these times include the wait until every process has compiled what scores a batch; a \
later commit leaves that out. Of four GPUs the slowest sets the pace."""


def page() -> str:
    """The whole text."""
    steps = read(BENCHMARKS, "results/step/*/*.json")
    parts = [HEAD, *_steps(steps), *_against_bare(steps), *_whole_runs(read(BENCHMARKS, "results/start/*/*.json"))]
    for _, learning in read(BENCHMARKS, "studies/learning/*.json"):
        parts += _learning(learning)
    parts += _long(read(BENCHMARKS, "studies/soak/*/*.json"))
    parts += _scaling(read(BENCHMARKS, "studies/scaling/*/*.json"))
    return from_docs("\n\n".join(parts) + "\n")


def _steps(measured: Sequence[Measured]) -> Iterator[str]:
    yield "## A step"
    header = (
        "task", "batch", "tokens", "model", "attention, dropout", *(f"{name}, ms" for name in LOOPS),
        "tokens/s of fit", "Lightning", "first step, s", "made with",
    )  # fmt: skip
    yield table(header, [_step(*each) for each in measured])
    captured = [(path, loop) for path, r in measured for loop in r["loops"] if loop["loop"] == "captured"]
    if profiled := [(path, loop, loop["where"]["groups"]) for path, loop in captured if loop["where"]]:
        yield GROUPS
        groups = list(profiled[0][2])
        spent = lambda loop, of: (*(f"{of[group]:.3f}" for group in groups), f"{loop['ms']:g}")  # noqa: E731
        rows = [(link(path.stem, path), *spent(loop, of)) for path, loop, of in profiled]
        yield table(["task", *groups, "step"], rows)


def _step(path: Path, result: dict[str, Any]) -> list[str]:
    run, model = result["run"], result["run"]["model"]
    loops = {loop["loop"]: loop for loop in result["loops"]}
    times = ["" if name not in loops else f"{loops[name]['ms'] or loops[name]['status']}" for name in LOOPS]
    speed, tokens = map(loops.get("fit", {}).get, ("tokens_per_second", "tokens"))
    return [
        link(path.stem, path), str(run["batch"]["size"]), "" if tokens is None else f"{tokens:,.0f}",
        f"{model['layers']} layers of {model['d_model']}, {model['heads']} heads",
        f"{run['attn']['name']}, {model['attn_dropout']:g}",
        *times, "" if speed is None else f"{speed:,}",
        "" if result["lightning"] is None else f"{100 * result['lightning']:+.1f}%",
        f"{loops['fit']['first_seconds']:.1f}" if "fit" in loops else "", _made_with(result["environment"]),
    ]  # fmt: skip


def _against_bare(measured: Sequence[Measured]) -> Iterator[str]:
    """Each fit beside the bare loop of the same model without attention's dropout, where that was measured."""
    bares = [(p, r, ms) for p, r in measured if r["run"]["model"]["attn_dropout"] == 0 and (ms := _ms(r, "bare"))]
    rows = [
        [
            link(path.stem, path), r["run"]["attn"]["name"], f"{fit:g}", link(f"{bare:g}", bare_path),
            f"{100 * fit / bare:.0f}%", r["environment"]["gpu"] or "CPU",
        ]
        for path, r in measured if (fit := _ms(r, "fit"))
        for bare_path, b, bare in bares if _model(r) == _model(b)
    ]  # fmt: skip
    if rows:
        yield BARE
        yield table(["fit", "attention", "fit, ms", "bare, ms", "fit / bare", "GPU"], rows)


def _whole_runs(measured: Sequence[Measured]) -> Iterator[str]:
    yield WHOLE
    parts = ("imports", "first steps", "training", "validation", "test")
    rows = []
    for path, result in measured:
        run, spent = result["run"], Counter[str]()
        for phase, seconds in result["phases"].items():
            name = phase.partition(":")[0]
            name = "validation" if name == "first validation" else name
            spent[name if name in parts else "else"] += seconds
        rows.append([
            link(path.stem, path), f"{run['trainer']['steps']:,} of {run['batch']['size']}",
            *(f"{spent[name]:.1f}" for name in (*parts, "else")), f"{result['seconds']:.1f}",
            _made_with(result["environment"]),
        ])  # fmt: skip
    yield table(["run", "steps", *(f"{name}, s" for name in parts), "all else, s", "whole run, s", "made with"], rows)


def _ms(result: dict[str, Any], name: str) -> float:
    """Of a step in this loop; 0 if it was not measured."""
    return next((loop["ms"] or 0.0 for loop in result["loops"] if loop["loop"] == name), 0.0)


def _model(result: dict[str, Any]) -> tuple[Any, ...]:
    """What was trained, whatever its attention and the dropout there, and on what GPU."""
    run = result["run"]
    model = {name: value for name, value in run["model"].items() if name != "attn_dropout"}
    return run["task"]["name"], run["batch"]["size"], model, result["environment"]["gpu"]


def _learning(result: dict[str, Any]) -> Iterator[str]:
    runs: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for run in result["runs"]:
        runs.setdefault(run["part"], {}).setdefault((run["task"], run["variant"]), []).append(run)
    exact, noise = (dict(sorted(runs.get(part, {}).items())) for part in ("exact", "noise"))

    def made_with(found: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
        return "; ".join(sorted({_made_with(run["environment"]) for runs in found.values() for run in runs}))

    if exact:
        yield f"{EXACT} {made_with(exact)}."
        rows = [[task, name + mark(found), _differences(found)] for (task, name), found in exact.items()]
        yield table(["task", "variant", "difference of each seed"], rows)
        yield from _kinks(read(BENCHMARKS, "studies/kinks/*/*.json"))
    if noise:
        yield f"{NOISE} {made_with(noise)}."
        yield table(
            ["task", "variant", "accuracy", "seeds"],
            [[task, name + mark(found), *_accuracies(found)] for (task, name), found in noise.items()],
        )


def _differences(runs: list[dict[str, Any]]) -> str:
    """Each seed's, or why it has none."""
    runs = sorted(runs, key=lambda run: run["seed"])
    return ", ".join(f"{run['difference']:.1e}" if "difference" in run else run["status"] for run in runs)


def _accuracies(runs: list[dict[str, Any]]) -> list[str]:
    """Of the seeds' means; and of each seed those of all its runs."""
    means, shown = [], []
    runs = sorted(runs, key=lambda run: (run["seed"], run["environment"]["date"]))
    for _, same in itertools.groupby(runs, key=lambda run: run["seed"]):
        found = [run["status"] if run.get("accuracy") is None else 100 * run["accuracy"] for run in same]
        if known := [accuracy for accuracy in found if not isinstance(accuracy, str)]:
            means.append(statistics.mean(known))
        shown.append(" / ".join(each if isinstance(each, str) else f"{each:.2f}" for each in found))
    return [format_mean_std(means, 2), ", ".join(shown)]


def _kinks(results: Sequence[Measured]) -> Iterator[str]:
    """Where runs part that differ by rounding alone."""
    header = [
        "task", "seed", "difference of halves", "kink in step", "value, whole and halves", "rms of all values",
        "difference, the kink taken alike",
    ]  # fmt: skip
    for path, result in results:
        yield f"{KINKS} {link(path.stem, path)}, {_made_with(result['environment'])}."
        yield table(header, [_kink(run, mark(result)) for run in result["runs"]])


def _kink(run: dict[str, Any], mark: str) -> list[str]:
    start, rms = [run["task"] + mark, str(run["seed"]), f"{run['difference']:.1e}"], f"{run['hidden_rms']:.2f}"
    if (kink := run["kink"]) is None:
        return [*start, "none", "", rms, ""]
    values = f"{kink['whole']:+.1e}, {kink['halves']:+.1e}"
    return [*start, str(kink["step"]), values, rms, f"{run['taken_alike']:.1e}"]


def _scaling(results: Sequence[Measured]) -> Iterator[str]:
    def speedup(result: dict[str, Any]) -> str:
        alone = [r["steps_per_second"] for _, r in results if r["world_size"] == 1 and _work(r) == _work(result)]
        return f"{result['steps_per_second'] / statistics.mean(alone):.2f}" if alone else ""

    if results:
        yield SCALING
        rows = [
            [
                link(path.stem, path), str(r["world_size"]), str(r["config"]["batch"]["size"]),
                f"{r['steps_per_second']:g}", speedup(r), _made_with(r["environment"]),
            ]
            for path, r in results
        ]  # fmt: skip
        yield table(["run", "GPUs", "batch", "steps/s", "times one GPU", "made with"], rows)


def _work(result: dict[str, Any]) -> tuple[str, int, str, str]:
    """What a step computes, on however many devices of which kind, and of which commit."""
    environment = result["environment"]
    return result["task"], result["config"]["batch"]["size"], environment["gpu"], environment["commit"]


def _long(results: Sequence[Measured]) -> Iterator[str]:
    if results:
        yield LONG
        rows = [
            [
                link(path.stem, path), f"{r['minutes']:g}", f"{r['steps']:,}", name.replace("_", " "),
                *(f"{value / unit:,.{digits}f}" for value in (early, *map(found.get, ("least", "most", "per_hour")))),
                _made_with(r["environment"]),
            ]
            for path, r in results
            for name, found in r["growth"].items()
            for unit, digits in [(1e6, 2) if name in ("memory", "gpu_memory", "disk") else (1, 0)]
            for early in [max(sample[name] for sample in r["samples"][: len(r["samples"]) // 2])]
        ]  # fmt: skip
        what = ("what (bytes in MB)", "most, first half", "least", "most", "per hour")
        yield table(["run", "minutes", "steps", *what, "made with"], rows)


def _made_with(environment: dict[str, Any]) -> str:
    versions, commit = environment["versions"], environment["commit"]
    return f"{environment['gpu'] or 'CPU'}, PyTorch {versions['torch']}, {environment['date'][:10]}, commit {commit}"


def make() -> dict[Path, str]:
    return {PAGE: page()}
