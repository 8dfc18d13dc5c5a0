"""The files of LRA's release, from its archive or from the folder in which it is unpacked.

`lra_release.gz` is a gzipped tar of about 7.7 GB. It holds some data folders twice, as `lra_release/<folder>` and as
`lra_release/lra_release/<folder>`. The inner copy is the good one, and is taken where both exist. An archive is read
from front to back and never unpacked: once for its names and to check that it is whole, once for the files.
"""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import io
import lzma
import os
import re
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, Self, cast

from lra.errors import UsageError, system_error

INNER_FOLDER = "lra_release"  # the folder of the inner copies
BUFFER = 1 << 18  # bytes per read of an archive
_OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}  # by how a file begins
_OTHERS = {b"PK\3\4": "zip", b"7z\xbc\xaf": "7z", b"\x28\xb5\x2f\xfd": "zstd", b"Rar!": "rar"}
_MEND = "name LRA's lra_release.gz, the folder in which it is unpacked, or the data folder itself"


class ReleaseFile(NamedTuple):
    """One file of a data folder."""

    name: str  # within the data folder
    path: str  # for messages; in an archive it begins with the archive's own
    stream: BinaryIO  # to be read forwards, until the next file is asked for


def release_files(source: str | Path, folder: str, *patterns: str) -> Iterator[ReleaseFile]:
    """The files of one data folder of the release that match `patterns`, where `*` is any part of one name.

    A folder's files come sorted, an archive's in its own order. Hidden files, such as those that macOS adds, do not
    count.

    Args:
        source: a tar archive (plain, gzip, bzip2 or xz), or a folder: one of the two folders `lra_release`, the one
            that holds the outer one, the data folder, or a folder above it.
        folder: place of the data folder in the release, as `pathfinder32/curv_baseline`.

    Raises:
        UsageError: if the data folder is missing or its copies cannot be told apart, if nothing matches one of the
            patterns, or if a file is a link. Also if an archive is damaged, cut short or has members outside itself;
            nothing is yielded from such an archive.
    """
    source = Path(os.path.expanduser(source)).resolve()
    unpacked = os.path.isdir(source)
    if not unpacked and not os.path.isfile(source):
        with suppress(FileNotFoundError, NotADirectoryError):
            source.stat()  # says why it can't be looked at
        raise UsageError(f"{source} is not a readable file or folder: {_MEND}")
    found = _names_in_folder(source, folder, patterns) if unpacked else _names_in_archive(source, folder, patterns)
    root = _choose(source, folder, patterns, found)
    if unpacked:
        yield from _read_folder(source / root, sorted(found[root]))
    else:
        yield from _read_archive(source, root, found[root])


def _choose(source: Path, folder: str, patterns: tuple[str, ...], found: Mapping[str, list[str]]) -> str:
    """The one of these folders that is `folder`, if it has all that is asked for."""
    roots = [root for root in found if f"{root.removesuffix(folder)}{INNER_FOLDER}/{folder}" not in found]
    if not roots:
        raise UsageError(f"{source} has no {patterns[0]} in a folder {folder}: {_MEND}")
    if len(roots) > 1:
        copies = " and ".join(str(source / root) for root in sorted(roots))
        raise UsageError(f"{source} has {folder} more than once: name one of {copies}, unpacked")
    [root] = roots
    for pattern in patterns:
        if not fnmatch.filter(found[root], pattern):
            raise UsageError(f"{source / root} has no {pattern}: get it again from LRA's release")
    if len(set(found[root])) < len(found[root]):
        raise UsageError(f"{source / root} has a file more than once: unpack the archive and name the folder")
    return root


def _names_in_folder(source: Path, folder: str, patterns: tuple[str, ...]) -> dict[str, list[str]]:
    """Matching names by the folder that holds them, relative to `source`, and that may be `folder`."""
    parts = PurePosixPath(folder).parts
    ends = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
    nested = [f"*/{folder}", f"*/*/{folder}"]  # not deeper: the release has millions of files
    roots = [source, *(root for place in [*ends, *nested] for root in source.glob(place))]
    found = {}
    for root in roots:
        paths = [path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)]
        if names := [name for name in paths if not _hidden(name)]:
            found[root.relative_to(source).as_posix()] = names
    return found


def _names_in_archive(source: Path, folder: str, patterns: tuple[str, ...]) -> dict[str, list[str]]:
    """Matching names by the folder of the archive that holds them, and that may be `folder`."""
    matching = "|".join(re.escape(pattern).replace(r"\*", "[^/]*") for pattern in patterns)
    wanted = re.compile(f"(?:(.*)/)?({matching})", re.DOTALL)
    found = defaultdict(list)
    for path, _, _ in _members(source):
        if (match := wanted.fullmatch(path)) and not _hidden(match[2]):
            root = match[1] or "."
            if root == "." or f"/{root}".endswith(f"/{folder}") or f"/{folder}".endswith(f"/{root}"):
                found[root].append(match[2])
    return found


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _read_folder(root: Path, names: list[str]) -> Iterator[ReleaseFile]:
    for name in names:
        path = root / name
        if not path.is_file() or path.resolve() != path:
            raise UsageError(f"{path} is a link, or not a regular file: put the file itself there")
        try:
            stream = path.open("rb")
        except PermissionError as error:
            raise UsageError(f"cannot read {path} ({error.strerror}): make it readable") from error
        with stream:
            yield ReleaseFile(name, str(path), stream)


def _read_archive(source: Path, root: str, names: list[str]) -> Iterator[ReleaseFile]:
    wanted = {str(PurePosixPath(root, name)): name for name in names}
    for path, member, archive in _members(source):
        if path in wanted:
            if not member.isreg():
                raise UsageError(f"{source / path} is a link, or not a regular file: get the archive again")
            with cast(BinaryIO, archive.extractfile(member)) as stream:
                yield ReleaseFile(wanted.pop(path), str(source / path), stream)
        if not wanted:
            return


def _members(source: Path) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarFile]]:
    """The archive's members with their normal paths. It is read to its very end, so a damaged one cannot pass."""
    try:
        with _decompressed(source) as stream:
            with tarfile.open(fileobj=_BoundedStream(stream), mode="r|", bufsize=BUFFER, tarinfo=_Member) as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # it would keep millions
                    path = PurePosixPath(member.name)
                    if path.is_absolute() or ".." in path.parts:
                        raise UsageError(f"{source} has a member outside itself, {member.name!r}: get it again")
                    yield str(path), member, archive
            while stream.read(BUFFER):  # the checksum of a compressed file is at its end
                pass
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
        if system := system_error(error, source):  # nothing is damaged
            raise system from None
        raise UsageError(f"{source} is not a tar archive, or is damaged ({error}): get it again") from error


def _decompressed(source: Path) -> BinaryIO:
    """Opens an archive. tarfile would not check the checksums of a stream, nor notice that its end is missing."""
    try:
        with source.open("rb") as file:
            head = file.read(8)
    except PermissionError as error:
        raise UsageError(f"cannot read {source} ({error.strerror}): make it readable") from error
    if other := next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None):
        raise UsageError(f"{source} is packed as {other}, which is not read: unpack it and name the folder")
    opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), io.open)
    return cast(BinaryIO, opener(source, "rb"))


class _BoundedStream(io.RawIOBase):
    """A stream that ends with an error if it is read on past its end.

    tarfile does that to skip a member that states more bytes than there are.
    """

    def __init__(self, stream: BinaryIO):
        self.stream, self.empty = stream, 0

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.empty += not data
        if self.empty > 2:
            raise EOFError("cut short")
        return data


class _Member(tarfile.TarInfo):
    """A member whose broken header is an error. tarfile itself takes a broken or missing header for the end."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {tarfile_.offset}") from error
