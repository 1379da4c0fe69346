"""Suites: several tasks in one command, each in a folder of its own."""

import json
from pathlib import Path

import pytest

from ruler_bench.config import config_dir
from ruler_bench.errors import UsageError
from ruler_bench.run_suite import passes
from ruler_bench.suites import check_engine_per, suite_tasks, task_names

ORACLE = ("backend=oracle", "device=cpu", "length=1024", "num_samples=2", "fresh=inprocess")
TWO = ("suite=niah", "suite.tasks=[niah_single_1,niah_multikey_2]")


@pytest.fixture(autouse=True)
def _engines(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


def custom(name):
    return ("backend=custom", f"backend._target_=odd_engines.{name}", *ORACLE[1:])


def rows(folder):
    if not (folder / "records.jsonl").exists():
        return []
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_a_suite_has_a_folder_a_task_and_a_report_over_all(cli, workdir):
    finished = cli(*ORACLE, *TWO, "out=here")
    assert finished.status == 0, finished.err
    for task in ("niah_single_1", "niah_multikey_2"):
        assert [row["task"] for row in rows(workdir / "here" / task)] == [task, task]
    lines = (workdir / "here" / "summary.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["niah_single_1", "niah_multikey_2"]
    assert finished.out.splitlines()[-1] == "Records and report: here"
    again = cli(*ORACLE, *TWO, "out=here")
    assert again.status == 0
    assert again.err.count("all 2 samples are recorded") == 2
    kept = json.loads((workdir / "here" / "suite.json").read_text())
    assert kept["tasks"] == ["niah_single_1", "niah_multikey_2"]


def test_lengths_of_a_list_and_of_a_multirun(cli, workdir):
    assert cli(*ORACLE, *TWO, "length=[600,1024]", "num_samples=1", "out=here").status == 0
    found = {
        str(one.parent.relative_to(workdir / "here")) for one in workdir.rglob("manifest.json")
    }
    tasks = ("niah_single_1", "niah_multikey_2")
    assert found == {f"{length}/{task}" for length in (600, 1024) for task in tasks}
    finished = cli("-m", *ORACLE, *TWO, "length=600,1024", "num_samples=1", "out=sweep")
    assert finished.status == 0, finished.err
    assert len(list((workdir / "sweep").glob("*/*/records.jsonl"))) == 4
    joined = next((workdir / "results" / ".sweeps").glob("*/summary.csv"))
    assert len(joined.read_text().splitlines()) == 5


STOPPING = """
from odd_engines import Plain
SERVED = []

class Stopping(Plain):
    def generate(self, request):
        SERVED.append(request)
        if len(SERVED) == 3:
            raise KeyboardInterrupt
        return super().generate(request)
"""


@pytest.mark.parametrize("engine_per", ["task", "suite"])
def test_a_suite_that_was_stopped_goes_on(cli, workdir, monkeypatch, engine_per):
    (workdir / f"stopping_{engine_per}.py").write_text(STOPPING)
    monkeypatch.syspath_prepend(workdir)
    mine = ("backend=custom", f"backend._target_=stopping_{engine_per}.Stopping", *ORACLE[1:], *TWO)
    stopped = cli(*mine, f"engine_per={engine_per}", "out=here")
    assert stopped.status == 130
    assert stopped.err.splitlines()[-1] == "Interrupted: the same command goes on."
    assert stopped.out.splitlines()[-1] == "Records and report: here"
    assert not rows(workdir / "here" / "niah_multikey_2")
    again = cli(*mine, f"engine_per={engine_per}", "out=here")
    assert again.status == 0, again.err
    assert "niah_single_1 1024 custom: all 2 samples are recorded" in again.err
    found = rows(workdir / "here" / "niah_multikey_2")
    # The engine that goes on has served nothing of the tasks before.
    earlier = None if engine_per == "task" else 0
    assert [row["earlier_requests"] for row in found] == [earlier, earlier]
    assert len((workdir / "here" / "summary.csv").read_text().splitlines()) == 3


def test_what_is_missing_is_named_before_anything_runs(cli, workdir):
    (workdir / "empty").mkdir()
    finished = cli(*ORACLE, "suite=ruler13", "qa_data=empty", "num_samples=1")
    assert finished.status == 2
    errors = finished.err.splitlines()
    assert "qa_1 at 1024: empty/squad.json is missing: python scripts/fetch_data.py" in errors[0]
    assert "qa_2 at 1024: empty/hotpotqa.json is missing" in errors[1]
    assert errors[2] == "error: nothing was run: 2 of 13 tasks cannot (qa_1, qa_2); see above."
    assert len(errors) == 3
    assert not (workdir / "results").exists()


def test_the_gravest_status_is_that_of_the_suite(cli):
    finished = cli(*ORACLE, *TWO, "backend.fail=[1]")
    assert finished.status == 1
    leaky = cli(*custom("Leaky"), *TWO, "num_samples=4", "arms=[persistent,fresh]")
    assert leaky.status == 3, leaky.err
    assert leaky.out.count("LEAK") == 2


def first_answers(folder):
    return [row["correct"] for row in rows(folder) if row["ordinal"] == 0]


def test_one_engine_for_all_tasks_makes_their_order_a_stream(cli, workdir):
    alone = (*custom("Leaky"), *TWO, "arms=[persistent,shuffled,fresh]")
    assert cli(*alone, "out=alone").status in (3, 5)
    assert first_answers(workdir / "alone" / "niah_multikey_2") == [True, False, True]
    assert cli(*alone, "engine_per=suite", "out=shared").status in (3, 5)
    shared = workdir / "shared" / "niah_multikey_2"
    assert first_answers(shared) == [False, False, True]
    earlier = {row["arm"]: row["earlier_requests"] for row in rows(shared)}
    assert earlier == {"persistent": 2, "shuffled": 2, "fresh": None}
    config = json.loads((shared / "manifest.json").read_text())["config"]
    assert config["suite"]["tasks"] == ["niah_single_1", "niah_multikey_2"]
    # What an engine of one task answered does not go on with that of a suite.
    refused = cli(*alone, "engine_per=suite", "out=alone")
    assert refused.status == 2
    assert "was made with other settings (config.suite" in refused.err


def test_arms_of_one_engine_go_through_the_tasks_one_after_the_other():
    assert passes(["fresh", "persistent", "shuffled", "fresh_again"]) == [
        ("persistent",),
        ("shuffled",),
        ("fresh", "fresh_again"),
    ]
    assert passes(["persistent"]) == [("persistent",)]


def test_a_request_that_failed_is_asked_once_a_command(cli, workdir):
    mine = (*ORACLE, *TWO, "engine_per=suite", "arms=[persistent,shuffled]", "out=here")
    assert cli(*mine, "backend.fail=[1]").status in (1, 5)
    found = rows(workdir / "here" / "niah_single_1")
    assert [(row["arm"], row["error"] is None) for row in found] == [
        ("persistent", True),
        ("persistent", False),
        ("shuffled", True),
        ("shuffled", False),
    ]


BAD = {
    ("suite=nia",): "unknown suite 'nia'. Did you mean 'niah'?",
    ("suite=null",): "suite=null: must be one of niah, ruler13.",
    ("suite=niah", "task.num_keys=2"): "task.num_keys: a suite names its tasks itself",
    ("suite=niah", "suite.tasks=vt"): "suite.tasks=vt: must be a list of tasks",
    ("engine_per=suite",): "without a suite there is one task",
    (*TWO, "backend.wrong=x"): "error: backend.wrong='x': must be a list of positions",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_said(cli, workdir, words):
    finished = cli(*ORACLE, *words)
    assert finished.status == 2
    assert BAD[words] in finished.err
    assert "Traceback" not in finished.err
    assert not list(workdir.glob("results/*/*/records.jsonl"))


@pytest.mark.parametrize(
    ("values", "given", "message"),
    [
        ({"tasks": ["vt"]}, {"task"}, "task: a suite names its tasks itself"),
        ({"tasks": ["niah_singel_1"]}, (), "Did you mean 'niah_single_1'?"),
        ({"tasks": ["vt", "vt"]}, (), "suite.tasks: names vt twice."),
        ({"tasks": []}, (), "must be a list of tasks"),
        ({}, (), "must be a list of tasks"),
        ({"tasks": ["vt"], "task": 1}, (), "unknown key 'suite.task'. Did you mean 'suite.tasks'?"),
    ],
)
def test_a_wrong_list_of_tasks_is_said(values, given, message):
    with pytest.raises(UsageError) as caught:
        suite_tasks(values, given, config_dir())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_per": "suit"}, "unknown engine_per 'suit'. Did you mean 'suite'?"),
        ({"has_suite": False}, "without a suite there is one task"),
        ({"arms": ["fresh"]}, "has an engine for each sample"),
        ({"minimise": True}, "minimise=true looks at the requests of one task"),
        ({"is_diagnosis": True}, "experiment=diagnose looks at the requests of one task"),
    ],
)
def test_an_engine_for_all_tasks_that_cannot_be_is_said(changes, message):
    asked = {
        "engine_per": "suite",
        "has_suite": True,
        "arms": ["persistent"],
        "minimise": False,
        "is_diagnosis": False,
    }
    check_engine_per(**asked)
    with pytest.raises(UsageError) as caught:
        check_engine_per(**(asked | changes))
    assert message in str(caught.value)


def test_a_folder_of_something_else_is_left_alone(cli, workdir):
    (workdir / "mine").mkdir()
    (workdir / "mine" / "thesis.tex").write_text("x")
    assert "holds files that no suite wrote (thesis.tex)" in cli(*ORACLE, *TWO, "out=mine").err
    assert cli(*ORACLE, "out=single").status == 0
    assert "holds a run of one task" in cli(*ORACLE, *TWO, "out=single").err


def test_a_dry_run_describes_every_task_and_writes_nothing(cli, workdir):
    finished = cli(*ORACLE, *TWO, "dry_run=true")
    assert finished.status == 0
    assert "niah_single_1" in finished.out
    assert "niah_multikey_2" in finished.out
    assert not (workdir / "results").exists()


def test_every_task_is_in_ruler13():
    text = (config_dir() / "suite" / "ruler13.yaml").read_text()
    named = [line.strip("- ") for line in text.splitlines() if line.startswith("  - ")]
    assert sorted(named) == task_names(config_dir())
    assert len(named) == 13
