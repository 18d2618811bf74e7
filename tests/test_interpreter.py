"""The Triton kernels in Triton's interpreter, on a machine without a GPU.

In a process of its own, because the switch is read when the kernels are defined. The default run
takes one odd shape of every kernel; `-m slow` takes every case of the files in FILES.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import backends
import eventful.ops

TESTS = Path(__file__).parent
FILES = (
    "test_backends.py",
    "test_box_ops.py",
    "test_context_ops.py",
    "test_map_ops.py",
    "test_motion_ops.py",
    "test_packed.py",
    "test_pick_floor.py",
    "test_region_ops.py",
    "test_score_ops.py",
    "test_triton_step.py",
)

pytestmark = pytest.mark.skipif(backends.TRITON, reason="the tests run the kernels in this process")


def kernels() -> set[str]:
    """Every function written in Triton's language."""
    sources = (Path(eventful.ops.__file__).parent / "triton").glob("*.py")
    return {
        name
        for source in sources
        for name in re.findall(r"^@triton\.jit\ndef (\w+)\(", source.read_text(), re.MULTILINE)
    }


def interpret(marks: str, launches: Path) -> set[str]:
    """Runs the tests of kernels with Triton's interpreter; the names of the kernels that ran."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, "-p", "launches"]
    command += ["-p", "no:cacheprovider", *(str(TESTS / name) for name in FILES)]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {"TRITON_INTERPRET": "1", "LAUNCHES": str(launches), "PYTHONPATH": paths}
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    return set(launches.read_text().split())


def test_every_kernel_equals_the_reference_at_an_odd_shape(tmp_path):
    found = interpret("triton and not slow", tmp_path / "launches")
    assert len(kernels()) > 15
    assert kernels() <= found  # beside them, functions of Triton's own


@pytest.mark.slow
def test_every_case_of_every_kernel(tmp_path):
    assert kernels() <= interpret("triton", tmp_path / "launches")
