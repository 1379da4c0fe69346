"""The script that measures how long many runs take to join, on few of them."""

import json
import subprocess
import sys
from pathlib import Path

from ruler_bench.records import read_records
from scripts.bench_report import LENGTHS, TASKS, make

ROOT = Path(__file__).parents[2]


def test_what_it_makes_are_records(tmp_path):
    assert make(tmp_path, 1, 3) == 3 * len(TASKS) * len(LENGTHS)
    found = read_records(tmp_path / "vt_4096_0" / "records.jsonl")
    assert [one.ordinal for one in found] == [0, 1, 2]
    assert all(len(one.expected) == TASKS["vt"] for one in found)


def test_it_measures_a_report():
    command = [sys.executable, "scripts/bench_report.py", "--setups", "2", "--samples", "4"]
    done = subprocess.run(
        [*command, "--processes", "1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["records"] == 2 * 13 * 6 * 4
    assert found["peak_bytes"] > 10_000_000
    assert 10_000 < found["page_bytes"] < 5_000_000
