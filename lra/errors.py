"""The one error a user can mend."""

from __future__ import annotations

import errno
import math


class UsageError(Exception):
    """Bad input: one line that says what is wrong and how to mend it.

    The command line prints it without a traceback and exits with code 2.
    """


def disk_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind `error`: libraries wrap it in errors of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, a GPU's or the machine's: there PyTorch raises a plain RuntimeError."""
    import torch  # here, as the command line begins without it

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its type where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def brief(value: object) -> str:
    """A value for a message: of a long one the beginning, and its length."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:40]}… ({len(text):,} characters)"


def named(error: BaseException) -> str:
    """Its type, and the first line of what it says."""
    name, said = type(error).__name__, first_line(error)
    return name if said == name else f"{name}: {said}"


def denied(error: BaseException) -> str | None:
    """What is said of a file or folder that may not or can't be read or written; None of any other error."""
    where = "change who may use it, or work in another folder (that of data is LRA_DATA)"
    mends = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR), where)
    mends |= {errno.ENAMETOOLONG: "name another", errno.EISDIR: "move it away, or name another"}
    if not isinstance(error, OSError) or error.errno not in mends or not error.filename:
        return None
    return f"{error.filename} can't be used ({error.strerror}): {mends[error.errno]}"


def refuse_diverged(loss: float, split: str) -> None:
    """UsageError if a split's loss is not finite: scores that are NaN have an accuracy, that of the first class."""
    if not math.isfinite(loss):
        raise UsageError(
            f"the loss on {split} is {loss}, these weights have diverged: choose another checkpoint, or train with a "
            "lower optim.lr, or optim.clip=1"
        )
