"""docs/attentions.md, of lra's registry of attentions and of their sources."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages.measured import ROOT, table
from lra.config.options import parse
from lra.config.registry import Entry
from lra.models.attention import ATTENTIONS, Capabilities
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.block_sparse import BlockSparseAttention

PAGE = ROOT / "docs" / "attentions.md"
KEYS = 256  # what a query costs in the micro-benchmarks of FlashAttention's appendix E.6, from N = 2048 on
LENGTHS = (1024, 65536)  # of sequences in which these are counted
NOT_SHOWN = ("fmt:", "type:", "noqa", "pyright:")  # comments for tools
HEADER = (
    "# Attentions\n\n<!-- made by benchmarks/pages/attentions.py: make docs -->\n\n"
    "For people who choose an attention or set its options. `attn=<name>` chooses one, `attn.<option>=<value>` sets "
    "an option, and `lra ls attns` shows which attentions work on your machine. It also lists attentions of other "
    "installed packages.\n\n"
    "- *cost*: how time grows with the sequence length N. Memory grows with N unless the cost says otherwise.\n"
    "- *exact*: equal to softmax attention up to rounding.\n"
    "- *dropout*: drops attention weights. Without it `model.attn_dropout` must be 0.\n"
    "- *ragged*: reads sequences of different lengths without padding. The others get the padded form.\n"
    "- *dtypes*: values of `trainer.precision`.\n\n"
    "An attention refuses a head dimension, dropout, precision or device that it does not take, and the message names "
    "those that take it.\n"
)


def page() -> str:
    """The whole text, the same on every machine."""
    entries = ATTENTIONS.builtins().values()
    header = ("attention", "cost", "exact", "dropout", "ragged", "head dimensions", "dtypes", "needs")
    rows = [_row(entry, ATTENTIONS.declared(entry)) for entry in entries]
    return "\n".join([HEADER, table(header, rows), *(_section(entry) for entry in entries)])


def _row(entry: Entry, facts: Capabilities) -> Sequence[str]:
    return (
        f"[`{entry.name}`](#{entry.name})",
        facts.cost,
        *(("no", "yes")[value] for value in (facts.exact, facts.dropout, facts.ragged)),
        _head_dims(facts),
        ", ".join(facts.dtypes),
        " and ".join(_needs(entry, facts)),
    )


def _head_dims(facts: Capabilities) -> str:
    low, high = facts.head_dims
    return f"{low} to {high}" + (f", multiples of {facts.head_dim_multiple}" if facts.head_dim_multiple > 1 else "")


def _needs(entry: Entry, facts: Capabilities) -> Iterator[str]:
    """Without which it can't be used."""
    if facts.needs_gpu:
        yield "a GPU"
    for requirement in entry.requires:
        choices = requirement.split("|")
        yield " or ".join(f"the file that `{c}` names" if c.startswith("$") else f"the package `{c}`" for c in choices)


def _section(entry: Entry) -> str:
    cls, facts = _load(entry), ATTENTIONS.declared(entry)
    source = f"lra/{entry.module.partition('.')[2].replace('.', '/')}.py"
    limits = [f"It needs {needed}." for needed in _needs(entry, facts)]
    limits += [f"It takes head dimensions {_head_dims(facts)}, in {' or '.join(facts.dtypes)}."]
    limits += [] if facts.dropout else ["It has no dropout: set `model.attn_dropout=0`."]
    limits += ["It takes one projection for queries and keys."] if facts.shared_qk else []
    rows = [(f"`attn.{name}`", *cells) for name, cells in options(cls.Config).items()]
    sized = " ".join(f"`attn.{name}={_value(value)}`" for name, value in cls.budget(KEYS).items())
    parts = [
        f"\n## {entry.name}",
        *(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(cls.__doc__).split("\n\n")),
        f"{facts.paper}. Source: [{source}](../{source}).",
        " ".join(limits),
        table(("option", "type", "default", "what"), rows) if rows else "No options.",
        f"For the cost of {KEYS} keys to a query: {sized}.{_seen(cls)}" if sized else "No option changes the cost.",
    ]
    return "\n\n".join(parts)


def _seen(cls: type[Attention]) -> str:
    """How many keys a query of a pattern sees then, on average: that can grow with the sequence."""
    if not issubclass(cls, BlockSparseAttention):
        return ""
    config = parse(cls.Config, [f"{name}={_value(value)}" for name, value in cls.budget(KEYS).items()])
    layouts = {n: cls.make_layout(config, AttentionSpec(heads=1, head_dim=64, max_length=n))[0] for n in LENGTHS}
    seen = (f"{n * layout.density(n):,.0f} of {n:,} keys" for n, layout in layouts.items())
    return f" A query then sees on average {' or '.join(seen)}."


def _load(entry: Entry) -> Any:
    """The class; its module can be imported without what it needs to run, so every machine makes the same text."""
    module = importlib.import_module(entry.module)
    return next(cls for cls in vars(module).values() if isinstance(cls, type) and vars(cls).get("name") == entry.name)


def options(config: type) -> dict[str, tuple[str, str, str]]:
    """(type, default, comment beside the field) of a dataclass's fields by name, inherited ones first."""
    comments: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        if dataclasses.is_dataclass(cls) and inspect.get_annotations(cls):
            comments |= _comments(cls)
    hints = typing.get_type_hints(config)
    return {
        field.name: (_type(hints[field.name]), _value(_default(field)), comments[field.name])
        for field in dataclasses.fields(config)  # type: ignore[arg-type]
    }


def _comments(cls: type) -> dict[str, str]:
    """The comment on the lines of each field that a class declares itself."""
    text = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {token.start[0]: token.string.lstrip("#: ") for token in tokens if token.type == tokenize.COMMENT}
    shown = {line: comment for line, comment in found.items() if not comment.startswith(NOT_SHOWN)}
    (tree,) = ast.parse(text).body
    assert isinstance(tree, ast.ClassDef)
    return {
        node.target.id: " ".join(shown[n] for n in range(node.lineno, (node.end_lineno or 0) + 1) if n in shown)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _type(hint: Any) -> str:
    """As a user would say what may be written: `int or null`, `auto`, `triton` or `gather`."""
    if typing.get_origin(hint) is typing.Literal:
        *most, last = (f"`{_value(choice)}`" for choice in typing.get_args(hint))
        return f"{', '.join(most)} or {last}" if most else last
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("`null`" if option is types.NoneType else _type(option) for option in typing.get_args(hint))
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _value(value: Any) -> str:
    """As it is written on the command line."""
    if value is dataclasses.MISSING:
        return "required"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def make() -> dict[Path, str]:
    return {PAGE: page() + "\n"}
