"""The tests of the estimate once more, with Triton's kernels run by its interpreter.

In a process of its own: Triton decides when it is imported whether it interprets.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]  # those of a worker that runs this test
    found = subprocess.run(
        [*command, HERE / "test_estimate.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
