"""The pages of docs that are made are what the registry, the sources and the measurements make them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from benchmarks import attentions
from lra.models.attention import ATTENTIONS

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Base:
    block: str = "128"  # tokens, or "16x256"
    impl: Literal["auto", "triton", "gather"] = "auto"
    lengths: tuple[int, ...] = (
        1,  # of the short,
        2,  # and of the long one
    )  # fmt: skip


@dataclass(frozen=True)
class Heir(Base):
    block: str = "64"  # tokens alone
    rate: float | None = None  # type: ignore[assignment]
    causal: bool = False  # or not


@pytest.mark.parametrize("page", ["attentions", "fig3", "runs", "tables", "training"])
def test_the_page_is_not_stale(page):
    command = [sys.executable, "-m", f"benchmarks.{page}", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # it names the command


def test_options_are_read_with_their_comments_from_the_class_and_its_bases():
    assert attentions.options(Heir) == {
        "block": ("str", "64", "tokens alone"),
        "impl": ("`auto`, `triton` or `gather`", "auto", ""),
        "lengths": ("tuple[int, ...]", "[1, 2]", "of the short, and of the long one"),
        "rate": ("float or `null`", "null", ""),
        "causal": ("bool", "false", "or not"),
    }


def test_every_attention_has_its_section_and_what_it_needs():
    page = attentions.page()
    for entry in ATTENTIONS.builtins().values():
        _, heading, section = page.partition(f"\n## {entry.name}\n\n{entry.summary}")
        section = section.partition("\n## ")[0]
        assert heading and entry.facts["paper"] in section
        packages = [choice for requirement in entry.requires for choice in requirement.split("|")]
        assert all(f"`{package}`" in section for package in packages)
        assert ("It needs a GPU." in section) == entry.facts.get("needs_gpu", False)


def test_a_stale_page_names_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attentions, "PAGE", tmp_path / "attentions.md")
    assert attentions.main(["--check"]) == 1 and capsys.readouterr().err.endswith("is stale: run make docs\n")
    assert attentions.main([]) == 0 and attentions.main(["--check"]) == 0
