"""Score by depth, of the tasks whose samples have one."""

import csv

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ruler_bench.report import write_reports
from ruler_bench.report.depth import by_depth


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_scores_stand_in_their_tenth_of_the_context(record, run, tmp_path):
    records = [
        record(0, depth=0.0),
        record(1, "no", depth=0.05),
        record(2, depth=0.1),
        record(3, "no", depth=1.0),
        record(4, depth=0.99),
        record(5, depth=0.5, error="x"),
    ]
    write_reports(tmp_path, [run(*records)])
    rows = table(tmp_path / "depth.csv")
    found = [(row["depth_from"], row["samples"], row["score"]) for row in rows]
    assert len(found) == 10
    assert [one for one in found if one[1] != "0"] == [
        ("0.0", "2", "50.0"),
        ("0.1", "1", "100.0"),
        ("0.9", "2", "50.0"),
    ]
    report = (tmp_path / "report.md").read_text()
    assert "## Score by depth" in report
    assert "50.0 (2)" in report


def test_a_task_without_depths_has_no_table(record, run, tmp_path):
    write_reports(tmp_path, [run(record(0))])
    assert (tmp_path / "depth.csv").exists()
    write_reports(tmp_path, [run(record(0, depth=None, task="vt"), task="vt")])
    assert not (tmp_path / "depth.csv").exists()
    assert "Score by depth" not in (tmp_path / "report.md").read_text()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(depths=st.lists(st.floats(0, 1), max_size=30))
def test_every_sample_is_in_the_tenth_that_holds_its_depth(record, depths):
    bins = by_depth([record(i, depth=depth) for i, depth in enumerate(depths)])
    assert sum(map(len, bins)) == len(depths)
    for number, scores in enumerate(bins):
        last = number == 9
        inside = [d for d in depths if number <= d * 10 and (last or d * 10 < number + 1)]
        assert scores == pytest.approx([100.0] * len(inside))


def test_names_are_escaped_once_and_never_formulas(record, run, tmp_path):
    runs = [run(record(0), model="=a\\b\n")]
    write_reports(tmp_path, runs)
    assert "'=a\\\\b\\n," in (tmp_path / "depth.csv").read_text()
