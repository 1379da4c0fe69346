r"""Run the same sweep under each launcher, and hold what they leave side by side.

    pip install -e ".[joblib,slurm,ray]"
    python scripts/try_launchers.py --out DIR
    python scripts/try_launchers.py --out DIR --launchers gpus submitit_local

Four jobs: two tasks by two lengths, one of them too short for any sample, of the oracle, with one
request that fails. Each launcher runs them in a folder of its own, then once more, when nothing is
missing but that request. DIR/launchers.md has the commands, their statuses, whether records and
joined table are those of Hydra's own launcher, and what each printed.
Exit status: 0 all launchers agree, 1 one does not, 2 a launcher is unknown or not installed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `ruler_bench`, wherever this is run from

from ruler_bench.device import device_name  # noqa: E402
from ruler_bench.errors import UsageError, unknown_name  # noqa: E402
from ruler_bench.launch_packages import GROUP, PACKAGES, check_launcher  # noqa: E402
from ruler_bench.manifest import now, versions  # noqa: E402

BASIC = "basic"
LAUNCHERS = (BASIC, "gpus", "submitit_local", "ray_gpus")
SWEEP = (
    "task=niah_single_1,niah_multikey_2",
    "length=64,1024",
    "backend=oracle",
    "backend.fail=[1]",
    "device=cpu",
    "num_samples=3",
)
EXPECTED = 2
"""The status of a sweep in which a job could not start."""
REPORTED = (
    *("hydra-core", "hydra-joblib-launcher", "joblib", "hydra-submitit-launcher", "submitit"),
    *("hydra-ray-launcher", "ray"),
)
SHOWN_LINES = 45
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Try:
    """What one launcher left.

    Attributes:
        launcher: its name.
        command: as a user types it.
        status: of the command, and of the same one again.
        records: without times, by cell.
        table: the joined table without times.
        engines: how many each cell had after both.
        printed: by the first, standard error after standard output.
    """

    launcher: str
    command: list[str]
    status: tuple[int, int]
    records: dict[str, Any]
    table: list[dict[str, str]]
    engines: dict[str, int]
    printed: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every launcher and write what came of it; returns the exit status."""
    options = parse(arguments)
    try:
        check(options.launchers)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    names = list(dict.fromkeys([BASIC, *options.launchers]))
    tries = [attempt(name, options.out / name) for name in names]
    for one in tries[1:]:
        print(f"{one.launcher}: {', '.join(differences(tries[0], one)) or 'as basic'}")
    page = options.out / "launchers.md"
    page.write_text(render(tries), encoding="utf-8", newline="\n")
    print(f"Written: {page}")
    return int(any(differences(tries[0], one) for one in tries))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="an empty folder")
    parser.add_argument(
        "--launchers", nargs="+", default=list(LAUNCHERS), metavar="NAME", help="which to try"
    )
    return parser.parse_args(arguments)


def check(launchers: Sequence[str]) -> None:
    """Refuse launchers that are not there.

    Raises:
        UsageError: names what is wrong.
    """
    for name in launchers:
        if name != BASIC and name not in PACKAGES:
            raise unknown_name("launcher", name, [BASIC, *PACKAGES])
        check_launcher([f"{GROUP}={name}"], is_sweep=True)


def attempt(launcher: str, folder: Path) -> Try:
    """Run the sweep twice under one launcher, in a new folder.

    Raises:
        FileExistsError: the folder is there; results of another time would be gone on with.
    """
    folder.mkdir(parents=True)
    words = ["-m", *([f"{GROUP}={launcher}"] if launcher != BASIC else []), *SWEEP]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    status, printed = [], ""
    for number in range(2):
        finished = subprocess.run(
            [sys.executable, "-m", "ruler_bench", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        status.append(finished.returncode)
        if number == 0:
            printed = shareable(finished.stdout + finished.stderr)
            table = joined(folder)
    return Try(
        launcher=launcher,
        command=["python", "-m", "ruler_bench", *words],
        status=(status[0], status[1]),
        records=records(folder),
        table=table,
        engines=engines(folder),
        printed=printed,
    )


def shareable(text: str) -> str:
    """Return what was printed without colours and without this machine's folders."""
    text = _COLOUR.sub("", text)
    for path, name in ((sys.prefix, "VENV"), (str(ROOT), "."), (str(Path.home()), "~")):
        text = text.replace(path, name)
    return text


def _timeless(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in values.items() if "seconds" not in key and "time" not in key
    }


def records(folder: Path) -> dict[str, Any]:
    """Return the records of each cell without times."""
    return {
        path.parent.name: [
            _timeless(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()
        ]
        for path in sorted(folder.glob("results/*/records.jsonl"))
    }


def joined(folder: Path) -> list[dict[str, str]]:
    """Return the joined table of the last sweep without times; empty where there is none."""
    tables = sorted(folder.glob("results/.sweeps/*/summary.csv"))
    if not tables:
        return []
    with tables[-1].open(encoding="utf-8") as file:
        return [_timeless(row) for row in csv.DictReader(file)]


def engines(folder: Path) -> dict[str, int]:
    """Return how many engines each cell has had."""
    return {
        path.parent.name: len(json.loads(path.read_text(encoding="utf-8"))["lives"])
        for path in sorted(folder.glob("results/*/manifest.json"))
    }


def differences(basic: Try, other: Try) -> list[str]:
    """Return what a launcher left otherwise than Hydra's own, in words."""
    found = []
    if other.status[0] != EXPECTED:
        found.append(f"status {other.status[0]}, not {EXPECTED}")
    if other.status != basic.status:
        found.append("statuses differ")
    if not other.records or other.records != basic.records:
        found.append("records differ")
    if not other.table or other.table != basic.table:
        found.append("joined tables differ")
    if other.engines != basic.engines:
        found.append("numbers of engines differ")
    return found


# --- the page -----------------------------------------------------------------------------------


def render(tries: Sequence[Try]) -> str:
    """Return launchers.md."""
    packages = versions() | {name: _version(name) for name in REPORTED}
    parts = [
        "# The same sweep under every launcher",
        f"`{shlex.join(['python', 'scripts/try_launchers.py', '--out', 'DIR'])}`, {now()}, "
        f"{device_name('cpu')}; "
        + ", ".join(f"{name} {number}" for name, number in packages.items())
        + ".",
        "Four jobs, two of which are too short for any sample; in the others one request of three "
        "fails. So the status is 2, and the same command asks the failed requests again and "
        "nothing else.",
        _table(tries),
        *(_section(one) for one in tries),
    ]
    return "\n\n".join(parts) + "\n"


def _table(tries: Sequence[Try]) -> str:
    lines = [
        "| launcher | status | the same again | records | joined table | engines a cell |",
        "|---|---|---|---|---|---|",
    ]
    for one in tries:
        same = differences(tries[0], one)
        cells = [
            one.launcher,
            str(one.status[0]),
            str(one.status[1]),
            "differ"
            if "records differ" in same
            else f"{sum(map(len, one.records.values()))} equal",
            "differs" if "joined tables differ" in same else f"{len(one.table)} lines equal",
            ", ".join(map(str, one.engines.values())),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _section(one: Try) -> str:
    lines = one.printed.splitlines()
    shown = [line.rstrip() for line in lines[-SHOWN_LINES:]]
    title = "printed" if len(lines) <= SHOWN_LINES else f"the last {SHOWN_LINES} lines printed"
    command = ["```", shlex.join(one.command), "```"]
    return "\n".join([f"## {one.launcher}", *command, f"{title}:", "```", *shown, "```"])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
