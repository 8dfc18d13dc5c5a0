"""What no archive can do: it is refused in one line, and nothing is written."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from lra import files
from lra.errors import UsageError
from lra.experiments.results import unpack
from lra.experiments.results.archive import merge_runs
from lra.training.predictions import Predictions, read_predictions, write_predictions
from lra.training.run_directory import FIRST_FAILURE_FILE
from tests.experiments.results.archives import DONE, SMALL, packed


def crafted(path: Path, members: Mapping[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


# what every result has, of another run
OTHER = {
    "task": "a", "config": {"task": {"name": "a"}, "attn": {"name": "b"}},
    "environment": {"date": "2026-01-02T03:04:05Z"},
}  # fmt: skip


def whole(runs: Path, name: str = DONE) -> dict[str, bytes | tarfile.TarInfo]:
    return {f"{name}/{file}": (runs / name / file).read_bytes() for file in sorted(SMALL)}


def special(name: str, kind: bytes, target: str = "/etc/passwd") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    "name",
    ["/etc/a/b/result.json", "../a/b/result.json", "a/../../result.json", "listops/flash/result.json",
     "a/b/c/d/env.json", "listops/flash/x-s0/evil.py", "listops/flash/.x-s0/env.json", "listops//x-s0/env.json",
     "listops/flash/x\n-s0/env.json",
     "./listops/flash/x-s0/env.json", "listops\\flash/x/y-s0/env.json"],
)  # fmt: skip
def test_a_name_that_is_no_runs_file_is_refused(runs, target, name):
    refuse(crafted(target.with_suffix(".xz"), whole(runs) | {name: b"{}"}), target, "which is not a file of a run")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_a_link_or_device_is_refused(runs, target, kind):
    name = f"{DONE}/best.ckpt"
    refuse(crafted(target.with_suffix(".xz"), whole(runs) | {name: special(name, kind)}), target, "not a regular file")


def refuse(file: Path, target: Path, message: str) -> None:
    """One error, and nothing written."""
    before = sorted(target.parent.rglob("*"))
    with pytest.raises(UsageError, match=message):
        merge_runs(file, [f"runs={target}"])
    assert sorted(target.parent.rglob("*")) == before


def test_too_many_bytes_are_refused(runs, target, monkeypatch):
    file = target.with_suffix(".xz")
    monkeypatch.setattr(files, "LEAST_LIMIT", 1 << 20)
    refuse(
        crafted(file, whole(runs) | {f"{DONE}/best.ckpt": bytes(8 << 20)}), target, "states more bytes than runs have"
    )
    head = special("x", tarfile.XHDTYPE)  # a header of the format itself
    head.size = 8 << 20
    file.write_bytes(lzma.compress(head.tobuf(tarfile.USTAR_FORMAT) + bytes(8 << 20)))
    refuse(file, target, "unpacks to more than")
    monkeypatch.setattr(unpack, "MOST_SMALL", 10)
    refuse(crafted(file, whole(runs)), target, "states more bytes than runs have")


def test_a_damaged_archive_is_refused(runs, target):
    good = packed(runs).read_bytes()
    flipped = good[:200] + bytes([good[200] ^ 1]) + good[201:]
    file = target.with_suffix(".xz")
    for content in (b"", b"no archive", good[:-40], good[: len(good) // 2], flipped):
        file.write_bytes(content)
        refuse(file, target, "is damaged|holds no runs")
    tar = lzma.decompress(good)
    file.write_bytes(lzma.compress(tar[: len(tar) // 2]))
    refuse(file, target, "is damaged|neither|has no")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.yaml": None}, "has no listops/flash/xiong2021-s0/config.yaml"),
        ({"result.json": None}, "has neither a result.json nor a last.ckpt"),
        ({"result.json": b"{"}, "is not a whole result"),
        ({"config.yaml": b"a: &x [1]\nb: [*x, *x]"}, "is not a configuration of a run"),
        ({"config.yaml": b"[1]"}, "is not a configuration of a run"),
        ({"config.yaml": b"a: 1"}, "is not a configuration of a run"),
        ({"config.yaml": b"task: {name: text}\nattn: {name: flash}\nseed: 0"}, "holds a run of text, flash, seed 0"),
        ({"config.yaml": b"task: {name: listops}\nattn: {name: flash}\nseed: 0"}, "config.yaml and result.json of"),
        ({FIRST_FAILURE_FILE: b"{}"}, "failed.json is not a whole result"),
        ({FIRST_FAILURE_FILE: json.dumps(OTHER | {"status": "failed"}).encode()}, "config.yaml and failed.json of"),
        (
            {FIRST_FAILURE_FILE: json.dumps(OTHER | {"status": "oom"}).encode()},
            r"failed.json is not a whole result \(it lacks a status of failed\)",
        ),
        ({"metrics.csv": b"\xff\xfe", "last.ckpt": b""}, "metrics.csv can't be read"),
        ({"last.ckpt": b""}, "last.ckpt can't be read"),
        ({"predictions.npz": b"PK"}, "predictions.npz can't be read"),
    ],
)
def test_a_run_that_is_not_whole_is_refused(runs, target, change, message):
    members = whole(runs) | {f"{DONE}/{name}": content for name, content in change.items()}
    kept = {name: content for name, content in members.items() if content is not None}
    refuse(crafted(target.with_suffix(".xz"), kept), target, message)


def test_predictions_are_carried_and_a_finished_run_gets_those_that_it_lacks(runs, target):
    kept = Predictions(np.zeros(3, np.uint8), np.ones(3, np.uint8))
    without = packed(runs)
    merge_runs(without, [f"runs={target}"])
    write_predictions(runs / DONE / "predictions.npz", {"test": kept})
    assert f"{DONE}: completed, predictions.npz" in merge_runs(packed(runs), [f"runs={target}"])
    assert read_predictions(target / DONE / "predictions.npz")["test"].label.tolist() == [1, 1, 1]


def test_a_file_twice_is_refused(runs, target):
    file = target.with_suffix(".xz")
    with tarfile.open(file, "w:xz") as tar:
        for _ in range(2):
            tar.add(runs / DONE / "config.yaml", f"{DONE}/config.yaml")
    refuse(file, target, "has listops/flash/xiong2021-s0/config.yaml twice")
