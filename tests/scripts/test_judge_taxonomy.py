"""Labels of wrong outputs: drawn without kinds, scored against those of the rules."""

import csv
import json
import re
from pathlib import Path

import pytest

from scripts import judge_taxonomy

ROOT = Path(__file__).parents[2]


def proof(folder, kinds=("truncated", "unknown_value", "unknown_value")):
    outputs = [
        {"ordinal": place, "expected": [f"{place}234567"], "output": f" {place}23.", "kind": kind}
        for place, kind in enumerate(kinds)
    ]
    row = {"kind": "faults", "name": "x", "figures": {"wrong_outputs": [*outputs, outputs[0]]}}
    path = folder / "detector.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "kind": "clean"}) + "\n")
    return str(path)


def label(path, kind):
    rows = list(csv.DictReader(path.open()))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, "kind": kind} for row in rows)


def test_outputs_are_drawn_once_without_kinds_and_scored(tmp_path, capsys):
    outputs, labels = proof(tmp_path), tmp_path / "labels.csv"
    assert judge_taxonomy.main(["draw", outputs, str(labels)]) == 0
    assert [row["kind"] for row in csv.DictReader(labels.open())] == [""] * 3
    assert judge_taxonomy.main(["draw", outputs, str(labels)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    label(labels, "truncated")
    assert judge_taxonomy.main(["score", outputs, str(labels)]) == 0
    told = capsys.readouterr().out
    assert "1 of 3 outputs have the kind" in told
    assert "| `truncated` | `unknown_value` | 2 |" in told


@pytest.mark.parametrize("kind", ["", "truncate"])
def test_a_kind_that_there_is_not_is_refused(tmp_path, capsys, kind):
    outputs, labels = proof(tmp_path), tmp_path / "labels.csv"
    judge_taxonomy.main(["draw", outputs, str(labels)])
    label(labels, kind)
    assert judge_taxonomy.main(["score", outputs, str(labels)]) == 2
    assert "line 2: kind" in capsys.readouterr().err


def test_the_page_says_what_the_labels_give(capsys):
    folder = ROOT / "results" / "reference"
    words = ["score", str(folder / "detector.jsonl"), str(folder / "taxonomy_labels.csv")]
    assert judge_taxonomy.main(words) == 0
    told = capsys.readouterr().out
    page = (ROOT / "docs" / "taxonomy.md").read_text()
    right, of = re.match(r"(\d+) of (\d+)", told).groups()
    assert f"{right} of {of} are named\nas labelled" in page
    assert told[told.index("| label") :].strip() in page
