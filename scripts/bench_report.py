"""Measure how long many runs take to join, and how much memory: 780,000 records by default.

    python scripts/bench_report.py
    python scripts/bench_report.py --setups 2 --samples 100

Makes records like those of an engine (20 setups, thirteen tasks, six lengths, 500 samples), a tenth
of them wrong, joins them with `python -m ruler_bench.report` in a process of its own and prints a
line of JSON: records, seconds, seconds of CPU time, the peak of the memory of all its processes
together, and the size of the page. The records lie in a temporary folder, a gigabyte of them. Exit
status: that of the report.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TASKS = {
    **{f"niah_single_{n}": 1 for n in (1, 2, 3)},
    **{f"niah_multikey_{n}": 1 for n in (1, 2, 3)},
    "niah_multivalue": 4,
    "niah_multiquery": 4,
    "vt": 5,
    "cwe": 10,
    "fwe": 3,
    "qa_1": 1,
    "qa_2": 1,
}
"""Tasks, and how many answers each asks for."""
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
WRONG = 0.1
POLL_SECONDS = 0.1


def main() -> int:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setups", type=int, default=20)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_report_") as name:
        folder = Path(name)
        made = make(folder / "results", options.setups, options.samples)
        command = [sys.executable, "-m", "ruler_bench.report", f"{folder}/results"]
        command += ["--out", f"{folder}/joined", "--processes", str(options.processes)]
        status, seconds, peak = measure(command)
        found = {
            "records": made,
            "record_bytes": sum(one.stat().st_size for one in folder.rglob("records.jsonl")),
            "processes": options.processes,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu_seconds(), 1),
            "peak_bytes": peak,
            "page_bytes": size(folder / "joined" / "report.html"),
            "markdown_bytes": size(folder / "joined" / "report.md"),
        }
    print(json.dumps(found))
    return status


def size(path: Path) -> int | None:
    """Return the size of a file in bytes, or None where there is none."""
    return path.stat().st_size if path.exists() else None


def make(folder: Path, setups: int, samples: int) -> int:
    """Write the runs; return how many records they have."""
    rng = random.Random(0)
    made = 0
    for setup in range(setups):
        for task, answers in TASKS.items():
            for length in LENGTHS:
                place = folder / f"{task}_{length}_{setup}"
                place.mkdir(parents=True)
                manifest = _manifest(task, length, setup)
                (place / "manifest.json").write_text(json.dumps(manifest))
                with (place / "records.jsonl").open("w") as file:
                    for ordinal in range(samples):
                        file.write(_line(rng, task, length, answers, ordinal))
                        made += 1
    return made


def _manifest(task: str, length: int, setup: int) -> dict[str, Any]:
    config = {"seed": 42, "backend": {"num_gpu_blocks": 2 + setup, "chunk_tokens": 2048}}
    return {
        "format_version": 1,
        "task": task,
        "length": length,
        "backend": ("offload", "gpu_only")[setup % 2],
        "model": "generated",
        "metric": "part" if task.startswith("qa") else "all",
        "config": config,
        "data": {"fingerprint": f"{task}-{length}"},
        "model_fingerprint": "0" * 16,
        "backend_in_force": config["backend"],
        "device": "none",
        "versions": {"python": "3"},
        "command": ["python", "-m", "ruler_bench", f"task={task}"],
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T01:00:00+00:00",
        "indices": ["0-499"],
        "lives": [],
    }


def _line(rng: random.Random, task: str, length: int, answers: int, ordinal: int) -> str:
    expected = [str(rng.randrange(10**6, 10**7)) for _ in range(answers)]
    right = answers if rng.random() > WRONG else rng.randrange(answers)
    shown = expected[:right] + [str(rng.randrange(10**6, 10**7)) for _ in range(answers - right)]
    output = " " + ", ".join(shown) + "."
    tokens = [rng.randrange(1 << 16) for _ in range(12)]
    score = 100.0 * right / answers
    record = {
        "arm": "persistent", "step": ordinal, "ordinal": ordinal, "task": task, "length": length,
        "life": 1, "position": ordinal, "predecessor": ordinal - 1 if ordinal else None,
        "expected": expected, "depth": rng.random(),
        "prompt_sha256": f"{rng.getrandbits(256):064x}", "prompt_tokens": length - 128,
        "output": output, "output_tokens": tokens,
        "logits_digest": [f"{one:016x}" for one in tokens],
        "top2_margin": [one / 1000 for one in tokens], "finish_reason": "stop", "score": score,
        "correct": score == 100.0, "error": None, "total_seconds": rng.random(),
        "ttft_seconds": 0.5, "decode_seconds": 0.1, "bytes_up": 1 << 20, "bytes_down": 1 << 20,
        "peak_device_bytes": 1 << 30, "kernel": "sdpa",
    }  # fmt: skip
    return json.dumps(record) + "\n"


def measure(command: list[str]) -> tuple[int, float, int]:
    """Run a command; return its status, the seconds, and the peak memory of it and its children."""
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(_resident_bytes, _family(process.pid))))
        time.sleep(POLL_SECONDS)
    return process.returncode, time.perf_counter() - started, peak


def cpu_seconds() -> float:
    """Return the CPU time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in _family(int(child)))]


def _resident_bytes(pid: int) -> int:
    """Return a process's proportional share of memory: what it shares counts once."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
