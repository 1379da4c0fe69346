import pytest

from ruler_bench.records import Record
from ruler_bench.report import Run
from ruler_bench.score import score

MANIFEST = {
    "format_version": 1,
    "task": "niah_single_1",
    "length": 4096,
    "backend": "offload",
    "model": "probe",
    "metric": "all",
    "tokens_to_generate": 128,
    "config": {"seed": 42, "backend": {"name": "offload", "num_gpu_blocks": 4}, "arms": []},
    "data": {"fingerprint": "abc123"},
    "device": "cpu",
    "versions": {"python": "3.11.2", "torch": "2.13.0"},
    "command": ["python", "-m", "ruler_bench", "length=4096"],
    "started": "2026-01-01T00:00:00+00:00",
    "finished": "2026-01-01T00:01:00+00:00",
    "lives": [],
}


def make_record(ordinal=0, output=" 1234567.", expected=("1234567",), metric="all", **changes):
    points = None if "error" in changes else score(metric, output, expected)
    values = {
        "arm": "persistent",
        "step": ordinal,
        "ordinal": ordinal,
        "task": "niah_single_1",
        "length": 4096,
        "life": 1,
        "position": ordinal,
        "predecessor": ordinal - 1 if ordinal else None,
        "expected": tuple(expected),
        "depth": 0.25,
        "prompt_sha256": "0" * 64,
        "prompt_tokens": 3968,
        "output": None if "error" in changes else output,
        "finish_reason": None if "error" in changes else "stop",
        "score": points,
        "correct": None if points is None else points == 100,
    }
    return Record(**{**values, **changes})


def make_run(*records, **manifest):
    return Run(manifest={**MANIFEST, **manifest}, records=list(records))


@pytest.fixture
def record():
    """Build a record; by default a right answer."""
    return make_record


@pytest.fixture
def run():
    """Build a run of records; keywords change its manifest."""
    return make_run
