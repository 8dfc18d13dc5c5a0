"""`lra check`: its options, and what the checks find of a component."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from lra.config.options import parse_options
from lra.config.override import Override, parse_overrides
from lra.errors import UsageError, name_error
from lra.models.attention import ATTENTIONS
from lra.models.conformance.checks import CHECKS, COMPILED
from lra.models.conformance.expectations import NotAsked, Violation
from lra.models.conformance.subject import Subject


@dataclass(frozen=True)
class CheckOptions:
    """Options of `lra check` beside those of the attention, which are `attn.field=value`."""

    attn: str = ""  # what is checked
    device: Literal["cpu", "cuda"] | None = None  # null: a GPU if there is one
    compile: bool = False  # also asks whether torch.compile makes one graph, which takes most of the time

    def __post_init__(self) -> None:
        if not self.attn:
            raise UsageError(f"attn= missing: attn= is one of {', '.join(ATTENTIONS.catalogue())}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device=cuda, but PyTorch finds no GPU: lra doctor says what it sees")


class CheckResult(NamedTuple):
    """The result of one check."""

    property: str
    status: Literal["passed", "failed", "not asked"]
    why: str = ""  # empty if it passed


def parse_check(args: Sequence[str]) -> tuple[Subject, CheckOptions]:
    """Returns what `lra check` checks, and its options.

    UsageError if the device has none of the attention's dtypes, or if it returns no rows.
    """
    overrides = parse_overrides(args)
    fields = tuple(
        Override(override.field.removeprefix("attn."), override.text)
        for override in overrides
        if override.field.startswith("attn.")
    )
    options = parse_options(CheckOptions, [each for each in overrides if not each.field.startswith("attn.")])
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    subject = Subject(options.attn, device, fields)
    inputs = subject.inputs()  # refuses a device or dtype
    try:
        subject.call(subject.build(), subject.batch(), *inputs)
    except UsageError:
        raise
    except Exception:  # the checks say which of them it fails
        pass
    return subject, options


def check_component(subject: Subject, compile: bool = False) -> Iterator[CheckResult]:
    """Runs all checks, and returns the result of each.

    Args:
        compile: whether to ask for COMPILED.
    """
    for name, check in CHECKS.items():
        if name == COMPILED and not compile:
            yield CheckResult(name, "not asked", "compile=true asks for it")
            continue
        try:
            check(subject)
        except NotAsked as reason:
            yield CheckResult(name, "not asked", str(reason))
        except (Violation, UsageError) as error:
            yield CheckResult(name, "failed", str(error))
        except Exception as error:  # whatever a component raises: the other properties are still worth knowing
            yield CheckResult(name, "failed", name_error(error) + _own_line(error, subject))
        else:
            yield CheckResult(name, "passed")


def _own_line(error: Exception, subject: Subject) -> str:
    """Returns the line of the component's own file that an error went through, or nothing."""
    file = inspect.getsourcefile(ATTENTIONS.get(subject.name))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(str(file)).name}, line {lines[-1]})" if lines else ""
