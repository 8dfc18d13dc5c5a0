"""The file of a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lra.errors import UsageError
from lra.training.run import write as replace_file


def write(path: Path, result: dict[str, Any]) -> None:
    """As JSON, replaced in one step; its folder is made. UsageError if it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"out={path} can't be written ({error.strerror}): name another file") from None
