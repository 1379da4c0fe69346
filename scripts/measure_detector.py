"""Measure how well the verdict works: faults it finds, and alarms that it raises for nothing.

    python scripts/measure_detector.py --out DIR                          # everything
    python scripts/measure_detector.py --out DIR faults                   # one part of it
    python scripts/measure_detector.py --out DIR --only stale_block_table # some faults
    python scripts/measure_detector.py --out DIR --judge                  # judge the records anew
    python scripts/measure_detector.py --out DIR --render                 # only the table, anew

faults: an engine with each seeded fault, under the settings that show it: is it found, in its
    class, and with how many samples?
clean: sound engines, the project's and transformers: any leak, race or engine fault is a false
    alarm.
noisy: sound engines with noise, many short runs; most are made in memory, some go through the
    runner.

Every answer is in DIR/runs and every row in DIR/PART/rows.jsonl before the next; the same command
goes on where an earlier one stopped. detector.md, detector.jsonl and detector.json in DIR are made
from the rows. Exit status: 0 all is as it must be, 1 a fault was missed or an alarm was false,
2 a setting is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `scripts` and `ruler_bench`, wherever this is run from

import torch  # noqa: E402

from backends.base import ConfigurationError  # noqa: E402
from backends.engine.faults import FAULTS  # noqa: E402
from backends.engine.settings import resolve_device  # noqa: E402
from ruler_bench.errors import UsageError, one_line, unknown_name  # noqa: E402
from ruler_bench.leak.join import PERSISTENT, REFERENCE  # noqa: E402
from ruler_bench.sharing import portable_path  # noqa: E402
from scripts.bench.journal import Journal, environment, read_rows  # noqa: E402
from scripts.detector import alarms, clean, faults, table  # noqa: E402

AS_IT_MUST, NOT_AS_IT_MUST, WRONG, INTERRUPTED = 0, 1, 2, 130
FAULTS_PART, CLEAN_PART, NOISY_PART = "faults", "clean", "noisy"
PARTS = (FAULTS_PART, CLEAN_PART, NOISY_PART)
Measure = Callable[[], dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        check_options(options)
        if not options.render:
            torch.set_num_threads(options.threads)
            for part in options.parts or PARTS:
                measure_part(part, options, arguments)
        return NOT_AS_IT_MUST if table.write(options.out, PARTS) else AS_IT_MUST
    except KeyboardInterrupt:
        print("Interrupted: the same command goes on.", file=sys.stderr)
        return INTERRUPTED
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", default=[], metavar="FAULT", help="only these faults")
    parser.add_argument("--judge", action="store_true", help="judge what is recorded anew")
    parser.add_argument("--render", action="store_true", help="write the table anew, run nothing")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--seed", type=int, default=42, help="of the samples")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of an engine")
    parser.add_argument("--device", default="cpu", help="of every engine but the noisy ones")
    parser.add_argument("--samples", type=int, default=20, help="of each fault, at most 20")
    parser.add_argument("--clean-samples", type=int, default=30, help="of each engine and task")
    parser.add_argument("--tasks", nargs="+", default=list(clean.TASKS), metavar="TASK")
    parser.add_argument(
        "--engines", nargs="+", default=list(clean.ENGINES), metavar="ENGINE", help="clean ones"
    )
    parser.add_argument(
        "--reference", choices=("hf", "gpu_only"), default="hf", help="of the project's engines"
    )
    parser.add_argument("--runs", type=int, default=450, help="of noisy engines, made in memory")
    parser.add_argument("--runner-runs", type=int, default=20, help="through the runner")
    parser.add_argument("--noisy-samples", type=int, default=20, help="of each noisy engine")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="for every run of an engine"
    )
    return parser.parse_intermixed_args(arguments)


def check_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be meant.

    Raises:
        UsageError: names the option.
        ConfigurationError: there is no such device.
    """
    for what, names, allowed in (
        ("part", options.parts, PARTS),
        ("--only", options.only, tuple(FAULTS)),
        ("--engines", options.engines, tuple(clean.ENGINES)),
    ):
        for name in names:
            if name not in allowed:
                raise unknown_name(what, name, allowed)
    resolve_device(options.device)
    if options.only:
        options.parts = options.parts or [FAULTS_PART]
    for key in ("length", "threads", "samples", "clean_samples", "noisy_samples"):
        if getattr(options, key) < 1:
            raise UsageError(f"--{key.replace('_', '-')}: must be 1 or more.")
    if options.samples > faults.MOST_SAMPLES:
        raise UsageError(
            f"--samples {options.samples}: a fault must be found with {faults.MOST_SAMPLES} "
            "samples; use that or fewer."
        )


def measure_part(part: str, options: argparse.Namespace, arguments: Sequence[str] | None) -> None:
    """Measure the rows of a part that are missing, or all where they are judged anew."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    shown = ["DIR" if one == str(options.out) else portable_path(one) for one in words]
    command = ["python", "scripts/measure_detector.py", *shown]
    settings = {**settings_of(part, options), **environment(device_of(part, options))}
    folder = options.out / part
    journal = Journal(folder, settings, " ".join(command), {"load": os.getloadavg()[0]})
    for key, name, measure in rows_of(part, options):
        if journal.has(key) and not options.judge:
            continue
        row: dict[str, Any] = {"key": key, "kind": part, "name": name, "error": None}
        try:
            journal.add({**row, "figures": measure()})
        except ConfigurationError as error:
            journal.add({**row, "figures": None, "error": one_line(error)})
        except Exception as error:
            journal.add_error(traceback.format_exc())
            text = f"{type(error).__name__}: {one_line(error)}"
            journal.add({**row, "figures": None, "error": text})
        added = read_rows(folder)[key]
        print(f"{part}: {key}: {table.outcome(added)}", file=sys.stderr, flush=True)


def settings_of(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what all rows of a part have in common."""
    if part == NOISY_PART:
        return {"length": alarms.LENGTH_TOKENS}
    return {
        "length": options.length,
        "seed": options.seed,
        "threads": options.threads,
        "set": list(options.set),
        "reference": options.reference,
    }


def device_of(part: str, options: argparse.Namespace) -> torch.device:
    """Return where a part's engines run; the noisy ones, which compute nothing, on the CPU."""
    return torch.device("cpu" if part == NOISY_PART else options.device)


def rows_of(part: str, options: argparse.Namespace) -> Iterator[tuple[str, str, Measure]]:
    """Yield key, name and measure of each row of a part."""
    makers = {FAULTS_PART: fault_rows, CLEAN_PART: clean_rows, NOISY_PART: noisy_rows}
    return makers[part](options)


def plan_of(options: argparse.Namespace, samples: int) -> faults.Plan:
    return faults.Plan(
        folder=options.out / "runs",
        length=options.length,
        samples=samples,
        threads=options.threads,
        device=options.device,
        seed=options.seed,
        overrides=options.set,
        reference=options.reference,
    )


def fault_rows(options: argparse.Namespace) -> Iterator[tuple[str, str, Measure]]:
    plan = plan_of(options, options.samples)
    theirs = faults.reference(plan)
    for name in options.only or FAULTS:
        yield name, name, lambda name=name: faults.measure(name, plan, theirs)  # type: ignore[misc]


def clean_rows(options: argparse.Namespace) -> Iterator[tuple[str, str, Measure]]:
    runs = clean.Clean(plan_of(options, options.clean_samples))
    for task in options.tasks:
        for engine in options.engines:
            yield (
                f"{engine} {task}",
                engine,
                lambda engine=engine, task=task: runs.measure(engine, task),  # type: ignore[misc]
            )
        for arm in (PERSISTENT, REFERENCE) if clean.HF in options.engines else ():
            yield (
                f"{clean.OTHER} as {arm} {task}",
                f"{clean.OTHER} as {arm}",
                lambda arm=arm, task=task: runs.measure_threads(task, arm),  # type: ignore[misc]
            )


def noisy_rows(options: argparse.Namespace) -> Iterator[tuple[str, str, Measure]]:
    folder = options.out / "runs" / NOISY_PART
    memory = alarms.InMemory(options.noisy_samples, folder)
    for trial in alarms.trials(options.runs):
        yield (
            f"in memory {trial.key}",
            f"{trial.noise}, in memory",
            lambda trial=trial: alarms.of_trial(trial, memory.measure(trial)),  # type: ignore[misc]
        )
    for trial in alarms.trials(options.runner_runs, first_seed=alarms.RUNNER_SEED):
        yield (
            f"runner {trial.key}",
            f"{trial.noise}, through the runner",
            lambda trial=trial: alarms.of_trial(  # type: ignore[misc]
                trial,
                alarms.through_runner(
                    trial, options.noisy_samples, folder / trial.key.replace(" ", "_")
                ),
            ),
        )


if __name__ == "__main__":
    sys.exit(main())
