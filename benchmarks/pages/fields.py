"""docs/fields.md, of the dataclasses of lra's configuration and of its tasks and attentions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages.attentions import load_class
from benchmarks.pages.measured import ROOT, table
from lra.config.fields import FieldDescription, describe_fields
from lra.config.registry import Registry
from lra.config.schema import RunConfig
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS

PAGE = ROOT / "docs" / "fields.md"
HEADER = (
    "# Fields\n\n<!-- made by benchmarks/pages/fields.py: make docs -->\n\n"
    "`lra fit task=… attn=… [recipe=…] [field=value …]` takes every field of this page. `task=` chooses the data set "
    "and `attn=` the attention: both decide which fields there are. The recipe replaces many of the defaults below; "
    "`lra config show task=… attn=…` shows the values that a run would have. A field of the task may be written "
    "without `task.`, as in `level=easy`.\n"
)
SECTIONS = {
    "": ("Run", "These fields have no section."),
    "model": ("Model", "The Transformer encoder around the attention."),
    "optim": ("Optimiser", "`lra ls optimizers` shows which optimiser has which options."),
    "batch": ("Batch", "An example is one sequence, or a pair of documents in Retrieval."),
    "trainer": ("Trainer", "How long a run trains, how often it is validated, and on what it computes."),
    "augment": ("Augmentation", "Random changes of training batches. Validation and test see the data as they are."),
    "positions": ("Positions", "How positions come from the run of `init=` to a task of another size."),
}


def page() -> str:
    """The whole text, the same on every machine."""
    run = [field for field in describe_fields(RunConfig(task=None, attn=None)) if field.name not in ("task", "attn")]
    parts = [HEADER]
    for section, (title, text) in SECTIONS.items():
        rows = [_row(field) for field in run if field.name.rpartition(".")[0] == section]
        parts += [f"## {title}\n", f"{text}\n", table(("field", "may be", "default", "meaning"), rows), ""]
    for title, text, registry, section in (
        ("Task", "Which fields there are depends on `task=`.", TASKS, "task."),
        ("Attention", "Which options there are depends on `attn=`. [Attentions](attentions.md) explains each.",
         ATTENTIONS, "attn."),
    ):  # fmt: skip
        header = ("field", "may be", "default", "meaning", section.rstrip("."))
        parts += [f"## {title}\n", f"{text}\n", table(header, list(_component_rows(registry, section))), ""]
    return "\n".join(parts).rstrip()


def _component_rows(registry: Registry, section: str) -> Iterator[tuple[str, ...]]:
    """The fields of all components, each once, with the components that have it."""
    owners: dict[FieldDescription, list[str]] = {}
    for entry in registry.builtins().values():
        for field in describe_fields(load_class(entry).Config(), section):
            owners.setdefault(field, []).append(entry.name)
    for field in sorted(owners, key=lambda field: (field.name, owners[field])):
        yield *_row(field), ", ".join(owners[field])


def _row(field: FieldDescription) -> tuple[str, ...]:
    return f"`{field.name}`", field.type, f"`{field.default}`" if field.default else "", field.meaning


def make() -> dict[Path, str]:
    return {PAGE: page() + "\n"}
