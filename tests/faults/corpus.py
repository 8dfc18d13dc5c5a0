"""Damage to files that were good, and the command lines that meet it: each a function that spoils a folder."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch

Spoil = Callable[[Path], object]
TSV = ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv")
GOOD = b"Source\tTarget\r\n( ( ( [MAX 1 ) 2 ) ] )\t2\r\n"


def _tsv(data: bytes) -> Spoil:
    return lambda folder: (folder / "basic_train.tsv").write_bytes(data)


def _row(text: str) -> Spoil:
    return _tsv(GOOD + text.encode() + b"\r\n")


# of a folder of LRA's ListOps files -> words
LISTOPS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "empty": (_tsv(b""), ("basic_train.tsv:1", "Source and Target")),
    "another header": (_tsv(b"a\tb\n1\t1\n"), ("basic_train.tsv:1", "Source and Target")),
    "zeros": (_tsv(bytes(1000)), ("basic_train.tsv:1", "Source and Target")),
    "not UTF-8": (_tsv(b"\xff\xfe\x00S"), ("basic_train.tsv:1", "Source and Target")),
    "unknown token": (_row("( [ADD 1 ] )\t1"), ("basic_train.tsv:3", "[ADD")),
    "label of letters": (_row("( ( ( [MAX 1 ) 2 ) ] )\tx"), ("basic_train.tsv:3", "x")),
    "label of no digit": (_row("( ( ( [MAX 1 ) 2 ) ] )\t10"), ("basic_train.tsv:3", "10")),
    "negative label": (_row("( ( ( [MAX 1 ) 2 ) ] )\t-1"), ("basic_train.tsv:3", "-1")),
    "label NaN": (_row("( ( ( [MAX 1 ) 2 ) ] )\tnan"), ("basic_train.tsv:3", "nan")),
    "no label": (_row("( ( ( [MAX 1 ) 2 ) ] )"), ("basic_train.tsv:3",)),
    "too long": (_row(f"( [MAX {'1 ' * 3000}] )\t1"), ("basic_train.tsv:3", "1999")),
    "a link": (lambda f: ((f / TSV[0]).unlink(), (f / TSV[0]).symlink_to("/etc/hosts")), ("basic_train.tsv", "link")),
    "a folder": (lambda f: ((f / TSV[0]).unlink(), (f / TSV[0]).mkdir()), ("basic_train.tsv", "regular file")),
    "missing": (lambda f: (f / TSV[1]).unlink(), ("basic_val.tsv", "get it again")),
}


def listops_files(folder: Path) -> Path:
    folder.mkdir()
    for name in TSV:
        (folder / name).write_bytes(GOOD)
    return folder


def archive(path: Path, name: str, kind: bytes = tarfile.REGTYPE, size: int | None = None) -> Path:
    """LRA's ListOps files in an archive, before one more member; `size`: what that one states, without any bytes."""
    with tarfile.open(path, "w:gz") as tar:
        for member in TSV:
            info = tarfile.TarInfo(f"lra_release/listops-1000/{member}")
            info.size = len(GOOD)
            tar.addfile(info, io.BytesIO(GOOD))
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, "/etc/hosts", size or 0
        tar.addfile(info)
    return path


_INSIDE = "lra_release/listops-1000/basic_train.tsv"
ARCHIVES: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "parent": (lambda path: archive(path, "../../pwned"), ("../../pwned", "get it again")),
    "parent within": (lambda path: archive(path, "a/../../pwned"), ("a/../../pwned", "get it again")),
    "absolute": (lambda path: archive(path, "/tmp/pwned"), ("/tmp/pwned", "get it again")),
    "twice": (lambda path: archive(path, _INSIDE), ("more than once", "name the folder")),
    "twice, a link": (lambda path: archive(path, _INSIDE, tarfile.SYMTYPE), ("more than once", "name the folder")),
    "size without bytes": (lambda path: archive(path, "x", size=1 << 40), ("damaged", "get it again")),
    "empty": (lambda path: path.write_bytes(b""), ("not a tar archive", "get it again")),
    "zeros": (lambda path: path.write_bytes(bytes(10240)), ("basic_train.tsv", "name LRA's")),
    "a zip": (lambda path: path.write_bytes(b"PK\x05\x06" + bytes(18)), ("not a tar archive", "get it again")),
    "gzip of nothing": (lambda path: path.write_bytes(b"\x1f\x8b"), ("not a tar archive", "get it again")),
    "cut": (lambda path: path.write_bytes(archive(path, "x").read_bytes()[:-30]), ("damaged", "get it again")),
    "text": (lambda path: path.write_bytes(b"<html>404</html>" * 99), ("not a tar archive", "get it again")),
}


class _Runs:
    """What a pickle could do to whoever loads it."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return exec, ("open('pwned', 'w')",)


def _cut(path: Path, share: float) -> object:
    return path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def _header(text: bytes, length: int | None = None) -> Spoil:
    """A safetensors file of this header, which states that it has `length` bytes."""
    stated = len(text) if length is None else length
    return lambda path: path.write_bytes(stated.to_bytes(8, "little") + text)


_OTHER = ("damaged or of another program",)
_UNSAFE = ("holds more than plain weights", "was not loaded")
_LIE = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
# of a .ckpt -> words
CKPT: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "empty": (lambda path: path.write_bytes(b""), _OTHER),
    "zeros": (lambda path: path.write_bytes(bytes(5000)), ("spoilt.ckpt",)),
    "text": (lambda path: path.write_text("weights"), ("spoilt.ckpt",)),
    "cut in half": (lambda path: _cut(path, 0.5), _OTHER),
    "cut at the end": (lambda path: _cut(path, 0.999), _OTHER),
    "a pickle that runs": (lambda path: path.write_bytes(pickle.dumps(_Runs())), ("spoilt.ckpt",)),
    "a checkpoint that runs": (lambda path: torch.save({"state_dict": _Runs()}, path), _UNSAFE),
    "a list": (lambda path: torch.save([1, 2], path), _OTHER),
    "a tensor": (lambda path: torch.save(torch.zeros(3), path), ("spoilt.ckpt",)),
    "no identity": (lambda path: torch.save({"state_dict": {}}, path), _OTHER),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), ("spoilt.ckpt", "finished run's directory")),
    "not there": (lambda path: path.unlink(), ("spoilt.ckpt", "finished run's directory")),
}
# of a .safetensors -> words
SAFETENSORS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "empty": (lambda path: path.write_bytes(b""), _OTHER),
    "text": (lambda path: path.write_text("weights" * 10), _OTHER),
    "cut in half": (lambda path: _cut(path, 0.5), _OTHER),
    "cut at the end": (lambda path: _cut(path, 0.999), _OTHER),
    "a header without end": (_header(b"{}", 1 << 62), _OTHER),
    "a header of no JSON": (_header(b"{{{{"), _OTHER),
    "a header of no metadata": (_header(b"{}"), _OTHER),
    "a size far above the file's": (_header(_LIE), _OTHER),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(_Runs())), _OTHER),
}

_AGAIN = ("run: lra data prepare task=listops", "force=true")


def _manifest(data: bytes) -> Spoil:
    return lambda store: (store / "manifest.json").write_bytes(data)


# of a prepared store -> words
STORES: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "no manifest": (lambda store: (store / "manifest.json").unlink(), ("manifest.json", *_AGAIN)),
    "empty manifest": (_manifest(b""), ("manifest.json", *_AGAIN)),
    "not JSON": (_manifest(b"{"), ("manifest.json", *_AGAIN)),
    "not UTF-8": (_manifest(b"\xff\xff"), ("manifest.json", *_AGAIN)),
    "a list": (_manifest(b"[]"), ("manifest.json", *_AGAIN)),
    "a number": (_manifest(b"3"), ("manifest.json", *_AGAIN)),
    "null": (_manifest(b"null"), ("manifest.json", *_AGAIN)),
    "an empty mapping": (_manifest(b"{}"), ("manifest.json", *_AGAIN)),
    "another format": (_manifest(b'{"format": 99, "files": {}}'), ("format 99", *_AGAIN)),
    "files is a list": (_manifest(b'{"format": 2, "files": [1]}'), ("manifest.json", *_AGAIN)),
    "files is a number": (_manifest(b'{"format": 2, "files": 5}'), ("manifest.json", *_AGAIN)),
    "a file is a number": (_manifest(b'{"format": 2, "files": {"x": 5}}'), ("manifest.json", *_AGAIN)),
    "source is a number": (_manifest(b'{"format": 2, "files": {}, "source": 5}'), ("manifest.json", *_AGAIN)),
    "only files": (_manifest(b'{"format": 2, "files": {}}'), ("manifest.json", *_AGAIN)),
    "nested too deep": (_manifest(b"[" * 100_000), ("manifest.json", *_AGAIN)),
    "tokens cut": (lambda store: _cut(store / "train.tokens.npy", 0.5), ("train.tokens.npy", *_AGAIN)),
    "labels gone": (lambda store: (store / "test.labels.npy").unlink(), ("test.labels.npy", *_AGAIN)),
    "offsets empty": (lambda store: _cut(store / "val.offsets.npy", 0), ("val.offsets.npy", *_AGAIN)),
}
