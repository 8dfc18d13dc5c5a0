"""Reads files back: regular ones of a bounded size, in UTF-8, without duplicate keys and numbers beyond 64 bits.

Any other file raises a ValueError that says briefly what is wrong. The caller adds its name and the mend. Errors of the
system pass: a file that may not be read, or that lies on a failing disk, is not damaged.
"""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

MOST_JSON = 64 << 20  # bytes; the largest manifests have some 100,000
MOST_YAML = 1 << 18  # bytes; PyYAML reads about 50,000 a second
MOST_NODES = 100_000  # values of a YAML file with its aliases written out; lra's files have some hundred
MOST_LEVELS = 50  # levels of nested values; lra's files have up to five
TOO_DEEP = "it is nested too deeply"
MOST_CURVES = 1 << 30  # bytes; a row has about 50


def read_text(path: Path, most: int) -> str:
    """The text of a regular file of at most `most` bytes, without its byte order mark."""
    try:
        mode = path.stat().st_mode
    except NotADirectoryError:  # a file lies where its folder would
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    if not stat.S_ISREG(mode):  # a pipe would be waited for, and a device may never end
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data.decode("utf-8-sig")


def read_json(path: Path) -> Any:
    """The value of a JSON file."""
    return parse_json(read_text(path, MOST_JSON))


def parse_json(text: str) -> Any:
    """The value of a JSON text."""
    try:
        return _check_depth(
            json.loads(text, object_pairs_hook=_mapping, parse_int=_integer, parse_float=_real, parse_constant=_real)
        )
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def read_yaml(path: Path, by_hand: bool = False) -> Any:
    """The value of a YAML file.

    Args:
        by_hand: people wrote it, so 1e-4 is a number and a date is a text. Files that a program wrote have neither.
    """
    text = read_text(path, MOST_YAML)
    try:
        loader = (_HandWrittenLoader if by_hand else _PlainLoader)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {})
        return _check_depth(loader.construct_document(node))
    except yaml.MarkedYAMLError as error:
        where = f" on line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{error.problem or error.context}{where}") from None
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def read_csv(path: Path, required: str) -> list[dict[str, str]]:
    """The rows of a CSV file by column, up to the last line break. The column `required` must exist.

    A process that is killed can leave half a row there. A power cut can leave zeros in place of the last rows.
    """
    text = read_text(path, MOST_CURVES)
    if "\0" in text and not text[(cut := text.index("\0")) :].strip("\0\n"):
        text = text[:cut]
    whole, _, _ = text.rpartition("\n")
    try:
        header, *rows = csv.reader(whole.splitlines()) if whole else [[]]
    except csv.Error as error:
        raise ValueError(str(error)) from None
    if header and required not in header:
        raise ValueError(f"it has no column {required}")
    return [dict(zip(header, row, strict=len(row) > len(header))) for row in rows if row]


def _check_depth(value: Any) -> Any:
    """The value, if it is not nested too deeply for code that recurses."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [part for parts in inner for part in parts]
        if not level:
            return value
    raise ValueError(TOO_DEEP)


def is_number(value: Any) -> bool:
    """Whether a value that was read is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (value := int(text)) < 1 << 64:
        raise ValueError(f"it has a number of {len(text):,} digits")
    return value


def _real(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"it has the number {text[:20]}, which is not finite")
    return value


def _count_nodes(node: yaml.Node, counts: dict[int, int]) -> int:
    """The nodes of a tree with its aliases written out: a few lines of aliases can make a tree of any size."""
    if (known := counts.get(id(node))) is not None:
        if known == 0:
            raise yaml.YAMLError("it has an alias within what it stands for")
        return known
    counts[id(node)] = 0  # it is being counted
    inner: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [part for pair in inner for part in pair] if isinstance(node, yaml.MappingNode) else inner
    total = counts[id(node)] = 1 + sum(_count_nodes(part, counts) for part in parts)
    if total > MOST_NODES:
        raise yaml.YAMLError(f"its aliases make more than {MOST_NODES:,} values of it")
    return total


class _HandWrittenLoader(yaml.SafeLoader):
    """YAML without duplicate keys and numbers beyond 64 bits."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            raise yaml.YAMLError(f"it has a key twice in the mapping on line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(node.value)
        if len(text) > 80 or not -(1 << 63) <= (value := super().construct_yaml_int(node)) < 1 << 64:
            raise yaml.YAMLError(f"it has a number of {len(text):,} characters on line {node.start_mark.line + 1}")
        return value


class _PlainLoader(_HandWrittenLoader):
    """YAML as programs write it, without aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        return super().compose_node(parent, index)


_HandWrittenLoader.add_constructor("tag:yaml.org,2002:int", _HandWrittenLoader.construct_yaml_int)
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)
_HandWrittenLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainLoader.yaml_implicit_resolvers = yaml.SafeLoader.yaml_implicit_resolvers
_HandWrittenLoader.add_implicit_resolver(  # YAML 1.1 wants a dot in it, and a sign after the e
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
