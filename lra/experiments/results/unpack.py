"""Unpacks an archive that is not trusted: only the files that `lra results pack` writes, and only so many bytes."""

from __future__ import annotations

import io
import lzma
import shutil
import tarfile
from pathlib import Path
from typing import IO, cast

from lra.errors import UsageError
from lra.training.run_directory import FIRST_FAILURE_FILE, PREDICTIONS_FILE

SMALL_FILES = ("config.yaml", "env.json", FIRST_FAILURE_FILE, "metrics.csv", PREDICTIONS_FILE, "result.json")
CHECKPOINT_FILES = {
    "none": (), "weights": ("model.safetensors",), "last": ("last.ckpt",), "best": ("best.ckpt",),
    "all": ("best.ckpt", "last.ckpt", "model.safetensors"),
}  # fmt: skip
LEAST_LIMIT = 64 << 20  # bytes that any archive may unpack to
MOST_GROWTH = 200  # times an archive's own size: curves shrink by less, checkpoints hardly
MOST_SMALL = 64 << 20  # bytes of a small file
BUFFER_BYTES = 1 << 20


def unpack_archive(file: Path, folder: Path) -> None:
    """Unpacks an archive's files below `folder`. UsageError if it holds anything that `pack_runs` does not write."""
    limit = max(LEAST_LIMIT, MOST_GROWTH * file.stat().st_size)
    stated, seen = 0, set()
    with file.open("rb") as packed, lzma.open(packed) as plain:
        stream = _Limited(cast(IO[bytes], plain), limit, file)
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
                for member in tar:
                    name, stated = _name(member, file), stated + member.size
                    if name in seen:
                        raise UsageError(f"{file} has {name} twice: get it again")
                    if stated > limit or (name.rpartition("/")[2] in SMALL_FILES and member.size > MOST_SMALL):
                        raise UsageError(
                            f"{file} states more bytes than runs have, {stated:,} up to {name}: get it again"
                        )
                    seen.add(name)
                    _extract(tar, member, folder / name)
            while stream.read(BUFFER_BYTES):  # the checksum is at the end
                pass
        except (lzma.LZMAError, EOFError, ValueError, tarfile.TarError, RecursionError) as error:
            raise UsageError(
                f"{file} is not an archive of lra results pack, or is damaged ({error}): get it again"
            ) from error
    for run in sorted({name.rpartition("/")[0] for name in seen}):
        if f"{run}/config.yaml" not in seen:
            raise UsageError(f"{file} has no {run}/config.yaml: get it again")


def is_plain_name(part: str) -> bool:
    """Whether a part of a path leads down, and can be printed."""
    return bool(part) and not part.startswith(".") and part.isprintable() and "\\" not in part


def _name(member: tarfile.TarInfo, file: Path) -> str:
    """The name of a regular file of a run. UsageError for anything else."""
    parts = member.name.split("/")
    known = (*SMALL_FILES, *CHECKPOINT_FILES["all"])
    if not (len(parts) == 4 and all(map(is_plain_name, parts)) and parts[3] in known):
        raise UsageError(f"{file} has {member.name!r}, which is not a file of a run: get it again")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        raise UsageError(f"{file} has {member.name!r}, which is a link, or not a regular file: get it again")
    return member.name


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
