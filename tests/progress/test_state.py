"""What displays say of a run, from counts and a clock that the test moves."""

import io
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from ruler_bench.progress import display_for
from ruler_bench.progress.bar import Bars, layout
from ruler_bench.progress.display import Display
from ruler_bench.progress.events import Events
from ruler_bench.progress.lines import Lines
from ruler_bench.progress.state import ANSWER, ENGINE, REPORT, SAMPLES, RunState, Tally, clock, pace
from ruler_bench.progress.stderr import lines_to

RIGHT = SimpleNamespace(correct=True, score=100.0, error=None)


def run_of(arms=("persistent", "fresh"), label="", **values):
    cell = SimpleNamespace(
        task=SimpleNamespace(name="niah_single_1"),
        length=4096,
        backend="offload",
        model="probe",
        arms=arms,
        folder="results/x",
    )
    now = time.monotonic()
    return RunState(cell, arms, label, waits_since=now, started=now, **values)


def tally_of(total, **counts):
    now = time.monotonic()
    return Tally(total, **counts, started=now, last=now)


@pytest.fixture
def now(monkeypatch):
    clock_now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock_now.seconds)
    return clock_now


def test_the_pace_of_an_arm_is_that_of_its_answers_and_the_time_left_of_all(now):
    run = run_of(total=20, done=0)
    run.arm, run.tally = "persistent", tally_of(10)
    now.seconds += 30
    run.engine_started()  # one engine: its start is not part of the pace
    assert run.left_seconds is None
    for _ in range(4):
        now.seconds += 2
        run.tally.add(RIGHT)
        run.done, run.asked = run.done + 1, run.asked + 1
    assert run.per_second == pytest.approx(0.5)
    assert run.left_seconds == pytest.approx(32)
    now.seconds += 1
    assert run.left_seconds == pytest.approx(31)
    run.arm, run.tally = "fresh", tally_of(10)
    assert run.per_second == pytest.approx(4 / 39)  # of the run, until this arm has an answer
    now.seconds += 8
    run.engine_started()
    now.seconds += 2
    run.tally.add(RIGHT)
    assert run.per_second == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "?"), (0, "0:00"), (59.6, "1:00"), (3661, "1:01:01")]
)
def test_clock(seconds, shown):
    assert clock(seconds) == shown


@pytest.mark.parametrize(
    ("per_second", "shown"),
    [(None, "? a minute"), (0.6, "36 a minute"), (1 / 120, "0.5 a minute"), (0.15, "9 a minute")],
)
def test_pace(per_second, shown):
    assert pace(per_second) == shown


@given(
    columns=st.integers(20, 240),
    counts=st.tuples(st.integers(0, 10**6), st.floats(0, 1)),
    waits_for=st.sampled_from([SAMPLES, ENGINE, ANSWER, REPORT]),
    arm=st.sampled_from([None, "persistent_again", "fresh"]),
    label=st.sampled_from(["", "+backend.x={a:1}", "seed=7"]),
)
def test_a_bar_fits_any_terminal(columns, counts, waits_for, arm, label):
    total, share = counts
    run = run_of(label=label, total=total, done=int(total * share), asked=3)
    run.arm, run.waits_for = arm, waits_for
    run.tally = tally_of(total, done=run.done, right=run.done, scored=run.done, asked=3)
    drawn = tqdm.format_meter(
        run.done, total or None, 1.0, ncols=columns, bar_format=layout(run, columns)
    )
    assert len(drawn) <= columns
    if waits_for == SAMPLES or not total:
        return
    assert f"{run.done}/{total}" in drawn
    if columns >= 200:
        assert run.title in drawn
        assert (f"{run.done}/{run.done} right" in drawn) == bool(run.done)


def test_lines_come_with_tenths_or_ten_seconds(now):
    stream = io.StringIO()
    lines, run = Lines(stream), run_of(("persistent",), total=100)
    lines.run_starts(run)
    run.arm, run.tally = "persistent", tally_of(100)
    lines.arm_starts(run)

    def answer(seconds):
        now.seconds += seconds
        run.tally.add(RIGHT)
        run.done, run.asked = run.done + 1, run.asked + 1
        lines.answered(run, RIGHT)

    for _ in range(20):  # a second each: two tenths
        answer(1)
    assert len(stream.getvalue().splitlines()) == 3
    assert "20/100 samples, 20/20 right, 60 a minute, 1:20 left" in stream.getvalue()
    answer(9)
    assert len(stream.getvalue().splitlines()) == 3
    answer(1)  # ten seconds since the last line
    assert len(stream.getvalue().splitlines()) == 4
    run.wait_for(ANSWER)
    waits = []
    for second in range(1, 200):
        now.seconds += 1
        before = stream.tell()
        lines.tick(run)
        if stream.tell() > before:
            waits.append(second)
    assert waits == [10, 30, 70, 150]
    assert "waits for an answer, 2:30" in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("mode", "stream", "is_alone", "kind"),
    [
        ("auto", Terminal(), True, Bars),
        ("auto", io.StringIO(), True, Lines),
        ("auto", Terminal(), False, Lines),
        ("bar", io.StringIO(), True, Bars),
        ("bar", Terminal(), False, Lines),
        ("json", Terminal(), False, Events),
        ("none", Terminal(), True, Display),
    ],
)
def test_which_display_a_mode_is(mode, stream, is_alone, kind, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert type(display_for(mode, stream, is_alone)) is kind


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert type(display_for("auto", Terminal())) is Lines


@pytest.mark.parametrize("kind", [Lines, Events, Bars])
def test_a_reader_that_is_gone_ends_no_run(kind, now):
    stream = Terminal()
    stream.close()
    display, run = kind(stream), run_of(total=1)
    run.arm, run.tally = "fresh", tally_of(1)
    display.message("x")
    if kind is not Bars:
        display.run_counted(run)
        display.arm_starts(run)
    display.run_ends(run, 0, None)


def test_lines_of_others_come_whole(monkeypatch):
    stream, taken = io.StringIO(), []
    monkeypatch.setattr(sys, "stderr", stream)
    with lines_to(taken.append):
        kept = sys.stderr
        print("one", "two", file=sys.stderr)
        print("half", end="", file=sys.stderr)
        assert taken == ["one two"]
        print(" whole\n\rover", end="", file=sys.stderr)
    assert taken == ["one two", "half whole", "\rover"]
    print("later", file=kept)  # as a logger does that was made meanwhile
    assert stream.getvalue() == "later\n"
    assert sys.stderr is stream
