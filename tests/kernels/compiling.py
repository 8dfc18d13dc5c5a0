"""What kernels compile to for a GPU that is not here, in a process of its own: see aot.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = (
    "import json, sys; from tests.kernels.aot import print_compiled; from {module} import launch_case; "
    "print_compiled(json.loads(sys.argv[1]), launch_case)"
)


def compiled(cases: list[dict[str, Any]], module: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each case, and what the kernels use that the module's `launch_case(case)` launches."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), str(ROOT)])
    environment["CUDA_VISIBLE_DEVICES"] = ""  # the tables of this machine's GPU are not for these
    program = [sys.executable, "-c", PROGRAM.format(module=module), json.dumps(cases)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases)
    return list(zip(cases, found, strict=True))
