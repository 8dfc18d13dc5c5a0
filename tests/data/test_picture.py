"""Pictures of samples, read back pixel by pixel, and ListOps trees, read back token by token."""

import statistics

import numpy as np
import pytest
from PIL import Image

from lra.data import listops, picture
from lra.data.picture import GAP, LETTER, LINES, WIDTH
from lra.errors import UsageError

REACH = 2  # pixels by which a letter may begin left of its place


def noise(count, side):
    return list(np.random.default_rng(side).integers(0, 256, (count, side, side), np.uint8))


def pixels(image):
    assert image.mode == "L"
    return np.asarray(image).astype(np.int16)


def box(one, other):
    """Where two pictures of one size differ: left, top, right, bottom."""
    rows, columns = np.nonzero(pixels(one) != pixels(other))
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


@pytest.mark.parametrize(
    ("count", "side", "columns", "factor"),
    [
        (1, 32, 1, 49),
        (2, 32, 2, 24),
        (12, 32, 4, 12),
        (9, 128, 3, 4),
        (16, 256, 4, 1),
        (36, 256, 6, 1),
        (1, 1024, 1, 1),
    ],
)
def test_every_image_is_in_its_cell(count, side, columns, factor):
    images = noise(count, side)
    made = picture.image_grid(images, ["sample"] * count)
    large = factor * side
    across, down = large + GAP, large + LETTER[1] + 2 * GAP
    assert made.size == (GAP + columns * across, GAP + -(-count // columns) * down)
    assert 800 <= made.width <= WIDTH or factor == 1
    rest = pixels(made).copy()
    for number, image in enumerate(images):
        top, left = GAP + number // columns * down, GAP + number % columns * across
        cell = rest[top : top + large, left : left + large]
        for y in range(0, factor, max(1, factor - 1)):  # the first and the last copy of every pixel
            for x in range(0, factor, max(1, factor - 1)):
                assert np.array_equal(cell[y::factor, x::factor], image)
        caption = rest[top + large : top + large + LETTER[1] + GAP, left - REACH : left + len("sample") * LETTER[0]]
        assert (caption == 0).sum() > 100  # letters are black
        cell[:], caption[:] = 255, 255
    assert (rest == 255).all()  # and nothing else is drawn


def test_a_caption_changes_its_own_place_only():
    images = noise(4, 32)
    one = picture.image_grid(images, ["cat", "cat", "cat", "cat"])
    other = picture.image_grid(images, ["cat", "cat", "cat", "cut"])
    left, top, right, bottom = box(one, other)
    side = 24 * 32
    place = 2 * GAP + side, GAP + 2 * (side + LETTER[1] + 2 * GAP) - LETTER[1] - 2 * GAP
    assert place[0] + LETTER[0] - REACH <= left < right <= place[0] + 2 * LETTER[0]  # the second letter
    assert place[1] <= top < bottom <= place[1] + LETTER[1] + 2 * GAP


def test_a_long_caption_is_wrapped_into_its_column():
    images = noise(4, 32)
    short, long = (picture.image_grid(images, [caption] * 4) for caption in ("word", "word " * 100))
    assert short.width == long.width and (long.height - short.height) % (2 * LETTER[1]) == 0
    assert long.height - short.height > 10 * LETTER[1]
    assert (pixels(long)[:, -GAP:] == 255).all()


def test_images_and_captions_must_match():
    with pytest.raises(ValueError, match="zip"):
        picture.image_grid(noise(2, 32), ["one"])
    with pytest.raises(ValueError, match="shape"):
        picture.image_grid([*noise(1, 32), *noise(1, 64)], ["one", "two"])
    with pytest.raises(ValueError, match="zip"):
        picture.text_page(["text"], [])


def lines_of(page):
    """Ink in every line of a page with one text under a caption of one line."""
    image = pixels(page)[GAP + LETTER[1] : page.height - GAP]
    return (image.reshape(-1, LETTER[1], page.width) != 255).sum(axis=(1, 2))


def test_page_draws_letters_where_they_belong():
    one, other = picture.text_page(["abc\n  dXf"], ["caption"]), picture.text_page(["abc\n  dYf"], ["caption"])
    left, top, right, bottom = box(one, other)
    assert GAP + 3 * LETTER[0] - REACH <= left < right <= GAP + 4 * LETTER[0]
    assert GAP + 2 * LETTER[1] <= top < bottom <= GAP + 3 * LETTER[1]
    _, top, _, bottom = box(one, picture.text_page(["abc\n  dXf"], ["CAPTION"]))
    assert GAP <= top < bottom <= GAP + LETTER[1]


def test_page_wraps_and_cuts():
    letters = (WIDTH - 2 * GAP) // LETTER[0]
    assert len(lines_of(picture.text_page(["x" * letters], ["t"]))) == 1
    assert len(lines_of(picture.text_page(["x" * (letters + 1)], ["t"]))) == 2
    assert len(lines_of(picture.text_page(["word " * 3 * letters], ["t"]))) == 16  # 26 whole words a line
    assert (lines_of(picture.text_page(["a\n\n\tb"], ["t"])) > 0).tolist() == [True, False, True]
    exact = [str(number) for number in range(LINES)]
    cut = picture.text_page(["\n".join([*exact, "a", "b"])], ["t"])
    says = picture.text_page(["\n".join([*exact[:-1], "... 3 more lines"])], ["t"])
    assert cut.tobytes() == says.tobytes() != picture.text_page(["\n".join(exact)], ["t"]).tobytes()


def test_page_of_several_texts_is_theirs_below_each_other():
    whole = pixels(picture.text_page(["one", "two\nlines"], ["first", "second"]))
    parts = [pixels(picture.text_page([text], [note])) for text, note in (("one", "first"), ("two\nlines", "second"))]
    assert np.array_equal(whole, np.concatenate(parts))


def test_letters_that_the_font_lacks():
    assert picture.text_page(["映画 �"], ["…"]).tobytes() == picture.text_page(["?? ?"], ["..."]).tobytes()
    assert picture.text_page(["na\xefve"], ["t"]).tobytes() != picture.text_page(["na?ve"], ["t"]).tobytes()
    assert len(lines_of(picture.text_page(["a\x00b\x07\x1b\udc80"], ["t"]))) == 1


def test_two_calls_give_equal_bytes(tmp_path):
    for name in ("one.png", "two.PNG"):
        picture.save_png(picture.image_grid(noise(3, 32), ["a", "b", "c"]), tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.PNG").read_bytes()


def test_save_replaces_a_file_and_leaves_nothing_else(tmp_path):
    made = picture.text_page(["text"], ["caption"])
    (tmp_path / "samples.png").write_text("old")
    picture.save_png(made, str(tmp_path / "samples.png"))
    with Image.open(tmp_path / "samples.png") as read:
        assert read.format == "PNG" and read.tobytes() == made.tobytes()
    assert [file.name for file in tmp_path.iterdir()] == ["samples.png"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("samples.jpg", "does not end in .png"),
        ("samples", "does not end in .png"),
        ("missing/samples.png", "No such file or directory"),
        ("file/samples.png", "Not a directory"),
        ("folder.png", "Is a directory"),
    ],
)
def test_where_no_picture_can_be_written(tmp_path, name, message):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match=message) as caught:
        picture.save_png(picture.text_page(["text"], ["caption"]), tmp_path / name)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)
    assert {file.name for file in tmp_path.iterdir()} == {"file", "folder.png"}


FUNCTIONS = {"MIN": min, "MAX": max, "MED": lambda v: int(statistics.median(v)), "SM": lambda v: sum(v) % 10}


def read(lines, depth=0):
    """Values and expressions that the last of reversed lines holds, with the lines indented below it."""
    line = lines.pop()
    assert len(line) - len(line.lstrip()) == 2 * depth
    words = line.split()
    if words[0] not in FUNCTIONS:
        return [(int(digit), digit) for digit in words]
    name, *digits, equals, value = words
    arguments = [(int(digit), digit) for digit in digits]
    while lines and lines[-1].startswith("  " * (depth + 1)):
        assert not digits
        arguments += read(lines, depth + 1)
    assert equals == "=" and int(value) == FUNCTIONS[name]([number for number, _ in arguments])
    return [(int(value), f"[{name} {' '.join(expression for _, expression in arguments)} ]")]


def test_tree_holds_the_expression_and_every_value():
    sequences, labels = listops.generate_expressions(40, seed=0)
    for ids, label in zip(sequences, labels, strict=True):
        lines = listops.format_tree(ids, max_lines=10_000).split("\n")[::-1]
        assert read(lines) == [(label, listops.decode(ids))] and not lines


def test_tree_of_a_small_expression():
    ids = listops.tokenize("[MAX 2 [MIN 4 7 ] 9 8 [SM [MED 1 2 6 9 ] 5 ] ]")
    assert listops.format_tree(ids).split("\n") == [
        "MAX = 9",
        "  2",
        "  MIN 4 7 = 4",
        "  9 8",
        "  SM = 9",
        "    MED 1 2 6 9 = 4",
        "    5",
    ]
    assert listops.format_tree([7]) == "7" and listops.format_tree(listops.tokenize("[SM 7 8 ]")) == "SM 7 8 = 5"


def test_tree_is_cut():
    (ids,), _ = listops.generate_expressions(1, seed=0)
    whole = listops.format_tree(ids, max_lines=10_000).split("\n")
    assert len(whole) > 100
    assert listops.format_tree(ids, max_lines=len(whole)).split("\n") == whole
    assert listops.format_tree(ids, max_lines=5).split("\n") == [*whole[:4], f"… {len(whole) - 4} more lines"]
    assert len(listops.format_tree(ids).split("\n")) == LINES  # a page shows it as it is


@pytest.mark.parametrize("text", ["", "]", "[MAX 2 3", "[MAX ]", "[MED ]", "[MAX 2 3 ] 4", "[MAX [MIN 2 3 ]", "2 ]"])
def test_tree_of_what_is_no_expression(text):
    with pytest.raises(UsageError, match=rf"begin '{text.replace('[', '.')}' are not one whole ListOps expression"):
        listops.format_tree(listops.tokenize(text))
