"""qa_data=DIR and data=DIR on the command line: questions, and samples that are ready-made."""

import json
import os
from pathlib import Path

import pytest

from ruler_bench import prepare

QA = Path(__file__).parent / "data" / "qa"
ORACLE = ("backend=oracle", "device=cpu", "num_samples=2")


@pytest.fixture
def prepared(cli, workdir):
    """Write samples of a task with prepare, and return their file."""

    def call(task, length, *more):
        out = workdir / "ready" / task / "validation.jsonl"
        arguments = (f"task={task}", f"length={length}", "num_samples=2", *more, f"out={out}")
        finished = cli(*arguments, entry=prepare.main)
        assert finished.status == 0, finished.err
        return out

    return call


def records(workdir):
    (file,) = workdir.glob("results/*/records.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_questions_are_asked_and_scored(cli, workdir, prepared):
    file = prepared("qa_1", 3000, f"qa_data={QA}")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["answer"] = "wrong"
    (workdir / "script.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = cli("task=qa_1", "length=3000", *ORACLE, "backend.script=script.jsonl",
                   f"qa_data={QA}")  # fmt: skip
    assert finished.status == 0, finished.err
    assert [one["score"] for one in records(workdir)] == [100.0, 0.0]


def test_any_answer_of_a_question_is_enough_and_all_of_a_chain_are_wanted(cli, workdir, prepared):
    file = prepared("vt", 3000)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["answer"] = ", ".join(rows[1]["outputs"][:2])
    (workdir / "script.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = cli("task=vt", "length=3000", *ORACLE, "backend.script=script.jsonl")
    assert finished.status == 0, finished.err
    assert [one["score"] for one in records(workdir)] == [100.0, pytest.approx(40)]


def outside(workdir):
    """Files beside the results, the samples and the cache, which the first run fills."""
    cache = Path(os.environ["RULER_BENCH_CACHE"])
    return {
        one
        for one in workdir.parent.rglob("*")
        if not {"results", "ready"} & {*one.relative_to(workdir.parent).parts}
        and cache not in (one, *one.parents)
    }


def test_nothing_in_ready_made_samples_leaves_the_run_folder(cli, workdir, prepared, monkeypatch):
    """Names of files, and the languages of whatever may read them later."""
    planted = "planted-5821"
    monkeypatch.setenv("PLANTED", planted)
    file = prepared("niah_single_1", 1024)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    hostile = "../../made/${oc.env:PLANTED}<script>x</script>"
    for row in rows:
        row["input"] = f"{hostile} {row['input']}"
        row["outputs"] = [hostile, "=HYPERLINK(1)"]
        row |= {"task": "../../made", "file": "/tmp/made", "name": hostile}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = outside(workdir)
    finished = cli("task=niah_single_1", "length=1024", *ORACLE, "data=ready")
    assert finished.status == 0, finished.err
    assert outside(workdir) == before
    written = [one for one in workdir.glob("results/**/*") if one.is_file()]
    assert not any("made" in one.name for one in written)
    texts = {one.name: one.read_text() for one in written}
    assert not any(planted in one for one in (*texts.values(), finished.out, finished.err))
    assert not any("<script>x" in text for name, text in texts.items() if name.endswith(".html"))
    assert not any("\n=HYPER" in text for name, text in texts.items() if name.endswith(".csv"))


def test_ready_made_samples_are_run(cli, workdir, prepared):
    file = prepared("niah_single_1", 1024)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        del row["ordinal"]
        row["input"] = row["input"].replace("The grass is green.", "The grass is blue.")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = cli("task=niah_single_1", "length=1024", *ORACLE, "data=ready")
    assert finished.status == 0, finished.err
    asked = records(workdir)
    assert [one["expected"] for one in asked] == [row["outputs"] for row in rows]
    assert [one["score"] for one in asked] == [100.0, 100.0]
    (manifest,) = workdir.glob("results/*/manifest.json")
    assert json.loads(manifest.read_text())["config"]["data"] == "ready"
    again = cli("task=niah_single_1", "length=1024", *ORACLE, "data=ready")
    assert again.status == 0, again.err
    file.write_text("".join(json.dumps({**row, "length": 1000}) + "\n" for row in rows))
    changed = cli("task=niah_single_1", "length=1024", *ORACLE, "data=ready")
    assert changed.status == 2
    assert "data" in changed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["task=qa_1", "qa_data=none"], "qa_data=none: is no folder"),
        (["task=qa_1"], "squad.json is missing: python scripts/fetch_data.py squad"),
        (["task=vt", "data=none"], "data=none: is no folder"),
        (["task=vt", "data=."], "data=.: has no vt/validation.jsonl"),
        (["task=qa_2", f"qa_data={QA}", "num_samples=41"], "has 40 questions, fewer than the 41"),
        (
            ["task=qa_2", f"qa_data={QA}", "length=1024"],
            "length=1024 is too small for qa_2: the least length",
        ),
        (["task=vt", "length=90"], "length=90 is too small for vt: the least length"),
        (["task=fwe", "length=149"], "length=149 is too small for fwe: the least length"),
    ],
)
def test_what_cannot_be_made_is_one_line(cli, workdir, arguments, message):
    for entry, more in ((prepare.main, ["out=samples.jsonl"]), (None, ORACLE[:2])):
        options = {} if entry is None else {"entry": entry}
        finished = cli("num_samples=2", *arguments, *more, **options)
        assert finished.status == 2
        assert message in finished.err
        assert len(finished.err.splitlines()) == 1, finished.err


def test_arms_of_other_data_are_refused_with_ready_made_ones(cli, workdir, prepared):
    prepared("niah_single_1", 1024)
    finished = cli("task=niah_single_1", "length=1024", *ORACLE, "data=ready",
                   "arms=[persistent,length_mix]")  # fmt: skip
    assert finished.status == 2
    assert "data=ready: the arms aged and length_mix ask" in finished.err
