"""The form of a store's manifest, on which its readers rely."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lra.reading import is_number

LENGTH_FIELDS = ("min", "max", "mean")  # of the sequences of a split


def faulty_fields(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The fields of a manifest that do not have this form."""
    for name, kind in (
        ("task", str), ("version", int), ("params", dict), ("source", str), ("vocabulary", list), ("generator", str),
        ("seed", int | None), ("vocabulary_hash", str), ("splits", dict), ("baselines", dict), ("notes", list),
        ("date", str), ("versions", dict),
    ):  # fmt: skip
        if not isinstance(manifest[name], kind):
            yield f"{name} of a store"
            return
    if not all(isinstance(text, str) for text in (*manifest["vocabulary"], *manifest["notes"])):
        yield "texts in vocabulary and notes"
    for name, file in manifest["files"].items():
        if "/" in name or not isinstance(file["bytes"], int) or not isinstance(file["sha256"], str):
            yield f"size and checksum of {name}"
    for name, part in manifest["splits"].items():
        if not _is_part(part) or not _are_counts(part.get("labels")):
            yield f"counts of the sequences and labels of {name}"
    if "documents" in manifest and not _is_part(manifest["documents"]):
        yield "counts of the documents"
    for rule, shares in manifest["baselines"].items():
        if not isinstance(shares, dict) or not all(is_number(share) and 0 <= share <= 1 for share in shares.values()):
            yield f"shares of the baseline {rule}"


def _is_part(part: Any) -> bool:
    """Whether a split, or the documents, has its count and, if it has sequences, their lengths."""
    lengths = part.get("length", {"min": 0, "max": 0, "mean": 0}) if isinstance(part, dict) else None
    return isinstance(lengths, dict) and all(map(is_number, (part.get("count"), *map(lengths.get, LENGTH_FIELDS))))


def _are_counts(labels: Any) -> bool:
    return isinstance(labels, dict) and all(isinstance(n, int) and n > 0 for n in labels.values())
