"""Compiled code: the folder that keeps it, and archives that carry it to a machine with another folder."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from lra import compile_caches, doctor
from lra.compile_caches import VARIABLES, cache_folders, machine_key, merge_caches, pack_caches, use_compile_caches
from lra.errors import UsageError
from lra.kernels.device import Ptxas
from lra.training import assembly
from tests.command_line import ROOT, lra, refused

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KERNEL, LIST, CODE = "triton/KEY/kernel.cubin", "triton/KEY/__grp__kernel.json", "inductor/ab/code.py"
LASTING = {KERNEL, LIST, CODE, "triton/KEY/kernel.json", "inductor/fxgraph/cd/fkey/entry"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """`elsewhere("name")` is the folder of the CPU's compiled code from now on, as on a machine of that name."""
    for name in (*VARIABLES.values(), "TRITON_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(compile_caches, "_chosen", {})

    def enter(name: str) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return tmp_path / name / "lra" / "compiled" / machine_key(CPU)

    enter("here")
    return enter


@pytest.fixture
def filled(elsewhere):
    """The folder of one machine, with what both libraries keep of a kernel, and what passes by."""
    folder = elsewhere("filled")
    passing = ("inductor/locks/code.lock", "triton/KEY/lock", "triton/KEY/tmp.pid_7_x/kernel.ptx", "inductor/ab/.7.tmp")
    for name in {*LASTING, *passing}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / KERNEL).write_bytes(bytes(64))  # an ELF header that states no sections
    (folder / LIST).write_text(json.dumps({"child_paths": {each: f"/old/{each}" for each in ("kernel.cubin",)}}))
    (folder / "triton/KEY/link").symlink_to(folder / KERNEL)
    return folder


@pytest.fixture
def packed(filled, tmp_path):
    pack_caches([f"out={tmp_path / 'caches.tar.xz'}"])
    return tmp_path / "caches.tar.xz"


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def crafted(file: Path, *members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    """An archive of other people."""
    with tarfile.open(file, "w:xz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = len(content), kind, "/etc/passwd"
            tar.addfile(member, io.BytesIO(content))
    return file


@pytest.fixture
def h200(monkeypatch):
    """A GPU, as far as its name goes."""
    properties = mock.Mock(major=9, minor=0)
    properties.name = "NVIDIA H200 / 141"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(compile_caches, "find_ptxas", lambda _: Ptxas("ptxas", (13, 4), ""))


def test_the_key_names_versions_and_gpu(h200):
    key = machine_key(GPU)
    assert f"torch-{torch.__version__}_triton-" in key and "_cuda-" in key and "_ptxas-13.4_" in key
    assert f"_python-{sys.version_info.major}.{sys.version_info.minor}_" in key
    assert key.endswith("_NVIDIA-H200-141-9.0") and machine_key(CPU).endswith("_cpu")


def test_what_the_user_has_set_stays(elsewhere, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    use_compile_caches(CPU)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine" and cache_folders("key")["inductor"] == Path("/mine")
    assert os.environ["TRITON_CACHE_DIR"] == str(elsewhere("here") / "triton")

    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", "/home")
    use_compile_caches(CPU)
    assert "TRITON_CACHE_DIR" not in os.environ and cache_folders("key")["triton"] == Path("/home/.triton/cache")


def test_the_default_that_pytorch_sets_by_itself_gives_way(elsewhere):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = default_cache_dir()
    use_compile_caches(CPU)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(elsewhere("here") / "inductor")


def test_another_device_has_another_folder(h200):
    use_compile_caches(CPU)
    use_compile_caches(GPU)
    assert [os.environ[name] for name in VARIABLES.values()] == [*map(str, cache_folders(machine_key(GPU)).values())]


def test_a_run_sets_them_before_anything_asks_pytorch_for_its_folder(h200, monkeypatch):
    """PyTorch sets its default, in /tmp, for good when it is first asked."""
    before = mock.Mock(side_effect=lambda _: before.seen.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR")), seen=[])
    monkeypatch.setattr(assembly, "watch_kernels", before)
    assembly.resolve_engine(mock.Mock(), mock.Mock(**{"captures.return_value": False}), GPU)
    assert before.seen == [str(cache_folders(machine_key(GPU))["inductor"])]


def test_files_come_to_another_folder(packed, elsewhere, filled):
    with tarfile.open(packed) as tar:
        assert set(tar.getnames()) == {f"{machine_key(CPU)}/{name}" for name in LASTING}
    there = elsewhere("there")
    lines = merge_caches(packed)
    assert files(there) == LASTING and lines == [f"for {there.name}", "5 files added, 0.0 MB, 0 were here"]
    assert json.loads((there / LIST).read_text())["child_paths"] == {"kernel.cubin": str(there / KERNEL)}
    assert (there / KERNEL).read_bytes() == bytes(64)


def test_a_whole_file_stays_and_a_damaged_one_gives_way(packed, elsewhere):
    there = elsewhere("there")
    merge_caches(packed)
    (there / KERNEL).write_bytes(bytes(80))
    assert merge_caches(packed)[1].startswith("0 files added") and len((there / KERNEL).read_bytes()) == 80

    (there / KERNEL).write_bytes(bytes(10))
    (there / "triton/KEY/kernel.json").write_text("{")
    (there / LIST).write_text(json.dumps({"child_paths": {"kernel.cubin": "/old/kernel.cubin"}}))
    assert merge_caches(packed)[1].startswith("3 files added") and files(there) == LASTING
    assert (there / KERNEL).read_bytes() == bytes(64) and str(there) in (there / LIST).read_text()


def test_damaged_files_are_not_packed(filled, tmp_path):
    """The list of a damaged file would let Triton load it."""
    (filled / KERNEL).write_bytes(bytes(10))
    lines = pack_caches([f"out={tmp_path / 'a.tar.xz'}"])
    assert lines[0] == "left out: 2 damaged files" and lines[2].startswith("3 files, ")


def test_an_archive_of_another_gpu_goes_to_its_own_folder(packed, elsewhere, filled, monkeypatch):
    elsewhere("there")
    monkeypatch.setattr(compile_caches, "machine_key", lambda _: "another")
    assert merge_caches(packed)[-1] == "this machine does not use them: it is another"
    assert files(cache_folders(filled.name)["triton"].parent) == LASTING


@pytest.mark.parametrize(
    ("members", "kind", "message"),
    [
        ([("key/triton/../../../x", b"1")], tarfile.REGTYPE, "which is not a file of a compile cache: get it again"),
        ([("/key/triton/x", b"1")], tarfile.REGTYPE, "not a file of a compile cache"),
        ([("key/else/x", b"1")], tarfile.REGTYPE, "not a file of a compile cache"),
        ([("key/triton/lock", b"1")], tarfile.REGTYPE, "not a file of a compile cache"),
        ([("key/triton/x", b"")], tarfile.SYMTYPE, "is a link, or not a regular file"),
        ([("key/triton/x", b"")], tarfile.CHRTYPE, "is a link, or not a regular file"),
        ([("key/triton/x", b"1"), ("key/triton/x", b"1")], tarfile.REGTYPE, "twice"),
        ([("key/triton/x", b"1"), ("other/triton/x", b"1")], tarfile.REGTYPE, "has code for 2 machines"),
        ([], tarfile.REGTYPE, "has code for 0 machines"),
        ([(f"key/{KERNEL}", bytes(10))], tarfile.REGTYPE, "damaged triton/KEY/kernel.cubin: get it again"),
        ([(f"key/{LIST}", b'{"child_paths": {"kernel.cubin": "/x"}}')], tarfile.REGTYPE, "damaged triton/KEY/__grp__"),
        ([(f"key/{LIST}", b'{"child_paths": {"../x": "/x"}}')], tarfile.REGTYPE, "damaged triton/KEY/__grp__"),
        ([(f"key/{LIST}", b"[1]")], tarfile.REGTYPE, "damaged triton/KEY/__grp__"),
    ],
)
def test_other_archives_are_refused_and_nothing_is_written(tmp_path, members, kind, message):
    file = crafted(tmp_path / "a.tar.xz", *members, kind=kind)
    refused(lra("caches", "merge", str(file)), message)
    assert [*tmp_path.iterdir()] == [file]


def test_a_damaged_archive_is_refused(packed, elsewhere, tmp_path):
    there, whole = elsewhere("there"), packed.read_bytes()
    for content in (b"", whole[:-40], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        packed.write_bytes(content)
        with pytest.raises(UsageError, match="damaged|for 0 machines"):
            merge_caches(packed)
    assert not there.exists()


def test_the_commands(filled, elsewhere, tmp_path):
    out = tmp_path / "a.tar.xz"
    done = lra("caches", "pack", f"out={out}")
    assert done.code == 0 and done.out.splitlines()[0] == f"for {filled.name}"
    refused(lra("caches", "pack", f"out={out}"), "is there already: name another file, or remove it first")
    refused(lra("caches", "pack"), "lra caches pack needs an out=<file>.tar.xz")
    elsewhere("there")
    assert lra("caches", "merge", str(out)).out.splitlines()[1] == "5 files added, 0.0 MB, 0 were here"
    elsewhere("empty")
    refused(lra("caches", "pack", f"out={tmp_path / 'b.tar.xz'}"), "nothing is compiled for torch-.* in .*/empty/")
    refused(lra("caches", "merge", str(tmp_path)), "name an archive of lra caches pack")


def test_the_doctor_says_where_they_are(filled):
    rows = dict(doctor._compiled())
    assert rows["compiled code"] == f"for {filled.name}"
    assert rows["  triton"] == f"3 files, 0.0 MB in {filled / 'triton'}"


INDUCTOR = """
import torch
from torch._dynamo.utils import counters
from lra.compile_caches import use_compile_caches
use_compile_caches(torch.device("cpu"))
layer, x = torch.nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
torch.compile(lambda x: layer(x).exp().sum())(x).backward()
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""
TRITON = """
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lra.compile_caches import use_compile_caches
use_compile_caches(torch.device("cpu"))
@triton.jit
def double(x, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(x + at, 2 * tl.load(x + at))
triton.knobs.compilation.listener = lambda *, cache_hit, **_: print(int(cache_hit), int(not cache_hit))
source = ASTSource(double, signature={"x": "*fp32", "n": "constexpr"}, constexprs={"n": 128})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "count"), [(INDUCTOR, 2), (TRITON, 1)], ids=["inductor", "triton"])
def test_real_code_is_found_in_another_folder(program, count, elsewhere, tmp_path):
    """PyTorch compiles forward and backward for the CPU; Triton compiles for a GPU that is not here."""

    def run(name: str) -> list[int]:
        """Hits and misses. The program lies elsewhere, too."""
        file = elsewhere(name).parents[2] / "program.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(program)
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, str(file)], env=variables | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [int(word) for word in done.stdout.split()]

    assert run("one") == [0, count]
    pack_caches([f"out={tmp_path / 'a.tar.xz'}"])
    (tmp_path / "one").rename(tmp_path / "gone")
    elsewhere("two")
    merge_caches(tmp_path / "a.tar.xz")
    assert run("two") == [count, 0]
