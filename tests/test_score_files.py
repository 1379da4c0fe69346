"""Prediction files scored from the command line, against a plain reading of RULER's rules."""

import csv
import json
import random
import subprocess
import sys

import pytest

from ruler_bench.config import config_dir
from ruler_bench.score import cell_score, score
from ruler_bench.score_files import main
from ruler_bench.suites import task_names

QA = ("qa_1", "qa_2")


def reading(task, rows):
    """Score rows as the reference's evaluate.py and string_match rules say, in plain steps."""
    total = 0.0
    for row in rows:
        shown = "".join("\n" if letter < " " else letter for letter in row["pred"].strip()).strip()
        hits = [reference.lower() in shown.lower() for reference in row["outputs"]]
        total += any(hits) if task in QA else sum(hits) / len(hits)
    return round(total / len(rows) * 100, 2)


def row(pred, outputs, index=0):
    return {
        "index": index,
        "pred": pred,
        "input": "A question? The answer is",
        "outputs": outputs,
        "others": {},
        "truncation": -1,
        "length": 4000,
    }


# Control characters, case, empty predictions, several references, references within references.
TRICKY = [
    row("1234567", ["1234567"]),
    row(" \x00\x01 1234567 \x1f", ["1234567"]),
    row("123\x004567", ["1234567"]),
    row("123\t4567 \r\n1234567", ["1234567"]),
    row("the NORMANS", ["the Normans", "Normans", "France"]),
    row("Normans", ["the Normans", "Normans", "France"]),
    row("", ["x"]),
    row("\x00 \n\t", ["x"]),
    row("İstanbul ǅ STRASSE ﬁ", ["istanbul", "ǆ", "straße", "FI"]),
    row("a\u2028b\x7f\x85c", ["a\u2028b", "\x7f", "c"]),
    row("one, two", ["one", "two", "three", "four", "one"]),
    row("91234567.", ["1234567", "91234567"]),
    row("anything", [""]),
]


def write(path, rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def run_score(cli):
    """Call `python -m ruler_bench.score` in an empty folder."""
    return lambda *arguments: cli(*map(str, arguments), entry=main)


def scores(finished):
    lines = finished.out.splitlines()[2:]
    return {line.split()[0]: line.split()[2] for line in lines if ".jsonl" in line}


@pytest.mark.parametrize("task", ["niah_multikey_1", "vt", "cwe", "qa_1", "qa_2"])
def test_tricky_predictions_score_as_the_reference_has_them(run_score, workdir, task):
    finished = run_score(write(workdir / f"{task}.jsonl", TRICKY))
    assert finished.status == 0, finished.err
    assert scores(finished) == {task: f"{reading(task, TRICKY):.2f}"}
    assert finished.out.splitlines()[2].split()[3] == "2"  # nulls
    for one in TRICKY:  # and each for itself
        metric = "part" if task in QA else "all"
        assert round(score(metric, one["pred"], one["outputs"]), 2) == reading(task, [one])


def test_any_reference_is_enough_in_qa_where_lm_eval_takes_the_mean(run_score, workdir):
    rows = [row("Normans", ["the Normans", "Normans", "France"])]
    path = write(workdir / "qa_1.jsonl", rows)
    assert scores(run_score(path)) == {"qa_1": "100.00"}
    assert scores(run_score(path, "--task", "niah_single_1")) == {"niah_single_1": "33.33"}


def test_a_name_that_says_another_task_is_told(run_score, workdir):
    path = write(workdir / "niah_single_1-0.jsonl", [row("x", ["x"])])
    (line,) = run_score(path, "--task", "vt").err.splitlines()
    assert line == (
        f"note: {path}: its name says niah_single_1; it is scored by the rule of vt, "
        "as --task asks."
    )
    assert run_score(path, "--task", "niah_single_1").err == ""
    assert run_score(write(workdir / "answers.jsonl", [row("x", ["x"])]), "--task", "vt").err == ""


def test_random_predictions_round_as_the_reference_does(run_score, workdir):
    draw = random.Random(5)
    for task in ("niah_single_1", "qa_2"):
        for _ in range(20):
            rows = [
                row(
                    "".join(draw.choices("aAbB\x01 ", k=4)),
                    draw.choices("ab", k=draw.randint(1, 3)),
                )
                for _ in range(draw.randint(1, 60))
            ]
            finished = run_score(write(workdir / f"{task}.jsonl", rows))
            assert scores(finished) == {task: f"{reading(task, rows):.2f}"}


def test_a_runs_own_predictions_give_the_runs_own_score(cli, run_score, workdir):
    finished = cli(
        *("backend=oracle", "device=cpu", "length=1024", "num_samples=3", "fresh=inprocess"),
        *("backend.wrong=[1]", "task=niah_multivalue", "out=here"),
    )
    assert finished.status == 0, finished.err
    with (workdir / "here" / "summary.csv").open(newline="") as file:
        (told,) = csv.DictReader(file)
    path = workdir / "here" / "predictions" / "niah_multivalue.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    expected = f"{reading('niah_multivalue', rows):.2f}"
    assert scores(run_score(path, "--out", "out")) == {"niah_multivalue": expected}
    assert f"{float(told['score']):.2f}" == expected == "66.67"
    name = "summary-niah_multivalue.csv"
    assert (workdir / "out" / name).read_bytes() == (path.parent / name).read_bytes()


def test_chunks_count_together_and_a_folder_has_its_means(run_score, workdir):
    parts = [
        write(workdir / "a" / "qa_1-0.jsonl", [row("x", ["x"])]),
        write(workdir / "a" / "qa_1-1.jsonl", [row("x", ["y"]), row("x", ["y"])]),
        write(workdir / "a" / "qa_2.jsonl", [row("x", ["x"])]),
        write(workdir / "b" / "qa_2.jsonl", [row("x", ["y"])]),
    ]
    finished = run_score(*parts)
    assert finished.status == 0, finished.err
    assert [line.split()[:3] for line in finished.out.splitlines()[2:5]] == [
        ["qa_1", "3", "33.33"],
        ["qa_2", "1", "100.00"],
        ["qa_2", "1", "0.00"],
    ]
    assert finished.out.splitlines()[5:] == [f"{workdir / 'a'}: qa 66.66"]
    assert "qa_2 is there twice" in run_score(*parts, "--out", "out").err
    *_, mean, summary = run_score(*parts[:3], "--out", "out").out.splitlines()
    assert (mean, summary) == ("all files: qa 66.66", "Summary: out/summary.csv")
    assert (workdir / "out" / "summary.csv").read_text() == (
        "0,1,2\nTasks,qa_1,qa_2\nScore,33.33,100.0\nNulls,0/3,0/1\n"
    )


def test_files_of_all_thirteen_tasks_have_their_mean(run_score, workdir):
    files = [
        write(workdir / task / f"{task}.jsonl", [row("x", ["y" if task in QA else "x"])])
        for task in task_names(config_dir())
    ]
    last = run_score(*files).out.splitlines()[-1]
    assert last == "all files: retrieval 100.00, aggregation 100.00, qa 0.00, mean of 13 84.62"
    assert "mean of 13" not in run_score(*files[1:]).out


def test_text_in_place_of_a_list_is_one_reference_and_said(run_score, workdir):
    finished = run_score(write(workdir / "vt.jsonl", [row("xb", "abx")]))
    assert scores(finished) == {"vt": "0.00"}
    assert "outputs is text in some lines and counts as one reference" in finished.err
    alone = {key: one for key, one in row("ab", []).items() if key != "outputs"}
    assert scores(run_score(write(workdir / "vt.jsonl", [{**alone, "output": "ab"}]))) == {
        "vt": "100.00"
    }
    for wrong in (
        lambda: score("all", "a", "abc"),
        lambda: cell_score("all", "ab", [["a"], ["b"]]),
    ):
        with pytest.raises(ValueError, match="list"):
            wrong()


def test_no_reference_in_the_first_line_scores_0_as_in_the_reference(run_score, workdir):
    path = write(workdir / "vt.jsonl", [row("x", [None]), row("x", ["x"])])
    assert scores(run_score(path)) == {"vt": "0.00"}


BAD = {
    "answers.jsonl": ([row("x", ["x"])], "its name tells no task", "Say it with --task."),
    "qa_3.jsonl": ([row("x", ["x"])], "Did you mean 'qa_", "Say it with --task."),
    "vt.jsonl": ([row("x", ["x"]), row(["x"], ["x"])], "vt.jsonl line 2: pred is a list", "text"),
    "cwe.jsonl": ([row(None, ["x"])], "line 1: pred is null", "must be text"),
    "fwe.jsonl": ([row("x", [])], "line 1: outputs is empty", "at least one"),
    "qa_1.jsonl": ([row("x", [5])], "line 1: outputs holds a number", "list of text"),
    "qa_2.jsonl": ([{"pred": "x"}], "line 1: has no outputs", "expected"),
    "niah_single_1.jsonl": ([{"outputs": ["x"], "input": ""}], "line 1: has no pred", "input"),
    "niah_single_2.jsonl": ([], "holds no answers", ""),
    "niah_single_3.jsonl": ([row("x", {"a": 1})], "outputs is an object", "list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_said_in_one_line(run_score, workdir, name):
    rows, *parts = BAD[name]
    finished = run_score(write(workdir / name, rows))
    assert finished.status == 2
    assert len(finished.err.splitlines()) == 1
    for part in parts:
        assert part in finished.err


def test_bad_arguments_are_said_in_one_line(run_score, workdir):
    path = write(workdir / "vt.jsonl", [row("x", ["x"])])
    chunk = write(workdir / "vt-0.jsonl", [row("x", ["x"])])
    for arguments, message in {
        (): "the following arguments are required: FILE",
        ("nothing.jsonl",): "nothing.jsonl: there is no such file",
        (str(workdir),): "is a folder; name its files",
        (path, "--task", "vx"): "unknown task 'vx'",
        (path, path): "is given twice",
        (chunk, chunk): "is given twice",
        (path, "--out", path): "cannot be written",
        (path, "--oot", "x"): "unrecognized arguments: --oot x",
    }.items():
        finished = run_score(*arguments)
        assert finished.status == 2, arguments
        assert message in finished.err
        assert len(finished.err.splitlines()) == 1


def test_it_runs_as_a_module(workdir):
    path = write(workdir / "vt.jsonl", [row("x", ["x"])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "ruler_bench.score", path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "vt" in done.stdout
    assert done.stderr == ""
