"""What a person sees: real processes on pseudo-terminals, and without one."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

ORACLE = ("backend=oracle", "device=cpu", "length=1024", "backend.delay_seconds=0.12")
NEXT_LINE = re.compile(r"\r\n|\r|\x1b\[A")


def on_terminal(columns, *arguments, stdout=None):
    """Run with standard error on a terminal of so many columns; return all it was sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "ruler_bench", *arguments],
        stdin=theirs,
        stdout=stdout or theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    sent = b""
    try:
        while part := os.read(ours, 65536):
            sent += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return process.wait(), sent.decode()


def test_a_narrow_terminal_has_a_bar_on_stderr_and_results_go_elsewhere(workdir):
    with (workdir / "table.txt").open("w") as table:
        arguments = ("task=niah_single_1", *ORACLE, "num_samples=3", "arms=[persistent,repeat]")
        status, sent = on_terminal(40, *arguments, stdout=table)
    assert status == 0, sent
    assert "persistent: 3/12 <" in sent
    assert "repeat: 12/12 <0:00, 9/9 right" in sent
    drawn, _, last = sent.rstrip().rpartition("\r")
    assert last.startswith("niah_single_1 1024 oracle: 12/12 samples in 0:0")
    assert all(len(one) < 40 for one in NEXT_LINE.split(drawn))
    table = (workdir / "table.txt").read_text()
    assert "score" in table
    assert "\r" not in table
    assert "samples in" not in table


def test_a_sweep_has_a_bar_of_its_own_above_that_of_the_run(workdir):
    tasks = "task=niah_single_1,niah_multikey_1"
    status, sent = on_terminal(100, "-m", tasks, *ORACLE, "num_samples=2")
    assert status == 0, sent
    for task, done in (("niah_single_1", 0), ("niah_multikey_1", 1)):
        of_sweep = rf"\rsweep: +{done * 50}%\|[^\r]*\| {done}/2 jobs \[[^\r]*\]\r\n"
        counts = r"2/2 \[0:0\d<0:00, 2/2 right, [^\r]*\]"
        of_run = rf"\r{task} 1024 oracle: 100%\|[^\r]*\| {counts} *\x1b\[A"
        assert re.search(of_sweep + of_run, sent), (task, sent)
        assert f"\r{task} 1024 oracle: 2/2 samples in 0:0" in sent
    after = sent[sent.index("All runs of the sweep:") :]
    assert "sweep: " not in after.replace("All runs of the sweep:", "")
    assert "right" not in after


def test_without_a_terminal_there_are_lines(cli):
    finished = cli(*ORACLE[:3], "num_samples=20", "arms=[persistent,fresh]", "fresh.engine=process")
    assert finished.status == 0
    title = "niah_single_1 1024 oracle"
    lines = finished.err.splitlines()
    assert lines[0] == f"{title} persistent: 20 samples; starts its engine"
    assert re.fullmatch(
        rf"{title} persistent: 2/20 samples, 2/2 right, \d+ a minute, 2/40 of all arms, \S+ left",
        lines[1],
    )
    assert f"{title} fresh: 20 samples; an engine for each" in lines
    assert re.fullmatch(rf"{title}: 40/40 samples in \S+", lines[-1])
    assert len(lines) < 2 * (1 + 10) + 5
    assert "\r" not in finished.err
    assert "samples in" not in finished.out


def test_none_is_silent(cli):
    finished = cli(*ORACLE[:3], "num_samples=1", "progress=none")
    assert finished.status == 0
    assert finished.err == ""


def test_a_wrong_value_names_the_nearest(cli):
    finished = cli(*ORACLE[:3], "progress=jsonl")
    assert finished.status == 2
    said = "unknown progress 'jsonl'. Did you mean 'json'? Allowed: auto, bar, json, lines, none."
    assert said in finished.err


def test_a_debugger_has_the_terminal_for_itself(cli, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for engines, has_bar in (("process", True), ("inprocess", False)):
        asked = (*ORACLE[:3], "num_samples=1", f"fresh={engines}", f"out={engines}")
        finished = cli(*asked)
        assert finished.status == 0
        assert ("\r" in finished.err) == has_bar
        assert ("1/1 samples, 1/1 right, " in finished.err) == (not has_bar)
