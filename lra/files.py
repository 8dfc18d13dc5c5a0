"""Files that appear whole, and archives of files, .tar.xz, that are not trusted when they are read."""

from __future__ import annotations

import io
import lzma
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, cast

from lra.errors import UsageError, name_file

ARCHIVE_ENDING = ".tar.xz"
LEAST_LIMIT = 64 << 20  # bytes that any archive may unpack to
MOST_GROWTH = 200  # times an archive's own size: curves and compiled code shrink by less, checkpoints hardly
BUFFER_BYTES = 1 << 20


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that replaces `path` in one step at the end, so that a reader sees the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with name_file(path):
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # without it a power cut may leave an empty file
            os.replace(aside, path)
    finally:
        with suppress(OSError):  # it is already in place, or could not be opened
            aside.unlink()


def check_archive_name(out: str, command: str) -> None:
    """UsageError if the command's `out=` does not name an archive."""
    if not out.endswith(ARCHIVE_ENDING):
        raise UsageError(f"{command} needs an out=<file>{ARCHIVE_ENDING}")


def refuse_existing_archive(out: Path) -> None:
    """UsageError if the archive is there: it may have files that are nowhere else any more."""
    if out.exists():
        raise UsageError(f"out={out} is there already: name another file, or remove it first")


def write_archive(out: Path, members: Iterable[tuple[str, Path]]) -> str:
    """Writes an archive, which appears whole. Returns its size and name for a message.

    Args:
        members: (name in the archive, file).

    Raises UsageError if it can't be written.
    """
    try:
        with (
            replace_file(out) as plain,
            lzma.open(plain, "wb", preset=1) as stream,
            tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, path in members:
                with path.open("rb") as file:
                    member = tarfile.TarInfo(name)
                    member.size, member.mtime = os.fstat(file.fileno()).st_size, int(os.fstat(file.fileno()).st_mtime)
                    tar.addfile(member, file)
    except OSError as error:
        raise UsageError(f"out={out} can't be written ({error.strerror or error}): name another file") from error
    return f"{max(1, out.stat().st_size // 1000):,} kB: {out}"


def unpack_archive(
    file: Path, folder: Path, command: str, what: tuple[str, str], most_bytes: Callable[[list[str]], int | None]
) -> set[str]:
    """Unpacks an archive's files below `folder`. Returns their names.

    Args:
        command: writes such archives.
        what: what an archive holds, in the singular with its article, and in the plural.
        most_bytes: the largest size of a member with these parts of a path, all of them plain names; None if it does
            not belong there.

    Raises UsageError if it is damaged, or holds anything else, or too much.
    """
    limit = max(LEAST_LIMIT, MOST_GROWTH * file.stat().st_size)
    stated, seen = 0, set()
    with file.open("rb") as packed, lzma.open(packed) as plain:
        stream = _Limited(cast(IO[bytes], plain), limit, file)
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
                for member in tar:
                    name, stated = member.name, stated + member.size
                    parts = name.split("/")
                    most = most_bytes(parts) if all(map(is_plain_name, parts)) else None
                    if most is None:
                        raise UsageError(f"{file} has {name!r}, which is not a file of {what[0]}: get it again")
                    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                        raise UsageError(f"{file} has {name!r}, which is a link, or not a regular file: get it again")
                    if name in seen:
                        raise UsageError(f"{file} has {name} twice: get it again")
                    if stated > limit or member.size > most:
                        raise UsageError(
                            f"{file} states more bytes than {what[1]} have, {stated:,} up to {name}: get it again"
                        )
                    seen.add(name)
                    _extract(tar, member, folder / name)
            while stream.read(BUFFER_BYTES):  # the checksum is at the end
                pass
        except (lzma.LZMAError, EOFError, ValueError, tarfile.TarError, RecursionError) as error:
            raise UsageError(f"{file} is not an archive of {command}, or is damaged ({error}): get it again") from error
    return seen


def is_plain_name(part: str) -> bool:
    """Whether a part of a path leads down, and can be printed."""
    return bool(part) and not part.startswith(".") and part.isprintable() and "\\" not in part


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with cast(IO[bytes], tar.extractfile(member)) as source, path.open("xb") as target:
        shutil.copyfileobj(source, target, BUFFER_BYTES)
    if path.stat().st_size != member.size:
        raise tarfile.ReadError(f"{member.name} is cut short")


class _Limited(io.RawIOBase):
    """A stream that raises UsageError when it unpacks to more than `limit` bytes."""

    def __init__(self, stream: IO[bytes], limit: int, file: Path):
        self.stream, self.limit, self.file, self.count = stream, limit, file, 0

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.count += len(data)
        if self.count > self.limit:
            raise UsageError(f"{self.file} unpacks to more than {self.limit:,} bytes, {MOST_GROWTH} times its size")
        return data
