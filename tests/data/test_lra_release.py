"""Files of LRA's release: which copy is read, from a folder or an archive, and what is refused."""

import errno
import gzip
import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from lra.data import lra_release
from lra.errors import UsageError
from tests.fixtures import pack

FOLDER = "pathfinder32/curv_baseline"
PATTERNS = ("imgs/*/sample_*.png", "metadata/*.npy")
NAMES = ("imgs/0/sample_0.png", "imgs/10/sample_2.png", "metadata/0.npy", "metadata/10.npy")


def write(root, *, mark=b""):
    """A data folder whose files say their name and `mark`."""
    for name in (
        "imgs/0/sample_0.png",
        "imgs/10/sample_2.png",
        "metadata/0.npy",
        "metadata/10.npy",
        "imgs/0/notes.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() + mark)
    return root


@pytest.fixture
def unpacked(tmp_path):
    """The release as it is unpacked: both copies, and other folders with files of the same names."""
    outer = tmp_path / "above" / "lra_release"
    inner = outer / "lra_release"
    write(outer / FOLDER, mark=b" outer")
    write(inner / FOLDER, mark=b" inner")
    for other in ("pathfinder64/curv_baseline", "pathfinder32/curv_contour_length_9", "listops-1000"):
        write(inner / other, mark=b" other")
    return outer.parent


def read(source, folder=FOLDER, patterns=PATTERNS):
    return {file.name: file.stream.read() for file in lra_release.release_files(source, folder, *patterns)}


def expected(mark):
    return {name: f"{name} {mark}".encode() for name in NAMES}


@pytest.mark.parametrize(
    "place",
    [
        "",
        "lra_release",
        "lra_release/lra_release",
        "lra_release/lra_release/pathfinder32",
        f"lra_release/lra_release/{FOLDER}",
    ],
)
def test_the_inner_copy_from_wherever_one_points(unpacked, place, tmp_path):
    source = unpacked / place
    assert read(source) == expected("inner")
    for suffix in ("tar", "tar.gz", "tar.bz2", "tar.xz"):
        assert read(pack(source, tmp_path / f"release.{suffix}")) == expected("inner")
        assert read(pack(source, tmp_path / f"dotted.{suffix}", inside=".")) == expected("inner")


def test_a_hidden_folder(tmp_path):
    write(tmp_path / ".data" / FOLDER, mark=b" hidden")
    assert read(tmp_path) == read(pack(tmp_path / ".data", tmp_path / "x.tar")) == expected("hidden")


def test_a_copy_that_is_named_is_read(unpacked):
    assert read(unpacked / "lra_release" / FOLDER) == expected("outer")
    assert read(unpacked / "lra_release" / "pathfinder32") == expected("outer")


def test_paths_for_messages(unpacked, tmp_path):
    name, inside = "metadata/0.npy", f"above/lra_release/lra_release/{FOLDER}/metadata/0.npy"
    [file] = lra_release.release_files(unpacked, FOLDER, name)
    assert file.path == str(tmp_path / inside)
    archive = pack(unpacked, tmp_path / "lra_release.gz")
    [file] = lra_release.release_files(str(archive), FOLDER, name)
    assert (file.name, file.path) == (name, f"{archive}/{inside}")


def test_two_copies_of_equal_rank_are_an_error_that_names_both(unpacked, tmp_path):
    write(unpacked / "old" / FOLDER)
    for source in (unpacked, pack(unpacked, tmp_path / "both.tar.gz")):
        with pytest.raises(UsageError, match=f"more than once.*lra_release/lra_release/{FOLDER} and .*old/{FOLDER}"):
            read(source)
    write(unpacked / "old" / "lra_release" / FOLDER)
    with pytest.raises(UsageError, match=f"more than once.*lra_release/{FOLDER} and .*old/lra_release/{FOLDER}"):
        read(unpacked)


def test_what_is_not_there(unpacked, tmp_path):
    for source in (unpacked, pack(unpacked, tmp_path / "release.tar.gz")):
        with pytest.raises(UsageError, match="has no imgs/.* in a folder pathfinder128/curv_baseline: name LRA's"):
            read(source, "pathfinder128/curv_baseline")
        with pytest.raises(UsageError, match=f"lra_release/lra_release/{FOLDER} has no labels/.*get it again"):
            read(source, patterns=(*PATTERNS, "labels/*.npy"))
    for source in (tmp_path / "nowhere", "/dev/null"):
        with pytest.raises(UsageError, match=f"{source} is not a readable file or folder: name LRA's"):
            read(source)


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_half_an_archive(unpacked, tmp_path, suffix):
    """Wherever it is cut, also between two members, and although all that is wanted comes before."""
    (unpacked / "zzz").write_bytes(os.urandom(30_000))
    whole = pack(unpacked, tmp_path / f"release.{suffix}")
    assert read(whole) == expected("inner")
    data = whole.read_bytes()
    member_ends = len(data) - 10240 * (suffix == "tar")  # a tar is padded to multiples of 10,240
    for length in {0, 1, 5, 300, 512, len(data) // 2, member_ends - 1, member_ends // 512 * 512 - 512}:
        cut = tmp_path / f"half.{suffix}"
        cut.write_bytes(data[:length])
        with pytest.raises(UsageError, match="not a tar archive, or is damaged.*get it again") as caught:
            read(cut)
        assert str(cut) in str(caught.value) and "\n" not in str(caught.value)


def test_every_cut_of_a_plain_archive_in_whole_blocks(tmp_path):
    """Without compression nothing but its closing zeros tells a whole archive."""
    whole = pack(write(tmp_path / "curv_baseline"), tmp_path / "release.tar").read_bytes()
    end = len(whole.rstrip(b"\0"))
    (cut := tmp_path / "cut.tar").write_bytes(whole[: -(-end // 512) * 512 + 512])
    assert len(read(cut)) == 4
    for length in range(0, end, 512):
        cut.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="damaged"):
            read(cut)


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.bz2", "tar.xz"])
def test_any_changed_byte_of_a_compressed_archive(tmp_path, suffix):
    folder = tmp_path / "curv_baseline"
    (folder / "imgs/0").mkdir(parents=True)
    (folder / "imgs/0/sample_0.png").write_bytes(os.urandom(2000))
    data = pack(folder, tmp_path / f"release.{suffix}").read_bytes()
    original = read(tmp_path / f"release.{suffix}", patterns=PATTERNS[:1])
    unchanged = 0
    for place in range(20, len(data), 23):
        changed = tmp_path / f"changed.{suffix}"
        changed.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        try:
            assert read(changed, patterns=PATTERNS[:1]) == original  # a byte of padding
            unchanged += 1
        except UsageError as error:
            assert "damaged" in str(error)
    assert unchanged < 3


def test_a_broken_header_does_not_end_an_archive(tmp_path):
    data = bytearray(pack(write(tmp_path / "curv_baseline"), tmp_path / "release.tar").read_bytes())
    data[data.rindex(b"ustar")] ^= 1  # of the last member
    for name, content in (("broken.tar", data), ("broken.tar.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match="is damaged .*at byte"):
            read(tmp_path / name)


def test_a_file_that_is_no_archive(unpacked):
    with pytest.raises(UsageError, match="0.npy is not a tar archive, or is damaged"):
        read(unpacked / "lra_release" / FOLDER / "metadata/0.npy")


def member(name, kind=tarfile.REGTYPE, target="", data=b""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, len(data)
    return info, io.BytesIO(data)


def archive(path, *members) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            tar.addfile(info, data)
    return path


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_only_regular_files_of_an_archive_are_read(tmp_path, kind):
    good, secret = member("listops-1000/a.tsv", data=b"a"), member("elsewhere/secret", data=b"s")
    source = archive(tmp_path / "x.tar.gz", secret, good, member("listops-1000/b.tsv", kind, "elsewhere/secret"))
    with pytest.raises(UsageError, match="listops-1000/b.tsv is a link, or not a regular file"):
        read(source, "listops-1000", ("*.tsv",))
    assert read(source, "listops-1000", ("a.tsv",)) == {"a.tsv": b"a"}  # a link that nobody asks for


@pytest.mark.parametrize("name", ["../listops-1000/b.tsv", "listops-1000/../../b.tsv", "/listops-1000/b.tsv"])
def test_members_outside_an_archive(tmp_path, name):
    source = archive(tmp_path / "x.tar.gz", member("listops-1000/a.tsv", data=b"a"), member(name, data=b"b"))
    with pytest.raises(UsageError, match="has a member outside itself, '.*b.tsv'"):
        read(source, "listops-1000", ("a.tsv",))


def test_a_member_that_comes_twice(tmp_path):
    twice = [member("listops-1000/a.tsv", data=data) for data in (b"1", b"2")]
    with pytest.raises(UsageError, match="listops-1000 has a file more than once"):
        read(archive(tmp_path / "x.tar.gz", *twice), "listops-1000", ("a.tsv",))


def test_only_regular_files_of_a_folder_are_read(tmp_path):
    folder = tmp_path / "release" / "listops-1000"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"s")
    bad = folder / "b.tsv"
    for make in (lambda: bad.symlink_to(tmp_path / "secret"), lambda: os.mkfifo(bad)):
        make()
        with pytest.raises(UsageError, match=f"{bad} is a link, or not a regular file"):
            read(folder, "listops-1000", ("*.tsv",))
        bad.unlink()
    bad.write_bytes(b"b")
    assert read(folder, "listops-1000", ("*.tsv",)) == {"b.tsv": b"b"}

    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=f"{bad} is a link"):
        read(tmp_path / "release", "listops-1000", ("*.tsv",))
    assert read(folder, "listops-1000", ("*.tsv",)) == {"b.tsv": b"b"}  # the source itself may be one


def test_an_archive_is_read_forwards_only(unpacked, tmp_path, monkeypatch):
    """A step back in a gzip stream may read it from its beginning again."""
    path = pack(unpacked, tmp_path / "release.tar.gz")

    def never(*_):
        raise AssertionError("a stream does not seek")

    monkeypatch.setattr(gzip.GzipFile, "seek", never)
    assert read(path) == expected("inner")


def test_what_a_mac_puts_beside_files_is_passed_over(tmp_path):
    folder = write(tmp_path / FOLDER, mark=b" x")
    for path in [*folder.rglob("*")]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")
        (path.parent / ".DS_Store").write_bytes(b"\0")
    for name in ("metadata/.0.npy", "imgs/.hidden/sample_1.png", "imgs/empty/.keep"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"no")
    shutil.copytree(folder, tmp_path / "__MACOSX" / FOLDER, ignore=shutil.ignore_patterns("[!.]*.*"))
    assert read(tmp_path) == read(folder) == expected("x")
    for suffix in ("tar", "tar.gz"):
        for inside in (None, "."):
            assert read(pack(tmp_path / "pathfinder32", tmp_path / f"mac.{suffix}", inside)) == expected("x")


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_and_attributes(tmp_path, form):
    info, data = member("./" + "deep/" * 18 + "listops-1000/a.tsv", data=b"a")
    if form == tarfile.PAX_FORMAT:
        info.pax_headers = {"LIBARCHIVE.creationtime": "1700000000", "SCHILY.xattr.com.apple.provenance": "é"}
    with tarfile.open(tmp_path / "x.tar", "w", format=form) as tar:
        tar.addfile(info, data)
    assert read(tmp_path / "x.tar", "listops-1000", ("*.tsv",)) == {"a.tsv": b"a"}


@pytest.mark.parametrize(
    ("head", "name"), [(b"PK\3\4", "zip"), (b"7z\xbc\xaf\x27\x1c", "7z"), (b"\x28\xb5\x2f\xfd", "zstd")]
)
def test_an_archive_of_another_kind_is_not_called_damaged(tmp_path, head, name):
    (tmp_path / "lra_release").write_bytes(head + bytes(100))
    with pytest.raises(UsageError, match=f"is packed as {name}, which is not read: unpack it and name the folder"):
        read(tmp_path / "lra_release")


@pytest.mark.parametrize("name", ["data[v1]", "a*b?", "50% of it", "größe 映画", "#1@home"])
def test_a_folder_of_any_name(tmp_path, name):
    write(tmp_path / name / FOLDER, mark=b" x")
    assert read(tmp_path / name) == read(f"{tmp_path}/{name}/") == expected("x")
    assert read(pack(tmp_path / name, tmp_path / f"{name}.tar.gz")) == expected("x")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("packed", [True, False])
def test_what_can_not_be_read_is_not_called_damaged(unpacked, tmp_path, monkeypatch, number, packed):
    source = pack(unpacked, tmp_path / "release.tar.gz") if packed else unpacked

    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((gzip.GzipFile, "read") if packed else (Path, "open")), fails)
    with pytest.raises(OSError) as caught:
        read(source)
    assert caught.value.errno == number and (caught.value.filename or not packed)


def test_unreadable_files(unpacked, tmp_path):
    path = unpacked / "lra_release" / FOLDER / "metadata/0.npy"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads everything")
    with pytest.raises(UsageError, match=f"cannot read {path} .*make it readable"):
        read(path.parents[1])
    archive = pack(unpacked / "lra_release" / "lra_release", tmp_path / "x.tar.gz")
    archive.chmod(0)
    with pytest.raises(UsageError, match=f"cannot read {archive} .*make it readable"):
        read(archive)
