"""`python -m ruler_bench.show`: everything about one index, and commands that do what they say."""

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruler_bench.leak.rebuild import read_run
from ruler_bench.records import read_records, to_line
from ruler_bench.show import command, main, marked, show

ORACLE = ("backend=oracle", "length=1024", "num_samples=3")


@pytest.fixture
def asked(cli, workdir):
    """Run the oracle, which is wrong at index 1 and fails at 2; return its folder."""
    done = cli(*ORACLE, "backend.wrong=[1]", "backend.fail=[2]", "arms=[persistent,fresh]",
               "fresh=inprocess", "out=run")  # fmt: skip
    assert (workdir / "run").is_dir(), done.err
    return workdir / "run"


def printed(folder, index):
    return "\n".join(show(read_run(folder), index))


def test_all_about_an_index_and_its_command_asks_it_again(asked, cli, workdir):
    text = printed(asked, 1)
    record = next(one for one in read_records(asked / "records.jsonl") if one.ordinal == 1)
    for said in (
        "Index 1 of ",
        f"Expected: {record.expected[0]}",
        f"sha256 {record.prompt_sha256[:16]}",
        "Needle at character ",
        f"is: {record.expected[0]}.",
        "persistent: wrong, score 0",
        "position 1, after index 0, which answered",
        "nothing was asked of this engine before",
        "^",
        "first token",
        "arms=[persistent]",
        "arms=[fresh]",
    ):
        assert said in text
    assert "error: " in printed(asked, 2)
    assert "is not in predictions/" in printed(asked, 2)
    again = next(line for line in text.splitlines() if line.startswith("  persistent: python"))
    words = shlex.split(again.partition(": ")[2])
    assert words[:3] == ["python", "-m", "ruler_bench"]
    done = cli(*words[3:])
    assert done.status == 0, done.err
    (other,) = read_records(workdir / "again_persistent_1" / "records.jsonl")
    assert (other.ordinal, other.prompt_sha256) == (1, record.prompt_sha256)
    assert other.output == record.output


def test_what_came_before_is_asked_before(asked):
    text = printed(asked, 1)
    assert "'indices=[0-1]'" in text
    assert "'indices=[0-1]'" not in printed(asked, 0)


def test_the_command_of_a_sweep_is_that_of_its_run(asked):
    run = read_run(asked)
    run.manifest["command"] = [
        "python", "-m", "ruler_bench", "-m", "backend=oracle,gpu_only", "seed=1,42",
        "backend.wrong=[1],[2]", "length=1024,2048", "out=x", "+backend.more=a", "suite=niah",
    ]  # fmt: skip
    assert command(run, "fresh", "1") == (
        "python -m ruler_bench backend=oracle seed=42 'backend.wrong=[1]' +backend.more=a "
        "task=niah_single_1 length=1024 'arms=[fresh]' fresh.on=all 'indices=[1]' out=again_fresh_1"
    )


def test_the_command_has_each_key_once_and_nothing_that_changes_no_answer(asked):
    run = read_run(asked)
    run.manifest["command"] = [
        "python", "-m", "ruler_bench", "backend=gpu_only", "backend.wrong=[0]", "progress=none",
        "+backend.more=a", "backend=oracle", "seed=1", "seed=42", "++backend.more=b",
    ]  # fmt: skip
    assert command(run, "persistent", "1") == (
        "python -m ruler_bench 'backend.wrong=[0]' backend=oracle seed=42 ++backend.more=b "
        "task=niah_single_1 length=1024 'arms=[persistent]' 'indices=[1]' out=again_persistent_1"
    )


def test_an_output_cannot_speak_to_the_terminal(asked):
    path = asked / "records.jsonl"
    lines = []
    for record in read_records(path):
        values = json.loads(to_line(record)) | {"output": "\x1b[2J\x07\nno", "error": None}
        lines.append(json.dumps(values) + "\n")
    path.write_text("".join(lines))
    text = printed(asked, 1)
    assert "\x1b" not in text
    assert "\\x1b[2J\\x07\\nno" in text


@given(st.text(max_size=40), st.text(max_size=40))
def test_marks_stand_below_what_differs(output, against):
    text, marks = marked(output, against)
    assert len(marks) <= len(text) + 1
    assert set(marks) <= {" ", "^", "_"}
    assert (marks == "") == (output.strip() == against.strip())


@pytest.mark.parametrize(
    ("output", "against", "text", "marks"),
    [
        (" 1234567.", "1234567", "1234567.", "       ^"),
        ("1234x67", "1234567", "1234x67", "    ^"),
        ("", "1234567", "", "_"),
    ],
)
def test_marks(output, against, text, marks):
    assert marked(output, against) == (text, marks)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "99"], "has no index 99; it has 3 from 0 to 2, the nearest is 2"),
        (["run", "-1"], "is no index"),
        (["run", "x"], "is no index"),
        (["run"], "usage: python -m ruler_bench.show RUN INDEX"),
        (["nothing", "1"], "is no run folder"),
    ],
)
def test_wrong_usage_is_one_line(asked, capsys, arguments, said):
    capsys.readouterr()
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
