"""Pictures of samples: images in a grid, texts on a page. The same samples give the same bytes."""

from __future__ import annotations

import contextlib
import io
import math
import os
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lra.errors import UsageError

WIDTH = 1600  # pixels of a page, and of a grid at most, unless its images are larger
GAP = 12  # pixels around every sample
LINES = 24  # of a text on a page
LETTER = (12, 22)  # width and height in pixels: twice those of Pillow's monospaced bitmap font
_WHITE, _GRAY, _BLACK = 255, 110, 0


@contextlib.contextmanager
def open_image(data: bytes, formats: list[str] | None = None) -> Iterator[Image.Image]:
    """Opens the image in a file's bytes.

    Raises:
        DecompressionBombWarning: if its header states too many pixels. Pillow itself only warns.
        Exception: of any kind, as Pillow raises for a broken file.
    """
    with (
        warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
        Image.open(io.BytesIO(data), formats=formats) as image,
    ):
        yield image


def image_grid(images: Sequence[np.ndarray], captions: Sequence[str]) -> Image.Image:
    """Images uint8 `[H, W]` of one size in a grid that is about square, with captions below them.

    Small images are magnified by a whole factor: the largest at which the grid is at most 1,600 pixels wide.
    """
    count, height, width = np.stack(images).shape
    columns = math.ceil(math.sqrt(count))
    factor = max(1, ((WIDTH - GAP) // columns - GAP) // width)
    height, width = height * factor, width * factor
    notes = [_wrap(caption, width) for caption in captions]
    step = height + LETTER[1] * max(map(len, notes)) + 2 * GAP
    rows = math.ceil(count / columns)
    picture = Image.new("L", (GAP + columns * (width + GAP), GAP + rows * step), _WHITE)
    for number, (image, note) in enumerate(zip(images, notes, strict=True)):
        left, top = GAP + number % columns * (width + GAP), GAP + number // columns * step
        picture.paste(Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST), (left, top))
        _write(picture, note, left, top + height + GAP // 2, _BLACK)
    return picture


def text_page(texts: Sequence[str], captions: Sequence[str]) -> Image.Image:
    """Texts below each other, each under its caption, wrapped and cut to 24 lines.

    The last line says how much is cut. Letters outside Latin-1 are drawn as question marks.
    """
    width = WIDTH - 2 * GAP
    blocks = []
    for text, caption in zip(texts, captions, strict=True):
        lines = _wrap(text, width)
        if len(lines) > LINES:
            lines[LINES - 1 :] = [f"... {len(lines) - LINES + 1} more lines"]
        blocks.append((_wrap(caption, width), lines))
    height = sum(LETTER[1] * len(note + lines) + 2 * GAP for note, lines in blocks)
    picture = Image.new("L", (WIDTH, height), _WHITE)
    top = GAP
    for note, lines in blocks:
        _write(picture, note, GAP, top, _GRAY)
        _write(picture, lines, GAP, top + LETTER[1] * len(note), _BLACK)
        top += LETTER[1] * len(note + lines) + 2 * GAP
    return picture


def save_png(image: Image.Image, path: str | Path) -> None:
    """Write a PNG file, complete or not at all. UsageError if `path` is no .png, or its folder cannot be written."""
    path = Path(os.path.expanduser(path))
    if path.suffix.lower() != ".png":
        raise UsageError(f"{path} does not end in .png: pictures are PNG files")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        image.save(partial, format="PNG")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UsageError(
            f"cannot write {path} ({error.strerror or error}): name a .png in a folder of yours"
        ) from error


def _write(picture: Image.Image, lines: Sequence[str], left: int, top: int, shade: int) -> None:
    """Draw lines of text. A space comes first, as letters may begin a little left of their place."""
    width, height = LETTER
    font = ImageFont.load_default_imagefont()
    for number, line in enumerate(lines):
        letters = len(line) + 1
        small = Image.new("L", (letters * width // 2, height // 2), _WHITE)
        ImageDraw.Draw(small).text((0, 0), f" {line}", fill=shade, font=font)
        large = small.resize((letters * width, height), Image.Resampling.NEAREST)
        picture.paste(large, (left - width, top + number * height))


def _wrap(text: str, width: int) -> list[str]:
    """The lines of a text in the letters of the font, each at most `width` pixels wide."""
    drawable = text.replace("…", "...").encode("latin-1", "replace").decode("latin-1")
    letters = max(1, width // LETTER[0])
    return [part for line in drawable.splitlines() for part in textwrap.wrap(line, letters, tabsize=4) or [""]]
