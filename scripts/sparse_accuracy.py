r"""Measure what sparse prefill costs in answers: policies, tasks and lengths beside each other.

    python scripts/sparse_accuracy.py --out DIR                    # the probe, all of it
    python scripts/sparse_accuracy.py --out DIR --prepare-only     # only samples, on all cores
    python scripts/sparse_accuracy.py --out DIR --render           # only the table, anew
    python scripts/sparse_accuracy.py --out DIR --model smollm2 --lengths 2048 \
        --tasks niah_single_1 --policies full xattention:stride=8,threshold=0.9

A policy is NAME or NAME:key=value,key=value. Each has a process of its own, in which one engine
answers all tasks and lengths, through the harness: DIR/runs/POLICY/LENGTH/TASK is a run folder as
`python -m ruler_bench` makes it, and the same command goes on where an earlier one stopped. DIR has
table.md (scores, intervals, density, speed, and each answer that a policy lost, with the depth of
its needle), accuracy.csv (one line a cell), manifest.json and a log of each process.
Exit status: 0 all is measured, 1 something is not, 2 a setting is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `scripts` and `ruler_bench`, wherever this is run from

from backends.base import ConfigurationError  # noqa: E402
from ruler_bench.command_line import GOES_ON, USAGE_ERROR, status_of, terminable  # noqa: E402
from ruler_bench.device import device_name  # noqa: E402
from ruler_bench.errors import UsageError, one_line, unknown_name  # noqa: E402
from ruler_bench.manifest import now, versions  # noqa: E402
from ruler_bench.model_files import model_folder  # noqa: E402
from ruler_bench.sharing import portable_path  # noqa: E402
from ruler_bench.values import default_threads, resolve_device  # noqa: E402
from scripts.accuracy.cells import NOTE, Plan, run_of, run_policy  # noqa: E402
from scripts.accuracy.policies import DEFAULT, FULL, PolicySpec, parse_policies, parse_policy  # noqa: E402
from scripts.accuracy.table import Result, render, write_csv  # noqa: E402
from scripts.check.questions import TASKS, Batch, Source, prepare  # noqa: E402

DONE, FAILED = 0, 1
TABLE, CSV, MANIFEST, LOGS = "table.md", "accuracy.csv", "manifest.json", "logs"
LENGTHS = (4096, 32768)
NAMED_MODELS = ("probe", "smollm2")
PROCESSES = {"cpu": 1, "cuda": 4}
LOOK_AGAIN_SECONDS = 0.2
SCRIPT = Path(__file__).resolve()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or render; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    with terminable():
        return status_of(lambda: run(options, words), GOES_ON)


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Do what the options ask for and return the exit status.

    Args:
        options: the command line.
        words: the same as typed, for the manifest and the workers.

    Raises:
        ConfigurationError: an option is wrong, or of a worker the engine cannot be built.
    """
    if options.render:
        return write(options.out)
    check_options(options)
    if options.prepare_only:
        return prepare_data(options)
    plan = plan_of(options)
    if options.worker is not None:
        run_policy(plan, parse_policy(options.worker))
        return DONE
    begin(options, plan, words)
    try:
        wrong = run_all(options, plan, words)
    finally:
        status = write(options.out)
    return USAGE_ERROR if wrong else status


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR")
    add("--prepare-only", action="store_true", help="make the samples, no engine")
    add("--render", action="store_true", help="write the table anew, no engine")
    add("--policies", nargs="+", default=list(DEFAULT), metavar="POLICY")
    add("--tasks", nargs="+", default=list(TASKS), metavar="TASK")
    add("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="TOKENS")
    add("--samples", type=int, default=25, help="of each cell")
    add("--model", default="probe", help="probe, smollm2 (its extra), or a folder")
    add("--seed", type=int, default=42, help="of the samples")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--threads", type=int, default=1, help="CPU threads of an engine")
    add("--processes", type=int, help="policies at a time (default: 1, on CUDA 4)")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for every run")
    add("--worker", metavar="POLICY", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def check_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be meant, and fill in what depends on the device.

    Raises:
        UsageError: names the option.
    """
    options.specs = parse_policies(options.policies)
    for task in options.tasks:
        if task not in TASKS:
            raise unknown_name("task", task, TASKS)
    for name in ("tasks", "lengths"):
        values = getattr(options, name)
        if len(set(values)) != len(values):
            raise UsageError(f"--{name}: names one twice.")
    for name in ("samples", "threads", "processes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: must be at least 1.")
    if min(options.lengths) < 1:
        raise UsageError(f"--lengths {min(options.lengths)}: must be at least 1.")
    options.device = resolve_device("cpu" if options.prepare_only else options.device)
    if options.processes is None:
        kind = options.device.partition(":")[0]
        options.processes = default_threads() + 1 if options.prepare_only else PROCESSES[kind]


def model_overrides(name: str) -> tuple[str, ...]:
    """Return what chooses a model."""
    if name in NAMED_MODELS:
        return (f"model={name}",)
    return ("model=local", f"model.path='{Path(name)}'")


def plan_of(options: argparse.Namespace) -> Plan:
    """Return what the options ask for."""
    return Plan(
        folder=options.out,
        tasks=tuple(options.tasks),
        lengths=tuple(options.lengths),
        samples=options.samples,
        overrides=(
            *model_overrides(options.model),
            f"seed={options.seed}",
            f"device={options.device}",
            f"threads={options.threads}",
            *options.set,
        ),
    )


def prepare_data(options: argparse.Namespace) -> int:
    """Make every sample that the options need."""
    plan = plan_of(options)
    cell = plan.cell(PolicySpec(FULL, ()), plan.lengths[0], plan.tasks[0])
    source = Source(model_folder(cell.model_path).resolve(), options.seed)
    batches = [Batch(task, length, options.samples) for length, task in plan.places()]
    prepare(source, batches, options.processes)
    print(f"{options.samples * len(batches)} samples are prepared", file=sys.stderr)
    return DONE


# --- the manifest -------------------------------------------------------------------------------


def begin(options: argparse.Namespace, plan: Plan, words: Sequence[str]) -> None:
    """Note in the manifest what is compared now, beside what was before, and by what command.

    Raises:
        UsageError: the folder holds something else.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    others = sorted(one.name for one in options.out.iterdir())
    if others and MANIFEST not in others:
        raise UsageError(
            f"--out {options.out}: holds files that are not of this script ({others[0]}); name an "
            "empty or new folder."
        )
    manifest = read_manifest(options.out) if others else {"commands": []}
    asked = {
        "policies": [one.title for one in options.specs],
        "tasks": list(plan.tasks),
        "lengths": list(plan.lengths),
    }
    for key, values in asked.items():
        manifest[key] = list(dict.fromkeys([*manifest.get(key, []), *values]))
    shown = ["DIR" if one == str(options.out) else portable_path(one) for one in words]
    manifest["commands"].append(
        {
            "started": now(),
            "command": " ".join(["python", "scripts/sparse_accuracy.py", *shown]),
            "model": options.model if options.model in NAMED_MODELS else "a folder",
            "device": device_name(options.device),
            "versions": versions(),
            "processes": options.processes,
            **asked,
        }
    )
    text = json.dumps(manifest, indent=2) + "\n"
    (options.out / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    try:
        found: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{folder}: has no {MANIFEST}; name a folder made by --out.") from error
    except ValueError as error:
        raise UsageError(f"{folder / MANIFEST} is damaged ({error}).") from error
    return found


# --- processes ----------------------------------------------------------------------------------


def run_all(options: argparse.Namespace, plan: Plan, words: Sequence[str]) -> bool:
    """Run the policies, so many at a time; returns whether the settings of one were wrong."""
    if options.processes == 1:
        return _run_here(options, plan)
    (options.out / LOGS).mkdir(exist_ok=True)
    waiting, wrong = list(options.specs), False
    running: list[_Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < options.processes:
                running.append(_Worker(options.out, waiting.pop(0), words))
            for worker in [one for one in running if one.process.poll() is not None]:
                running.remove(worker)
                wrong |= worker.report() == USAGE_ERROR
            time.sleep(LOOK_AGAIN_SECONDS)
    finally:
        for worker in running:
            worker.process.terminate()
        for worker in running:
            worker.process.wait()
    return wrong


def _run_here(options: argparse.Namespace, plan: Plan) -> bool:
    wrong = False
    for spec in options.specs:
        try:
            run_policy(plan, spec)
        except ConfigurationError as error:
            print(f"error: {spec.title}: {one_line(error)}", file=sys.stderr)
            wrong = True
    return wrong


class _Worker:
    """A process that runs one policy."""

    def __init__(self, folder: Path, spec: PolicySpec, words: Sequence[str]) -> None:
        self._spec, self._started = spec, time.perf_counter()
        self._log = folder / LOGS / f"{spec.folder}.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *words, "--worker", spec.title],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def report(self) -> int:
        """Print how it ended, and return its status."""
        status = self.process.wait()
        seconds = time.perf_counter() - self._started
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = f": {lines[-1]}" if status and lines else ""
        print(
            f"{self._spec.title}: ended with status {status} after {seconds:.1f} s{why}",
            file=sys.stderr,
            flush=True,
        )
        return status


# --- the table ----------------------------------------------------------------------------------


def write(folder: Path) -> int:
    """Write table and CSV from what is on disk; returns whether all is there and without errors."""
    manifest = read_manifest(folder)
    plan = Plan(folder, tuple(manifest["tasks"]), tuple(manifest["lengths"]), 1, ())
    specs = [parse_policy(one) for one in manifest["policies"]]
    full = PolicySpec(FULL, ())
    asked, results, missing = manifest["commands"][-1], [], 0
    for length, task in plan.places():
        reference = run_of(plan, full, length, task) if full in specs else None
        for spec in specs:
            run = run_of(plan, spec, length, task)
            if run is not None and run.records:
                results.append(Result(spec.title, run, reference))
            elif (
                spec.title in asked["policies"]
                and length in asked["lengths"]
                and task in asked["tasks"]
            ):
                missing += 1
    if not results:
        print(f"{folder}: nothing is measured yet", file=sys.stderr)
        return FAILED
    text = render(results, facts_of(manifest))
    (folder / TABLE).write_text(text, encoding="utf-8")
    cells = [one.figures() for one in results]
    write_csv(folder / CSV, cells)
    print(text)
    if missing:
        print(f"{missing} cells are not measured", file=sys.stderr)
    return FAILED if missing or any(one.errors for one in cells) else DONE


def facts_of(manifest: dict[str, Any]) -> dict[str, list[str]]:
    """Return what the table says of the whole."""
    last = manifest["commands"][-1]
    shown = ", ".join(f"{name} {value}" for name, value in last["versions"].items())
    processes = last["processes"]
    shared = "one policy at a time" if processes == 1 else f"{processes} policies share the device"
    return {
        "heading": [
            f"model {last['model']}; {last['device']}; {shown}",
            f"{NOTE}",
            f"times are those of a device on which {shared}" if processes > 1 else shared,
        ],
        "commands": [f"{one['started']}  {one['command']}" for one in manifest["commands"]],
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
