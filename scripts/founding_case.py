"""Replay the case that the leak lab grew out of: an engine that keeps old state, and a sound one.

    python scripts/founding_case.py --out DIR --device cuda             # all, and the report
    python scripts/founding_case.py --out DIR --part before_2_slots     # a part of it
    python scripts/founding_case.py --out DIR --render                  # only the report, anew

Three tasks are asked of one engine with a seeded fault (before) and of the same engine without it
(after), with 2 and with 4 slots: twice in a row, and of fresh engines in processes of their own.
Fresh engines cost a start each, so they are asked what may be a leak (an answer that is wrong or
that the two warm runs give differently) and some samples drawn by the seed; `--fresh all` asks
every sample.

Each of a part's runs is one command of `python -m ruler_bench`, with its folder in DIR/runs. Parts
may run at the same time, also in commands of their own; the same command goes on where an earlier
one stopped. founding_case.md, .jsonl and .json, and lists of wrong answers as CSV, are made from
the folders. Exit status: 0 every engine with the fault leaks and every one without it is ok,
1 something is otherwise or missing, 2 a setting is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `scripts` and `ruler_bench`, wherever this is run from

from backends.base import ConfigurationError  # noqa: E402
from backends.engine.faults import FAULTS  # noqa: E402
from ruler_bench.errors import UsageError, unknown_name  # noqa: E402
from ruler_bench.model_files import model_folder  # noqa: E402
from ruler_bench.values import resolve_device  # noqa: E402
from scripts.check.questions import Batch, Source, load_task, prepare  # noqa: E402
from scripts.founding import report  # noqa: E402
from scripts.founding.jobs import PARTS, Job, Plan, StoppedJob, jobs_of, keep_plan, run  # noqa: E402
from scripts.founding.launch import Launch, Processes  # noqa: E402

AS_IT_MUST, NOT_AS_IT_MUST, WRONG, INTERRUPTED = 0, 1, 2, 130
TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3")
"""Those of which figures of both one engine and fresh ones were published."""
FAULT = "tracked_by_id"
"""Of the three faults that stand for causes of the case the one with errors most like its own: some
of the answers, more of them with many keys. Of 16 of niah_single_1 at 2048 tokens on a CPU
cpu_kv_read_past_length spoils none, this one 4 and decode_buffer_kept 13."""
BLOCKS = 8
"""In a context, by default: 4096 tokens each at 32768."""
AT_ONCE = {"cpu": 1, "cuda": 12}
WORKERS = {"cpu": 1, "cuda": 2}


def main(arguments: Sequence[str] | None = None, launch: Launch | None = None) -> int:
    options = parse(arguments)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        check_options(options)
        if not options.render:
            ask(options, launch or Processes())
        return AS_IT_MUST if report.write(options.out) else NOT_AS_IT_MUST
    except KeyboardInterrupt:
        print("Interrupted: the same command goes on.", file=sys.stderr)
        return INTERRUPTED
    except StoppedJob as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_AS_IT_MUST
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--part", nargs="+", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--render", action="store_true", help="write the report anew, run nothing")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--length", type=int, default=32768, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=100, help="of each task")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK")
    parser.add_argument("--seed", type=int, default=42, help="of the samples")
    parser.add_argument("--fault", default=FAULT, help="of the engine before")
    parser.add_argument("--block-tokens", type=int, help="default: an eighth of the length")
    parser.add_argument("--chunk-tokens", type=int, help="default: a block")
    parser.add_argument("--fresh", choices=("suspects", "all"), default="suspects")
    parser.add_argument("--audit", type=int, default=10, help="samples for fresh engines besides")
    parser.add_argument("--at-once", type=int, help="runs at a time (default: 1, on CUDA 12)")
    parser.add_argument("--workers", type=int, help="fresh engines of a run (default: 1, CUDA 2)")
    return parser.parse_args(arguments)


def check_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be meant, and fill in what follows from other options.

    Raises:
        UsageError: names the option.
    """
    if options.render:
        return
    options.device = resolve_device(options.device)
    kind = options.device.partition(":")[0]
    for name, value in (
        ("block_tokens", max(options.length // BLOCKS, 1)),
        ("at_once", AT_ONCE[kind]),
        ("workers", WORKERS[kind]),
    ):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.chunk_tokens is None:
        options.chunk_tokens = options.block_tokens
    for name in ("length", "samples", "block_tokens", "chunk_tokens", "at_once", "workers"):
        if getattr(options, name) < 1:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} {getattr(options, name)}: must be 1 or more.")
    if not 0 <= options.audit <= options.samples:
        raise UsageError(
            f"--audit {options.audit}: must be 0 to {options.samples}, the number of samples."
        )
    for part in options.part:
        if part not in PARTS:
            raise unknown_name("part", part, PARTS)
    for task in options.tasks:
        load_task(task)
    if options.fault not in FAULTS:
        raise unknown_name("fault", options.fault, FAULTS)


def ask(options: argparse.Namespace, launch: Launch) -> None:
    """Ask what is missing of the chosen parts.

    Raises:
        UsageError, ConfigurationError: a setting is wrong, or the folder holds another case.
        StoppedJob: a run ended without its answers.
    """
    plan = Plan(
        device=options.device,
        length=options.length,
        samples=options.samples,
        tasks=tuple(options.tasks),
        seed=options.seed,
        fault=options.fault,
        block_tokens=options.block_tokens,
        chunk_tokens=options.chunk_tokens,
        fresh=options.fresh,
        audit=options.audit,
    )
    keep_plan(options.out, plan)
    batches = [Batch(task, plan.length, plan.samples) for task in plan.tasks]
    source = Source(model_folder("package:probe").resolve(), plan.seed)
    prepare(source, batches, min(len(batches), os.cpu_count() or 1, options.at_once))
    jobs = [job for part in options.part for job in jobs_of(plan, part, options.out)]
    run(jobs, options.at_once, options.workers, launch, _say)


def _say(job: Job, seconds: float) -> None:
    print(f"{job.part} {report.sentence_of(job)} ({seconds:.0f} s)", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
