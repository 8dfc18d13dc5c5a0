"""Damaged files in a compile cache of Triton, torch.compile or numba.

`explain_damage` recognises the error of reading such a file. A GPU's code that was cut short gives no error: the driver
ends the process when it loads the code. So `watch_kernels` checks such files before they are loaded.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from lra.errors import UsageError

ELF_HEADER = 64  # bytes, of the 64-bit form
# The end of the path of each source file that reads a cache, and the variable that names the cache's folder.
CACHE_READERS = {
    "triton/runtime/cache.py": "TRITON_CACHE_DIR",
    "triton/runtime/build.py": "TRITON_CACHE_DIR",
    "triton/runtime/autotuner.py": "TRITON_CACHE_DIR",
    "triton/compiler/compiler.py": "TRITON_CACHE_DIR",
    "torch/_inductor/codecache.py": "TORCHINDUCTOR_CACHE_DIR",
    "torch/_inductor/remote_cache.py": "TORCHINDUCTOR_CACHE_DIR",
    "torch/_inductor/triton_bundler.py": "TORCHINDUCTOR_CACHE_DIR",
    "torch/_inductor/runtime/autotune_cache.py": "TORCHINDUCTOR_CACHE_DIR",
    "torch/_inductor/runtime/compile_tasks.py": "TORCHINDUCTOR_CACHE_DIR",
    "torch/_inductor/runtime/static_triton_launcher.py": "TORCHINDUCTOR_CACHE_DIR",
    "numba/core/caching.py": "NUMBA_CACHE_DIR",
}
# nothing but a damaged file raises these there
UNREADABLE_ERRORS = (json.JSONDecodeError, UnicodeDecodeError, EOFError, pickle.UnpicklingError)
# These functions only process a file's content, so any error in them is the file's.
READING_FUNCTIONS = (
    "CompiledKernel.__init__",
    "_CacheImpl.rebuild",
    "IndexDataCacheFile._load_index",
    "IndexDataCacheFile._load_data",
)
# messages for a library or a GPU's code that can't be loaded
DAMAGE_WORDS = (
    "file too short",
    "invalid ELF",
    "image is invalid",
    "invalid image",
    "named symbol not found",
    "Failed to import",
)


def explain_damage(error: BaseException | None) -> str | None:
    """The message for an error that comes from reading a compile cache, with the mend; None for any other error."""
    while error is not None:
        for frame in _innermost_first(error):
            code = frame.f_code
            source = Path(code.co_filename).as_posix()
            variable = next((name for end, name in CACHE_READERS.items() if source.endswith(end)), None)
            if variable and _of_a_file(error, code.co_qualname):
                file = next(_files(frame), None)
                where = f"{file.parent}" if file else f"the folder that {variable} names, or its default,"
                return _message(where, str(error).partition("\n")[0] or type(error).__name__)
        error = error.__cause__ or error.__context__
    return None


def watch_kernels(device: int) -> None:
    """From now on a GPU binary that was cut short raises UsageError instead of ending the process.

    Triton's kernels are checked when they are loaded. torch.compile announces no load, so its files for this CUDA
    device are checked here.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from triton import knobs

    knobs.runtime.kernel_load_start_hook.add(_before_load)
    for path in Path(triton_cache_dir(device)).glob("*/*.cubin"):
        check_binary(path)


def _before_load(module: Any, function: Any, name: str, metadata_group: dict[str, str], hash: str) -> None:
    for file in metadata_group.values():
        if str(file).endswith(".cubin"):
            check_binary(Path(file))


def check_binary(path: Path) -> None:
    """Raises UsageError if a file of a GPU's code is shorter than its header says (ELF-64, "File header")."""
    with open(path, "rb") as file:
        header = file.read(ELF_HEADER)
        size = os.fstat(file.fileno()).st_size
    wanted = ELF_HEADER
    if len(header) == ELF_HEADER:
        segments, sections = struct.unpack_from("<QQ", header, 32)
        segment, segment_count, section, section_count = struct.unpack_from("<HHHH", header, 54)
        wanted = max(segments + segment * segment_count, sections + section * section_count)
    if size < wanted:
        raise UsageError(_message(str(path.parent), f"{path.name} has {size} bytes of {wanted}"))


def _message(folder: str, said: str) -> str:
    return f"the compile cache is damaged: {folder} has a file that can't be read ({said}); remove that folder"


def _of_a_file(error: BaseException, function: str) -> bool:
    if isinstance(error, UNREADABLE_ERRORS):
        return True
    if isinstance(error, ImportError | OSError | RuntimeError) and any(word in str(error) for word in DAMAGE_WORDS):
        return True
    return function in READING_FUNCTIONS and not isinstance(error, OSError | RuntimeError | MemoryError)


def _innermost_first(error: BaseException) -> list[FrameType]:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def _files(frame: FrameType) -> Iterator[Path]:
    """The files that a function worked on: those in its variables and in those of its object."""
    values: list[Any] = [*frame.f_locals.values(), *getattr(frame.f_locals.get("self"), "__dict__", {}).values()]
    for value in values:
        for each in value.values() if isinstance(value, dict) else (value,):
            name = getattr(each, "name", each)  # of an open file
            # not pathlib's is_file, which raises for a text that is no path
            if isinstance(name, str | Path) and os.path.isabs(name) and os.path.isfile(name):
                yield Path(name)
