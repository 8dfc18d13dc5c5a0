"""The study `randomness` tests the words that dropout draws: against a stand-in for TestU01 that prints them."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import pytest
import torch

from benchmarks.studies.randomness import study as randomness
from lra.bench.cases import make_batch
from lra.kernels.flash.reference import LOW_32_BITS, draw_words
from lra.kernels.layers import reference as layers
from lra.models.dropout import row_keys

UNIF01 = """
#pragma once
typedef struct { unsigned int (*next)(void); } unif01_Gen;
unif01_Gen *unif01_CreateExternGenBits(char *name, unsigned int (*next)(void));
"""
BBATTERY = """
#pragma once
#include "unif01.h"
extern int bbattery_NTests; extern double bbattery_pVal[]; extern char *bbattery_TestNames[];
void bbattery_SmallCrush(unif01_Gen *generator); void bbattery_Crush(unif01_Gen *generator);
"""
TESTU01 = """
#include "bbattery.h"
static unif01_Gen it;
int bbattery_NTests = 64; double bbattery_pVal[64]; char *bbattery_TestNames[64];
unif01_Gen *unif01_CreateExternGenBits(char *name, unsigned int (*next)(void)) { it.next = next; return &it; }
void bbattery_SmallCrush(unif01_Gen *generator) {
    for (int i = 0; i < 64; i++) bbattery_pVal[i] = generator->next(), bbattery_TestNames[i] = "word";
}
void bbattery_Crush(unif01_Gen *generator) { bbattery_SmallCrush(generator); }
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    root = tmp_path_factory.mktemp("testu01")
    for name, text in (("include/unif01.h", UNIF01), ("include/bbattery.h", BBATTERY), ("lib/testu01.c", TESTU01)):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["gcc", "-c", "-I../include", "testu01.c"], cwd=root / "lib", check=True)
    for library in ("testu01", "probdist", "mylib"):
        subprocess.run(["ar", "rcs", f"lib{library}.a", "testu01.o"], cwd=root / "lib", check=True)
    randomness.build(root, root / "program")
    return root / "program"


def expected(words: torch.Tensor, reverse: int) -> list[int]:
    return [int(f"{x:032b}"[::-1], 2) if reverse else x for x in words.tolist()]


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("order", [0, 1])
def test_words_of_attention(order, reverse, program, monkeypatch):
    monkeypatch.setattr(randomness, "WIDTHS", (5, 5))
    number = torch.arange(64)
    row, column = {0: (number // 5, number % 5), 1: (number % 5, number // 5)}[order]
    words = torch.stack(draw_words(tuple(map(torch.tensor, randomness.key(0))), row, 2 * column), 1)
    for word in range(5):
        stream = randomness.run(program, False, (order, reverse, word))
        assert [each["p"] for each in stream["p_values"]] == expected(
            words.flatten()[:64] if word == 4 else words[:, word], reverse
        )
        assert {each["test"] for each in stream["p_values"]} == {"word"}


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_words_between_layers(order, reverse, program, monkeypatch):
    """Of the first rows of a batch, as the model drops."""
    monkeypatch.setattr(randomness, "LAYERS_WIDTHS", (5, 5, 5))
    number, sites = torch.arange(64), randomness.SITES_OF_MODEL
    row, column, site = {
        0: (number // 5, number % 5, 0 * number),
        1: (number % 5, number // 5, 0 * number),
        2: (number // (5 * sites), number // sites % 5, number % sites),
    }[order]
    batch = make_batch((64,), False, torch.device("cpu"), seed=torch.tensor(randomness.SEED))
    keys = row_keys(dataclasses.replace(batch, index=torch.tensor([randomness.INDEX], dtype=torch.int32)))
    words = torch.stack(
        [
            layers.draw_feature_words(keys, int(s), column.int())[r, i]
            for i, (s, r) in enumerate(zip(site, row, strict=True))
        ]
    )
    stream = randomness.run(program, False, (order, reverse, randomness.LAYERS))
    assert (stream["order"], stream["words"]) == (randomness.ORDERS[order], "between layers")
    assert [each["p"] for each in stream["p_values"]] == expected(words.long() & LOW_32_BITS, reverse)


def test_without_testu01(tmp_path, capsys):
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    assert randomness.main(["--testu01", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in said and not (tmp_path / "out.json").exists()
