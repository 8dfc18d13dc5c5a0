"""The command line: parse, call, print. Every verb takes `field=value` arguments."""

from __future__ import annotations

import atexit
import gc
import inspect
import logging
import sys
from contextlib import suppress
from typing import Annotated, Any, NoReturn, get_args

import typer
from rich.table import Column, Table
from rich.text import Text

from lra import caches, ranks, timeline
from lra.commands import app, bench_app, config_app, data_app, ls_app, results_app, uncollected_imports, verb
from lra.completion import complete_fields
from lra.errors import UsageError, explain_system_error
from lra.help import FitCommand
from lra.printing import console, print_catalogue, print_measured, print_rows, print_scores
from lra.streams import guard_streams
from lra.terminal import Terminal, make_visible

EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141  # as shells have it: 128 + SIGINT, 128 + SIGPIPE
ClickUsageError: Any = typer.BadParameter.__base__  # click's UsageError, which Typer brings along or imports

Fields = Annotated[list[str] | None, typer.Argument(
    metavar="task=… attn=… [recipe=…] [field=value …]", help="lra config show lists all.",
    autocompletion=complete_fields,
)]  # fmt: skip
TaskFields = Annotated[list[str] | None, typer.Argument(
    metavar="task=… [recipe=…] [field=value …]", help="Fields of the task.", autocompletion=complete_fields
)]  # fmt: skip


@verb(app, parser="lra.training.fit:configure", command=FitCommand)
def fit(fields: Fields = None) -> None:
    """Train, then score the test set once with the best checkpoint of validation.

    The same command again prints the result of a finished run; resume=auto goes on with an unfinished one.
    """
    with uncollected_imports():
        from lra.training.fit import fit as run

    result = run(*(fields or ()))
    timeline.mark_phase("end of process")
    if result:  # only rank 0 has one
        print_scores(result)
        folder = result["directory"]
        for what, file in (("checkpoint", "best.ckpt"), ("curves", "metrics.csv"), ("config", "config.yaml")):
            console.print(f"{what:10} {folder}/{file}")


@verb(app, parser="lra.training.evaluate:parse_test")
def test(
    fields: Annotated[list[str] | None, typer.Argument(metavar="init=<run or checkpoint> [field=value …]")] = None,
) -> None:
    """Score a checkpoint on its task's test sets."""
    with uncollected_imports():
        from lra.training.evaluate import test as run

    if result := run(*(fields or ())):  # only rank 0 has one
        print_scores(result)


@verb(app)
def doctor() -> None:
    """What this machine has: GPU, versions, usable kernels, prepared data."""
    from lra.doctor import diagnose

    table = Table(show_header=False, box=None)
    for name, state in diagnose():
        table.add_row(name, state)
    console.print(table)


@verb(app, parser="lra.bench.tune:TuneOptions")
def tune(
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="[kernels=…,…] [dtypes=…] [head_dims=…] [dropout=true,false] [out=<file>]"),
    ] = None,
) -> None:
    """Measure the attention kernels' tiles on this GPU and keep the fastest for every later run: minutes, once."""
    from lra.bench.tune import tune_tiles as run

    written = run(fields or (), progress=lambda trial: console.print(str(trial)))
    console.print(f"written: {written}")


@verb(app, parser="lra.experiments:parse_reproduction")
def reproduce(
    fields: Annotated[list[str] | None, typer.Argument(metavar="[<name> [field=value …]]")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what is there, what is left and how long that takes.")
    ] = False,
) -> None:
    """Measure what a paper states, and say whether it holds here; without a name, list what there is."""
    from lra.experiments import find_experiment, list_experiments

    if dry_run and not fields:
        raise UsageError("--dry-run of what? lra reproduce lists the names")
    if not fields:
        table = Table("experiment", "what")
        for name, what in list_experiments().items():
            table.add_row(name, what)
        console.print(table)
        return
    run = find_experiment(fields[0])
    if dry_run and "dry_run" not in inspect.signature(run).parameters:
        raise UsageError(f"lra reproduce {fields[0]} has no --dry-run: leave it out")
    report = run(fields[1:], progress=console.print, **({"dry_run": True} if dry_run else {}))
    print_measured(report.tables, report.lines, report.wrong)


@verb(app, parser="lra.experiments:parse_report")
def report(
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[<table> [results=<folder>] [tasks=… attns=… seeds=… recipe=… field=value …] [speed=<file>] "
            "[out=<folder>]]"
        ),
    ] = None,
) -> None:
    """Put the results of runs into a paper's table, beside its figures; without a name, list the tables."""
    from lra.config.recipes import config_names
    from lra.experiments import describe_table

    if not fields:
        table = Table("table", "what")
        for name in config_names("table"):
            table.add_row(name, describe_table(name))
        console.print(table)
        return
    from lra.experiments.results.report import make_report

    made = make_report(fields[0], fields[1:])
    print_measured(made.tables, made.notes)


@verb(ls_app, "tasks")
def ls_tasks() -> None:
    """The benchmark's tasks."""
    from lra.tasks import TASKS

    print_catalogue(TASKS, ("version", "classes", "length"))


@verb(ls_app, "attns")
def ls_attns() -> None:
    """The attentions."""
    from lra.models.attention import ATTENTIONS

    print_catalogue(ATTENTIONS, ("exact", "dropout", "causal", "ragged", "head_dims"))


@verb(ls_app, "recipes")
def ls_recipes() -> None:
    """The training recipes."""
    from lra.config.recipes import read_recipe, recipe_names

    table = Table("recipe", "tasks", "what")
    for name in recipe_names():
        try:
            recipe = read_recipe(name)
        except UsageError as error:  # one that is broken takes no other away
            recipe = {"about": str(error)}
        table.add_row(name, " ".join(map(str, recipe.get("tasks") or {})), recipe.get("about") or "")
    console.print(table)


@verb(ls_app, "optimizers")
def ls_optimizers() -> None:
    """The optimisers, and their options beside lr and weight_decay."""
    from lra.config.optim import OPTIM_OPTIONS, OptimizerName

    table = Table("optimiser", "options")
    for name in get_args(OptimizerName):
        table.add_row(name, " ".join(option for option, having in OPTIM_OPTIONS.items() if name in having))
    console.print(table)


@verb(ls_app, "runs", "lra.experiments.results.listing:ListOptions")
def ls_runs(
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="[task=…] [attn=…] [runs=<folder>]", autocompletion=complete_fields),
    ] = None,
) -> None:
    """The runs below a folder: what each changes of its recipe, how far it is, and what it reached."""
    from lra.experiments.results.listing import HEADER, list_runs

    columns = (Column(name, no_wrap=name not in ("changes", "state"), overflow="fold") for name in HEADER)
    table = Table(*columns)
    for run in list_runs(fields or ()):
        table.add_row(*run.cells)
    console.print(table, soft_wrap=False)


@verb(config_app, "show", "lra.training.fit:configure")
def config_show(fields: Fields = None) -> None:
    """Every field: its value, where that came from, what else it may be, and what it means."""
    with uncollected_imports():
        from lra.config.compose import flatten, to_dict
        from lra.config.fields import describe_fields, format_value
        from lra.kernels import effective_dropout
        from lra.training.fit import configure

    composed = configure(fields or ())
    values = dict(flatten(to_dict(composed.config)))
    folded = (Column(header, overflow="fold") for header in ("value", "from"))
    table = Table(Column("field", no_wrap=True), *folded, "may be; meaning")
    for field in describe_fields(composed.config):
        value, meaning = values[field.name], field.meaning
        if field.name in ("model.dropout", "model.attn_dropout") and value != (dropped := effective_dropout(value)):
            meaning += f"; here {dropped:.4f} is dropped"
        table.add_row(field.name, format_value(value), composed.origin[field.name], f"{field.type}; {meaning}")
    console.print(table, soft_wrap=False)


@verb(config_app, "stages", "lra.training.fit:configure")
def config_stages(fields: Fields = None) -> None:
    """The chain of runs that a recipe makes for one: their steps, state, time and changes."""
    from lra.experiments.grid.stages import list_stages

    print_rows(*list_stages(fields or ()))


@verb(data_app, "prepare", "lra.training.data_verbs:parse_prepare")
def data_prepare(fields: TaskFields = None) -> None:
    """Generate or import a task's data; force=true replaces what is there."""
    from lra.training.data_verbs import prepare_store

    console.print(prepare_store(fields or ()))


@verb(data_app, "verify", "lra.training.data_verbs:task_data")
def data_verify(fields: TaskFields = None) -> None:
    """Read every byte of a prepared store and compare it with the manifest."""
    from lra.training.data_verbs import verify_store

    console.print(verify_store(fields or ()))


@verb(data_app, "info", "lra.training.data_verbs:task_data")
def data_info(fields: TaskFields = None) -> None:
    """Counts, lengths, label balance and hashes of a prepared store."""
    from lra.training.data_verbs import describe_store

    table = Table(Column(), Column(overflow="fold"), show_header=False)
    for key, value in describe_store(fields or ()):
        table.add_row(key, str(value))
    console.print(table)


@verb(data_app, "show", "lra.training.data_verbs:parse_show")
def data_show(fields: TaskFields = None) -> None:
    """Draw examples of each label into a PNG: split=train, count=8 of each, out=<file>.png."""
    from lra.training.data_verbs import draw_examples

    console.print(draw_examples(fields or ()))


@verb(bench_app, "attention", "lra.bench.attention:configure_attention")
def bench_attention(
    fields: Annotated[list[str] | None, typer.Argument(metavar="attn=… | attns=… [lengths=… field=value …]")] = None,
) -> None:
    """Speed and memory of attentions, each checked first; exit code 1 if one is wrong."""
    from lra.bench.attention import attention_notes, attention_tables, measure_attention

    result = measure_attention(fields or (), progress=console.print)
    records = result.cells
    wrong = any(record.failed for record in records)
    print_measured(attention_tables(records, result.options["table"]), attention_notes(records), wrong)


@verb(bench_app, "io", "lra.bench.traffic:IoOptions")
def bench_io(fields: Annotated[list[str] | None, typer.Argument(metavar="[field=value …]")] = None) -> None:
    """Bytes that attention moves to and from HBM, against block size: by formula, and measured where ncu is."""
    from lra.bench.traffic import measure_traffic, traffic_table

    result = measure_traffic(fields or ())
    print_rows(*traffic_table(result))
    for note in result.notes:
        console.print(note)


@verb(bench_app, "step", "lra.bench.step:parse_step_fields")
def bench_step(
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="task=… attn=… [recipe=…] [loops=… steps=… field=value …]")
    ] = None,
) -> None:
    """Time of a training step of lra fit, beside loops without Lightning, and where it goes."""
    from lra.bench.step import measure_step, step_notes, step_tables

    result = measure_step(fields or (), progress=console.print)
    print_measured(step_tables(result), step_notes(result), any(record.failed for record in result.loops))


@verb(bench_app, "start", "lra.bench.start:parse_start_fields")
def bench_start(
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="task=… attn=… [recipe=…] [cold=true] [out=<file>] [field=value …]")
    ] = None,
) -> None:
    """Where the seconds of one lra fit go, from the start of its process to its end."""
    from lra.bench.start import measure_start, start_notes, start_table

    result = measure_start(fields or ())
    print_measured([start_table(result)], start_notes(result))


@verb(results_app, "pack", "lra.experiments.results.archive:PackOptions")
def results_pack(
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="out=<file>.tar.xz [runs=<folder>] [checkpoints=none|weights|last|best|all]"),
    ] = None,
) -> None:
    """Put the results of runs into an archive; with checkpoints, unfinished runs at rest too."""
    from lra.experiments.results.archive import pack_runs

    for line in pack_runs(fields or ()):
        console.print(line)


@verb(results_app, "merge", "lra.experiments.results.archive:MergeOptions")
def results_merge(
    file: Annotated[str, typer.Argument(metavar="<file>.tar.xz|checkpoints/<name>")],
    fields: Annotated[list[str] | None, typer.Argument(metavar="[runs=<folder>]")] = None,
) -> None:
    """Add the runs of an archive, or released weights, to those that are here; what is finished stays."""
    from lra.experiments.results.archive import merge_runs

    for line in merge_runs(file, fields or ()):
        console.print(line)


def main() -> None:
    timeline.begin_timeline()
    atexit.register(gc.freeze)  # no object is searched for garbage once more: with PyTorch that takes a second
    with guard_streams() as output:
        try:
            _main()
        except SystemExit as ended:
            output.flush()
            if ended.code in (None, 0) and output.error and sys.argv[1:2] != ["fit"]:  # a run leaves its files
                if isinstance(output.error, BrokenPipeError):
                    sys.exit(EXIT_BROKEN_PIPE)  # the reader has gone, and knows it
                _exit_with(f"standard output can't be written to ({output.error.strerror}): send it elsewhere")
            raise


def _main() -> None:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no word of its caches where HOME can't be written to
    try:
        ranks.check_variables()
        for argument in sys.argv[1:]:
            if not argument.isprintable():
                raise UsageError(f"'{argument}' has a character that is no printable text: leave it out")
        sys.exit(app(prog_name="lra", standalone_mode=False))
    except ClickUsageError as error:
        _exit_misused(error)
    except UsageError as error:
        _exit_with(str(error))
    except (KeyboardInterrupt, typer.Abort):  # which one depends on Typer's version
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if not (said := explain_system_error(error) or caches.explain_damage(error)):
            raise
        _exit_with(said)
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning ends with 1
            sys.exit(EXIT_INTERRUPTED)
        raise


def _exit_misused(error: Any) -> NoReturn:
    """As Typer does, but in one line."""
    command, text = error.ctx.command_path if error.ctx else "lra", error.format_message()
    if not text:  # nothing was asked for, and the help is printed already
        sys.exit(2)
    _exit_with(f"{text} (see {command} --help)")


def _exit_with(text: str) -> NoReturn:
    with suppress(OSError):  # a full disk may have the standard error, too
        Terminal(stderr=True, soft_wrap=True).print(Text.assemble(("lra:", "red"), f" {make_visible(text)}"))
    sys.exit(2)
