"""Importing PyTorch without a search for garbage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Collects no garbage while PyTorch is imported inside, and leaves what the imports made out of later collections.

    The imports make several hundred thousand objects that stay until the process ends. Searching them again and again
    takes half a second. If PyTorch is imported already, nothing is different inside.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
