"""The Pathfinder images of LRA's release, split as its public loaders split them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch.utils.data import random_split

from lra.data import checks, lra_release, picture
from lra.data.pathfinder.generate import marker_distance, threshold_accuracy
from lra.data.pathfinder.law import ImageLaw, image_law
from lra.data.writer import StoreWriter
from lra.errors import UsageError, system_error

GENERATOR = "lra.data.pathfinder.released@1"
PUBLISHED = 200_000  # images of each folder
CHUNK = 1 << 24  # bytes of pixels per write
_FOLDERS = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}
_EMPTY = "pathfinder32/curv_baseline/imgs/0/sample_172.png"  # in the release, and no other


class _Row(NamedTuple):
    """One line of metadata."""

    image: str  # path within the folder of the level
    label: int
    line: str  # file and number, for messages


def build_released_pathfinder(writer: StoreWriter, source: str | Path, *, resolution: int, level: str) -> None:
    """Store the splits train, val and test: rows of `resolution` pixels from the top, label 1 if the ends are
    joined.

    The examples are the lines of `metadata/<number>.npy`, which are text, by number and line. PyTorch's `random_split`
    with seed 42 gives a tenth of them each to val and test, rounded down. A note says how many images are left out: the
    one that is empty in the release, and those that no line names. While it works, the pixels are on the disk twice.

    Args:
        source: LRA's release or a folder of it (`lra_release.release_files`).

    Raises:
        UsageError: names the file that is not as it should be.
    """
    writer.compare(source)
    images = image_law(resolution, level)
    folder = f"pathfinder{resolution}/{_FOLDERS[level]}"
    scratch = writer.scratch() / "pixels"
    with scratch.open("wb") as file:  # not a memory map: on a full disk, writing to one kills the process
        rows, places = _read(source, folder, images, file)
    writer.find(checks.check_row_count(f"{folder}/metadata", len(rows), PUBLISHED))
    kept = [row for row in rows if row.image in places or f"{folder}/{row.image}" != _EMPTY]
    unnamed = set(places)
    for row in kept:
        if row.image not in unnamed:
            what = "is named before" if row.image in places else "is not there"
            raise UsageError(f"{row.line}: {row.image} {what}; get the folder again")
        unnamed.remove(row.image)
    if len(kept) < 10:
        raise UsageError(f"{source}: {len(kept)} images of {folder} are too few to split; get the folder again")
    if left := len(rows) - len(kept) + len(unnamed):
        writer.note(f"images of {folder} left out, empty or not in metadata: {left}")

    order, labels = np.array([places[row.image] for row in kept]), np.array([row.label for row in kept])
    splits = _split(len(kept))
    with scratch.open("rb") as file:  # nor can every file system map files
        for split, chosen in splits.items():
            for chunk in _chunks(chosen, resolution):
                writer.add(split, _pixels(file, order[chunk], resolution), labels[chunk])
        every = _chunks(np.arange(len(places)), resolution)
        distance = np.concatenate([marker_distance(_pixels(file, chunk, resolution), images) for chunk in every])
    if (unmarked := np.isnan(distance)).any():  # the images are LRA's, whatever the law expects of their markers
        first = f"{folder}/{list(places)[int(unmarked.argmax())]}"
        writer.note(f"no baseline of the marker distance: images without two markers: {unmarked.sum()}, first {first}")
    else:
        seen = {split: (distance[order[chosen]], labels[chosen]) for split, chosen in splits.items()}
        accuracy = {split: threshold_accuracy(seen["train"], seen[split]) for split in ("val", "test")}
        writer.baseline("marker distance", accuracy)


def _read(source: str | Path, folder: str, images: ImageLaw, pixels: BinaryIO) -> tuple[list[_Row], dict[str, int]]:
    """All lines of metadata in order, and the place in `pixels` at which each image was written."""
    tables: list[tuple[int, list[_Row]]] = []
    places: dict[str, int] = {}
    for file in lra_release.release_files(source, folder, "imgs/*/sample_*.png", "metadata/*.npy"):
        if file.name.startswith("metadata/"):
            tables.append((_number(file), list(_rows(file, images.contour_length))))
        elif (data := file.stream.read()) or f"{folder}/{file.name}" != _EMPTY:
            pixels.write(_decode(data, file.path, images.resolution))
            places[file.name] = len(places)
    tables.sort(key=lambda table: table[0])
    return [row for _, table in tables for row in table], places


def _number(file: lra_release.ReleaseFile) -> int:
    try:
        return int(PurePosixPath(file.name).stem)
    except ValueError:
        raise UsageError(f"{file.path}: the files of metadata have numbers as names; take this one away") from None


def _rows(file: lra_release.ReleaseFile, contour_length: int) -> Iterator[_Row]:
    """The columns are folder, file, number in the folder, label, continuity, contour length, and others."""
    for number, text in enumerate(file.stream, start=1):
        line, fields = f"{file.path}:{number}", text.decode(errors="replace").split()
        if len(fields) < 6:
            raise UsageError(f"{line}: {len(fields)} columns instead of at least 6; get the file again")
        if fields[3] not in ("0", "1"):
            raise UsageError(f"{line}: the label is {fields[3][:20]!r}, not 0 or 1; get the file again")
        if fields[5].removesuffix(".0") != str(contour_length):
            length = f"contours of {fields[5][:20]!r} paddles instead of {contour_length}"
            raise UsageError(f"{line}: {length}; name the folder of the level asked for")
        yield _Row(str(PurePosixPath(fields[0], fields[1])), int(fields[3]), line)


def _decode(data: bytes, path: str, resolution: int) -> bytes:
    """The gray levels of a PNG file, row by row."""
    try:
        with picture.open_image(data, ["PNG"]) as image:
            if image.size == (resolution, resolution) and not image.mode.startswith(("I", "F")):  # of 16 bits or more
                return image.convert("L").tobytes()
            found = f"{image.width}x{image.height} of mode {image.mode}"
    except Exception as error:  # Pillow raises what it likes for a broken file
        if system_error(error) or isinstance(error, MemoryError):
            raise
        raise UsageError(f"{path} is empty, or is not a readable PNG image; get it again") from error
    raise UsageError(f"{path} is {found}, not {resolution}x{resolution} of 8 bits; get it again")


def _split(count: int) -> dict[str, np.ndarray]:
    """Which of `count` examples each split has, int64 `[n]`, in its order."""
    tenth = int(0.1 * count)
    generator = torch.Generator().manual_seed(42)
    parts = random_split(range(count), [count - 2 * tenth, tenth, tenth], generator)  # type: ignore[arg-type]
    return {split: np.array(part.indices) for split, part in zip(("train", "val", "test"), parts, strict=True)}


def _pixels(file: BinaryIO, numbers: np.ndarray, resolution: int) -> np.ndarray:
    """These images of a file of images, uint8 `[n, resolution**2]`."""
    size = resolution**2
    data = bytearray().join(os.pread(file.fileno(), size, int(number) * size) for number in numbers)
    return np.frombuffer(data, np.uint8).reshape(-1, size)


def _chunks(images: np.ndarray, resolution: int) -> list[np.ndarray]:
    """Numbers of images in parts of about `CHUNK` bytes of pixels."""
    return np.array_split(images, -(-len(images) * resolution**2 // CHUNK))
