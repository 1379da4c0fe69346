import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ruler_bench.errors import UsageError
from ruler_bench.records import (
    Record,
    RecordingError,
    RecordWriter,
    from_line,
    read_records,
    repair_last_line,
    to_line,
)

PLAIN = Record(
    arm="persistent",
    step=0,
    ordinal=0,
    task="niah_single_1",
    length=4096,
    life=1,
    position=0,
    predecessor=None,
    expected=("1234567",),
    depth=0.5,
    prompt_sha256="00",
    prompt_tokens=3968,
    output=" 1234567.",
    score=100.0,
    correct=True,
)

texts = st.text(max_size=40)
records = st.builds(
    Record,
    arm=st.sampled_from(["persistent", "fresh"]),
    step=st.integers(0, 99),
    ordinal=st.integers(0, 99),
    task=texts,
    length=st.integers(1, 1 << 20),
    life=st.integers(1, 9),
    position=st.integers(0, 99),
    predecessor=st.none() | st.integers(0, 99),
    expected=st.lists(texts, max_size=4).map(tuple),
    depth=st.none() | st.floats(0, 1),
    prompt_sha256=texts,
    prompt_tokens=st.integers(0, 1 << 20),
    output=st.none() | texts,
    output_tokens=st.none() | st.lists(st.integers(0, 1 << 17), max_size=5).map(tuple),
    top2_margin=st.none() | st.lists(st.floats(0, 99), max_size=5).map(tuple),
    error=st.none() | texts,
    copy_hidden_share=st.none() | st.floats(0, 1),
    dense_share=st.none() | st.floats(0, 1),
    estimation_seconds=st.none() | st.floats(0, 99),
    reused_tokens=st.none() | st.integers(0, 1 << 20),
)


def write(path: Path, rows: list[Record]) -> None:
    writer = RecordWriter(path)
    for row in rows:
        writer.append(row)
    writer.close()


@given(records)
def test_a_record_survives_its_line(record: Record) -> None:
    line = to_line(record)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert from_line(line) == record


def test_a_record_from_before_a_field_was_known_reads_as_unknown() -> None:
    values = json.loads(to_line(PLAIN))
    for field in ("copy_hidden_share", "reused_tokens", "dense_share", "attention_seconds"):
        del values[field]
    assert from_line(json.dumps(values)) == PLAIN


@settings(max_examples=30)
@given(rows=st.lists(records, min_size=1, max_size=6), cut=st.integers(1, 200))
def test_a_file_cut_anywhere_in_its_last_line_keeps_all_lines_before(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Record], cut: int
) -> None:
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    write(path, rows)
    whole = path.read_bytes()
    last = to_line(rows[-1]).encode()
    keep = len(whole) - min(cut, len(last) - 1)
    path.write_bytes(whole[:keep])

    assert repair_last_line(path) == keep - (len(whole) - len(last))
    assert path.read_bytes() == whole[: len(whole) - len(last)]
    assert repair_last_line(path) == 0


def test_the_last_line_for_a_key_wins(tmp_path: Path) -> None:
    failed = replace(PLAIN, output=None, score=None, correct=None, error="out of memory")
    write(tmp_path / "r", [failed, replace(PLAIN, step=1, ordinal=1), PLAIN])
    assert [(one.step, one.error) for one in read_records(tmp_path / "r")] == [(0, None), (1, None)]


@pytest.mark.parametrize("damage", ['{"arm": 1', "not json", "[]", '{"arm": "persistent"}', ""])
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "records.jsonl"
    lines = [to_line(replace(PLAIN, step=step)) for step in range(3)]
    path.write_text(lines[0] + damage + "\n" + lines[2])
    with pytest.raises(UsageError, match=r"records\.jsonl line 2 is damaged.*overwrite=true"):
        read_records(path)


def test_a_full_device_is_said_and_names_the_sample() -> None:
    writer = RecordWriter(Path("/dev/full"))
    with pytest.raises(RecordingError, match=r"ordinal 0 .*No space left on device"):
        writer.append(PLAIN)
    writer.close()


def test_a_line_that_fits_only_in_part_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    size = len(to_line(PLAIN))
    pid = os.fork()
    if pid == 0:  # a limit on file sizes cannot be lifted again: try it in a child
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 2 + 10, size * 2 + 10))
        writer = RecordWriter(path)
        writer.append(PLAIN)
        writer.append(replace(PLAIN, step=1))
        try:
            writer.append(replace(PLAIN, step=2))
        except RecordingError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert path.read_text() == to_line(PLAIN) + to_line(replace(PLAIN, step=1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("score", '"x"'),
        ("score", "NaN"),
        ("output", "5"),
        ("expected", "null"),
        ("expected", "[1]"),
        ("step", '"1"'),
        ("step", "true"),
        ("ordinal", "[1]"),
        ("arm", "null"),
        ("bytes_up", "1.5"),
        ("top2_margin", '["a"]'),
        ("correct", '"no"'),
        ("ttft_seconds", "1" + "0" * 400),
        ("output_tokens", "[" * 5000 + "]" * 5000),
    ],
)
def test_a_field_of_the_wrong_type_is_damage(field: str, value: str) -> None:
    values = {key: json.dumps(one) for key, one in json.loads(to_line(PLAIN)).items()}
    values[field] = value
    line = "{" + ", ".join(f'"{key}": {one}' for key, one in values.items()) + "}"
    with pytest.raises(ValueError, match=f"{field} is of the wrong type|holds NaN|too deeply"):
        from_line(line)
