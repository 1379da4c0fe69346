"""`| head`: a command that nobody reads to the end goes on, and ends with its own status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAK = 3
RUN = (
    *("-m", "ruler_bench", "backend=oracle", "num_samples=2", "length=512", "fresh=inprocess"),
    "out=run",
)


def call_unread(words: tuple[str, ...], folder: Path, stderr: int) -> subprocess.CompletedProcess:
    """Call Python with a standard output that is closed at its other end."""
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            stdout=write,
            stderr=write if stderr == subprocess.STDOUT else stderr,
            text=True,
            check=False,
        )
    finally:
        os.close(write)


@pytest.mark.parametrize("characters", [10, 1_000_000])
@pytest.mark.parametrize("file", ["stdout", "stderr"])
def test_the_status_is_what_the_command_found(tmp_path, characters, file):
    program = (
        "import sys; from ruler_bench.command_line import status_of\n"
        f"write = lambda: print('x' * {characters}, file=sys.{file})\n"
        f"sys.exit(status_of(lambda: write() or {LEAK}))"
    )
    done = call_unread(("-c", program), tmp_path, subprocess.STDOUT)
    assert done.returncode == LEAK


@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT], ids=["1", "2>&1"])
def test_a_run_goes_on_to_its_report(tmp_path, stderr):
    done = call_unread(RUN, tmp_path, stderr)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in (done.stderr or "")
    folder = tmp_path / "run"
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert sum("output" in record for record in records) == 2
    assert (folder / "report.md").stat().st_size > 0
    assert (folder / "report.html").stat().st_size > 0
