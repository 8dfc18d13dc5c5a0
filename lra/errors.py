"""The error that a user can mend, and messages for errors of the system."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UsageError(Exception):
    """Bad input: one line that says what is wrong and how to mend it.

    The command line prints it without a traceback and exits with code 2.

    Args:
        of_earlier_run: whether it concerns an earlier run, from which the requested run starts. The line says so.
    """

    def __init__(self, line: object, of_earlier_run: bool = False):
        super().__init__(line)
        self.of_earlier_run = of_earlier_run


_ACCESS = "change who may use it, or work in another folder (that of data is LRA_DATA)"
_SPACE = "free some space, or work in another folder (that of data is LRA_DATA)"
_MOUNT = "see whether its disk or network mount still works"
_OPEN = "close other programs, or raise the limit on open files (ulimit -n)"
_LACKING = "its file system has no such function, as locks are: work in a folder of another one"
_MENDS = {
    errno.EACCES: _ACCESS, errno.EPERM: _ACCESS, errno.EROFS: _ACCESS, errno.ENOTDIR: _ACCESS,
    errno.ENAMETOOLONG: "name another", errno.EISDIR: "move it away, or name another",
    errno.ENOSPC: _SPACE, errno.EDQUOT: _SPACE,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: _OPEN, errno.ENFILE: _OPEN,
    errno.ENOENT: "it is not there: put back what was removed or renamed",
    errno.EIO: _MOUNT, errno.ESTALE: _MOUNT, errno.ENOTCONN: _MOUNT, errno.ENXIO: _MOUNT,
    errno.EREMOTEIO: _MOUNT, errno.EHOSTDOWN: _MOUNT, errno.ETIMEDOUT: _MOUNT,
    errno.ENOMEM: "free memory, or raise its limit", errno.ENOLCK: _LACKING, errno.ENOSYS: _LACKING,
    errno.EOPNOTSUPP: _LACKING, errno.ENODEV: _LACKING,
}  # fmt: skip
# errors that a library may wrap: nothing but the system's files gives them
_CERTAIN = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE,
)  # fmt: skip
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_OTHERS = (ConnectionError, BlockingIOError, ChildProcessError, InterruptedError, ProcessLookupError)  # of no file


def _behind(error: BaseException | None, *numbers: int) -> OSError | None:
    """The first OSError with one of these numbers among `error` and its causes."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in numbers:
            return error
        error = error.__cause__ or error.__context__
    return None


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk caused `error`. Libraries wrap that in their own errors."""
    return _behind(error, errno.ENOSPC, errno.EDQUOT) is not None


def explain_system_error(error: BaseException, place: str | Path = "a file") -> str | None:
    """The message for a file or folder that the system can't read or write, with the mend.

    Args:
        error: an OSError, or an error that a library made of one.
        place: is named if the error names no file.

    Returns:
        One line without a full stop; None if `error` is not the system's error on a file.
    """
    if isinstance(error, MemoryError):
        return f"there is not enough memory ({first_line(error)}): free some, or raise its limit"
    found = _behind(error, *_CERTAIN) or error
    if not isinstance(found, OSError) or isinstance(found, _OTHERS) or found.errno is None:
        return None
    if not found.filename and found.errno not in _MENDS:
        return None
    mend = _MENDS.get(found.errno, f"{_MOUNT}, or work in another folder")
    return f"{found.filename or place} can't be used ({found.strerror}): {mend}"


def is_disk_failure(error: BaseException) -> bool:
    """Whether the machine can't read or write a file that exists and may be used, without damage or a denied access."""
    of_users = (*_ABSENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOSPC, errno.EDQUOT)
    known = isinstance(error, OSError) and error.errno in _MENDS and error.errno not in of_users
    return known or isinstance(error, MemoryError)


@contextmanager
def name_file(path: str | Path) -> Iterator[None]:
    """Raises errors of the system inside as OSErrors that name `path`, also if a library has wrapped them."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        found = error if isinstance(error, OSError) else _behind(error, *_CERTAIN)
        if found is None or found.errno is None:
            raise
        raise OSError(found.errno, found.strerror, str(path)) from error


def system_error(error: BaseException | None, file: str | Path | None = None) -> OSError | None:
    """The operating system's error behind `error`, with `file` if it names none. A library's opinion of a file does
    not count.

    Libraries raise an OSError without a number for content that they can't read, and make calls that are not valid.
    """
    while error is not None and not (isinstance(error, OSError) and error.errno not in (None, 0, errno.EINVAL)):
        error = error.__cause__ or error.__context__
    if error is not None and error.filename is None and file is not None:
        error.filename = str(file)
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, a GPU's or the machine's. For the latter PyTorch raises a plain RuntimeError."""
    import torch  # here, as the command line begins without it

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shorten(value: object) -> str:
    """A value for a message. Of a long one, it is the beginning and the length."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:40]}… ({len(text):,} characters)"


def name_error(error: BaseException) -> str:
    """An error's type, and the first line of its message."""
    name, said = type(error).__name__, first_line(error)
    return name if said == name else f"{name}: {said}"


def refuse_diverged(loss: float, split: str, mend: str) -> None:
    """UsageError if a split's loss is not finite. Scores of NaN have an accuracy: that of the first class.

    Args:
        mend: how to train weights that do not diverge.
    """
    if not math.isfinite(loss):
        raise UsageError(
            f"the loss on {split} is {loss}, these weights have diverged: choose another checkpoint, or train anew and "
            f"{mend}"
        )
