import json
import re

import pytest

from ruler_bench.report import write_predictions
from ruler_bench.tasks.sample import Sample


def sample(ordinal, outputs=("1234567",)):
    return Sample(
        task="niah_single_1",
        ordinal=ordinal,
        input=f'Question {ordinal}: "é"?\n',
        answer_prefix=" The answer is",
        outputs=tuple(outputs),
        length=4000 + ordinal,
        tokens_to_generate=128,
        answer_offset=77,
    )


def test_rows_are_the_references(record, run, tmp_path):
    records = [record(1, output=" 1234567.\n"), record(0, output="\x00é"), record(2, error="x")]
    write_predictions(tmp_path, run(*records), [sample(i) for i in range(4)])
    text = (tmp_path / "predictions/niah_single_1.jsonl").read_bytes()
    # As json.dumps of the reference's own row writes it: this order, ASCII, one object a line.
    assert text == (
        b'{"index": 0, "pred": "\\u0000\\u00e9", "input": "Question 0: \\"\\u00e9\\"?\\n '
        b'The answer is", "outputs": ["1234567"], "others": {}, "truncation": -1, "length": 4000}\n'
        b'{"index": 1, "pred": " 1234567.\\n", "input": "Question 1: \\"\\u00e9\\"?\\n '
        b'The answer is", "outputs": ["1234567"], "others": {}, "truncation": -1, "length": 4001}\n'
    )


# What `evaluate.py` of the reference writes (pandas without column names) for these rows.
@pytest.mark.parametrize(
    ("task", "outputs", "summary"),
    [
        ("niah_single_1", ["1234567"], "0,1\nTasks,niah_single_1\nScore,100.0\nNulls,0/1\n"),
        ("vt", ["x1234567", "", " \x00 "], "0,1\nTasks,vt\nScore,33.33\nNulls,2/3\n"),
        ("qa_1", [], "0,1\nTasks,qa_1\nScore,0.0\nNulls,0/0\n"),
    ],
)
def test_the_summary_is_the_references(record, run, tmp_path, *, task, outputs, summary):
    records = [record(i, output=output) for i, output in enumerate(outputs)]
    write_predictions(tmp_path, run(*records, task=task), [sample(i) for i in range(5)])
    assert (tmp_path / f"predictions/summary-{task}.csv").read_bytes().decode() == summary


def test_the_references_reading_of_the_file_gives_the_summarys_score(record, run, tmp_path):
    """Score the written file by a plain reading of RULER's rule, as its own tool would."""
    expected = ("1111111", "2222222", "3333333")
    outputs = ["1111111, 2222222", "3333333\x003333333 1111111 2222222", "", "92222222"]
    records = [record(i, output=output, expected=expected) for i, output in enumerate(outputs)]
    write_predictions(tmp_path, run(*records), [sample(i, expected) for i in range(4)])
    shares = []
    for line in (tmp_path / "predictions/niah_single_1.jsonl").read_text().splitlines():
        row = json.loads(line)
        pred = re.sub("[\x00-\x1f]", "\n", row["pred"].strip()).strip().lower()
        shares.append(sum(ref.lower() in pred for ref in row["outputs"]) / len(row["outputs"]))
    score = round(sum(shares) / len(shares) * 100, 2)
    text = (tmp_path / "predictions/summary-niah_single_1.csv").read_text()
    assert f"Score,{score}\nNulls,1/4\n" in text


def test_writing_again_replaces(record, run, tmp_path):
    write_predictions(tmp_path, run(record(0), record(1)), [sample(0), sample(1)])
    write_predictions(tmp_path, run(record(1)), [sample(1)])
    lines = (tmp_path / "predictions/niah_single_1.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [1]


def test_a_sample_that_is_not_there_is_no_prediction(record, run, tmp_path):
    with pytest.raises(KeyError):
        write_predictions(tmp_path, run(record(3)), [sample(0)])
