"""Means over tasks and lengths, against the figures that RULER's README prints."""

import csv
import json

import pytest

from ruler_bench.config import config_dir
from ruler_bench.report import terminal_means, write_reports
from ruler_bench.report.means import (
    FAMILIES,
    LENGTHS_TOKENS,
    TASKS,
    averages,
    effective_length,
    mean_of,
)
from ruler_bench.suites import task_names

# README.md of NVIDIA/RULER at c3f5e3b: means by length, Avg., wAvg. (inc), wAvg. (dec), effective.
README = {
    "Llama3.1 (8B)": ((95.5, 93.8, 91.6, 87.4, 84.7, 77.0), (88.3, 85.4, 91.3), "32768"),
    "Llama3.1 (70B)": ((96.5, 95.8, 95.4, 94.8, 88.4, 66.6), (89.6, 85.5, 93.7), "65536"),
    "Qwen1.5 (72B)": ((94.9, 93.8, 78.0, 67.8, 0.0, 0.0), (55.7, 37.5, 74.0), "8192"),
    "LongChat (7B)": ((84.7, 79.9, 70.8, 59.3, 0.0, 0.0), (49.1, 33.1, 65.2), "<4096"),
}


@pytest.mark.parametrize("model", README)
def test_averages_are_those_of_the_readme(model):
    means, published, effective = README[model]
    by_length = dict(zip(LENGTHS_TOKENS, means, strict=True))
    # The README rounds means that it has more digits of.
    assert averages(by_length) == pytest.approx(published, abs=0.1)
    assert effective_length(by_length) == effective


def test_the_threshold_itself_is_enough_and_the_last_length_counts():
    assert effective_length({4096: 85.6}) == ">=4096"
    assert effective_length({4096: 85.59, 8192: 85.6, 16384: 20.0}) == "8192"
    assert effective_length({8192: 0.0}) == "<8192"
    assert averages(dict.fromkeys(LENGTHS_TOKENS[:5], 90.0)) is None
    assert averages({**dict.fromkeys(LENGTHS_TOKENS, 90.0), 1024: 0.0}) == (90.0, 90.0, 90.0)


def test_the_thirteen_tasks_are_those_of_the_configurations():
    assert sorted(TASKS) == task_names(config_dir())
    assert mean_of(dict.fromkeys(TASKS, 50.0), TASKS) == 50.0
    assert mean_of(dict.fromkeys(TASKS[1:], 50.0), TASKS) is None


@pytest.fixture
def suite(record, run):
    """Make a run for each task: the first sample is right, the second where `both` says so."""

    def build(tasks=TASKS, both=TASKS, length=4096, **manifest):
        return [
            run(
                record(0, task=task, length=length),
                record(1, "no", task=task, length=length, finish_reason="length")
                if task not in both
                else record(1, task=task, length=length),
                task=task,
                length=length,
                **manifest,
            )
            for task in tasks
        ]

    return build


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_tasks_have_a_mean_and_each_family(suite, tmp_path):
    write_reports(tmp_path, suite(both=FAMILIES["retrieval"]))
    (row,) = table(tmp_path / "means.csv")
    figures = {name: row[name] for name in (*FAMILIES, "mean_13", "tasks", "samples", "truncated")}
    assert figures == {
        "retrieval": "100.0",
        "tracing": "50.0",
        "aggregation": "50.0",
        "qa": "50.0",
        "mean_13": str(round((8 * 100 + 5 * 50) / 13, 2)),
        "tasks": "13",
        "samples": "26",
        "truncated": "5",
    }
    (average,) = table(tmp_path / "averages.csv")
    assert average["average"] == ""
    assert average["effective_length_tokens"] == "<4096"
    report = (tmp_path / "report.md").read_text()
    assert "## Means over tasks" in report
    assert "80.77" in report


def test_fewer_tasks_never_have_a_mean_of_thirteen(suite, tmp_path):
    write_reports(tmp_path, suite())
    for missing in ("niah_multiquery", "vt", "cwe", "qa_2"):
        runs = suite([task for task in TASKS if task != missing])
        write_reports(tmp_path, runs)
        (row,) = table(tmp_path / "means.csv")
        assert row["mean_13"] == ""
        assert not (tmp_path / "averages.csv").exists()
        incomplete = [name for name in FAMILIES if row[name] == ""]
        assert incomplete == [name for name, tasks in FAMILIES.items() if missing in tasks]
    assert terminal_means(suite(["vt"])) is None
    write_reports(tmp_path, suite(["vt", "cwe"]))
    assert not (tmp_path / "means.csv").exists()
    assert "Means over tasks" not in (tmp_path / "report.md").read_text()


def test_a_task_that_failed_or_was_changed_or_is_there_twice_is_missing(suite, record, run):
    def mean(runs):
        return terminal_means(runs).splitlines()[2].split()[-1]

    good = suite()
    assert mean(good) == "100.00"
    assert mean([*good[1:], run(record(0, error="x"), task=TASKS[0])]) == "-"
    assert mean([*good, good[0]]) == "-"
    own = json.loads(
        '{"name": "vt", "kind": "variable_tracking", "num_chains": 1, "num_hops": 4,'
        ' "tokens_to_generate": 30, "metric": "all"}'
    )
    for hops, expected in ((4, "100.00"), (3, "-")):
        manifest = {"config": {"task": own | {"num_hops": hops}}}
        others = suite([task for task in TASKS if task != "vt"], config={})
        assert mean([*others, *suite(["vt"], **manifest)]) == expected


def test_each_engine_and_length_has_its_own_mean(suite):
    runs = [*suite(), *suite(length=8192, both=()), *suite(backend="hf", both=())]
    text = terminal_means(runs)
    rows = [line.split() for line in text.splitlines() if line.startswith(("offload", "hf"))]
    assert [(row[0], row[3], row[-1]) for row in rows[:3]] == [
        ("offload", "4096", "100.00"),
        ("offload", "8192", "50.00"),
        ("hf", "4096", "50.00"),
    ]
    assert [row[-1] for row in rows[3:]] == ["4096", "<4096"]
