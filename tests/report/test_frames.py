"""Runs as pandas frames."""

import json
import subprocess
import sys

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.records import to_line


@pytest.fixture
def put(record, run, tmp_path):
    def write(name, right, **manifest):
        records = [
            record(n, output=" 1234567" if n < right else "no", output_tokens=(1, 2), arm=arm)
            for arm in ("persistent", "fresh") for n in range(20)
        ]  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps(run(**manifest).manifest))
        (folder / "records.jsonl").write_text("".join(map(to_line, records)))
        return folder

    return write


def test_records_are_a_line_each(put, tmp_path):
    from ruler_bench import load_records

    put("a", 20)
    put("b", 5, backend="gpu_only")
    frame = load_records(tmp_path)
    assert len(frame) == 80
    means = frame.groupby(["backend", "arm"])["score"].mean()
    assert means["gpu_only", "fresh"] == 25
    assert means["offload", "persistent"] == 100
    assert set(frame["run"]) == {str(tmp_path / "a"), str(tmp_path / "b")}
    assert frame["output_tokens"].iloc[0] == (1, 2)
    assert frame["ttft_seconds"].isna().all()
    assert len(load_records([tmp_path / "a"])) == 40


def test_runs_are_compared_cell_by_cell(put):
    from ruler_bench import compare

    table = compare(put("a", 20), put("b", 5, backend="gpu_only"))
    assert len(table) == 2
    assert table["difference"].tolist() == [-75, -75]
    assert table["is_clear"].all()
    assert table["is_paired"].all()
    assert (table["low_95"] < -75).all()
    assert table[["score_a", "score_b"]].drop_duplicates().values.tolist() == [[100, 25]]


def test_arms_of_one_run_are_compared_with_the_first(put):
    from ruler_bench import compare

    table = compare(put("a", 20))
    assert table[["a", "b", "difference"]].values.tolist() == [["persistent", "fresh", 0]]


def test_runs_without_a_cell_in_common_are_refused(put):
    from ruler_bench import compare

    with pytest.raises(UsageError, match="no cell is in both"):
        compare(put("a", 1), put("b", 1, data={"fingerprint": "other"}))


def test_the_import_stays_light_and_a_function_is_one_whatever_was_imported():
    program = """
import sys, ruler_bench
assert not {"pandas", "numpy", "jinja2", "torch", "omegaconf"} & set(sys.modules)
from ruler_bench import compare
assert compare.__module__ == "ruler_bench.frames"
import ruler_bench.compare
from ruler_bench import compare
try:
    compare("nothing here")
except Exception as error:
    assert "there is no such folder" in str(error), error
else:
    raise SystemExit(1)
try:
    ruler_bench.nothing
except AttributeError:
    print("light")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "light", done.stderr
