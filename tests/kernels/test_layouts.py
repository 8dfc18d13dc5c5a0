"""Layouts against their definitions, token by token; their pictures, and the page that shows them."""

from __future__ import annotations

import random
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from lra.kernels import block_sparse_attention
from lra.kernels.block_sparse import layouts
from lra.kernels.flash.layout import FULL, LIST_END, NONE, Layout, find_layout

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "block-sparse.md").read_text(encoding="utf-8")
CPU = torch.device("cpu")


def mask(layout: Layout, n: int | None = None) -> torch.Tensor:
    """bool [H or 1, n, n], or all that the layout covers."""
    rows, columns = layout.size if n is None else (n, n)
    return layout.token_mask(torch.arange(rows), torch.arange(columns))


def by_hand(sees: Any, rows: int, columns: int | None = None) -> torch.Tensor:
    return torch.tensor([[bool(sees(i, j)) for j in range(columns or rows)] for i in range(rows)])


# Patterns

BUTTERFLY = {0, *(2**i for i in range(20))}
DEFINITIONS = [  # whether square a sees square b
    ("butterfly", {}, lambda a, b: a ^ b in BUTTERFLY),
    ("butterfly", {"factors": 0}, lambda a, b: a == b),
    ("butterfly", {"factors": 2}, lambda a, b: a ^ b in (0, 1, 2)),
    ("local", {}, lambda a, b: a - 1 <= b <= a + 1),
    ("local", {"width": 0}, lambda a, b: a == b),
    ("local", {"width": 3}, lambda a, b: b in range(a - 3, a + 4)),
    ("fixed", {"stride": 3, "summary": 2}, lambda a, b: a // 3 == b // 3 or b % 3 in (1, 2)),
    ("fixed", {"stride": 4, "summary": 0}, lambda a, b: a // 4 == b // 4),
    ("strided", {"stride": 3}, lambda a, b: b in range(a - 3, a + 4) or (a - b) % 3 == 0),
    ("bigbird", {"width": 1, "first": 2, "random": 0}, lambda a, b: abs(a - b) <= 1 or a < 2 or b < 2),
]


@pytest.mark.parametrize(("n", "block"), [(16, 1), (44, 4), (30, 4), (29, (2, 4)), (70, (8, 2)), (3, 8), (1, 1)])
@pytest.mark.parametrize(("name", "options", "sees"), DEFINITIONS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_pattern_is_its_definition(name, options, sees, n, block):
    side = block if isinstance(block, int) else max(block)
    if "factors" in options:  # more than there are would change nothing, and are refused
        options = {"factors": min(options["factors"], layouts.count_factors(n, block))}
    layout = layouts.PATTERNS[name](n, block, **options)
    assert layout.block == (block if isinstance(block, tuple) else (block, block))
    assert all(n <= size < n + side for size in layout.size)
    assert torch.equal(mask(layout, n)[0], by_hand(lambda i, j: sees(i // side, j // side), n))


@pytest.mark.parametrize("band", [0, 1, 7, 100])
def test_window_counts_tokens(band):
    layout = layouts.window(37, (8, 4), band)
    assert torch.equal(mask(layout, 37)[0], by_hand(lambda i, j: abs(i - j) <= band, 37))


@pytest.mark.parametrize("name", layouts.PATTERNS)
def test_every_pattern_takes_the_rules(name):
    plain, ruled = (layouts.PATTERNS[name](50, 8, band=3, **more) for more in ({}, {"globals": 5, "causal": True}))
    expected = mask(plain, 50)[0] | by_hand(lambda i, j: abs(i - j) <= 3 or i < 5 or j < 5, 50)
    assert torch.equal(mask(ruled, 50)[0], expected & by_hand(lambda i, j: j <= i, 50))


def test_bigbird_adds_random_blocks_of_each_head():
    fewest = layouts.bigbird(64, 4, random=0).blocks
    layout = layouts.bigbird(64, 4, random=3, heads=5)
    added = layout.blocks & ~fewest
    assert bool((layout.blocks | ~fewest).all()) and added[:, 1:].sum(2).eq(3).all() and not added[:, 0].any()
    assert len({head.numpy().tobytes() for head in layout.blocks}) == 5
    assert layout.key == layouts.bigbird(64, 4, random=3, heads=5).key
    assert layout.key != layouts.bigbird(64, 4, random=3, heads=5, seed=1).key
    assert layouts.bigbird(64, 4, random=99).blocks.all()


@pytest.mark.parametrize(("n", "density"), [(4096, 0.1875), (16384, 0.0625), (65536, 0.01953125)])
def test_density_of_the_whole_butterfly(n, density):
    """log2(blocks) + 1 of the blocks, what FlexAttention's masks were measured with."""
    assert layouts.butterfly(n, 128).density(n) == layouts.butterfly(n).density() == density


@pytest.mark.parametrize("rest", [None, {}, {"globals": 3}, {"globals": 2, "causal": True}, {"band": 9}])
def test_factors_that_fit_a_density(rest):
    n, block, causal = 100, (4, 8), bool(rest and "causal" in rest)
    other = None if rest is None else layouts.local(n, block, 1, **rest)
    reached = []
    for factors in range(layouts.count_factors(n, block) + 1):
        layout = layouts.butterfly(n, block, factors, causal=causal)
        layout = layout if other is None else layout | other
        reached.append(float(mask(layout, n).double().mean()))
    for density in (*reached, *(x + 1e-9 for x in reached), 1.0):
        fits = max(factors for factors, x in enumerate(reached) if x <= density)
        assert layouts.fit_factors(n, block, density, other) == fits
    with pytest.raises(ValueError, match=f"density .* cannot be reached.* {re.escape(str(reached[0]))}$"):
        layouts.fit_factors(n, block, reached[0] - 1e-9, other)


REFUSED = [
    (lambda: layouts.butterfly(64, 8, 4), "factors must be 0 to 3, got 4"),
    (lambda: layouts.butterfly(64, 8, -1), "factors must be 0 to 3, got -1"),
    (lambda: layouts.butterfly(0), "n must be at least 1, got 0"),
    (lambda: layouts.local(8, 0), "sides of a block must be positive .* got 0x0"),
    (lambda: layouts.local(8, (4, 6)), "one divide the other, got 4x6"),
    (lambda: layouts.local(8, 1, -1), "width must be at least 0"),
    (lambda: layouts.window(8, 1, -1), "band and globals not negative"),
    (lambda: layouts.local(8, 1, globals=-1), "band and globals not negative"),
    (lambda: layouts.fixed(8, 1, 0), "stride must be at least 1"),
    (lambda: layouts.fixed(8, 1, 4, 5), "summary must be 0 to 4"),
    (lambda: layouts.strided(8, 1, 0), "stride must be at least 1"),
    (lambda: layouts.bigbird(8, 1, random=-1), "random must be at least 0"),
    (lambda: layouts.bigbird(8, 1, heads=0), "heads must be at least 1"),
    (lambda: layouts.fit_factors(64, 8, 0.0), "density must be more than 0 and at most 1"),
    (lambda: layouts.fit_factors(64, 8, float("nan")), "density must be more than 0 and at most 1"),
    (lambda: layouts.local(64, 8) | layouts.local(64, 4), "one size, one block and one causality"),
    (lambda: layouts.local(64, 8) | layouts.local(128, 8), "one size, one block and one causality"),
    (lambda: layouts.local(64, 8) | layouts.local(64, 8, causal=True), "one size, one block and one causality"),
    (lambda: layouts.bigbird(64, 8, heads=2) | layouts.bigbird(64, 8, heads=3), "one number of heads, got 2 and 3"),
    (lambda: Layout(torch.ones(2, 2, dtype=torch.bool), (8, 8)), "must be a bool tensor"),
    (lambda: Layout(torch.ones(1, 2, 2), (8, 8)), "must be a bool tensor"),
    (lambda: Layout(torch.ones(1, 2, 0, dtype=torch.bool), (8, 8)), "a head, a row and a column"),
    (lambda: Layout(torch.ones(1, 2, 2, dtype=torch.bool), (8, 0)), "block sizes must be positive"),
    (lambda: Layout(torch.tensor([[[True], [True]], [[True], [False]]]), (8, 8)), "block row 1 of head 1"),
    (lambda: Layout(torch.eye(2, dtype=torch.bool)[None].flip(1), (8, 8), causal=True), "block row 0 of head 0"),
    (lambda: Layout(torch.ones(1, 1, 3, dtype=torch.bool), (8, 2), causal=True).density(7), "1 to 6 tokens, not 7"),
    (lambda: layouts.local(64, 8).density(0), "1 to 64 tokens, not 0"),
    (lambda: layouts.local(64, 8).visits(16, 8, CPU), "tiles of 16 by 8 do not divide blocks of 8 by 8"),
    (lambda: layouts.local(64, 8).visits(8, 3, CPU, by_key=True), "tiles of 8 by 3 do not divide"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# Layouts


def random_layout(rng: random.Random) -> Layout:
    block = rows, columns = rng.choice([1, 2, 4, 6, 12]), rng.choice([1, 2, 4, 6, 12])
    grid = rng.randint(1, 40 // rows), rng.randint(1, 40 // columns)
    blocks = torch.rand(rng.randint(1, 3), *grid, generator=torch.Generator().manual_seed(rng.randint(0, 99))) < 0.3
    band, some_globals = rng.choice([None, None, 0, 1, 5]), rng.choice([0, 0, 1, 7])
    for a in range(grid[0]):
        blocks[:, a, min(a * rows // columns, grid[1] - 1)] = True  # every query sees a key
    return Layout(blocks, block, band, some_globals, rng.random() < 0.4)


def definition(layout: Layout) -> torch.Tensor:
    def sees(i: int, j: int, head: list[list[bool]]) -> bool:
        if layout.causal and j > i:
            return False
        by_rule = (layout.band is not None and abs(i - j) <= layout.band) or min(i, j) < layout.globals
        return by_rule or head[i // layout.block[0]][j // layout.block[1]]

    return torch.stack([by_hand(partial(sees, head=head), *layout.size) for head in layout.blocks.tolist()])


RANDOM = [random_layout(random.Random(seed)) for seed in range(40)]


@pytest.mark.parametrize("number", range(len(RANDOM)))
def test_layout_against_brute_force(number):
    layout, rng = RANDOM[number], random.Random(number)
    seen = definition(layout)
    assert torch.equal(mask(layout), seen)
    least = min(layout.size)
    for n in {1, least, rng.randint(1, least)}:
        assert layout.density(n) == float(seen[:, :n, :n].double().mean())
    assert layout.density() == layout.density(least)

    divisors = [[x for x in range(1, side + 1) if side % x == 0] for side in layout.block]
    exact = not (layout.causal and layout.globals)  # else a rectangle may be visited in vain
    for _ in range(3):
        rows, columns = rng.choice([1, 3, 8, 16, 64]), rng.choice([1, 3, 8, 16, 64])
        kinds = layout.kinds(rows, columns)
        some, every = tiles(seen, rows, columns)
        assert (
            kinds.shape == some.shape
            and bool((some <= (kinds != NONE)).all())
            and bool(((kinds == FULL) <= every).all())
        )

        rows, columns = (rng.choice(choices) for choices in divisors)
        some, every = tiles(seen, rows, columns)
        kinds = layout.kinds(rows, columns)
        assert torch.equal(kinds != NONE, some) or not exact
        assert layout.ruled or torch.equal(kinds == FULL, every)
        shown = layout.blocks.repeat_interleave(layout.block[0] // rows, 1)
        shown = shown.repeat_interleave(layout.block[1] // columns, 2)
        for by_key in (False, True):
            got, longest = decode(layout.visits(rows, columns, CPU, by_key))
            visited, whole = (x.transpose(1, 2) if by_key else x for x in (kinds != NONE, shown))
            assert got == [
                [[(t, bool(row[t])) for t in range(len(row)) if here[t]] for row, here in zip(*head, strict=True)]
                for head in zip(whole.tolist(), visited.tolist(), strict=True)
            ]
            assert longest & (longest - 1) == 0 and longest < 2 * max(1, int(visited.sum(2).max()))


def tiles(seen: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether some and whether all pairs of each tile are seen; those at the edge are smaller."""
    parts = [[part.flatten(1) for part in band.split(columns, 2)] for band in seen.split(rows, 1)]
    some, every = (
        torch.stack([torch.stack([combine(x) for x in row], 1) for row in parts], 1)
        for combine in (lambda x: x.any(1), lambda x: x.all(1))
    )
    return some, every


def decode(visits: Any) -> tuple[list[list[list[tuple[int, bool]]]], int]:
    """(tile, whether its block is set) for each head and tile of the other side; what follows END must be END."""
    assert visits.entries.dtype == torch.int32 and visits.entries.is_contiguous()
    assert visits.entries.shape[2] == visits.max_visits
    found = []
    for head in visits.entries.tolist():
        lists = [[x for x in row if x != LIST_END] for row in head]
        assert all(row[: len(real)] == real for row, real in zip(head, lists, strict=True))
        found.append([[(x // 2, bool(x % 2)) for x in row] for row in lists])
    return found, visits.max_visits


def test_union_is_the_union():
    rules = [{}, {"band": 3}, {"band": 5, "globals": 2}, {"globals": 4}]
    parts = [
        layouts.bigbird(40, (2, 4), 0, 0, random=i, heads=heads, seed=i, **rules[i])
        for i, heads in enumerate((3, 1, 3, 1))
    ]
    for a in parts:
        for b in parts:
            assert torch.equal(mask(a | b), mask(a) | mask(b))
    rectangle, square = layouts.local(40, (2, 4)), layouts.butterfly(40, (2, 4))
    assert (rectangle | square).key == (square | rectangle).key != square.key


def test_equal_content_shares_its_lists():
    one, same = layouts.butterfly(100, 16, globals=2), layouts.butterfly(112, 16, globals=2)
    assert one is not same and one.key == same.key and one.visits(16, 8, CPU) is same.visits(16, 8, CPU)
    assert torch.equal(find_layout(one.key).blocks, one.blocks)
    others = [
        layouts.butterfly(100, 16, globals=3), layouts.butterfly(100, 16, globals=2, causal=True),
        layouts.butterfly(100, 16, globals=2, band=0), layouts.butterfly(100, (16, 8), globals=2),
        layouts.butterfly(100, 16, 2, globals=2), layouts.butterfly(200, 16, globals=2),
    ]  # fmt: skip
    assert len({layout.key for layout in (one, *others)}) == 1 + len(others)
    assert 0 <= one.key < 2**63


# The command line and the page


def test_module_draws_without_a_warning(tmp_path):
    command = [
        sys.executable,
        "-W",
        "error::RuntimeWarning",
        "-m",
        "lra.kernels.block_sparse.layouts",
        "butterfly",
        "n=64",
    ]
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "butterfly-64.png: density 0.1094\n", "")
    assert [file.name for file in tmp_path.iterdir()] == ["butterfly-64.png"]


DRAWINGS = [
    (["butterfly"], layouts.butterfly(64, 1)),
    (["strided", "n=50", "block=4"], layouts.strided(50, 4)),
    (["butterfly+local", "block=2x8", "width=2"], layouts.butterfly(64, (2, 8)) | layouts.local(64, (2, 8), 2)),
    (["window", "band=6", "block=8", "causal=true", "globals=1"], layouts.window(64, 8, 6, globals=1, causal=True)),
    (["bigbird", "heads=3", "block=4"], layouts.bigbird(64, 4, heads=3)),
]


@pytest.mark.parametrize(("arguments", "layout"), DRAWINGS, ids=[" ".join(arguments) for arguments, _ in DRAWINGS])
def test_picture_shows_the_blocks_of_each_head(arguments, layout, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert layouts.main([*arguments, "out=drawn.png"]) == 0
    density = layout.density(50 if "n=50" in arguments else 64)
    assert capsys.readouterr().out == f"drawn.png: density {density:.4f}\n"
    drawn, kinds = np.asarray(Image.open("drawn.png")), layout.kinds(*layout.block)
    side, heads = drawn.shape[0], len(kinds)
    assert 256 < side <= 512 and drawn.shape[1] == heads * (side + 8) - 8
    shades = [set(), set(), set()]
    for head in range(heads):
        square = drawn[:, head * (side + 8) :][:, :side]
        expected = kinds[head].repeat_interleave(side // kinds.shape[1], 0).repeat_interleave(side // kinds.shape[2], 1)
        for kind, found in enumerate(shades):
            found.update(square[expected.numpy() == kind].tolist())
    assert all(len(found) <= 1 for found in shades) and len(set.union(*shades)) == sum(map(bool, shades)) > 1


MISTAKES = [
    ([], "unknown pattern '': choose from butterfly, local, window, fixed, strided, bigbird"),
    (["butterflies"], "unknown pattern 'butterflies': choose from butterfly, local"),
    (["butterfly+moth", "n=8"], "unknown pattern 'moth'"),
    (
        ["butterfly", "width=2"],
        "unknown option width=: butterfly takes band=, block=, causal=, factors=, globals=, n=, out=",
    ),
    (["butterfly", "n"], "'n' is not of the form option=value"),
    (["butterfly", "n=many"], "n=many is not a whole number"),
    (["butterfly", "n="], "n= is not a whole number"),
    (["local", "width=-1"], "width=-1 is not a whole number"),
    (["butterfly", "n=1e3"], "n=1e3 is not a whole number"),
    (["butterfly", "block=16x"], "block=16x is not a whole number of at most 6 digits, nor two of them as in 16x256"),
    (["butterfly", "block=1x2x4"], "block=1x2x4 is not"),
    (["butterfly", "n=2x4"], "n=2x4 is not a whole number"),
    (["butterfly", "causal=1"], "causal=1 is neither true nor false"),
    (["butterfly", "n=0"], "n must be at least 1"),
    (["butterfly", "factors=7"], "factors must be 0 to 6, got 7"),
    (["butterfly", "block=3x4"], "one divide the other"),
    (["butterfly", "n=8", "n=9"], "n= is given twice"),
    (["butterfly", "n=65536"], "n=65536 has too many blocks for a picture: set a larger block="),
    (["butterfly", "out=none/here.png"], "cannot write none/here.png .* name a .png in a folder of yours"),
    (["butterfly", "out=.png/"], "does not end in .png"),
    (["butterfly", "out=picture.jpg"], "out=picture.jpg does not end in .png"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_mistakes_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert layouts.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and re.match(f"layouts: .*{message}", err), err
    assert not list(tmp_path.iterdir())


def test_python_of_the_page_runs(capsys):
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "docs/block-sparse.md", "exec"), {})


DRAWN = re.findall(r"python -m lra.kernels.block_sparse.layouts (.*out=docs/\S+)", PAGE)


@pytest.mark.parametrize("command", DRAWN)
def test_pictures_of_the_page_are_drawn_by_its_commands(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    assert layouts.main(shlex.split(command)) == 0
    (drawn,) = Path("docs").iterdir()
    shown = ROOT / drawn
    assert (
        np.array_equal(np.asarray(Image.open(drawn)), np.asarray(Image.open(shown))) and shown.stat().st_size < 10_000
    )
    assert f"]({drawn.name})" in PAGE


def test_page_shows_every_pattern():
    assert set(layouts.PATTERNS) <= {name for command in DRAWN for name in command.split()[0].split("+")}


def test_a_layout_from_another_process_is_known_by_its_key(tmp_path):
    torch.save(layouts.butterfly(96, 16), tmp_path / "layout.pt")
    program = (
        "import torch, sys; from lra.kernels import block_sparse_attention; q = torch.ones(1, 96, 1, 16);"
        "layout = torch.load(sys.argv[1], weights_only=False);"
        "print(float(block_sparse_attention(q, q, q, layout).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "layout.pt"], capture_output=True, text=True)
    assert done.returncode == 0 and float(done.stdout) == pytest.approx(96 * 16), done.stderr


def test_a_layout_keeps_its_own_blocks():
    blocks = torch.eye(4, dtype=torch.bool)[None]
    Layout(blocks, (16, 16))
    blocks[:] = True
    assert Layout(torch.eye(4, dtype=torch.bool)[None], (16, 16)).density() == 0.25
    fresh = Layout(torch.eye(4, dtype=torch.bool)[None], (16, 16))
    assert find_layout(fresh.key).density() == 0.25


def test_a_call_needs_a_layout():
    q = torch.randn(1, 64, 1, 16)
    with pytest.raises(TypeError, match="layout must be a Layout, got NoneType"):
        block_sparse_attention(q, q, q, cast(Layout, None))
