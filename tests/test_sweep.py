"""Sweeps with real joblib processes, held against the same sweep without a launcher."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ruler_bench.cli import JobResult
from ruler_bench.config import config_dir
from ruler_bench.run_suite import run_cells
from ruler_bench.sweep import failed_lines, planned_jobs, with_missing, with_overrides

ORACLE = ("backend=oracle", "device=cpu", "num_samples=2")
CELLS = ("length=64,1024,2048", *ORACLE)
GPUS = ("-m", "hydra/launcher=gpus", "hydra.launcher.n_jobs=2")
TIMES = ("seconds", "time")


@pytest.fixture(scope="module")
def joblib():
    """Skip without Hydra's launcher for joblib; returns what ends its processes.

    They keep the folder that they were started in, so that no test may leave its own to the next.
    """
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra joblib")
    from joblib.externals.loky import get_reusable_executor

    return lambda: get_reusable_executor().shutdown(wait=True)


def records(root):
    """Return the records of every cell by folder, without times."""
    return {
        path.parent.name: [
            {key: value for key, value in json.loads(line).items() if not key.endswith(TIMES)}
            for line in path.read_text().splitlines()
        ]
        for path in root.glob("results/niah*/records.jsonl")
    }


def joined(root):
    """Return the table of the last sweep, without times."""
    path = max(root.glob("results/.sweeps/*/summary.csv"))
    with path.open() as file:
        return [
            {key: value for key, value in row.items() if not any(one in key for one in TIMES)}
            for row in csv.DictReader(file)
        ]


@pytest.fixture(scope="module")
def both(joblib, cli_in, tmp_path_factory):
    """The same three jobs without a launcher and under joblib; one does not fit its length."""
    roots = {}
    for name, launcher in (("basic", ("-m",)), ("joblib", GPUS)):
        roots[name] = tmp_path_factory.mktemp(name)
        roots[f"{name} printed"] = cli_in(roots[name], *launcher, *CELLS)
        joblib()
    return roots


def test_records_and_table_are_those_of_a_sweep_without_a_launcher(both):
    found = records(both["joblib"])
    assert found == records(both["basic"])
    assert len(found) == 2
    assert all(len(one) == 2 for one in found.values())
    assert joined(both["joblib"]) == joined(both["basic"])


@pytest.mark.parametrize("name", ["basic", "joblib"])
def test_failed_jobs_stop_no_others_and_are_in_the_joined_report(both, name):
    printed = both[f"{name} printed"]
    assert printed.status == 2
    logs = [one.read_text() for one in both[name].glob("results/.sweeps/*/*/output.log")]
    assert "Traceback" not in "".join((printed.out, printed.err, *logs))
    (report,) = both[name].glob("results/.sweeps/*/report.md")
    failed, _, results = report.read_text().partition("## Results")
    assert failed.count("is too small for") == 1
    assert "length=64 backend=oracle" in failed
    assert results.count("niah_single_1") >= 2
    assert "is too small for" in report.with_name("report.html").read_text()


def test_manifests_name_the_command_of_the_sweep(both):
    for path in both["joblib"].glob("results/niah*/manifest.json"):
        command = json.loads(path.read_text())["command"]
        assert command[:4] == ["python", "-m", "ruler_bench", "-m"]
        assert CELLS[0] in command
        assert "launcher" not in "".join(command)  # it changes no result


def test_without_the_launcher_nothing_is_asked_again(both, cli_in):
    root = both["joblib"]
    before = records(root)
    finished = cli_in(root, "-m", *CELLS)
    assert finished.status == 2, finished.err
    assert records(root) == before
    for path in root.glob("results/niah*/manifest.json"):
        assert len(json.loads(path.read_text())["lives"]) == 1


ENGINE = """
import os, time
from backends.oracle import Oracle

class Seeing(Oracle):
    def __init__(self, threads):
        super().__init__()

    def generate(self, request):
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
        with open("seen", "a") as file:
            print(gpu, "takes", file=file, flush=True)
            time.sleep(0.3)
            print(gpu, "gives", file=file, flush=True)
        with open("threads", "a") as file:
            print(os.environ.get("MKL_NUM_THREADS"), file=file)
        return super().generate(request)
"""


def test_each_job_sees_one_gpu_and_shares_it_with_none(joblib, cli, workdir, monkeypatch):
    """Two jobs at a time, two made-up GPUs; both prepare the same data at once.

    That more jobs than GPUs wait for one is tested where GPUs are shared out.
    """
    (workdir / "seeing.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(workdir)
    monkeypatch.setenv("RULER_BENCH_CACHE", str(workdir / "cache"))
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    for module in ("launch", "launch_gpus"):
        monkeypatch.setattr(f"ruler_bench.{module}.visible_gpus", lambda: ("GPU-a", "GPU-b"))
    finished = cli(
        *("-m", "hydra/launcher=gpus", "hydra.launcher.n_jobs=2"),
        *("backend=custom", "backend._target_=seeing.Seeing", "length=1024", "num_samples=1"),
        *("seed=7", "threads=1,2", "fresh=inprocess"),
    )
    joblib()
    assert finished.status == 0, finished.err
    held, seen = set(), []
    for line in (workdir / "seen").read_text().splitlines():
        gpu, verb = line.split()
        assert (gpu in held) == (verb == "gives")
        (held.add if verb == "takes" else held.remove)(gpu)
        seen.append(gpu)
    assert set(seen) == {"GPU-a", "GPU-b"}
    assert set((workdir / "threads").read_text().split()) == {"None"}  # joblib would set it
    assert len(seen) == 4
    assert len({str(one) for one in records(workdir).values()}) == 1
    logs = "".join(path.read_text() for path in workdir.glob("results/.sweeps/*/*/output.log"))
    assert "damaged" not in logs


def left_of(mark):
    """Return the processes that have this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_ctrl_c_leaves_no_process_and_the_same_jobs_go_on(joblib, cli, workdir):
    jobs = ("seed=1,2", *ORACLE, "length=1024", "backend.delay_seconds=2")
    command = [sys.executable, "-m", "ruler_bench", *GPUS, *jobs]
    mark = f"RULER_BENCH_TEST_SESSION={workdir}"
    environment = os.environ | dict([mark.split("=", 1)])
    sweep = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    folders = workdir / "results"
    wait_for(lambda: any(path.stat().st_size for path in folders.glob("niah*/records.jsonl")))
    os.killpg(sweep.pid, signal.SIGINT)
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 130
    assert "interrupted; the same command goes on" in out
    assert "All runs of the sweep" in out  # with what was recorded by then
    wait_for(lambda: not left_of(mark))
    kept = {path: path.read_bytes() for path in folders.glob("niah*/records.jsonl")}
    asked = [record for one in records(workdir).values() for record in one]
    assert 1 <= len(asked) < 4
    assert not [record["error"] for record in asked if record["error"] is not None]
    finished = cli("-m", *jobs)  # the launcher, which has no part in it, takes long to start
    assert finished.status == 0, finished.err
    assert all(path.read_bytes().startswith(one) for path, one in kept.items())
    assert [len(one) for one in records(workdir).values()] == [2, 2]
    assert all(row["engines"] in ("1", "2") for row in joined(workdir))


def test_jobs_are_planned_in_hydras_order():
    line = ["-m", "seed=1,2", "hydra/launcher=gpus", "task=a,b", "length=[1,2]", "--cfg", "+x=3"]
    assert planned_jobs(line) == [
        [f"seed={seed}", f"task={task}", "length=[1,2]", "+x=3"] for seed in (1, 2) for task in "ab"
    ]


def test_globs_and_ranges_are_planned_as_hydra_takes_them():
    assert planned_jobs(["model=glob(*)", "seed=range(1,3)", "seed=interval(1,2)"]) == [
        [f"model={name}", "seed=interval(1,2)"]
        for name in sorted(path.stem for path in (config_dir() / "model").glob("*.yaml"))
    ]
    assert planned_jobs(["seed=range(1,3)"]) == [["seed=1"], ["seed=2"]]


def test_settings_of_ours_stand_where_hydra_takes_them():
    assert with_overrides(["seed=1,2", "-m", "a=2"], "x=1") == ["-m", "seed=1,2", "a=2", "x=1"]
    assert with_overrides(["hydra.mode=MULTIRUN", "a=2"], "x=1") == ["-m", "a=2", "x=1"]
    assert with_overrides(["-m"], "x=1") == ["-m", "x=1"]


@pytest.mark.parametrize("line", [("seed=1,2", "-m"), ("hydra.mode=MULTIRUN", "seed=1,2")])
def test_an_error_of_our_own_is_one_jobs(cli, workdir, monkeypatch, line):
    def broken(planned, overwrite):
        if planned[0].seed == 1:
            raise ZeroDivisionError("made up")
        yield from run_cells(planned, overwrite)

    monkeypatch.setattr("ruler_bench.run_suite.run_cells", broken)
    finished = cli(*line, *ORACLE, "length=1024")
    assert finished.status == 1
    assert "All runs of the sweep" in finished.out
    assert "Did not end: seed=1 backend=oracle" in finished.out
    assert "ZeroDivisionError: made up" in finished.out.splitlines()[-1]
    assert [len(one) for one in records(workdir).values()] == [2]


def test_a_dry_run_is_told_here_whatever_the_launcher(joblib, cli, workdir):
    finished = cli(*GPUS, "seed=1,2", *ORACLE, "length=1024", "dry_run=true")
    assert finished.status == 0, finished.err
    assert finished.out.count("requests: 2 to run, 0 recorded already") == 2
    assert not list(workdir.glob("results/niah*"))


@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=gpus",)])
@pytest.mark.parametrize("more", [(), ("dry_run=true",)])
def test_the_same_job_twice_is_refused_before_anything_starts(joblib, cli, workdir, launcher, more):
    finished = cli("-m", *launcher, *ORACLE, "seed=1,2", "length=1024,2048,1024", *more)
    assert finished.status == 2
    (line,) = finished.err.splitlines()
    assert line.startswith("error: length: length=1024 is there twice")
    assert finished.out == ""
    assert not list(workdir.iterdir())


def test_an_error_that_jobs_share_is_said_once():
    results = [
        JobResult(2, errors=["no address"], overrides=["seed=1"]),
        JobResult(2, errors=["too small"], overrides=["seed=2"]),
        JobResult(2, errors=["no address"], overrides=["seed=3"]),
        JobResult(1, errors=["no address"], overrides=["seed=4"]),
    ]
    assert failed_lines(results) == [
        "Did not run: 2 jobs: no address",
        "Did not run: seed=2: too small",
        "Did not end: seed=4: no address",
    ]


def test_a_job_without_a_result_is_an_error():
    found = with_missing(
        {1: JobResult(3)}, [["seed=1"], ["seed=2"], ["seed=3"]], {2: "lost"}, "gone"
    )
    assert [one.status for one in found] == [1, 3, 1]
    assert [one.errors for one in found] == [["gone"], [], ["lost"]]
    assert found[0].overrides == ["seed=1"]
