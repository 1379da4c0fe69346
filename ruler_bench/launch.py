"""One job of a sweep under a launcher (joblib, submitit, Ray), in a process of its own.

The launcher's process only watches it. So a job that is killed, or that runs out of time, costs the
others nothing and leaves a status like any other; and each has the GPU, the environment and the
modules that a command of its own would have.

    launcher's process -- stdin: what to run --> python -m ruler_bench.launch
                                             <-- status.json and output.log in the job's folder
The pipe stays open: when the launcher's process is gone, the job is interrupted.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, open_dict, read_write

from ruler_bench.cli import (
    SAMPLE_ERRORS,
    STATUS_FILE,
    JobResult,
    job_folder,
    read_status,
    run_job_of_sweep,
    write_status,
)
from ruler_bench.command_line import INTERRUPTED
from ruler_bench.errors import one_line
from ruler_bench.launch_gpus import VISIBLE, one_of, visible_gpus

BASIC = "BasicLauncher"
LOCAL_LAUNCHERS = ("JoblibLauncher", "LocalLauncher")
"""Classes of those that share out the machine that the sweep was started on."""
LIMITS = frozenset(
    f"{one}_NUM_THREADS" for one in ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMBA", "NUMEXPR")
)
OUTPUT = "output.log"
GPU_LOCKS = ".gpus"
LOOK_AGAIN_SECONDS = 1.0
END_SECONDS = 30
"""How long an interrupted job may take to close its engine and write its table."""


@dataclass(frozen=True)
class SweepTask:
    """What Hydra calls for each job of a sweep, in whatever process its launcher chose.

    Attributes:
        arguments: the command line without its launcher, as manifests name it.
        gpus: of the machine that the sweep was started on.
        limits: of threads, as the environment has them there.
    """

    arguments: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type[SweepTask], tuple[Any, ...]]:
        """Look around on the way to another process: launchers change the environment there."""
        limits = self.limits or {key: os.environ[key] for key in LIMITS & os.environ.keys()}
        return SweepTask, (self.arguments, self.gpus or visible_gpus(), limits)

    def __call__(self, config: DictConfig) -> None:
        """Run one job and leave its status in its folder.

        Raises:
            KeyboardInterrupt: the sweep was interrupted.
        """
        if launcher_class() != BASIC:
            with self._environment(config) as environment:
                run_apart(self.arguments, config, environment)
        elif _run_here(config).status == INTERRUPTED:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _environment(self, config: DictConfig) -> Iterator[dict[str, str]]:
        """Own a GPU where this machine's are shared out and the job takes any."""
        if launcher_class() not in LOCAL_LAUNCHERS:
            yield dict(os.environ)
            return
        # joblib parts the cores among jobs; `threads` decides here, as without it.
        environment = {key: value for key, value in os.environ.items() if key not in LIMITS}
        environment |= self.limits
        if not self.gpus or config.device not in ("auto", "cuda"):
            yield environment
            return
        with one_of(self.gpus, job_folder().parent / GPU_LOCKS) as gpu:
            yield environment | {VISIBLE: gpu}


def launcher_class() -> str:
    """Return the class of the launcher that runs this job."""
    return str(HydraConfig.get().launcher["_target_"]).rpartition(".")[2]


def _run_here(config: DictConfig) -> JobResult:
    from ruler_bench.job import job  # noqa: PLC0415 (it imports this)

    return run_job_of_sweep(job, config)


# --- the launcher's process ---------------------------------------------------------------------


def run_apart(arguments: Sequence[str], config: DictConfig, environment: Mapping[str, str]) -> None:
    """Run a job in a process of its own and see to it that it leaves a status.

    Args:
        arguments: the command line of the sweep.
        config: of the job.
        environment: of its process.

    Raises:
        KeyboardInterrupt, SystemExit: the launcher is to end; the job was ended before.
    """
    folder = job_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATUS_FILE).unlink(missing_ok=True)  # of the same job, if it was queued again
    log, handed = folder / OUTPUT, _handed(arguments, config)
    where = f" on GPU {environment[VISIBLE]}" if environment.get(VISIBLE) else ""
    _say(f"starts{where}; it prints into {_from_here(log)}")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ruler_bench.launch"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C is passed on by this process, once
        )
    problem, died = None, False
    try:
        _hand_over(process, handed)
        problem = _problem(_wait(process), log)
        died = problem is not None
    except Exception as error:  # such as submitit's, when the time is up
        problem = f"stopped by its launcher: {one_line(error)} The same command goes on."
    finally:
        _end(process)
    result = read_status(folder)
    if result is None or problem is not None:
        result = result or JobResult(SAMPLE_ERRORS)
        if died:
            result.status = SAMPLE_ERRORS
        result.errors.append(problem or f"it ended without a result; see {_from_here(log)}")
        write_status(result)
    _say(f"status {result.status}" + "".join(f"; {one}" for one in result.errors))


def _say(text: str) -> None:
    job = HydraConfig.get()
    print(
        f"job {job.job.num} ({' '.join(job.overrides.task)}): {text}", file=sys.stderr, flush=True
    )


def _from_here(path: Path) -> str:
    return os.path.relpath(path)


def _handed(arguments: Sequence[str], config: DictConfig) -> bytes:
    """Return what `main` reads: where modules are, then what to run."""
    hydra_config = copy.deepcopy(HydraConfig.instance().cfg)
    with read_write(hydra_config.hydra), open_dict(hydra_config.hydra):
        for plugin in ("launcher", "sweeper"):  # of classes that the job's process does not know
            hydra_config.hydra[plugin] = {"_target_": hydra_config.hydra[plugin]["_target_"]}
    return pickle.dumps(sys.path) + pickle.dumps((list(arguments), config, hydra_config))


def _hand_over(process: subprocess.Popen[bytes], handed: bytes) -> None:
    """Send what `main` reads; the pipe is left open."""
    if process.stdin is None:
        raise AssertionError("it was started with a pipe")
    with contextlib.suppress(BrokenPipeError):  # it died: its exit status says how
        process.stdin.write(handed)
        process.stdin.flush()


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of a job, and end this process where its own parent is gone."""
    parent = os.getppid()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_AGAIN_SECONDS)
        if launcher_class() in LOCAL_LAUNCHERS and os.getppid() != parent:
            _end(process)
            os._exit(1)  # there is nobody to tell


def _problem(code: int, log: Path) -> str | None:
    """Return what an exit status says that status.json does not."""
    if code == 0:
        return None
    name = str(code)
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
    kind = "ended by signal" if code < 0 else "ended with status"
    return f"its process was {kind} {name}; see {_from_here(log)}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job that still runs, with time to close its engine."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


# --- the job's process --------------------------------------------------------------------------


def main() -> int:
    """Run the job that standard input names; its status is in its folder."""
    sys.path[:] = pickle.load(sys.stdin.buffer)
    arguments, config, hydra_config = pickle.load(sys.stdin.buffer)
    sys.argv = ["ruler_bench", *arguments]
    setup_globals()
    HydraConfig.instance().set_config(hydra_config)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    _run_here(config)
    return 0


def _end_with_launcher() -> None:
    """Interrupt this process when its launcher's is gone."""
    with contextlib.suppress(OSError):
        os.read(sys.stdin.fileno(), 1)  # it blocks until the pipe is closed
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
