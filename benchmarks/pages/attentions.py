"""docs/attentions.md, of lra's registry of attentions and of their sources."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages.measured import ROOT, table
from lra.config.fields import describe_fields, format_value
from lra.config.options import parse_options
from lra.config.registry import CatalogueEntry
from lra.models.attention import ATTENTIONS, Capabilities
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.block_sparse import BlockSparseAttention

PAGE = ROOT / "docs" / "attentions.md"
KEYS = 256  # what a query costs in the micro-benchmarks of FlashAttention's appendix E.6, from N = 2048 on
LENGTHS = (1024, 65536)  # of sequences in which these are counted
HEADER = (
    "# Attentions\n\n<!-- made by benchmarks/pages/attentions.py: make docs -->\n\n"
    "For people who choose an attention or set its options. `attn=<name>` chooses one, `attn.<option>=<value>` sets "
    "an option, and `lra ls attns` shows which attentions work on your machine. It also lists attentions of other "
    "installed packages. [Fields](fields.md) has "
    "every other field of a run.\n\n"
    "- *cost*: how time grows with the sequence length N. Memory grows with N unless the cost says otherwise.\n"
    "- *exact*: equal to softmax attention up to rounding.\n"
    "- *dropout*: drops attention weights. Without it `model.attn_dropout` must be 0.\n"
    "- *causal*: can hide later tokens from each token. Without it `model.causal=true` is refused.\n"
    "- *ragged*: reads sequences of different lengths without padding. The others get the padded form.\n"
    "- *dtypes*: values of `trainer.precision`.\n\n"
    "An attention refuses a head dimension, dropout, causality, precision or device that it does not take, and the "
    "message names those that take it.\n\n"
    "The last table has [mixers](mixers.md). `attn=` chooses them, too. They have no queries, keys and head "
    "dimensions, and no dropout of weights: `model.attn_dropout` must be 0, and `model.positions` not `rotary`.\n"
)


def page() -> str:
    """The whole text, the same on every machine."""
    entries = ATTENTIONS.builtins().values()
    header = ("attention", "cost", "exact", "dropout", "causal", "ragged", "head dimensions", "dtypes", "needs")
    facts = {entry.name: ATTENTIONS.facts_of(entry) for entry in entries}
    rows = [_row(entry, facts[entry.name]) for entry in entries if not facts[entry.name].mixes]
    mixers = [_row(entry, facts[entry.name]) for entry in entries if facts[entry.name].mixes]
    kept = [place for place, name in enumerate(header) if name not in ("exact", "dropout", "head dimensions")]
    short = table(["mixer", *(header[i] for i in kept[1:])], [[row[i] for i in kept] for row in mixers])
    return "\n".join([HEADER, table(header, rows), "", short, *(_section(entry) for entry in entries)])


def _row(entry: CatalogueEntry, facts: Capabilities) -> Sequence[str]:
    return (
        f"[`{entry.name}`](#{entry.name})",
        facts.cost,
        *(("no", "yes")[value] for value in (facts.exact, facts.dropout, facts.causal, facts.ragged)),
        _head_dims(facts),
        ", ".join(facts.dtypes),
        " and ".join(_needs(entry, facts)),
    )


def _head_dims(facts: Capabilities) -> str:
    if facts.mixes:
        return ""
    low, high = facts.head_dims
    return f"{low} to {high}" + (f", multiples of {facts.head_dim_multiple}" if facts.head_dim_multiple > 1 else "")


def _needs(entry: CatalogueEntry, facts: Capabilities) -> Iterator[str]:
    """Without which it can't be used."""
    if facts.needs_gpu:
        yield "a GPU"
    for requirement in entry.requires:
        choices = requirement.split("|")
        yield " or ".join(f"the file that `{c}` names" if c.startswith("$") else f"the package `{c}`" for c in choices)


def _section(entry: CatalogueEntry) -> str:
    cls, facts = load_class(entry), ATTENTIONS.facts_of(entry)
    source = f"lra/{entry.module.partition('.')[2].replace('.', '/')}.py"
    limits = [f"It needs {needed}." for needed in _needs(entry, facts)]
    takes = "is a [mixer](mixers.md)" if facts.mixes else f"takes head dimensions {_head_dims(facts)}"
    limits += [f"It {takes}, in {' or '.join(facts.dtypes)}."]
    limits += [] if facts.dropout or facts.mixes else ["It has no dropout: set `model.attn_dropout=0`."]
    limits += ["It takes one projection for queries and keys."] if facts.shared_qk else []
    described = describe_fields(cls.Config(), "attn.")
    rows = [(f"`{field.name}`", field.type, field.default, field.meaning) for field in described]
    sized = " ".join(f"`attn.{name}={format_value(value)}`" for name, value in cls.budget(KEYS).items())
    parts = [
        f"\n## {entry.name}",
        *(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(cls.__doc__).split("\n\n")),
        f"{facts.paper}. Source: [{source}](../{source}).",
        " ".join(limits),
        table(("option", "may be", "default", "meaning"), rows) if rows else "No options.",
        f"For the cost of {KEYS} keys to a query: {sized}.{_seen(cls)}" if sized else "No option changes the cost.",
    ]
    return "\n\n".join(parts)


def _seen(cls: type[Attention]) -> str:
    """How many keys a query of a pattern sees then, on average: that can grow with the sequence."""
    if not issubclass(cls, BlockSparseAttention):
        return ""
    config = parse_options(cls.Config, [f"{name}={format_value(value)}" for name, value in cls.budget(KEYS).items()])
    layouts = {n: cls.make_layout(config, AttentionSpec(heads=1, head_dim=64, max_length=n))[0] for n in LENGTHS}
    seen = (f"{n * layout.density(n):,.0f} of {n:,} keys" for n, layout in layouts.items())
    return f" A query then sees on average {' or '.join(seen)}."


def load_class(entry: CatalogueEntry) -> Any:
    """The class; its module can be imported without what it needs to run, so every machine makes the same text."""
    module = importlib.import_module(entry.module)
    return next(cls for cls in vars(module).values() if isinstance(cls, type) and vars(cls).get("name") == entry.name)


def make() -> dict[Path, str]:
    return {PAGE: page() + "\n"}
