"""Launchers: what is refused, one GPU a job, and a job whose process ends early."""

import multiprocessing
import os
import signal
import time

import pytest
from omegaconf import OmegaConf

from ruler_bench import launch, launch_packages
from ruler_bench.errors import UsageError
from ruler_bench.launch_gpus import named, one_job_per_gpu, one_of

SWEEP = ("-m", "seed=1,2", "backend=oracle", "device=cpu", "length=1024", "num_samples=1")


@pytest.fixture
def joblib():
    """Skip without Hydra's launcher for joblib."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra joblib")


@pytest.mark.parametrize(
    ("name", "extra"),
    [("gpus", "joblib"), ("slurm", "slurm"), ("submitit_local", "slurm"), ("ray_gpus", "ray")],
)
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(
    cli, workdir, monkeypatch, name, extra
):
    monkeypatch.setattr(launch_packages, "_is_installed", lambda _: False)
    finished = cli(*SWEEP, f"hydra/launcher={name}")
    assert finished.status == 2
    (line,) = finished.err.splitlines()
    assert f'pip install "ruler-bench[{extra}]"' in line
    assert not (workdir / "results").exists()


REFUSED = {
    "hydra/launcher=slrum": "unknown hydra/launcher 'slrum'. Did you mean 'slurm'?",
    "hydra/launcher=jobib": "Did you mean 'joblib'?",
    "hydra/launcher=": "has no value",
    "hydra.launcher.n_jbos=2": "unknown key hydra.launcher.n_jbos. Did you mean "
    "hydra.launcher.n_jobs? Allowed: hydra.launcher.backend,",
}


either_way = pytest.mark.parametrize("more", [(), ("dry_run=true",)], ids=["run", "dry run"])


@either_way
@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_launcher_or_key_is_one_line_with_the_nearest(cli, joblib, line, more):
    finished = cli(*SWEEP, "hydra/launcher=gpus", line, *more)
    assert finished.status == 2
    (words,) = finished.err.splitlines()
    assert words.startswith("error: ")
    assert REFUSED[line] in words


DROPPED = {
    ("hydra.launcher.n_jobs=2",): "hydra/launcher=basic runs one job after the other and has no "
    "settings; add hydra/launcher=gpus",
    ("hydra/launcher=basic", "hydra.launcher.n_jobs=2"): "add hydra/launcher=gpus",
    ("hydra.sweep.dir=elsewhere",): "hydra.sweep.dir=elsewhere: a sweep keeps",
    ("hydra.sweep.subdir=x", "hydra/launcher=gpus"): "out=DIR says where results go",
    ("hydra/launcher=gpus", "hydra.launcher.n_jobs=0"): "a number of jobs at a time from 1, or -1",
}


@either_way
@pytest.mark.parametrize("line", DROPPED)
def test_a_setting_that_a_sweep_cannot_take_is_refused_with_what_to_do(
    cli, workdir, joblib, line, more
):
    finished = cli(*SWEEP, *line, *more)
    assert finished.status == 2
    (words,) = finished.err.splitlines()
    assert DROPPED[line] in words
    assert not list(workdir.iterdir())


def test_a_launcher_without_a_sweep_is_refused(cli):
    finished = cli(*SWEEP[2:], "hydra/launcher=gpus")
    assert finished.status == 2
    assert "hydra/launcher=gpus: is for sweeps; add -m" in finished.err


@pytest.mark.parametrize(
    ("count", "visible", "names"),
    [
        (0, None, ()),
        (0, "", ()),
        (2, None, ("0", "1")),
        (2, "3, 5", ("3", "5")),
        (1, "GPU-8f2a,-1,4", ("GPU-8f2a",)),  # CUDA stops at what it does not know
    ],
)
def test_gpus_are_named_as_cuda_reads_them(count, visible, names):
    assert named(count, visible) == names


def test_as_many_jobs_as_gpus(monkeypatch):
    monkeypatch.setattr("ruler_bench.launch_gpus.visible_gpus", lambda: ("3", "5", "7"))
    assert one_job_per_gpu() == 3
    assert OmegaConf.create({"n": "${one_job_per_gpu:}"}).n == 3
    monkeypatch.setattr("ruler_bench.launch_gpus.visible_gpus", tuple)
    assert one_job_per_gpu() == 2


def _hold(gpus, folder, log, seconds):
    with one_of(gpus, folder) as gpu, log.open("a") as file:
        file.write(f"{gpu} takes\n")
        file.flush()
        time.sleep(seconds)
        file.write(f"{gpu} gives\n")


def test_jobs_at_once_never_share_a_gpu_and_a_killed_one_gives_its_back(tmp_path):
    context = multiprocessing.get_context("fork")
    folder, log = tmp_path / "locks", tmp_path / "log"
    killed = context.Process(target=_hold, args=(["GPU-a"], folder, tmp_path / "first", 60))
    killed.start()
    while not (tmp_path / "first").exists():
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    many = [
        context.Process(target=_hold, args=(["GPU-a", "GPU-b"], folder, log, 0.02))
        for _ in range(6)
    ]
    for one in many:
        one.start()
    for one in many:
        one.join()
    held = set()
    for line in log.read_text().splitlines():
        gpu, verb = line.split()
        assert (gpu in held) == (verb == "gives")
        (held.add if verb == "takes" else held.remove)(gpu)
    assert not held
    assert {one.exitcode for one in many} == {0}


def test_what_an_exit_status_says(tmp_path):
    assert launch._problem(0, tmp_path) is None
    assert "signal SIGKILL" in launch._problem(-signal.SIGKILL, tmp_path)
    assert "ended with status 3" in launch._problem(3, tmp_path)


def test_the_last_launcher_counts():
    line = ["-m", "hydra/launcher=gpus", "hydra/launcher=nothing"]
    assert launch_packages.launcher_name(line) == "nothing"
    launch_packages.check_launcher(line, is_sweep=True)  # Hydra says which there are
    launch_packages.check_launcher([], is_sweep=False)
    with pytest.raises(UsageError, match="add -m"):
        launch_packages.check_launcher(line, is_sweep=False)
