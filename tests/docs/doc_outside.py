"""Commands of other programs than ours: pip, make, git and the shell, run for real but reduced."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from doc_held import Done, executable
from doc_pages import ROOT

MANY_PIPS = Path(__file__).parent / "many_pips.py"
NOTHING_FETCHED = ("--dry-run", "--no-index", "--no-deps", "--no-build-isolation")
"""Of `pip install`. Without isolation `-e` wants a package that pip would fetch: it is left out."""
SMALL_RUN = ("backend=oracle", "num_samples=1", "length=512")
ONE_TEST = ("-p", "no:cacheprovider", "--noconftest", "tests/test_values.py")
ONE_MODULE = ("--cache-dir", os.devnull, "--follow-imports=skip", "backends/base.py")
PROGRAMS = {
    "python": (
        'case "$2" in\n'
        f'ruler_bench) exec "{{python}}" "$@" {shlex.join(SMALL_RUN)} "out={{venv}}/demo" ;;\n'
        f'pytest) exec "{{python}}" "$@" {shlex.join(ONE_TEST)} ;;\n'
        "esac\n"
        "exit 9"
    ),
    "pip": (
        'for word; do shift; [ "$word" = -e ] || set -- "$@" "$word"; done\n'
        f'exec "{{python}}" -m pip "$@" {shlex.join(NOTHING_FETCHED)}'
    ),
    "ruff": 'exec "{bin}/ruff" "$@" --no-cache',
    "mypy": f'exec "{{bin}}/mypy" "$@" {shlex.join(ONE_MODULE)}',
}
"""Of the environment that make uses: each hands over to the real one, with less to do."""
ONLY_FROM_INDEX = 'case "$*" in *--index-url*) ;; *) exit 0 ;; esac\n'
"""Before pip, where `make setup TORCH_INDEX=URL` does the rest as `make setup` does."""


def run(command: Sequence[str], where: Path, given: str = "", **variables: str) -> Done:
    """Run a program with a text as its input; pip in it reads no settings of this machine."""
    quiet = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    found = subprocess.run(
        command,
        cwd=where,
        env={**os.environ, **quiet, **variables},
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    return Done(found.returncode, found.stdout, found.stderr)


def pips(commands: Sequence[Sequence[str]], folder: Path) -> list[Done]:
    """Have pip install without fetching or writing, or uninstall from an environment that is empty.

    `.` is the package of docs/add_a_backend.md, and with an extra this checkout. An extra that
    pyproject.toml has not is a failure: pip itself, with --no-deps, says nothing of it.
    """
    lines = "".join(f"{json.dumps(_pip(words, folder))}\n" for words in commands)
    calls = run([sys.executable, str(MANY_PIPS)], folder, lines, PYTHONPATH=str(folder))
    assert calls.status == 0, calls.err
    found = []
    for words, line in zip(commands, calls.out.splitlines(), strict=True):
        missing = [extra for one in words for extra in _unknown_extras(one)]
        status, printed = json.loads(line)
        found.append(
            Done(1, "", f"no such extra: {missing}") if missing else Done(status, "", printed)
        )
    return found


def _pip(words: Sequence[str], folder: Path) -> list[str]:
    """Return what pip is given in place of `pip WORD...`."""
    _, command, *given = words
    if command == "uninstall":
        return ["--python", str(folder / ".venv" / "bin" / "python"), command, "--yes", *given]
    wanted = [one for one in given if one != "-e"]
    wanted = [str(folder / "project") if one == "." else one for one in wanted]
    wanted = [f"{ROOT}{one[1:]}" if one.startswith(".[") else one for one in wanted]
    return [command, *NOTHING_FETCHED, *wanted]


def _unknown_extras(requirement: str) -> list[str]:
    """Return what of a requirement's extras pyproject.toml has not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, _, extras = requirement.rstrip("]").partition("[")
    if name.replace("_", "-") not in (project["name"], ".") or not extras:
        return []
    return [one for one in extras.split(",") if one not in project["optional-dependencies"]]


def make(words: Sequence[str], folder: Path) -> Done:
    """Run make in the checkout with an environment whose programs have less to do."""
    has_index = any(one.startswith("TORCH_INDEX=") for one in words)
    venv = folder / ("made_from_index" if has_index else "made")
    values = {"python": sys.executable, "bin": Path(sys.executable).parent, "venv": venv}
    for name, text in PROGRAMS.items():
        before = ONLY_FROM_INDEX if has_index and name == "pip" else ""
        executable(venv / "bin" / name, before + _filled(text, values))
    variables = [f"VENV={venv}", "TEST_PROCESSES=0", *_torch()]
    return run(["make", *words[1:], *variables], ROOT, MAKEFLAGS="")  # not those of `make test`


def _filled(text: str, values: Mapping[str, object]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def _torch() -> list[str]:
    """Return make's variable where another torch is installed than constraints.txt names."""
    here = importlib.metadata.version("torch").partition("+")[0]
    wanted = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return [] if wanted and wanted[1] == here else [f"TORCH=torch=={here}"]


def shell(words: Sequence[str], folder: Path, then: str = "true") -> Done:
    """Give a command to bash, and behind it a line that tells whether it had its effect."""
    return run(["bash", "-c", f"{shlex.join(words)} && {then}"], folder)
