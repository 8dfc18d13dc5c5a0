"""A file of a compile cache that was cut short is told as that, with the folder to remove."""

from __future__ import annotations

import importlib
import json
import re
import struct
import sys
from pathlib import Path
from unittest import mock

import pytest

from lra import caches, cli
from lra.errors import UsageError, name_error
from tests.command_line import lra, refused

KERNEL = {"target": {"backend": "cuda", "arch": 90, "warp_size": 32}, "name": "kernel", "shared": 0}


def said(error: BaseException, folder: Path) -> None:
    """One line that names the folder."""
    text = caches.explain_damage(error)
    assert text and "\n" not in text and f"{folder} has a file that can't be read" in text, (text, name_error(error))
    assert text.endswith("remove that folder")


@pytest.fixture
def entry(tmp_path):
    """What Triton keeps of a kernel: files by name."""
    folder = tmp_path / "triton" / "KEY"
    folder.mkdir(parents=True)
    files = {name: folder / name for name in ("kernel.json", "kernel.ttir", "kernel.cubin")}
    files["kernel.json"].write_text(json.dumps(KERNEL))
    files["kernel.ttir"].write_text("module {}")
    files["kernel.cubin"].write_bytes(b"\x7fELF")
    return files


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("kernel.json", b""), ("kernel.json", b'{"target": {"ba'), ("kernel.json", b"{}"), ("kernel.json", b"[]"),
        ("kernel.json", b"\xff\xfe"), ("kernel.json", bytes(40)), ("kernel.json", b'{"target": 5}'),
        ("kernel.json", b"null"), ("kernel.ttir", b"\xff\xfe"), ("kernel.cubin", None), ("kernel.json", None),
    ],
)  # fmt: skip
def test_what_triton_keeps_of_a_kernel(entry, file, content):
    from triton.compiler.compiler import CompiledKernel

    if content is None:
        del entry[file]
    else:
        entry[file].write_bytes(content)
    with pytest.raises(Exception) as raised:
        CompiledKernel(None, {name: str(path) for name, path in entry.items()}, "hash")
    said(raised.value, next(iter(entry.values())).parent)


def test_code_that_the_gpu_does_not_load(entry, monkeypatch):
    from triton.compiler import compiler

    kernel = object.__new__(compiler.CompiledKernel)
    kernel.module, kernel.metadata_group = None, {name: str(path) for name, path in entry.items()}

    for word in ("device kernel image is invalid", "out of memory"):
        refusal = RuntimeError(f"Triton Error [CUDA]: {word}")
        monkeypatch.setattr(compiler, "driver", mock.Mock(**{"active.get_current_device.side_effect": refusal}))
        with pytest.raises(RuntimeError) as raised:
            kernel._init_handles()
        if "image" in word:
            said(raised.value, entry["kernel.cubin"].parent)
        else:
            assert caches.explain_damage(raised.value) is None


def gpu_binary(size: int) -> bytes:
    """As much of an ELF file as says how long it is: one section header ends it."""
    header = bytearray(size)
    header[:4] = b"\x7fELF"
    struct.pack_into("<QQ", header, 32, 0, size - 64)
    struct.pack_into("<HHHH", header, 54, 56, 0, 64, 1)
    return bytes(header)


def test_gpu_code_that_was_cut_short_is_not_loaded(entry, monkeypatch):
    """The driver would end the process with a segmentation fault."""
    from triton import knobs

    file = entry["kernel.cubin"]
    file.write_bytes(gpu_binary(1000))
    monkeypatch.setattr(knobs.runtime, "kernel_load_start_hook", knobs.HookChain())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file.parents[1]))
    caches.watch_kernels(0)
    for content in (file.read_bytes()[:100], b"", b"\x7fELF"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=rf"{file.parent} has a file.*{len(content)} bytes.*remove that folder"):
            caches.watch_kernels(0)  # what torch.compile would load

        with pytest.raises(UsageError, match="remove that folder"):  # as Triton calls it before it loads a kernel
            files = {name: str(path) for name, path in entry.items()}
            knobs.runtime.kernel_load_start_hook(None, None, "kernel", files, "hash")


def test_a_library_that_was_cut_short(tmp_path):
    from torch._inductor.codecache import CppCodeCache
    from triton.runtime.build import _load_module_from_path

    library = tmp_path / "launcher.so"
    library.write_bytes(b"\x7fELF")
    for load in (_load_module_from_path, lambda name, path: CppCodeCache._load_library(path, name)):
        with pytest.raises((ImportError, OSError)) as raised:
            load("launcher", str(library))
        said(raised.value, tmp_path)


def test_generated_code_that_was_cut_short(tmp_path):
    from torch._inductor.codecache import PyCodeCache

    file = tmp_path / "code.py"
    file.write_text("def call(")
    with pytest.raises(RuntimeError) as raised:
        PyCodeCache.load_by_key_path("key", str(file))
    try:
        raise ValueError("torch.compile failed") from raised.value  # as Dynamo wraps it
    except ValueError as error:
        said(error, tmp_path)
    file.write_text("raise ValueError('of the code itself')")
    with pytest.raises(ValueError, match="itself") as raised:
        PyCodeCache.load_by_key_path("key", str(file))
    assert caches.explain_damage(raised.value) is None


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
def test_what_numba_keeps(tmp_path, ending, monkeypatch):
    name = f"for_numba_{ending[1:]}"
    (tmp_path / f"{name}.py").write_text("import numba\n@numba.njit(cache=True)\ndef twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    assert importlib.import_module(name).twice(2) == 4
    [file] = (tmp_path / "__pycache__").glob(f"*{ending}")
    for data in (b"", file.read_bytes()[:30], b"garbage"):
        file.write_bytes(data)
        del sys.modules[name]
        with pytest.raises(Exception) as raised:
            importlib.import_module(name).twice(2)
        said(raised.value, file.parent)


def test_other_errors_are_none():
    for make in (lambda: json.loads("{"), lambda: Path("/nowhere").read_text(), lambda: [][0], lambda: int("x")):
        with pytest.raises(Exception) as raised:
            make()
        assert caches.explain_damage(raised.value) is None


def test_the_command_line_says_it(entry, monkeypatch):
    from triton.compiler.compiler import CompiledKernel

    entry["kernel.json"].write_bytes(b"")
    group = {name: str(path) for name, path in entry.items()}
    monkeypatch.setattr(cli, "app", lambda **_: CompiledKernel(None, group, "hash"))
    line = refused(lra("doctor"), "the compile cache is damaged: ")
    assert re.search(f"{entry['kernel.json'].parent} has a file", line)
