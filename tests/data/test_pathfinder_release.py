"""Pathfinder images of LRA's release: their order, their split, and what is refused."""

import io
import os

import numpy as np
import pytest
from PIL import Image
from torch import Generator
from torch.utils.data import random_split

from lra.data.cifar10 import PIXELS
from lra.data.pathfinder import released
from lra.data.pathfinder.generate import draw_image, generate_images, threshold_accuracy
from lra.data.pathfinder.law import image_law
from lra.data.store import StoreContent, prepare_store
from lra.data.writer import StoreWriter
from lra.errors import UsageError
from tests.fixtures import pack, write_pathfinder

COUNT = 30
# Of 30 rows, by PyTorch's random_split with seed 42
SPLITS = {
    "train": [12, 0, 6, 25, 8, 15, 10, 18, 16, 23, 28, 26, 20, 7, 21, 22, 29, 13, 14, 2, 4, 1, 9, 11],
    "val": [17, 19, 27],
    "test": [5, 24, 3],
}


def images(count=COUNT, side=32, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side), np.uint8)


def labels(count=COUNT):
    return [row // 3 % 2 for row in range(count)]


def write(folder, seed=0, side=32, contour_length=14):
    """Two images to each file of metadata, so that 10 lies between 1 and 2 by name."""
    return write_pathfinder(folder, images(side=side, seed=seed), labels(), contour_length, each=2)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "pathfinder32" / "curv_contour_length_14")


def store(source, resolution=32, level="hard"):
    params = {"resolution": resolution, "level": level}
    content = StoreContent("pathfinder", 1, params, str(source), PIXELS, released.GENERATOR, None)
    return prepare_store(
        content,
        lambda writer: released.build_released_pathfinder(writer, source, resolution=resolution, level=level),
        force=True,
    )


def check(made, pixels, classes, splits):
    """Whether the splits hold these rows of the images and labels, in this order."""
    assert made.splits == tuple(splits)
    for name, rows in splits.items():
        part = made.split(name)
        assert len(part) == len(rows)
        assert all(np.array_equal(part[place], pixels[row].reshape(-1)) for place, row in enumerate(rows))
        assert part.labels.tolist() == [classes[row] for row in rows]


@pytest.mark.parametrize("chunk", [released.CHUNK, 5 * 1024])
def test_rows_by_number_and_the_split_of_public_loaders(folder, monkeypatch, chunk):
    monkeypatch.setattr(released, "CHUNK", chunk)
    check(store(folder), images(), labels(), SPLITS)


def test_every_folder_and_the_inner_copy(tmp_path):
    outer = tmp_path / "lra_release"
    levels = {"easy": ("curv_baseline", 6), "intermediate": ("curv_contour_length_9", 9)}
    for seed, (level, (name, length)) in enumerate(levels.items()):
        for side in (32, 64):
            write(outer / f"pathfinder{side}" / name, seed + 10, side, length)
            write(outer / "lra_release" / f"pathfinder{side}" / name, seed, side, length)
            for source in (outer, pack(outer, tmp_path / "lra_release.gz")):
                check(store(source, side, level), images(side=side, seed=seed), labels(), SPLITS)


def test_the_images_of_an_archive_in_any_order(folder, tmp_path):
    """A release packed with its metadata before, between and after the images."""
    whole = store(folder)
    for order in ("metadata imgs", "imgs metadata"):
        path = tmp_path / "release.tar.gz"
        pack(folder.parent, path, members=[f"{folder.name}/{part}" for part in order.split()])
        check(store(path), images(), labels(), SPLITS)
    assert whole.manifest["files"] == store(path).manifest["files"]


def test_the_image_that_the_release_has_empty(tmp_path):
    pixels, classes = images(200), labels(200)
    folder = write_pathfinder(tmp_path / "pathfinder32" / "curv_baseline", pixels, classes, 6, each=200)
    whole = store(folder, level="easy").manifest
    assert whole["splits"]["train"]["count"] == 160 and not [note for note in whole["notes"] if "left out" in note]
    (folder / "imgs/0/sample_172.png").write_bytes(b"")
    rest = [row for row in range(200) if row != 172]
    parts = random_split(rest, [161, 19, 19], Generator().manual_seed(42))  # type: ignore[arg-type]
    splits = {name: [rest[place] for place in part.indices] for name, part in zip(SPLITS, parts, strict=True)}
    for source in (folder, pack(folder, tmp_path / "easy.tar.gz")):
        made = store(source, level="easy")
        assert "images of pathfinder32/curv_baseline left out, empty or not in metadata: 1" in made.manifest["notes"]
        check(made, pixels, classes, splits)
    (folder / "imgs/0/sample_171.png").write_bytes(b"")
    with pytest.raises(UsageError, match="sample_171.png is empty, or is not a readable PNG image; get it again"):
        store(folder, level="easy")


def test_another_count_than_published_is_noted(folder, monkeypatch):
    said = f"pathfinder32/{folder.name}/metadata has 30 rows, where 200,000 are published"
    assert said in store(folder).manifest["notes"]
    monkeypatch.setattr(released, "PUBLISHED", COUNT)
    assert not [note for note in store(folder).manifest["notes"] if "published" in note]


def test_that_image_is_good_in_other_folders(tmp_path):
    folder = write_pathfinder(tmp_path / "pathfinder32" / "hard", images(200), labels(200), 14, each=200)
    (folder / "imgs/0/sample_172.png").write_bytes(b"")
    with pytest.raises(UsageError, match="sample_172.png is empty, or is not a readable PNG image"):
        store(folder)


def test_the_baseline_of_the_marker_distance(tmp_path):
    drawn = list(generate_images(image_law(32, "hard"), seed=0, first=0, count=120))
    pixels, classes, distances = (
        np.concatenate([getattr(part, field) for part in drawn]) for field in ("pixels", "labels", "marker_distance")
    )
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    write_pathfinder(folder, pixels.reshape(-1, 32, 32), classes.tolist(), 14, each=50)
    parts = random_split(range(120), [96, 12, 12], Generator().manual_seed(42))  # type: ignore[arg-type]
    train, val, test = ((distances[list(part.indices)], classes[list(part.indices)]) for part in parts)
    expected = {"val": threshold_accuracy(train, val), "test": threshold_accuracy(train, test)}
    assert store(folder).manifest["baselines"] == {"marker distance": expected}


def unmarked():
    """Generated images whose markers are blacked out."""
    drawings = [draw_image(image_law(32, "hard"), seed=0, index=index) for index in range(COUNT)]
    for drawing in drawings:
        for y, x in drawing.markers:
            drawing.pixels[max(y - 3, 0) : y + 4, max(x - 3, 0) : x + 4] = 0
    return np.stack([drawing.pixels for drawing in drawings])


@pytest.mark.parametrize("make", [unmarked, lambda: images() // 2], ids=["unmarked", "dim"])
def test_images_without_markers_have_no_baseline(tmp_path, make):
    pixels = make()
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    write_pathfinder(folder, pixels, labels(), 14, each=COUNT)
    made = store(folder)
    (note,) = (note for note in made.manifest["notes"] if note.startswith("no baseline of the marker distance: "))
    assert note.endswith(f"images without two markers: {COUNT}, first pathfinder32/{folder.name}/imgs/0/sample_0.png")
    assert made.manifest["baselines"] == {} and len(made.split("train")) == 24


def test_an_image_without_markers_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(released, "CHUNK", 5 * 1024)
    pixels = np.concatenate(
        [part.pixels for part in generate_images(image_law(32, "hard"), seed=0, first=0, count=COUNT)]
    )
    pixels[[17, 23]] = 0
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    write_pathfinder(folder, pixels.reshape(-1, 32, 32), labels(), 14, each=2)
    why = f"images without two markers: 2, first pathfinder32/{folder.name}/imgs/11/sample_1.png"
    assert f"no baseline of the marker distance: {why}" in store(folder).manifest["notes"]


def png(pixels, form="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def test_gray_levels_of_coloured_files(folder):
    (folder / "imgs/1/sample_1.png").write_bytes(png(images()[3][..., None].repeat(3, axis=2)))
    check(store(folder), images(), labels(), SPLITS)


NOISE = images(1, side=64)[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(NOISE), "is 64x64 of mode L, not 32x32 of 8 bits"),
        (png(NOISE[:32, :31]), "is 31x32 of mode L, not 32x32"),
        (png(NOISE[:32, :32].astype(np.uint16)), "is 32x32 of mode I;16, not 32x32 of 8 bits"),
        (png(NOISE[:32, :32])[:-400], "is empty, or is not a readable PNG image"),
        (png(NOISE[:32, :32], "GIF"), "is empty, or is not a readable PNG image"),
        (b"text", "is empty, or is not a readable PNG image"),
    ],
)
def test_other_images(folder, tmp_path, data, message):
    (folder / "imgs/10/sample_0.png").write_bytes(data)
    for source in (folder, pack(folder.parent, tmp_path / "release.tar.gz")):
        with pytest.raises(UsageError, match=f"imgs/10/sample_0.png {message}.*; get it again") as caught:
            store(source)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("imgs/3 sample_1.png 1 2 1.8 14 4", "the label is '2', not 0 or 1"),
        ("imgs/3 sample_1.png 1 -1 1.8 14 4", "the label is '-1', not 0 or 1"),
        ("imgs/3 sample_1.png 1 1.8 14 4 5", "the label is '1.8', not 0 or 1"),
        ("imgs/3 sample_1.png 1 1", "4 columns instead of at least 6"),
        ("", "0 columns instead of at least 6"),
        ("imgs/3 sample_1.png 1 1 1.8 6 2", "contours of '6' paddles instead of 14; name the folder of the level"),
        ("imgs/3 sample_9.png 1 1 1.8 14 4", "imgs/3/sample_9.png is not there"),
        ("imgs/99 sample_1.png 1 1 1.8 14 4", "imgs/99/sample_1.png is not there"),
        ("imgs/3 ../../sample_1.png 1 1 1.8 14 4", "imgs/3/../../sample_1.png is not there"),
        ("imgs/3 sample_0.png 1 1 1.8 14 4", "imgs/3/sample_0.png is named before"),
        ("imgs/2 sample_0.png 1 1 1.8 14 4", "imgs/2/sample_0.png is named before"),
    ],
)
def test_other_metadata(folder, line, message):
    path = folder / "metadata/3.npy"
    path.write_text(f"{path.read_text().splitlines()[0]}\n{line}\n")
    with pytest.raises(UsageError, match=f"^{path}:2: {message}") as caught:
        store(folder)
    assert "\n" not in str(caught.value)


def test_metadata_of_numpy_is_refused(folder):
    """The images' public generator writes such files; those of the release are text."""
    np.save(folder / "metadata/3.npy", np.array(["imgs/3", "sample_1.png"]))
    with pytest.raises(UsageError, match="metadata/3.npy:1: 3 columns|metadata/3.npy:1: the label is"):
        store(folder)


def test_folders_that_lack_something(folder):
    (folder / "metadata/combined.npy").write_text("")
    with pytest.raises(UsageError, match="combined.npy: the files of metadata have numbers as names"):
        store(folder)
    (folder / "metadata/combined.npy").unlink()
    (folder / "imgs/12/sample_1.png").unlink()
    with pytest.raises(UsageError, match="metadata/12.npy:2: imgs/12/sample_1.png is not there"):
        store(folder)
    (folder / "metadata/12.npy").unlink()
    made = store(folder)
    left_out = "images of pathfinder32/curv_contour_length_14 left out, empty or not in metadata: 1"
    assert left_out in made.manifest["notes"]
    assert {name: split["count"] for name, split in made.manifest["splits"].items()} == {
        "train": 24,
        "val": 2,
        "test": 2,
    }
    for path in sorted((folder / "metadata").iterdir())[4:]:
        path.unlink()
    with pytest.raises(UsageError, match="8 images of pathfinder32/curv_contour_length_14 are too few to split"):
        store(folder)
    for path in (folder / "metadata").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match=r"curv_contour_length_14 has no metadata/\*.npy"):
        store(folder)


def test_a_folder_that_is_not_in_the_release(folder):
    with pytest.raises(UsageError, match="has no imgs/.* in a folder pathfinder64/curv_contour_length_14"):
        store(folder.parents[1], resolution=64)
    with pytest.raises(UsageError, match="is 32x32 of mode L, not 64x64"):
        store(folder, resolution=64)
    with pytest.raises(UsageError, match="contours of '14' paddles instead of 6"):
        store(folder, level="easy")
    with pytest.raises(UsageError, match="choose from 32, 64, 128, 256"):
        store(folder, resolution=48)
    with pytest.raises(UsageError, match="choose from easy, intermediate, hard"):
        store(folder, level="medium")


def test_half_an_archive_gives_no_store(folder, tmp_path, data_root):
    data = pack(folder.parent, tmp_path / "whole.tar.gz").read_bytes()
    (tmp_path / "half.tar.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(UsageError, match="half.tar.gz is not a tar archive, or is damaged"):
        store(tmp_path / "half.tar.gz")
    assert not [path for path in data_root.iterdir() if path.is_dir()]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_one_line(folder, tmp_path, monkeypatch):
    (tmp_path / "pixels").symlink_to("/dev/full")
    monkeypatch.setattr(StoreWriter, "scratch", lambda _: tmp_path)
    with pytest.raises(UsageError, match="no space left"):
        store(folder)
