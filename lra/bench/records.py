"""Measurements: typed records in memory, JSON objects in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Self, TypeVar, get_args, get_origin, get_type_hints

from lra import environment
from lra.reading import is_number, read_json

SessionFacts = dict[str, Any]  # date, command and commit of what measured a record


def session_of(session: Mapping[str, Any]) -> SessionFacts:
    """The part of `environment.describe` that differs between sessions which measure for one file."""
    return {name: session.get(name) for name in ("date", "command", "commit")}


class Measurement:
    """What all records share. A kind is a frozen dataclass, whose fields are the keys of the JSON, in order."""

    status: str  # ok; or, without times, OOM, unsupported, failed or WRONG
    reason: str  # why it has no times
    ms: float | None
    memory_mb: float | None  # peak of what is allocated, in 10^6 bytes; None on a CPU
    # None where only one session has measured; in a file, of a record of the session that began it
    made: SessionFacts | None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def failed(self) -> bool:
        """Whether something must be mended. A size that does not fit, or is not supported, is an answer."""
        return self.status in ("WRONG", "failed")

    @property
    def mark(self) -> str:
        """The mark of a record that no clean commit made, else empty."""
        return "" if self.made is None or environment.is_clean_commit(self.made["commit"]) else environment.UNCLEAN_MARK

    def saved(self) -> dict[str, Any]:
        """The JSON object."""
        saved = {key: getattr(self, each.name) for key, each in _names(type(self)).items()}
        return saved if self.made else {key: value for key, value in saved.items() if key != "made"}

    @classmethod
    def loaded(cls, saved: Any) -> Self:
        """The record of a JSON object. ValueError if a key is unknown or missing, or a value has another type."""
        names, hints = _names(cls), get_type_hints(cls)
        required = {key for key, each in names.items() if each.default is MISSING}
        if not isinstance(saved, dict) or not required <= saved.keys() <= names.keys():
            raise ValueError(f"a record has other keys than {', '.join(names)}")
        given = {names[key].name: value for key, value in saved.items()}
        for name, value in given.items():
            if not _fits(value, hints[name]):
                raise ValueError(f"a record's {name} is {value!r}")
        return cls(**given)


@dataclass(frozen=True, kw_only=True)
class AttentionMeasurement(Measurement):
    """A pass of an attention at one size, measured by `lra bench attention`."""

    attention: str
    options: str  # chosen by the paper's table, name=value:…
    ragged: str
    pass_name: str = field(metadata={"key": "pass"})
    length: int = field(metadata={"key": "N"})  # the longest, or what each sequence is padded to
    head_dim: int = field(metadata={"key": "d"})
    dtype: str
    dropout: float
    batch: int
    heads: int
    tokens: int
    squares: int  # of the lengths, summed
    density: float | None = None  # share of these that is seen; None if the attention has no such share
    block: str | None = None  # queries by keys, if it is block-sparse
    status: str = "ok"
    ms: float | None = None
    tflops: float | None = None  # 10^12 operations a second
    memory_mb: float | None = None
    host_ms: float | None = None  # until the pass is launched on an idle GPU; None on a CPU
    repetitions: int | None = None
    checked: float | None = None  # largest error / budget
    reason: str = ""
    made: SessionFacts | None = None


@dataclass(frozen=True, kw_only=True)
class StepMeasurement(Measurement):
    """A training step in a loop, measured by `lra bench step`."""

    loop: str
    status: str = "ok"
    reason: str = ""
    engine: str | None = None
    ms: float | None = None  # median of the steady blocks, if there are any
    blocks_ms: list[float] | None = None
    steady: list[bool] | None = None  # of each block, whether no shape of batches was compiled or captured in it
    host_ms: float | None = None  # until a step is launched on an idle GPU
    tokens_per_second: int | None = None  # without padding and filling
    rows_per_second: int | None = None
    tokens: float | None = None  # of a step
    rows: float | None = None
    memory_mb: float | None = None
    first_seconds: float | None = None  # of the first step
    shapes: int | None = None  # shapes of batches that came
    captured: int | None = None  # of these shapes
    loss: float | None = None
    where: dict[str, Any] | None = None  # `breakdown` of the step
    made: SessionFacts | None = None


M = TypeVar("M", bound=Measurement)
F = TypeVar("F", float, float | None)


@dataclass
class MeasurementFile(Generic[M]):
    """The content of a file of measurements. A record that another session measured says so in the file."""

    environment: dict[str, Any]  # `environment.describe` of the session that began it
    options: dict[str, Any]  # as `recorded_options` gives them
    cells: list[M]

    def saved(self) -> dict[str, Any]:
        """The JSON object."""
        own = session_of(self.environment)
        cells = [
            {key: value for key, value in cell.saved().items() if (key, value) != ("made", own)} for cell in self.cells
        ]
        return {"environment": self.environment, "options": self.options, "cells": cells}

    def sessions(self) -> list[SessionFacts]:
        """Every session that has measured, by date. A file without records has the one that began it."""
        found = [cell.made or session_of(self.environment) for cell in self.cells] or [session_of(self.environment)]
        return [dict(each) for each in sorted({tuple(made.items()) for made in found}, key=lambda each: str(each[0]))]


def read_measurements(path: Path, kind: type[M]) -> MeasurementFile[M]:
    """Reads a file of records of this kind. Raises OSError, and ValueError if it is no such file."""
    found, kinds = read_json(path), {"environment": dict, "options": dict, "cells": list}
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"it has not all of {', '.join(kinds)}")
    own = session_of(found["environment"])
    cells = [kind.loaded({"made": own} | cell if isinstance(cell, dict) else cell) for cell in found["cells"]]
    for cell in cells:
        if cell.made is None or cell.made.keys() != own.keys() or not _fits(list(cell.made.values()), list[str | None]):
            raise ValueError(f"a record's made is {cell.made!r}")
    return MeasurementFile(found["environment"], found["options"], cells)


def round_figure(value: F) -> F:
    """Four significant digits; None stays None."""
    rounded: Any = None if value is None else float(f"{value:.4g}")
    return rounded


def _names(kind: Any) -> dict[str, Field[Any]]:
    """The field of each key."""
    return {each.metadata.get("key", each.name): each for each in fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of a JSON file has a type. A whole number is also a float."""
    if isinstance(hint, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if hint in (int, float):
        return is_number(value) and isinstance(value, (int, hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(each, get_args(hint)[0]) for each in value)
    return isinstance(value, get_origin(hint) or hint)
