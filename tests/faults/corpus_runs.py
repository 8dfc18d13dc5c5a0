"""Damage to what runs leave, their directories, checkpoints and archives, and to the content of prepared data."""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.faults.corpus import Spoil

RUN = "listops/flash/done-s0"


def _config(change: Callable[[bytes], bytes]) -> Spoil:
    return lambda run: (run / "config.yaml").write_bytes(change((run / "config.yaml").read_bytes()))


def _only(data: bytes) -> Spoil:
    return _config(lambda _: data)


def _result(data: bytes) -> Spoil:
    return lambda run: (run / "result.json").write_bytes(data)


def _told(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """A result that says something else."""

    def spoil(run: Path) -> None:
        result = json.loads((run / "result.json").read_bytes())
        change(result)
        (run / "result.json").write_text(json.dumps(result))

    return spoil


_BOMB = b"a0: &a0 [x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9)
)
_CONFIG = (f"{RUN}/config.yaml is damaged", "move ", "choose another name=")
_RESULT = (f"{RUN}/result.json is not a whole result", "remove it", "resume=auto")
# of a finished run's directory -> words
DIRECTORIES: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "config empty": (_only(b""), _CONFIG),
    "config of a tab": (_config(lambda good: b"\t" + good), _CONFIG),
    "config a list": (_only(b"[1, 2]"), _CONFIG),
    "config a number": (_only(b"5"), _CONFIG),
    "config a text": (_only(b"weights"), _CONFIG),
    "config zeros": (_only(bytes(500)), _CONFIG),
    "config not UTF-8": (_only(b"\xff\xfe\x00"), _CONFIG),
    "config UTF-16": (_config(lambda good: good.decode().encode("utf-16")), _CONFIG),
    "config cut": (
        _config(lambda good: good[: good.index(b"betas") + 8]), ("another configuration", "choose another name=")
    ),
    "config not closed": (_config(lambda good: good + b"a: {"), _CONFIG),
    "config with a key twice": (_config(lambda good: good + b"seed: 1\n"), _CONFIG),
    "config with a key twice inside": (_config(lambda good: good.replace(b"  lr:", b"  lr: 1\n  lr:")), _CONFIG),
    "config with a python tag": (_only(b"a: !!python/object/apply:os.system ['touch pwned']"), _CONFIG),
    "config with a python name": (_only(b"a: !!python/name:os.system"), _CONFIG),
    "config of aliases": (_only(_BOMB), _CONFIG),
    "config of an alias to itself": (_only(b"a: &a [*a]"), _CONFIG),
    "config merged": (_only(b"a: &a {b: 1}\n<<: *a"), _CONFIG),
    "config nested too deep": (_only(b"[" * 5000), _CONFIG),
    "config twice": (_config(lambda good: good + b"---\n" + good), _CONFIG),
    "config with a list for a key": (_only(b"? [1]\n: 2"), _CONFIG),
    "config with a date that is none": (_only(b"a: 2001-99-99"), _CONFIG),
    "config a folder": (lambda run: ((run / "config.yaml").unlink(), (run / "config.yaml").mkdir()), _CONFIG),
    "config with a list for a number": (
        _config(lambda good: good.replace(b"d_model: 64", b"d_model: [1]")), ("model.d_model: [1] -> 64", "name=")
    ),
    "config with a text for a section": (
        _config(lambda good: good.replace(b"optim:", b"optim: x\nother:")), ("optim: x -> None", "name=")
    ),
    "config of another task": (
        _config(lambda good: good.replace(b"name: listops", b"name: text")), ("task.name: text -> listops", "name=")
    ),
    "result empty": (_result(b""), _RESULT),
    "result half": (_result(b'{"status": "finished", "direc'), _RESULT),
    "result a list": (_result(b"[]"), _RESULT),
    "result a number": (_result(b"5"), _RESULT),
    "result null": (_result(b"null"), _RESULT),
    "result without status": (_result(b"{}"), _RESULT),
    "result without scores": (_result(b'{"status": "finished"}'), _RESULT),
    "result not UTF-8": (_result(b"\xff\xff"), _RESULT),
    "result nested too deep": (_result(b"[" * 100_000), _RESULT),
    "result without baselines": (_told(lambda result: result["test"].pop("baselines")), _RESULT),
    "result with a text for a share": (_told(lambda result: result["test"].update(accuracy="good")), _RESULT),
    "result with a text for a size": (_told(lambda result: result["fresh"].update(n="all")), _RESULT),
    "result with a share above 1": (_told(lambda result: result["fresh"]["baselines"].update(majority=17.1)), _RESULT),
    "result with a list for a bound": (_told(lambda result: result["test"].update(plus_minus=[1])), _RESULT),
    "result with another set of scores": (_told(lambda result: result.update(more={"plus_minus": "x"})), _RESULT),
    "result with a number for a directory": (_told(lambda result: result.update(directory=5)), _RESULT),
    "result with a number without end": (_told(lambda result: result.update(steps=10**400)), _RESULT),
    "result with NaN": (_told(lambda result: result["test"].update(loss=float("nan"))), _RESULT),
    "result with a key twice": (_result(b'{"status": "finished", "status": "finished"}'), (*_RESULT, "a key twice")),
    "result a pipe": (
        lambda run: ((run / "result.json").unlink(), os.mkfifo(run / "result.json")), (*_RESULT, "not a regular file")
    ),
    "config a pipe": (lambda run: ((run / "config.yaml").unlink(), os.mkfifo(run / "config.yaml")), _CONFIG),
    "config with digits without end": (_config(lambda good: good + b"a: " + b"9" * 5000), _CONFIG),
    "config of a megabyte": (_config(lambda good: good + b"a: " + b"9" * (1 << 20)), _CONFIG),
    "result a folder": (lambda run: ((run / "result.json").unlink(), (run / "result.json").mkdir()), _RESULT),
}  # fmt: skip


def _saved(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """A .ckpt that is whole, with something else in it."""

    def spoil(path: Path) -> None:
        held = torch.load(path, weights_only=True)
        change(held)
        torch.save(held, path)

    return spoil


def _tensor(change: Callable[[torch.Tensor], Any]) -> Spoil:
    name = "model.encoder.embedding.weight"

    def swap(held: dict[str, Any]) -> None:
        key = next(key for key in held["state_dict"] if key.endswith(name.rpartition("model.")[2]))
        held["state_dict"][key] = change(held["state_dict"][key])

    return _saved(swap)


def _identity(**changes: Any) -> Spoil:
    return _saved(lambda held: held["lra"].update(changes))


def _model(**changes: Any) -> Spoil:
    return _saved(lambda held: held["lra"]["config"]["model"].update(changes))


_OTHER = ("damaged or of another program",)
_NAN = ("embedding.weight", "NaN or infinite", "choose another checkpoint")
_FIT = ("does not fit this model",)
# of a .ckpt -> words
CKPT: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "weights NaN": (_tensor(lambda value: value * float("nan")), _NAN),
    "one weight infinite": (_tensor(lambda value: value.index_fill(0, torch.tensor(0), float("inf"))), _NAN),
    "a weight a number": (_tensor(lambda _: 3.0), _OTHER),
    "a weight null": (_tensor(lambda _: None), _OTHER),
    "a weight complex": (_tensor(lambda value: value.to(torch.complex64)), _OTHER),
    "a weight sparse": (_tensor(lambda value: value.to_sparse()), _OTHER),
    "a weight cut": (_tensor(lambda value: value[:3].clone()), ("[3, 64] here [15, 64]", *_FIT)),
    "identity a number": (_saved(lambda held: held.update(lra=5)), _OTHER),
    "identity empty": (_saved(lambda held: held.update(lra={})), _OTHER),
    "identity a list": (_saved(lambda held: held.update(lra=[])), _OTHER),
    "weights a list": (_saved(lambda held: held.update(state_dict=[1])), _OTHER),
    "no weights": (_saved(lambda held: held.update(state_dict={})), ("this model",)),
    "configuration a text": (_identity(config="x"), _OTHER),
    "configuration empty": (_identity(config={}), _OTHER),
    "configuration without a model": (_saved(lambda held: held["lra"]["config"].pop("model")), _OTHER),
    "configuration with a variable": (_saved(lambda held: held["lra"]["config"].update(name="${oc.env:HOME}")), _OTHER),
    "configuration with a gap": (_saved(lambda held: held["lra"]["config"].update(name="???")), _OTHER),
    "another vocabulary": (_identity(vocabulary="0", task="text@1"), ("vocabulary of text@1", "choose a checkpoint")),
    "another width": (_model(d_model=128), ("this model",)),
    "more layers": (_model(layers=9), ("this model",)),
    "a width that is none": (_model(d_model=[64]), _OTHER),
}  # fmt: skip


def _bytes(change: Callable[[bytearray], object]) -> Spoil:
    def spoil(path: Path) -> None:
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return spoil


def _flip(at: int) -> Spoil:
    def change(data: bytearray) -> None:
        data[at] ^= 8

    return _bytes(change)


def _digit(data: bytearray) -> None:
    """Another learning rate in the configuration, of the same length."""
    at = data.index(b'\\"lr\\": ') + 8
    data[at : at + 1] = b"7"


def earlier(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> Spoil:
    """Weights and identity, changed, in a file as an earlier lra wrote it, without a checksum."""

    def spoil(path: Path) -> None:
        with safe_open(path, "pt") as file:
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            identity = json.loads(file.metadata()["lra"])
        del identity["sha256"]
        change(weights, identity)
        save_file(weights, path, {"lra": json.dumps(identity)})

    return spoil


# of a model.safetensors -> words
SAFETENSORS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "a bit of the last weight": (_flip(-2), ("checksum", *_OTHER)),
    "a bit of another weight": (_flip(-5000), ("checksum", *_OTHER)),
    "a digit of the configuration": (_bytes(_digit), ("checksum", *_OTHER)),
    "a bit of the header's length": (_flip(2), _OTHER),
    "a byte too many": (_bytes(lambda data: data.append(0)), _OTHER),
    "weights NaN, without a checksum": (
        earlier(lambda weights, _: [value.fill_(float("nan")) for value in weights.values()]), ("NaN or infinite",)
    ),
    "no configuration": (earlier(lambda _, identity: identity.pop("config")), _OTHER),
    "configuration a list": (earlier(lambda _, identity: identity.update(config=[1])), _OTHER),
    "a tensor gone": (earlier(lambda weights, _: weights.pop("encoder.embedding.weight", None)), _FIT),
    "a tensor more": (earlier(lambda weights, _: weights.update(x=torch.zeros(3))), ("x unknown here", *_FIT)),
}  # fmt: skip


def _array(name: str, change: Callable[[np.ndarray], object]) -> Spoil:
    """Other numbers in a file of the same size."""

    def spoil(store: Path) -> None:
        values = np.load(store / name, mmap_mode="r+")
        change(values)
        values.flush()

    return spoil


def _header(name: str, old: bytes, new: bytes) -> Spoil:
    def spoil(store: Path) -> None:
        data = (store / name).read_bytes()
        assert old in data and len(old) == len(new)
        (store / name).write_bytes(data.replace(old, new, 1))

    return spoil


def _stated(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(store: Path) -> None:
        manifest = json.loads((store / "manifest.json").read_bytes())
        change(manifest)
        (store / "manifest.json").write_text(json.dumps(manifest))

    return spoil


_MEND = ("run: lra data prepare task=listops", "force=true")
# of a prepared store, all files of which have their sizes -> words
STORES: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "a label that is no class": (_array("train.labels.npy", lambda v: v.__setitem__(3, 99)), ("train.labels", *_MEND)),
    "a negative label": (_array("val.labels.npy", lambda v: v.__setitem__(0, -1)), ("val.labels", *_MEND)),
    "the label that is ignored": (_array("test.labels.npy", lambda v: v.__setitem__(0, -100)), ("test.labels", *_MEND)),
    "a token of no vocabulary": (_array("train.tokens.npy", lambda v: v.__setitem__(9, 255)), ("train.tokens", *_MEND)),
    "tokens of no vocabulary": (_array("fresh.tokens.npy", lambda v: v.fill(77)), ("fresh.tokens", *_MEND)),
    "a sequence of negative length": (
        _array("train.offsets.npy", lambda v: v.__setitem__(1, v[2] + 1)), ("train.offsets", *_MEND)
    ),
    "a sequence past the end": (
        _array("train.offsets.npy", lambda v: v.__setitem__(-1, v[-1] + 9)), ("train.offsets", *_MEND)
    ),
    "a first sequence past the start": (
        _array("train.offsets.npy", lambda v: v.__setitem__(0, 1)), ("train.offsets", *_MEND)
    ),
    "zeros for an array": (lambda f: (f / "val.labels.npy").write_bytes(bytes(208)), ("val.labels", *_MEND)),
    "an array of another type": (_header("val.offsets.npy", b"<i8", b"<f8"), ("val.offsets", *_MEND)),
    "an array of objects": (_header("val.labels.npy", b"'<i8'", b"'|O' "), ("val.labels", *_MEND)),
    "an array of another shape": (_header("val.labels.npy", b"(10,)", b"(99,)"), ("val.labels", *_MEND)),
    "an array that runs": (_header("val.labels.npy", b"False", b"1//0 "), ("val.labels", *_MEND)),
    "splits a list": (_stated(lambda m: m.update(splits=["train"])), ("no splits of a store", *_MEND)),
    "splits without labels": (_stated(lambda m: m["splits"]["val"].pop("labels")), ("labels of val", *_MEND)),
    "a count that is a text": (_stated(lambda m: m["splits"]["val"].update(count="ten")), ("of val", *_MEND)),
    "a length that is a text": (_stated(lambda m: m["splits"]["val"]["length"].update(mean="9")), ("of val", *_MEND)),
    "no longest length": (_stated(lambda m: m["splits"]["val"]["length"].pop("max")), ("of val", *_MEND)),
    "a label's count a text": (_stated(lambda m: m["splits"]["val"]["labels"].update({"0": "x"})), ("of val", *_MEND)),
    "a baseline of a text": (
        _stated(lambda m: m["baselines"].update(wise={"test": "all"})), ("shares of the baseline wise", *_MEND)
    ),
    "a baseline above 1": (_stated(lambda m: m["baselines"].update(wise={"test": 7})), ("baseline wise", *_MEND)),
    "notes a text": (_stated(lambda m: m.update(notes="none")), ("no notes of a store", *_MEND)),
    "a note a number": (_stated(lambda m: m.update(notes=[5])), ("texts in vocabulary and notes", *_MEND)),
    "versions a list": (_stated(lambda m: m.update(versions=[])), ("no versions of a store", *_MEND)),
    "a file of another folder": (
        _stated(lambda m: m["files"].update({"../x.npy": {"bytes": 1, "sha256": ""}})), ("../x.npy", *_MEND)
    ),
    "a size without end": (_stated(lambda m: m["files"]["val.labels.npy"].update(bytes=10**400)), _MEND),
    "a vocabulary of numbers": (_stated(lambda m: m.update(vocabulary=[1, 2])), ("texts in vocabulary", *_MEND)),
    "no vocabulary": (_stated(lambda m: m.pop("vocabulary")), ("lacks vocabulary", *_MEND)),
}  # fmt: skip


def _members(run: Path, changes: Mapping[str, bytes | tarfile.TarInfo | None]) -> list[tuple[tarfile.TarInfo, bytes]]:
    """A run's small files, then or instead what `changes` says by whole names; None leaves one out."""
    files: dict[str, bytes | tarfile.TarInfo | None] = {
        f"{RUN}/{name}": (run / name).read_bytes() for name in ("config.yaml", "env.json", "metrics.csv", "result.json")
    }
    members = []
    for name, content in (files | dict(changes)).items():
        if content is None:
            continue
        member = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
        data = b"" if isinstance(content, tarfile.TarInfo) else content
        member.size = member.size or len(data)
        members.append((member, data))
    return members


Archive = Callable[[Path, Path], object]  # of the archive's path and a run


def _packed(changes: Mapping[str, bytes | tarfile.TarInfo | None]) -> Archive:
    def make(path: Path, run: Path) -> None:
        with tarfile.open(path, "w:xz") as tar:
            for member, data in _members(run, changes):
                tar.addfile(member, io.BytesIO(data))

    return make


def _special(name: str, kind: bytes, target: str = "/etc/hosts") -> dict[str, tarfile.TarInfo]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return {name: member}


def _stating(size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(f"{RUN}/metrics.csv")
    member.size = size
    return member


def _raw(change: Callable[[bytes], bytes]) -> Archive:
    """Other bytes than those of a good archive."""

    def make(path: Path, run: Path) -> None:
        _packed({})(path, run)
        path.write_bytes(change(path.read_bytes()))

    return make


def _xz_bomb(path: Path, _: Path) -> None:
    """100 MB of zeros in some ten thousand bytes, of 500 MB that are stated."""
    packer = lzma.LZMACompressor(preset=0)
    with path.open("wb") as file:
        file.write(packer.compress(_stating(500 << 20).tobuf()))
        for _megabyte in range(100):
            file.write(packer.compress(bytes(1 << 20)))
        file.write(packer.flush())


_NAME, _KIND = ("not a file of a run", "get it again"), ("not a regular file", "get it again")
_BROKEN = ("not an archive of lra results pack", "get it again")
# what lra results merge is given -> words
ARCHIVES: dict[str, tuple[Archive, tuple[str, ...]]] = {
    "parent": (_packed({"../../pwned/result.json": b"{}"}), _NAME),
    "parent within": (_packed({"listops/../../result.json": b"{}"}), _NAME),
    "absolute": (_packed({"/tmp/pwned/x/result.json": b"{}"}), _NAME),
    "hidden": (_packed({"listops/flash/.x/result.json": b"{}"}), _NAME),
    "another file": (_packed({f"{RUN}/run.py": b"{}"}), _NAME),
    "a name of a megabyte": (_packed({f"{RUN}/{'x' * 1_000_000}": b"{}"}), _NAME),
    "a name that a terminal would obey": (_packed({"a/b/\x1b[2J/env.json": b"{}"}), _NAME),
    "a link": (_packed(_special(f"{RUN}/best.ckpt", tarfile.SYMTYPE)), _KIND),
    "a hard link": (_packed(_special(f"{RUN}/best.ckpt", tarfile.LNKTYPE, f"{RUN}/env.json")), _KIND),
    "a folder": (_packed(_special(f"{RUN}/best.ckpt", tarfile.DIRTYPE)), _KIND),
    "a pipe": (_packed(_special(f"{RUN}/best.ckpt", tarfile.FIFOTYPE)), _KIND),
    "a device": (_packed(_special(f"{RUN}/best.ckpt", tarfile.CHRTYPE)), _KIND),
    "a size without bytes": (_raw(lambda _: lzma.compress(_stating(1 << 40).tobuf())), ("more bytes", "get it again")),
    "a bomb": (_xz_bomb, ("more bytes", "get it again")),
    "no configuration": (_packed({f"{RUN}/config.yaml": None}), (f"no {RUN}/config.yaml", "get it again")),
    "no result": (_packed({f"{RUN}/result.json": None}), ("neither a result.json nor a last.ckpt",)),
    "a failure that is none": (_packed({f"{RUN}/failed.json": b'{"status": "oom"}'}), ("is not a whole result",)),
    "half a result": (_packed({f"{RUN}/result.json": b'{"status": "fin'}), ("is not a whole result",)),
    "a configuration of aliases": (_packed({f"{RUN}/config.yaml": _BOMB}), ("not a configuration", "get it again")),
    "a configuration with a tag": (
        _packed({f"{RUN}/config.yaml": b"a: !!python/object/apply:os.system ['touch pwned']"}), ("not a configuration",)
    ),
    "a configuration of another run": (
        _packed({f"{RUN}/config.yaml": b"task: {name: text}\nattn: {name: flash}\nseed: 0"}), ("a run of text",)
    ),
    "curves of bytes": (
        _packed({f"{RUN}/metrics.csv": b"\xff\xfe", f"{RUN}/last.ckpt": b""}), ("metrics.csv can't be read",)
    ),
    "an empty checkpoint": (_packed({f"{RUN}/last.ckpt": b""}), ("last.ckpt can't be read",)),
    "empty": (_raw(lambda _: b""), ("get it again",)),
    "nothing packed": (_raw(lambda _: lzma.compress(b"")), ("get it again",)),
    "text": (_raw(lambda _: b"<html>404</html>" * 99), _BROKEN),
    "cut": (_raw(lambda good: good[: len(good) // 2]), _BROKEN),
    "cut at the end": (_raw(lambda good: good[:-9]), _BROKEN),
    "a bit": (_raw(lambda good: good[:200] + bytes([good[200] ^ 1]) + good[201:]), _BROKEN),
    "no tar inside": (_raw(lambda _: lzma.compress(b"weights" * 999)), _BROKEN),
}  # fmt: skip
