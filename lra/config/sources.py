"""Where components outside lra come from: a module or a file that the user names, its digest, and lines that failed."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from lra.errors import UsageError, name_error

SCRIPT = "__main__"  # the module of a script or notebook
_LRA = Path(__file__).resolve().parent.parent
# by module of an imported component outside lra: its file or the folder of its package, and the digest at that time
_own_code: dict[str, tuple[Path, str]] = {}


@dataclass(frozen=True)
class Source:
    """A module that registers components."""

    text: str  # as configurations keep it: the module's name, or the path of its file
    module: str
    file: Path


def split_reference(text: str) -> tuple[str, str]:
    """Splits `module:name`, `file.py:name` or `file.py` into source and name. A plain name has no source."""
    source, colon, name = text.partition(":")
    module = colon and all(part.isidentifier() for part in source.split("."))
    return (source, name) if module or source.endswith(".py") else ("", text)


def find_file_or_module(text: str) -> Source:
    """Finds a module from the current folder or Python's path, or a file of Python. Nothing is imported.

    The folder of the file, or the current one, joins `sys.path` at its end. Raises a UsageError if there is no such
    source, or if another module has the name of the file.
    """
    if not text.endswith(".py"):
        _join_path(Path.cwd())
        if (file := find_source(text)) is None:
            raise UsageError(f"no module {text} is here or on PYTHONPATH: name its file, as in <folder>/{text}.py")
        return Source(text, text, file)
    file = Path(text).expanduser()
    if not file.is_file():
        raise UsageError(f"{text} is not there: name a file of Python, or work in its folder")
    file, here = file.resolve(), Path.cwd()
    if not file.stem.isidentifier():
        raise UsageError(f"{text} can't be imported under this name: rename it, with letters, digits and _ alone")
    _join_path(file.parent)
    found = find_source(file.stem)
    if found is None or found.resolve() != file:
        raise UsageError(f"{text} has the name of another module of Python ({found}): rename it")
    if file.parent == here:  # so that it is one source, whether a file or a module is named
        return Source(file.stem, file.stem, file)
    return Source(str(file.relative_to(here) if file.is_relative_to(here) else file), file.stem, file)


def find_source(module: str) -> Path | None:
    """Returns a module's file without importing its parents, or None if there is none."""
    top, *rest = module.split(".")
    spec = None if top == SCRIPT else importlib.util.find_spec(top)
    for name in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
    return Path(spec.origin) if spec is not None and spec.origin else None


def import_component(module: str) -> None:
    """Imports a module that registers components. What is raised in it later is an error of its author."""
    _keep_digest(module)
    importlib.import_module(module)


def own_code(*modules: str) -> dict[str, str]:
    """Returns the digest of each file, or folder of a package, that has one of these modules of components, by name.

    A digest has 12 digits. It is of the code as it was imported. Modules of lra, scripts and notebooks have none.
    """
    for module in modules:
        _keep_digest(module)  # of a module that the user's script imported
    return {code.name: digest for code, digest in (_own_code[module] for module in modules if module in _own_code)}


def explain_own_code(error: BaseException) -> str | None:
    """Returns the file, the line and the error if a component outside lra raised it; None if lra did.

    Of the frames in lra and in such components the innermost decides. Frames of libraries that they call are left out.
    """
    frames = traceback.extract_tb(error.__traceback__)
    compiled = getattr(error, "real_stack", None) or ()  # the lines that torch.compile could not trace
    plain = " (of torch.compile: engine=eager does without)" if compiled else ""
    for frame in reversed([*frames, *compiled]):
        file = Path(frame.filename).resolve()
        if any(file.is_relative_to(code.resolve()) for code, _ in _own_code.values()):
            return f"{name_line(file, frame.lineno)}: {name_error(error)}{plain}"
        if file.is_relative_to(_LRA):
            return None
    return None


def explain_syntax(file: Path, error: SyntaxError) -> str:
    """Returns the file, the line and the error of a source that is no Python."""
    return f"{name_line(file, error.lineno)}: {type(error).__name__}: {error.msg}"


def name_line(file: Path, line: int | None) -> str:
    """Returns `file:line` for a message. The file is named from the current folder if it is below that."""
    here = Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{line}"


def _keep_digest(module: str) -> None:
    """Keeps the digest of a module's code from the first time on, if it is outside lra."""
    if module in _own_code:
        return
    file = find_source(module.partition(".")[0]) or find_source(module)  # the folder above may be no package
    if file is not None and not file.is_relative_to(_LRA):
        code = file.parent if file.name == "__init__.py" else file
        _own_code[module] = code, _digest(code)


def _digest(code: Path) -> str:
    """SHA-256 of a file, or of the files of Python in a folder with their names. Hidden ones are no code."""
    if not code.is_dir():
        return hashlib.sha256(code.read_bytes()).hexdigest()[:12]
    found = hashlib.sha256()
    for file in sorted(code.rglob("*.py")):
        name = file.relative_to(code)
        if file.is_file() and not any(part.startswith(".") for part in name.parts):
            content = file.read_bytes()
            found.update(f"{name.as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]


def _join_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()  # the file may be new
