"""RULER's own output, by hash: all thirteen tasks."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ruler_bench.tasks import DataSpec, Sample, generate
from ruler_bench.tokenizer import FolderTokenizer

MakeSpec = Callable[..., DataSpec]

GOLDEN = [
    json.loads(line) for line in (Path(__file__).parent / "golden.jsonl").read_text().splitlines()
]


def content_hash(samples: list[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        row = [sample.input, sample.answer_prefix, list(sample.outputs), sample.length]
        digest.update((json.dumps(row, ensure_ascii=True) + "\n").encode())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "row", GOLDEN, ids=lambda row: f"{row['task']}-{row['length']}-{row['template']}"
)
def test_samples_are_the_references(
    spec: MakeSpec, smollm2: FolderTokenizer, qa_data: Path, row: dict[str, object]
) -> None:
    folder = qa_data if "qa_data" in row else None
    data = spec(row["task"], row["length"], row["seed"], row["template"], smollm2, qa_data=folder)
    samples = generate(data, row["n"])
    assert list(samples[0].outputs) == row["first_outputs"]
    assert [sample.length for sample in samples[: len(row["lengths"])]] == row["lengths"]
    assert content_hash(samples) == row["sha256"]


def test_there_are_rows_for_all_thirteen_tasks() -> None:
    assert len({row["task"] for row in GOLDEN}) == 13
    assert len(GOLDEN) == 52
