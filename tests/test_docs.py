"""The made tables of README and pages of docs are what the registry, the sources and the measurements make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from benchmarks.pages import __main__ as pages
from benchmarks.pages import attentions, measured
from lra.models.attention import ATTENTIONS


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


@pytest.mark.parametrize("maker", pages.MAKERS, ids=lambda maker: maker.__name__.rpartition(".")[2])
def test_no_page_is_stale(maker):
    assert not pages.stale(maker.make()), "run make docs"


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
    monkeypatch.setattr(pages, "MAKERS", (attentions,))
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    monkeypatch.setattr(attentions, "PAGE", tmp_path / "docs" / "attentions.md")
    assert pages.main(["--check"]) == 1 and capsys.readouterr().err == "docs/attentions.md is stale: run make docs\n"
    assert pages.main([]) == 0 and pages.main(["--check"]) == 0
