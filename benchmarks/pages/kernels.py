"""Tables of docs/results.md and docs/kernels.md on kernels, of what `lra bench` and three studies measured.

Each function is given the folder that has results/ and studies/.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pages.measured import Measured, link, read, table
from benchmarks.studies.randomness.study import LAYERS, SUSPECT, WORDS, beyond
from lra.kernels.kernel_choices import HOPPER_GPU, attention_choices

SPARSE = "butterfly-*.json"  # of results/attention: what sees only some keys
SIZE = ("dtype", "d", "N", "batch", "dropout", "pass")  # what cells have in common that are compared


def choices(_: Path) -> str:
    """The kernels of each kind of call on a Hopper GPU, and why, as the function says that decides at each call."""
    rows = (
        (call, f"`{one.kernel}`", f"`{two.kernel}`", "; ".join(dict.fromkeys((one.reason, two.reason))))
        for call, one, two in attention_choices(HOPPER_GPU)
    )
    return table(("calls", "forward", "backward", "why"), rows)


def exactness(root: Path) -> str:
    rows, notes = [], []
    for file, result in read(root, "studies/exactness/*/*.json"):
        for dtype, entry in result["dtypes"].items():
            worst = ("" if ratio is None else f"{ratio:.3f}" for ratio in entry["worst"].values())
            rows.append((link(file.stem, file), dtype, str(entry["cases"]), *worst, str(entry["failures"])))
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


def randomness(root: Path) -> str:
    rows = []
    for file, result in read(root, "studies/randomness/*/*.json"):
        streams = result["streams"]
        p = [found["p"] for stream in streams for found in stream["p_values"]]
        suspect = sum(len(beyond(stream, SUSPECT)) for stream in streams)
        battery = link(streams[0]["battery"], file)
        words = streams[0]["words"]
        where = words if words == WORDS[LAYERS] else "of attention"
        least = f"{min(min(x, 1 - x) for x in p):.1e}"
        rows.append((where, battery, str(len(streams)), f"{len(p):,}", str(suspect), least))
    return table(("dropout", "battery", "streams", "p-values", "suspect", "nearest to 0 or 1"), rows)


def turns(root: Path) -> str:
    """What the later of two trees takes, and how much more that is than what the earlier one takes."""
    rows = []
    for file, result in read(root, "studies/turns/*/*.json"):
        for case, times in result["ms"].items():
            before, now = ([median(column) for column in zip(*rows, strict=True)] for rows in times.values())
            more = (f"{one:.3f} ({100 * (one / other - 1):+.1f}%)" for one, other in zip(now, before, strict=True))
            rows.append((link(case, file), *more))
    return table(("bf16, if not fp32", "forward, ms", "backward, ms"), rows)


def speed(root: Path) -> str:
    """TFLOP/s, forward / backward, of what `lra bench attention` timed without a preset of the paper."""
    return _by_gpu([pair for pair in _dense(root) if pair[1]["options"]["table"] is None], _speed)


def _speed(measured: Sequence[Measured]) -> str:
    names = list(dict.fromkeys(cell["attention"] for _, result in measured for cell in result["cells"]))
    rows: dict[Any, dict[Any, str]] = {}
    for file, result in measured:
        ragged = result["options"]["ragged"] != "false"
        for cell in result["cells"]:
            key = (ragged, cell["dropout"], cell["d"], cell["N"], cell["batch"], file)
            value = f"{cell['tflops']:.0f}" if cell["status"] == "ok" else _ended(cell)
            rows.setdefault(key, {})[cell["attention"], cell["pass"]] = value
    made = [
        (
            link(f"{d}", file), f"{dropout:g}", f"IMDB, at most {n:,}" if ragged else f"{n:,}",
            f"{batch}", *(_both(row, attention) for attention in names),
        )
        for (ragged, dropout, d, n, batch, file), row in sorted(rows.items(), key=lambda pair: pair[0])
    ]  # fmt: skip
    return table(("d", "dropout", "N", "batch", *_code(names)), made)


def _code(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


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
        parts += [make(ours), _made_with([result for _, result in ours])]
    return "\n\n".join(parts)


def _dense(root: Path) -> list[Measured]:
    measured = read(root, "results/attention/*/*.json")
    return [(file, result) for file, result in measured if not file.match(SPARSE)]


def sparse(root: Path) -> str:
    """Milliseconds, forward / backward, of butterfly, dense attention and FlexAttention with the same blocks."""
    return _by_gpu(read(root, f"results/attention/*/{SPARSE}"), _sparse)


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
            key = (file, cell["d"], f"{cell['N']:,}", blocks, f"{cell['density']:.3g}", f"{cell['dropout']:g}")
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
    made = [
        (link(f"{key[1]}", key[0]), *key[2:], *(_both(row, column) for column in values), _of_both(shares[key]))
        for key, row in rows.items()
    ]
    return table(header, made)


def _of_both(shares: Mapping[str, tuple[float, float]]) -> str:
    """The time of forward and backward over what it is compared with; nothing where one of them was not measured."""
    if not shares.keys() >= {"forward", "backward"}:
        return ""
    taken, compared = map(sum, zip(shares["forward"], shares["backward"], strict=True))
    return f"{taken / compared:.2f}"


def _ms(cells: Sequence[dict[str, Any]]) -> str:
    return "".join(f"{cell['ms']:.3f}" if cell["status"] == "ok" else _ended(cell) for cell in cells[:1])


def memory(root: Path) -> str:
    """Peak MB of forward and backward, of the preset of the paper's Table 21."""
    rows: dict[Any, dict[str, str]] = {}
    measured = [pair for pair in _dense(root) if pair[1]["options"]["table"] == "21"]
    for file, result in measured:
        for cell in result["cells"]:
            if cell["pass"] == "both":
                value = f"{cell['memory_mb']:,.0f}" if cell["status"] == "ok" else _ended(cell)
                rows.setdefault((file, cell["N"]), {})[cell["attention"]] = value
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    made = [(link(f"{n:,}", file), *(row.get(name, "") for name in names)) for (file, n), row in rows.items()]
    return table(("N", *_code(names)), made)


def short(root: Path) -> str:
    """Milliseconds of the preset of the paper's Table 7."""
    rows: dict[Any, dict[int, str]] = {}
    for file, result in _dense(root):
        for cell in result["cells"] if result["options"]["table"] == "7" else ():
            value = f"{cell['ms']:.3f}" if cell["status"] == "ok" else _ended(cell)
            rows.setdefault((file, cell["attention"], cell["pass"]), {})[cell["N"]] = value
    lengths = list(dict.fromkeys(n for row in rows.values() for n in row))
    made = [
        (link(f"`{name}`", file), what, *(row.get(n, "") for n in lengths)) for (file, name, what), row in rows.items()
    ]
    return table(("attention", "pass", *(f"N = {n}" for n in lengths)), made)


def profile(root: Path) -> str:
    """What hardware counters say of the kernels: the share of time in which each unit is busy, in percent."""
    rows = [(file, row) for file, result in read(root, "studies/counters/*/*.json") for row in result["rows"]]
    units = list(dict.fromkeys(unit for _, row in rows for unit in row["busy_percent"]))
    made = [
        (
            link(row["kernel"].removesuffix("_kernel").replace("_", " "), file), f"{row['d']}", f"{row['dropout']:g}",
            *(f"{row['busy_percent'][unit]:.0f}" for unit in units),
        )
        for file, row in rows
    ]  # fmt: skip
    return table(("kernel", "d", "dropout", *units), made)


def traffic(root: Path) -> str:
    """GB that the forward pass moves, from the formulas, and as the hardware counted them."""
    rows = [
        (
            link(row["algorithm"], file),
            *("" if row[block] is None else str(row[block]) for block in ("block_columns", "block_rows")),
            *("" if value is None else f"{value / 1e9:.2f}" for value in (row["read"] + row["write"], _counted(row))),
        )
        for file, result in read(root, "results/io/*/*.json")
        for row in result["rows"]
    ]
    return table(("algorithm", "B_c", "B_r", "loads and stores, GB", "measured in HBM, GB"), rows)


def _counted(row: dict[str, Any]) -> float | None:
    both = (row["measured_read"], row["measured_write"])
    return None if None in both else sum(both)


def _made_with(results: Sequence[dict[str, Any]]) -> str:
    """What they all were made with, and from the first day to the last."""
    said, sizes = set(), set()
    for made_with, options in ((result["environment"], result["options"]) for result in results):
        versions = made_with["versions"]
        said.add(f"{made_with['gpu']}, PyTorch {versions['torch']}, Triton {versions['triton']}")
        sizes.add(f"{options['heads']} heads, {', '.join(options['dtypes'])}")
    days = sorted(result["environment"]["date"][:10] for result in results)
    period = " to ".join(dict.fromkeys((days[0], days[-1])))
    return f"{' and '.join(sorted(said))}, {period}; {' and '.join(sorted(sizes))}."
