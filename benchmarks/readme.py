"""Makes the tables of README.md from lra's registries and from the measurements in benchmarks/results.

    python -m benchmarks.readme [--check]

A table stands between `<!-- made by benchmarks/readme.py: NAME -->` and `<!-- end -->`. A measurement is a JSON file:
`<what>-exactness.json`, `<what>-learnability.json` or `<what>-prepare.json` of the program of that name here,
`<what>-profile.json` of counters.py, or `<what>-attention.json`, `<what>-butterfly-attention.json` (what is
block-sparse) or `<what>-io.json` of `lra bench`. docs/table3.md and docs/table6.md, made before, have the accuracies.
With --check nothing is written, and the exit code is 1 if README.md is not what would be.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import table
from lra.config.compose import read_recipe, recipes
from lra.config.registry import Registry
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS

README = pages.ROOT / "README.md"
BLOCK = re.compile(r"(<!-- made by benchmarks/readme\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SIZE = ("dtype", "d", "N", "batch", "dropout", "pass")  # what cells have in common that are compared

Row = Sequence[str]
Measured = tuple[Path, dict[str, Any]]


def tasks(_: Path) -> str:
    def row(name: str, facts: dict[str, Any], what: str) -> Row:
        covered = [recipe for recipe in recipes() if name in read_recipe(recipe)["tasks"]]
        version = f"`{name}@{facts['version']}`"
        return version, what, f"{facts['length']:,}", str(facts["classes"]), " ".join(covered), facts["paper"]

    header = ("task", "what", "longest", "classes", "recipes", "source")
    return table(header, (row(*entry) for entry in _catalogue(TASKS)))


def attentions(_: Path) -> str:
    def row(name: str, facts: dict[str, Any], what: str) -> Row:
        low, high = facts["head_dims"]
        return (
            f"`{name}`", what, _yes(facts["exact"]), _yes(facts["dropout"]), _yes(facts["ragged"]), f"{low} to {high}",
            facts["paper"],
        )  # fmt: skip

    header = ("attention", "what", "exact", "dropout", "ragged", "head dimension", "source")
    return table(header, (row(*entry) for entry in _catalogue(ATTENTIONS)))


def table3(_: Path) -> str:
    return _accuracies("table3")


def table6(_: Path) -> str:
    return _accuracies("table6")


def _accuracies(name: str) -> str:
    """The first table of docs/<name>.md on the recipe that goes furthest, and how long its runs took."""
    section = (pages.ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").partition("## Recipe `curriculum`")[2]
    parts = (r"\n(\|.*?)\n\n", r"- hardware: ([^\n]*)", r"- ([\d.]+ GPU-hours [^\n]*)")
    rows, hardware, hours = (found[1] if (found := re.search(part, section, re.DOTALL)) else "" for part in parts)
    if not rows:
        raise ValueError(f"docs/{name}.md has no table of recipe `curriculum`: python -m benchmarks.tables")
    return f"{rows}\n\nRecipe `curriculum`, {hardware}: {hours}."


def learnability(results: Path) -> str:
    rows = []
    for file, result in _measured(results, "-learnability"):
        rows.append((
            f"[{result['task']}](benchmarks/results/{file.name})",
            result["data"]["level"],
            f"{100 * result['accuracy']:.2f} of {result['n']:,}",
            f"{100 * result['curve'][-1]['train']:.2f}",
            f"{100 * max(result['baselines'].values()):.2f}",
            f"{result['steps']:,} of {result['batch']}",
            f"{result['train_seconds'] / 60:.1f} min",
            result["environment"]["gpu"] or "",
        ))  # fmt: skip
    header = ("task", "level", "test accuracy, %", "train accuracy, %", "baseline, %", "steps", "time", "GPU")
    return table(header, rows)


def prepare(results: Path) -> str:
    rows = [
        (
            f"[{store['task']}](benchmarks/results/{file.name})",
            " ".join(f"`{field}`" for field in store["fields"]),
            f"{store['examples']:,}",
            f"{store['bytes'] / 1e9:.2f} GB",
            f"{store['prepare_seconds']:.0f} s",
            f"{store['verify_seconds']:.0f} s",
            str(result["cores"]),
        )
        for file, result in _measured(results, "-prepare")
        for store in result["stores"]
    ]
    return table(("task", "fields", "examples", "size", "prepare", "verify", "CPU cores"), rows)


def exactness(results: Path) -> str:
    rows, notes = [], []
    for file, result in _measured(results, "-exactness"):
        link = f"[{file.stem.removesuffix('-exactness')}](benchmarks/results/{file.name})"
        for dtype, entry in result["dtypes"].items():
            worst = ("" if ratio is None else f"{ratio:.3f}" for ratio in entry["worst"].values())
            rows.append((link, dtype, str(entry["cases"]), *worst, str(entry["failures"])))
        notes.append(_covered(result))
    made = table(("kernel", "dtype", "cases", "out", "dq", "dk", "dv", "failed"), rows)
    return "\n".join([made, *(f"\n{note}" for note in notes)])


def _covered(result: dict[str, Any]) -> str:
    cover, made_with = result["coverage"], result["environment"]
    low, high = cover["length"]
    layouts = f", {cover['layouts']} layouts, {cover['rules']} with rules" if cover.get("layouts") else ""
    assembler = f", ptxas {result['ptxas']}" if result["ptxas"] else ""
    return (
        f"{result['cases']} cases, {cover['dropout']} with dropout, {cover['packed']} packed, {cover['padded']} "
        f"padded, {cover['causal']} causal{layouts}, lengths {low} to {high:,}, head dimensions "
        f"{cover['head_dim'][0]} to {cover['head_dim'][-1]}; {made_with['gpu']}, PyTorch "
        f"{made_with['versions']['torch']}, Triton {made_with['versions']['triton']}{assembler}, "
        f"{made_with['date'][:10]}."
    )


def speed(results: Path) -> str:
    """TFLOP/s, forward / backward, of what `lra bench attention` timed without a preset of the paper."""
    return _by_gpu([pair for pair in _dense(results) if pair[1]["options"]["table"] is None], _speed)


def _speed(measured: Sequence[Measured]) -> str:
    names = list(dict.fromkeys(cell["attention"] for _, result in measured for cell in result["cells"]))
    rows: dict[Any, dict[Any, str]] = {}
    for file, result in measured:
        ragged = result["options"]["ragged"] != "false"
        for cell in result["cells"]:
            length = f"IMDB, at most {cell['N']:,}" if ragged else f"{cell['N']:,}"
            key = (file.name, f"{cell['d']}", f"{cell['dropout']:g}", length, f"{cell['batch']}")
            value = f"{cell['tflops']:.0f}" if cell["status"] == "ok" else _ended(cell)
            rows.setdefault(key, {})[cell["attention"], cell["pass"]] = value
    header = ("d", "dropout", "N", "batch", *(f"`{name}`" for name in names))
    return table(
        header,
        (
            (f"[{d}](benchmarks/results/{name})", dropout, length, batch, *(_both(row, attn) for attn in names))
            for (name, d, dropout, length, batch), row in rows.items()
        ),
    )


def _both(row: dict[Any, str], attention: str) -> str:
    both = [row.get((attention, what), "") for what in ("forward", "backward")]
    return " / ".join(both) if any(both) else ""


def _ended(cell: dict[str, Any]) -> str:
    return "" if cell["status"] == "unsupported" else cell["status"]


def _by_gpu(measured: Sequence[Measured], make: Callable[[Sequence[Measured]], str]) -> str:
    """A table for each GPU, that of most measurements first, and below it what they were made with."""
    parts = []
    for gpu, _ in Counter(result["environment"]["gpu"] for _, result in measured).most_common():
        ours = [pair for pair in measured if pair[1]["environment"]["gpu"] == gpu]
        parts += [make(ours), _made_with(ours[0][1])]
    return "\n\n".join(parts)


def _dense(results: Path) -> list[Measured]:
    measured = _measured(results, "-attention")
    return [(file, result) for file, result in measured if not file.stem.endswith("-butterfly-attention")]


def sparse(results: Path) -> str:
    """Milliseconds, forward / backward, of butterfly, dense attention and FlexAttention with the same blocks."""
    return _by_gpu(_measured(results, "-butterfly-attention"), _sparse)


def _sparse(measured: Sequence[Measured]) -> str:
    rows: dict[Any, dict[Any, str]] = {}
    shares: dict[Any, dict[str, tuple[float, float]]] = defaultdict(dict)  # by pass: time, density times dense time
    for file, result in measured:
        for cell in result["cells"]:
            name, *options = cell["attention"].split(":")
            if name != "butterfly" or cell["block"] is None:
                continue
            alike = [other for other in result["cells"] if all(other[key] == cell[key] for key in SIZE)]
            flash = [other for other in alike if other["attention"] == "flash"]
            flex = [other for other in alike if other["attention"].partition(":")[0] == "butterfly@flex"]
            flex = [other for other in flex if all(other[key] == cell[key] for key in ("block", "density"))]
            blocks = " ".join([cell["block"], *(f"`{text}`" for text in options if not text.startswith("block="))])
            key = (file.name, cell["d"], f"{cell['N']:,}", blocks, f"{cell['density']:.3g}", f"{cell['dropout']:g}")
            columns = {"butterfly": _ms([cell]), "flash": _ms(flash), "flex": _ms(flex), "ratio": ""}
            if flash and cell["status"] == flash[0]["status"] == "ok":
                share = cell["density"] * flash[0]["ms"]
                columns["ratio"] = f"{cell['ms'] / share:.2f}"
                shares[key][cell["pass"]] = cell["ms"], share
            rows.setdefault(key, {}).update({(column, cell["pass"]): value for column, value in columns.items()})
    header = (
        "d", "N", "block", "density", "dropout", "`butterfly`, ms", "`flash`, ms", "FlexAttention, ms",
        "`butterfly` / (density × `flash`)", "of both passes",
    )  # fmt: skip
    values = ("butterfly", "flash", "flex", "ratio")
    return table(
        header,
        (
            (
                f"[{key[1]}](benchmarks/results/{key[0]})", *key[2:], *(_both(row, column) for column in values),
                _of_both(shares[key]),
            )
            for key, row in rows.items()
        ),
    )  # fmt: skip


def _of_both(shares: Mapping[str, tuple[float, float]]) -> str:
    """The time of forward and backward over what it is compared with; nothing where one of them was not measured."""
    if not shares.keys() >= {"forward", "backward"}:
        return ""
    taken, compared = map(sum, zip(shares["forward"], shares["backward"], strict=True))
    return f"{taken / compared:.2f}"


def _ms(cells: Sequence[dict[str, Any]]) -> str:
    return "".join(f"{cell['ms']:.3f}" if cell["status"] == "ok" else _ended(cell) for cell in cells[:1])


def memory(results: Path) -> str:
    """Peak MB of forward and backward, of the preset of the paper's Table 21."""
    rows: dict[Any, dict[str, str]] = {}
    measured = [pair for pair in _dense(results) if pair[1]["options"]["table"] == "21"]
    for file, result in measured:
        for cell in result["cells"]:
            if cell["pass"] == "both":
                value = f"{cell['memory_mb']:,.0f}" if cell["status"] == "ok" else _ended(cell)
                rows.setdefault((file.name, cell["N"]), {})[cell["attention"]] = value
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    return table(
        ("N", *(f"`{name}`" for name in names)),
        (
            (f"[{n:,}](benchmarks/results/{file})", *(row.get(name, "") for name in names))
            for (file, n), row in rows.items()
        ),
    )


def short(results: Path) -> str:
    """Milliseconds of the preset of the paper's Table 7."""
    rows: dict[Any, dict[int, str]] = {}
    for file, result in _dense(results):
        for cell in result["cells"] if result["options"]["table"] == "7" else ():
            value = f"{cell['ms']:.3f}" if cell["status"] == "ok" else _ended(cell)
            rows.setdefault((file.name, cell["attention"], cell["pass"]), {})[cell["N"]] = value
    lengths = list(dict.fromkeys(n for row in rows.values() for n in row))
    return table(
        ("attention", "pass", *(f"N = {n}" for n in lengths)),
        (
            (f"[`{name}`](benchmarks/results/{file})", what, *(row.get(n, "") for n in lengths))
            for (file, name, what), row in rows.items()
        ),
    )


def profile(results: Path) -> str:
    """What hardware counters say of the kernels: the share of time in which each unit is busy, in percent."""
    rows = [(file, row) for file, result in _measured(results, "-profile") for row in result["rows"]]
    units = list(dict.fromkeys(unit for _, row in rows for unit in row["busy_percent"]))
    return table(
        ("kernel", "d", "dropout", *units),
        (
            (
                f"[{row['kernel'].removesuffix('_kernel').replace('_', ' ')}](benchmarks/results/{file.name})",
                f"{row['d']}",
                f"{row['dropout']:g}",
                *(f"{row['busy_percent'][unit]:.0f}" for unit in units),
            )
            for file, row in rows
        ),
    )


def traffic(results: Path) -> str:
    """GB that the forward pass moves, from the formulas, and as the hardware counted them."""
    rows = [
        (
            f"[{row['algorithm']}](benchmarks/results/{file.name})",
            *("" if row[block] is None else str(row[block]) for block in ("block_columns", "block_rows")),
            *("" if value is None else f"{value / 1e9:.2f}" for value in (row["read"] + row["write"], _counted(row))),
        )
        for file, result in _measured(results, "-io")
        for row in result["rows"]
    ]
    return table(("algorithm", "B_c", "B_r", "loads and stores, GB", "measured in HBM, GB"), rows)


def _counted(row: dict[str, Any]) -> float | None:
    both = (row["measured_read"], row["measured_write"])
    return None if None in both else sum(both)


def _made_with(result: dict[str, Any]) -> str:
    made_with = result["environment"]
    versions = made_with["versions"]
    return (
        f"{made_with['gpu']}, PyTorch {versions['torch']}, Triton {versions['triton']}, {made_with['date'][:10]}; "
        f"{result['options']['heads']} heads, {', '.join(result['options']['dtypes'])}."
    )


MADE: dict[str, Callable[[Path], str]] = {
    f.__name__: f
    for f in (
        tasks,
        attentions,
        table3,
        table6,
        speed,
        sparse,
        short,
        profile,
        memory,
        traffic,
        learnability,
        prepare,
        exactness,
    )
}


def make(text: str, results: Path = pages.RESULTS) -> str:
    """`text` with every block made anew; ValueError if a block is missing, unknown or there twice."""
    names = [match[2] for match in BLOCK.finditer(text)]
    if sorted(names) != sorted(MADE):
        raise ValueError(f"README.md has the blocks {', '.join(names)}, not {', '.join(MADE)}")
    return BLOCK.sub(lambda match: f"{match[1]}{MADE[match[2]](results)}\n{match[3]}", text)


def _measured(results: Path, ending: str) -> list[Measured]:
    """The files whose name ends so, before `.json`, and what they hold."""
    files = sorted(results.glob(f"[!.]*{ending}.json"))
    return [(file, json.loads(file.read_text(encoding="utf-8"))) for file in files]


def _catalogue(registry: Registry) -> Iterable[tuple[str, dict[str, Any], str]]:
    for entry in registry.builtins().values():
        yield entry.name, vars(registry.declared(entry)), entry.summary.rstrip(".")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.exit(pages.main(lambda: {README: make(README.read_text(encoding="utf-8"))}))
