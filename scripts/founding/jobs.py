"""What is asked of which engine: one run of the harness for each part and task."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backends.base import ConfigurationError
from ruler_bench.errors import UsageError
from ruler_bench.journal import read_run
from ruler_bench.leak.join import FRESH, FRESH_AGAIN, PERSISTENT, PERSISTENT_AGAIN, REFERENCE
from ruler_bench.manifest import differences
from scripts.founding.launch import Launch

PLAN = "plan.json"
BEFORE, AFTER = "before", "after"
SLOTS = (2, 4)
PARTS = tuple(f"{state}_{slots}_slots" for state in (BEFORE, AFTER) for slots in SLOTS)
ARMS = (PERSISTENT, PERSISTENT_AGAIN, FRESH, FRESH_AGAIN)
WRONG_SETTING = 2
ANSWERED = (0, 1, 3, 4, 5)
"""Exit statuses of a run that has come to its end, whatever it found."""


class StoppedJob(Exception):  # noqa: N818 (what happened to it)
    """A run ended before its answers were there."""


@dataclass(frozen=True)
class Plan:
    """What all runs have in common.

    Attributes:
        device: of the engines.
        length: tokens of a sample.
        samples: of each task.
        tasks: by name.
        seed: of the samples.
        fault: of the engine before.
        block_tokens, chunk_tokens: of the engine, before and after.
        fresh: "all" or "suspects", which samples fresh engines are asked.
        audit: with suspects, how many more, drawn by the seed.
    """

    device: str
    length: int
    samples: int
    tasks: tuple[str, ...]
    seed: int
    fault: str
    block_tokens: int
    chunk_tokens: int
    fresh: str
    audit: int


@dataclass(frozen=True)
class Job:
    """One run of the harness.

    Attributes:
        part: one of PARTS.
        task: by name.
        samples: that it asks.
        folder: of the run.
        overrides: what it is asked, the folder and the workers apart.
    """

    part: str
    task: str
    samples: int
    folder: Path
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return what to call it."""
        return f"{self.part} {self.task}"


def state_of(part: str) -> str:
    """Return whether a part is before or after."""
    return part.partition("_")[0]


def slots_of(part: str) -> int:
    """Return the slots of a part's engines."""
    return int(part.split("_")[1])


def jobs_of(plan: Plan, part: str, out: Path) -> Iterator[Job]:
    """Yield the runs of a part."""
    for task in plan.tasks:
        overrides = (
            f"task={task}",
            f"length={plan.length}",
            f"num_samples={plan.samples}",
            f"seed={plan.seed}",
            f"device={plan.device}",
            "threads=1",
            "backend=offload",
            f"backend.num_gpu_blocks={slots_of(part)}",
            f"backend.kvcache_block_size={plan.block_tokens}",
            f"backend.chunk_tokens={plan.chunk_tokens}",
            *([f"backend.fault={plan.fault}"] if state_of(part) == BEFORE else []),
            *_arms(plan, part),
            f"fresh.on={plan.fresh}",
            *([f"fresh.audit={plan.audit}"] if plan.fresh == "suspects" else []),
        )
        yield Job(part, task, plan.samples, out / "runs" / part / task, overrides)


def _arms(plan: Plan, part: str) -> list[str]:
    """Return the arms of a part: the engine after is also held against one without offload, which
    must have its bits, so that an answer that is wrong in both is known to be the model's.
    """
    if state_of(part) == BEFORE:
        return [f"arms=[{','.join(ARMS)}]"]
    return [
        f"arms=[{','.join((*ARMS, REFERENCE))}]",
        "backend@reference=gpu_only",
        f"reference.chunk_tokens={plan.chunk_tokens}",
        f"reference.attend_tokens={plan.block_tokens}",
    ]


def keep_plan(out: Path, plan: Plan) -> None:
    """Write the plan down, or see that the folder holds the same one.

    Raises:
        UsageError: it holds another, or cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        path = out / PLAN
        if not path.exists():
            # Parts that start at the same time write the same, each whole or not at all.
            part = out / f".{os.getpid()}.part"
            part.write_text(json.dumps(asdict(plan), indent=2) + "\n", encoding="utf-8")
            part.replace(path)
    except OSError as error:
        raise UsageError(
            f"--out {out}: cannot be written ({error.strerror}); name another folder."
        ) from error
    found = differences(asdict(read_plan(out)), asdict(plan))
    if found:
        raise UsageError(
            f"--out {out}: was begun with other settings ({'; '.join(found)}); name another folder."
        )


def read_plan(out: Path) -> Plan:
    """Return the plan of a folder.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    path = out / PLAN
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Plan(**{**found, "tasks": tuple(found["tasks"])})
    except FileNotFoundError as error:
        raise UsageError(f"--out {out}: nothing was asked there yet.") from error
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise UsageError(f"{path} is damaged ({error}); name another folder.") from error


def run(
    jobs: Sequence[Job],
    at_once: int,
    workers: int,
    launch: Launch,
    done: Callable[[Job, float], None],
) -> None:
    """Run jobs, at most so many at a time; what has its answers already takes a moment.

    Args:
        jobs: to run.
        at_once: how many of them at a time.
        workers: fresh engines of each at a time.
        launch: runs the harness.
        done: is told of each that ends well, and its seconds.

    Raises:
        ConfigurationError: a setting was refused; the others were ended.
        StoppedJob: some did not come to their end; the others did.
        KeyboardInterrupt: all were ended.
    """
    stopped: list[str] = []
    with ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(_timed, one, workers, launch): one for one in jobs}
        try:
            for future in as_completed(futures):
                stopped += _taken(futures[future], future, done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            launch.end()
            raise
    if stopped:
        raise StoppedJob(f"{'; '.join(stopped)}. The same command goes on.")


def _timed(job: Job, workers: int, launch: Launch) -> tuple[int, float]:
    started = time.perf_counter()
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    anew = ["overwrite=true"] if is_torn(job) else []
    arguments = [*job.overrides, f"workers={workers}", *anew, f"out={job.folder}"]
    status = launch(arguments, log_of(job))
    return status, time.perf_counter() - started


def is_torn(job: Job) -> bool:
    """Tell whether an arm that one engine must serve was begun and not finished by that engine.

    Another that went on in its place would have served other requests before, so that two runs of
    one stream would differ without a race. Fresh engines are asked later and lose nothing.
    """
    found = read_run(job.folder) if (job.folder / "records.jsonl").exists() else None
    if found is None:
        return False
    for arm in (PERSISTENT, PERSISTENT_AGAIN):
        answers = [one for one in found.records if one.arm == arm]
        lives = {one.life for one in answers}
        if len(lives) > 1 or 0 < len({one.ordinal for one in answers}) < job.samples:
            return True
    return False


def log_of(job: Job) -> Path:
    """Return the file that holds what the run's command printed."""
    return job.folder.with_name(f"{job.task}.log")


def _taken(
    job: Job, future: Future[tuple[int, float]], done: Callable[[Job, float], None]
) -> list[str]:
    """Return why a job did not come to its end, if it did not."""
    status, seconds = future.result()
    if status in ANSWERED and (job.folder / "records.jsonl").exists():
        done(job, seconds)
        return []
    last = _last_line(log_of(job))
    if status == WRONG_SETTING:
        raise ConfigurationError(f"{job.name}: {last.removeprefix('error: ')}")
    return [f"{job.name}: its command ended with status {status} ({last}), see {log_of(job)}"]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
