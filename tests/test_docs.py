"""The made tables of README and pages of docs are what the registry, the sources and the measurements make them."""

from __future__ import annotations

import json

import pytest

from benchmarks.pages import __main__ as pages
from benchmarks.pages import attentions, headline, measured
from lra.models.attention import ATTENTIONS
from tests.drawings import words


@pytest.mark.parametrize("maker", pages.MAKERS, ids=lambda maker: maker.__name__.rpartition(".")[2])
def test_no_page_is_stale(maker):
    assert not pages.stale(maker.make()), "run make docs"


def test_the_headline_names_what_differs_and_its_figure_how_long_training_takes():
    text = headline.headline(measured.BENCHMARKS)
    for part in (
        "million parameters, rotary positions. It pretrains", "learned positions and one stage", "`megatron`",
        "123 of its 25,000 test reviews are also in train", "test images validated an earlier stage",
    ):  # fmt: skip
        assert part in text
    points = list(headline.points())
    assert points[0].most is False and points[-1].most and all(p.ours > p.guess for p in points)
    assert points[-2].minutes > 9, "Path-X has the time of its five stages, which other columns have, too"
    shown = words(headline.figure(points))
    assert {f"{'≤ ' * point.most}{point.minutes:.1f} min" for point in points} <= {*shown} and "Path-X" in shown


def test_every_attention_has_its_section_and_what_it_needs():
    page = attentions.page()
    for entry in ATTENTIONS.builtins().values():
        _, heading, section = page.partition(f"\n## {entry.name}\n\n{entry.summary}")
        section = section.partition("\n## ")[0]
        assert heading and entry.facts["paper"] in section
        packages = [choice for requirement in entry.requires for choice in requirement.split("|")]
        assert all(f"`{package}`" in section for package in packages)
        assert ("It needs a GPU." in section) == entry.facts.get("needs_gpu", False)


CLEAN = {"commit": "0123456789ab"}


@pytest.mark.parametrize(("content", "marked"), [
    ({"environment": CLEAN}, False), ({"environment": {"commit": "0123456789ab+"}}, True), ({"environment": {}}, True),
    ({"environment": CLEAN, "cells": [{"made": CLEAN}, {"made": {"commit": None}}]}, True),
    ({"runs": [{"environment": CLEAN}, {"environment": {"commit": "a"}}]}, True),
    ({"environment": CLEAN, "provenance": {"commit": "0123456789ab", "ancestors": [{"commit": "a+"}]}}, True),
])  # fmt: skip
def test_a_link_to_what_no_clean_commit_made_is_marked_and_the_table_says_why(monkeypatch, tmp_path, content, marked):
    monkeypatch.setattr(measured, "BENCHMARKS", tmp_path)
    measured.mark_of.cache_clear()
    (tmp_path / "a.json").write_text(json.dumps(content))
    ((file, found),) = measured.read(tmp_path, "*.json")
    assert found == content and measured.link("a", file).endswith("a.json)" + "†" * marked)
    made = measured.table(["what"], [[measured.link("a", file)]])
    assert made.endswith("\n\n† made by changed code, or no commit is stated.") == marked
    measured.mark_of.cache_clear()


def test_a_stale_page_names_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pages, "MAKERS", (attentions,))
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    monkeypatch.setattr(attentions, "PAGE", tmp_path / "docs" / "attentions.md")
    assert pages.main(["--check"]) == 1 and capsys.readouterr().err == "docs/attentions.md is stale: run make docs\n"
    assert pages.main([]) == 0 and pages.main(["--check"]) == 0
