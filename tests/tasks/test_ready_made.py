"""Ready-made samples: read as they are, and refused with file and line where they are not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.prepare import sample_line
from ruler_bench.tasks import DataSpec, Sample, TaskSpec, generate
from ruler_bench.tasks.ready_made import read_samples

ROW = {"input": "what", "answer_prefix": " is", "outputs": ["1"], "length": 300}


@pytest.fixture
def read(tmp_path: Path, task: Callable[[str], TaskSpec]) -> Callable[..., list[Sample]]:
    """Write lines as the file of vt, and read so many samples."""

    def call(lines: list[Any], num_samples: int, length: int = 4096) -> list[Sample]:
        file = tmp_path / "vt" / "validation.jsonl"
        file.parent.mkdir(exist_ok=True)
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        file.write_text("".join(f"{text}\n" for text in texts))
        return read_samples(tmp_path, task("vt"), length, num_samples)

    return call


def test_lines_count_where_there_is_no_ordinal(read) -> None:
    """The reference's `index` is a character offset, and no number of the sample."""
    rows = [{**ROW, "input": text, "index": 9 - n} for n, text in enumerate("abc")]
    samples = read(rows, 2)
    assert [(one.ordinal, one.input) for one in samples] == [(0, "a"), (1, "b")]
    assert samples[0] == Sample("vt", 0, "a", " is", ("1",), 300, 30)


def test_ordinals_count_where_there_are(read) -> None:
    rows = [{**ROW, "input": text, "ordinal": n} for text, n in zip("abc", (2, 0, 1), strict=True)]
    assert [one.input for one in read(rows, 3)] == ["b", "c", "a"]


@pytest.mark.parametrize("name", ["niah_single_1", "vt"])
def test_what_prepare_wrote_is_read(
    spec: Callable[..., DataSpec], tmp_path: Path, name: str
) -> None:
    made = generate(spec(name, 1800), 3)
    file = tmp_path / name / "validation.jsonl"
    file.parent.mkdir()
    file.write_text("".join(map(sample_line, made)))
    assert read_samples(tmp_path, spec(name).task, 1800, 3) == made


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in ROW.items() if name != key}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a', "is no JSON object"),
        ("", "is no JSON object"),
        ("[1]", "is list, not a JSON object"),
        (without("input"), "input is missing; a sample needs input, answer_prefix"),
        (without("outputs"), "outputs is missing"),
        (without("length"), "length is missing"),
        (without("answer_prefix"), 'answer_prefix is missing .*add "answer_prefix": ""'),
        ({**ROW, "outputs": "1"}, "outputs must be a list"),
        ({**ROW, "outputs": []}, "at least one answer"),
        ({**ROW, "outputs": [1]}, "outputs must be a list of text"),
        ({**ROW, "input": 3}, "input must be text"),
        ({**ROW, "length": "300"}, "length must be an integer"),
        ({**ROW, "length": True}, "length must be an integer"),
        ({**ROW, "ordinal": -1}, "ordinal must be an integer"),
        ({**ROW, "ordinal": 0.5}, "ordinal must be an integer"),
        ({**ROW, "ordinal": 0}, "ordinal 0 is that of line 1"),
        ({**ROW, "depth": 2}, "depth must be a number in 0 to 1"),
    ],
)
def test_a_bad_line_is_named(read, line: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"vt/validation.jsonl line 2: .*{message}") as caught:
        read([ROW, line, ROW], 1)
    assert "\n" not in str(caught.value)


def test_too_few_samples(read) -> None:
    with pytest.raises(UsageError, match=r"has 2 samples and none with ordinal 2.*num_samples=2"):
        read([ROW, ROW], 3)
    with pytest.raises(UsageError, match="has no sample with ordinal 0"):
        read([{**ROW, "ordinal": 4}], 1)
    with pytest.raises(UsageError, match="has no sample with ordinal 0"):
        read([], 1)


def test_samples_beyond_the_length(read) -> None:
    with pytest.raises(UsageError, match=r"length=299: .* up to 300 tokens; use length=300"):
        read([ROW], 1, length=299)
    assert read([ROW, {**ROW, "length": 9000}], 1, length=300)


def test_no_such_task(tmp_path: Path, task: Callable[[str], TaskSpec]) -> None:
    with pytest.raises(UsageError, match=r"has no cwe/validation.jsonl"):
        read_samples(tmp_path, task("cwe"), 4096, 1)


def test_an_open_end_is_no_line(read, tmp_path: Path, task: Callable[[str], TaskSpec]) -> None:
    read([ROW], 1)
    file = tmp_path / "vt" / "validation.jsonl"
    file.write_text(file.read_text().rstrip("\n"))
    assert len(read_samples(tmp_path, task("vt"), 4096, 1)) == 1


def test_the_file_decides_the_fingerprint(
    spec: Callable[..., DataSpec], read, tmp_path: Path
) -> None:
    import dataclasses

    read([ROW], 1)
    data = dataclasses.replace(spec("vt"), data=tmp_path)
    before = data.fingerprint()
    assert str(tmp_path) not in json.dumps(data.describe())
    assert dataclasses.replace(data, seed=7).fingerprint() == before
    read([ROW, ROW], 1)
    assert data.fingerprint() != before
