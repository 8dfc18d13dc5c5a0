"""The arguments of the run from which a recipe starts another one, and the guard of such chains of runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lra.config.override import Override, parse_overrides
from lra.errors import UsageError

START = "start."  # before the name of a field: it is one of the run before this one alone
LENGTH_FIELDS = (STEPS, EPOCHS) = ("trainer.steps", "trainer.epochs")  # each says how long a run is
MAX_STAGES = 30  # runs of which each starts from the next; recipes have up to four
# fields that say where a run starts and where it lies: the run before it does not inherit them
RUN_FIELDS = ("init", "head", "name", "resume", "predictions", "positions.resize", "positions.scale")
# the arguments of the runs that wait for the one that is composed: each starts from the next
_stages_after: ContextVar[tuple[tuple[Override, ...], ...]] = ContextVar("_chain", default=())


def split_start_fields(overrides: Iterable[Override]) -> tuple[list[Override], list[Override]]:
    """Returns the fields of the run before this one, as `start.field=value` gives them, and the others."""
    found: tuple[list[Override], list[Override]] = [], []
    for override in overrides:
        found[not override.field.startswith(START)].append(override)
    return found


def starting_arguments(
    label: str,
    rule: Mapping[str, Any],
    selected: Mapping[str, str],
    given: Sequence[Override],
    before: Sequence[Override],
    complete: Callable[[str], str],
    known: Collection[str],
) -> tuple[Override, ...]:
    """Arguments of the run before this one.

    They are this one's, with the rule's `from` on top, of which `field=` drops one, and the user's fields of that run.

    Args:
        given: the fields of the command line, with complete names.
        before: those with `start.` before their name.
        complete: returns the complete name of a field.
        known: the complete names of this run's fields.
    """
    own = f"{label}: from of a rule of start: "
    changes = parse_overrides(rule["from"], own, may_be_empty=True)
    for dropped in (complete(each.field) for each in changes if not each.text):
        if dropped not in known and not dropped.startswith("attn."):  # a rule may be for several attentions
            raise UsageError(f"{own}{dropped}= drops a field that this run does not have")
    arguments = {**selected, **{each.field: each.text for each in given if each.field not in RUN_FIELDS}}
    for source, layer in ((own, changes), ("", [Override(e.field.removeprefix(START), e.text) for e in before])):
        changed: dict[str, str] = {}
        for override in layer:
            if (field := complete(override.field)) in changed:
                raise UsageError(f"{source or START}{field}= is given twice")
            changed[field] = override.text
        if "resume" in changed:
            raise UsageError(f"{source or START}resume=: a run before this one always goes on, leave it out")
        if "attn" in changed:  # another attention has other options
            arguments = {field: text for field, text in arguments.items() if not field.startswith("attn.")}
        if changed.keys() & {*LENGTH_FIELDS}:  # one stands instead of the other
            arguments = {field: text for field, text in arguments.items() if field not in LENGTH_FIELDS}
        arguments |= changed
    return tuple(Override(field, text) for field, text in arguments.items() if text)


@contextmanager
def guard_chain(label: str, start: tuple[Override, ...]) -> Iterator[None]:
    """Guards the composing of a run that others start from. Raises a UsageError if their chain does not end."""
    after = _stages_after.get()
    if start in after or len(after) == MAX_STAGES:
        what = "starts from itself" if start in after else f"has more than {MAX_STAGES} runs after it"
        raise UsageError(
            f"{label}: by the rules of start, the run of {' '.join(map(str, start))} {what}: mend their when or from"
        )
    token = _stages_after.set((*after, start))
    try:
        yield
    finally:
        _stages_after.reset(token)
