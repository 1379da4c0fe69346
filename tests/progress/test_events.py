"""progress=json: a program can follow a run by what docs/progress.md says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "progress.md"
ORACLE = ("backend=oracle", "device=cpu", "length=1024", "progress=json")
HEAD = {"version", "event", "time", "run"}


@pytest.fixture(scope="module")
def documented():
    """Fields of each event, as the documentation lists them."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (`.+`) \|$", DOCS.read_text(), re.MULTILINE)
    return {event: HEAD | set(re.findall(r"`(\w+)`", fields)) for event, fields in rows}


@pytest.fixture
def follow(cli):
    """Run in this process; return the events and what else there was."""

    def call(*arguments):
        finished = cli(*ORACLE, *arguments)
        found = [json.loads(line) for line in finished.err.splitlines()]
        return found, finished

    return call


def of(events, name):
    return [one for one in events if one["event"] == name]


def test_a_process_writes_nothing_but_events_to_stderr(workdir, documented):
    command = [sys.executable, "-m", "ruler_bench", *ORACLE, "num_samples=4", "backend.wrong=[1]"]
    done = subprocess.run(
        [*command, "arms=[persistent,fresh]", "out=here"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 3, 4, 5), done.stderr
    assert "{" not in done.stdout
    events = [json.loads(line) for line in done.stderr.splitlines()]
    for one in events:
        assert set(one) == documented[one["event"]]
        assert (one["version"], one["run"]) == (1, "here")
    times = [one["time"] for one in events]
    assert times == sorted(times)
    (start,), (end,) = of(events, "start"), of(events, "end")
    assert (start["done"], start["total"], start["arms"]) == (0, 8, ["persistent", "fresh"])
    assert (end["done"], end["total"], end["status"]) == (8, 8, done.returncode)
    samples = of(events, "sample")
    assert [one["done"] for one in samples] == list(range(1, 9))
    records = [json.loads(line) for line in (workdir / "here" / "records.jsonl").open()]
    for one, record in zip(samples, records, strict=True):
        for key in ("arm", "ordinal", "step", "score", "correct"):
            assert one[key] == record[key]
    assert [one["right"] for one in samples] == [1, 1, 2, 3, 1, 2, 3, 4]
    assert [one["arm"] for one in of(events, "arm")] == ["persistent", "fresh"]
    assert [one["arm"] for one in of(events, "engine")] == ["persistent", *["fresh"] * 4]
    assert samples[-1]["left_seconds"] == 0


def test_what_is_recorded_counts_as_done(follow):
    follow("num_samples=2")
    events, finished = follow("num_samples=5", "arms=[persistent,repeat]")
    assert finished.status == 0
    (start,) = of(events, "start")
    assert (start["done"], start["total"]) == (2, 5 + 15)
    persistent, repeat = of(events, "arm")
    assert (persistent["arm_done"], persistent["arm_total"], persistent["right"]) == (2, 5, 2)
    assert (repeat["arm_done"], repeat["arm_total"], repeat["done"]) == (0, 15, 5)
    assert [one["done"] for one in of(events, "sample")] == list(range(3, 21))
    events, finished = follow("num_samples=5", "arms=[persistent,repeat]")
    assert [one["event"] for one in events if one["event"] != "message"] == ["start", "end"]
    assert all((one["done"], one["total"]) == (20, 20) for one in events if "total" in one)


def test_errors_are_counted_apart_and_lines_of_others_are_messages(follow):
    asked = ("num_samples=3", "backend.fail=[1]", "arms=[persistent,persistent_again]")
    events, finished = follow(*asked)
    assert finished.status == 1
    samples = of(events, "sample")
    assert [one["errors"] for one in samples] == [0, 1, 1] * 2
    assert [one["scored"] for one in samples] == [1, 1, 2] * 2
    assert "fail" in samples[1]["error"]
    events, _ = follow(*asked)
    assert any("recorded requests again" in one["text"] for one in of(events, "message"))


def test_suspects_lower_the_total(follow):
    events, _ = follow("num_samples=4", "arms=[persistent,fresh]", "fresh.on=suspects")
    assert of(events, "start")[0]["total"] == 8
    assert (of(events, "end")[0]["done"], of(events, "end")[0]["total"]) == (4, 4)


def test_a_command_of_several_cells_says_how_many_are_done(follow, documented):
    events, _ = follow("length=[512,1024]", "num_samples=1")
    found = [(one["done"], one["total"], one["unit"]) for one in of(events, "sweep")]
    assert found == [(0, 2, "cell"), (1, 2, "cell"), (2, 2, "cell")]
    assert all(set(one) == documented["sweep"] for one in of(events, "sweep"))


def test_samples_that_a_suite_makes_ahead_are_no_run(follow):
    tasks = ("suite=niah", "suite.tasks=[niah_single_1,niah_multikey_1]")
    events, finished = follow(*tasks, "num_samples=1", "out=here")
    assert finished.status == 0
    assert [one["event"] for one in events if one["event"] in ("sweep", "start", "end")] == [
        *["sweep", "start", "end"] * 2,
        "sweep",
    ]
    assert [one["run"] for one in of(events, "start")] == [
        "here/niah_single_1",
        "here/niah_multikey_1",
    ]
    assert {one["run"] for one in of(events, "sweep")} == {None}


def test_a_run_that_is_refused_says_why(follow):
    events, finished = follow("backend.wrong=5")
    (end,) = of(events, "end")
    assert (end["status"], finished.status) == (2, 2)
    assert "backend.wrong" in end["error"]


def test_a_run_that_is_interrupted_ends_with_the_status_of_the_command(cli, monkeypatch):
    """Before its first sample is asked, too."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ruler_bench.bench.check_answer_prefix", interrupted)
    finished = cli(*ORACLE)
    *lines, said = finished.err.splitlines()
    (end,) = of(map(json.loads, lines), "end")
    assert (end["status"], end["error"], finished.status) == (130, None, 130)
    assert said.startswith("Interrupted")
