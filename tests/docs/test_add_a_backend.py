"""docs/add_a_backend.md: its three files are installed as it says, and every command of it runs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ruler_bench.config_packages import config_packages
from ruler_bench.testing.__main__ import main as check_command

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "add_a_backend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FILES = {name: text for _, name, text in BLOCKS if name}
TEST = "test_my_engine.py"
COMMANDS = [
    shlex.split(line) for kind, _, text in BLOCKS if kind == "sh" for line in text.splitlines()
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The package as the page has it, not installed."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def installed(project, tmp_path_factory):
    """The folder that the package is installed into."""
    folder = tmp_path_factory.mktemp("installed")
    command = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *command]
    subprocess.run([*pip, "--target", str(folder), str(project)], check=True, capture_output=True)
    return folder


def command(*words):
    """Return the arguments of the one command of the page that has these words and no others."""
    found = [one[3:] for one in COMMANDS if one[:3] == ["python", "-m", "ruler_bench"]]
    (arguments,) = [one for one in found if set(words) == {w for w in one if w in TELLING}]
    return arguments


KEY = "backend.key_tokens=16"
LEAKCHECK = "experiment=leakcheck"
TELLING = {"backend=my_engine", "backend=custom", KEY, LEAKCHECK}


def run(arguments, folder, path):
    """Run a command of the page in a process of its own, in a folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "ruler_bench", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_page_has_three_files_of_under_60_lines_their_test_and_six_commands():
    assert set(FILES) - {TEST} == {
        "pyproject.toml",
        "my_engine/__init__.py",
        "my_engine/configs/backend/my_engine.yaml",
    }
    lines = {name: len(text.splitlines()) for name, text in FILES.items()}
    assert sum(lines.values()) - lines[TEST] < 60
    assert [one[0] for one in COMMANDS] == ["pip"] + 5 * ["python"]


def test_once_installed_it_is_a_backend_like_ours(installed, tmp_path):
    # Processes of engines are what the other tests have; without them this takes half the time.
    finished = run([*command("backend=my_engine"), "fresh=inprocess"], tmp_path, installed)
    assert finished.returncode == 0, finished.stderr
    (folder,) = tmp_path.glob("results/niah_single_1_my_engine_probe_1024*")
    assert (folder / "records.jsonl").read_text().count('"correct": true') == 3
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["backend_in_force"] == {"max_model_len": 1024, "key_tokens": None}
    assert "my_engine" in manifest["sources"]


@pytest.fixture
def in_reach(installed, monkeypatch):
    monkeypatch.syspath_prepend(installed)


@pytest.mark.usefixtures("in_reach")
@pytest.mark.parametrize(("words", "status", "verdict"), [((), 0, "ok"), ((KEY,), 3, "leak")])
def test_the_leak_lab_finds_the_fault_that_it_can_be_switched_to(
    cli, workdir, words, status, verdict
):
    finished = cli(*command("backend=my_engine", LEAKCHECK, *words))
    assert finished.status == status, finished.err
    (path,) = workdir.glob("results/*/verdict.json")
    found = json.loads(path.read_text())
    assert found["verdict"] == verdict
    kinds = {one["kind"] for index in found["indices"] for one in index["evidence"]}
    assert ("canary" in kinds) == (verdict == "leak")


def test_without_a_package_it_is_a_class_of_the_folder(project, cli, monkeypatch, workdir):
    monkeypatch.syspath_prepend(project)
    finished = cli(*command("backend=custom"))
    assert finished.status == 0, finished.err
    assert list(workdir.glob("results/*/records.jsonl"))


@pytest.mark.usefixtures("in_reach")
def test_it_keeps_the_contract_in_its_own_test_and_from_the_command_line(cli, project):
    names: dict[str, Any] = {}
    exec(compile(FILES[TEST], TEST, "exec"), names)
    names["test_my_engine_keeps_the_contract"]()
    (arguments,) = [one[3:] for one in COMMANDS if one[2:3] == ["ruler_bench.testing"]]
    finished = cli(*arguments, entry=check_command)
    assert (finished.status, finished.out.count("BROKEN")) == (0, 0)
    broken = cli(*arguments, KEY, entry=check_command)
    assert broken.status == 1
    assert "the answer is another prompt's" in broken.out


@pytest.mark.usefixtures("in_reach")
def test_its_names_and_keys_are_told_as_ours_are(cli):
    assert "my_engine" in cli("--help").out
    assert "Did you mean 'my_engine'?" in cli("backend=my_engin").err
    assert "my_engine" in cli("backend=5").err
    assert "Did you mean backend.key_tokens?" in cli("backend=my_engine", "backend.key_token=1").err


# --- packages that are not as they should be ------------------------------------------------------


@pytest.fixture
def brings(tmp_path, monkeypatch):
    """Make up an installed package that names a folder of configurations."""

    def call(name, target, *files):
        site = tmp_path / name
        information = site / f"{name}-1.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (information / "entry_points.txt").write_text(f"[ruler_bench.configs]\n{name} = {target}\n")
        for one in files:
            path = site / one
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("raise SystemExit(9)\n" if path.suffix == ".py" else "_target_: a.B\n")
        monkeypatch.syspath_prepend(site)

    return call


def test_a_name_that_two_have_is_refused_where_it_is_chosen(brings, cli):
    brings("zebra", "zebra.configs", "zebra/__init__.py", "zebra/configs/backend/oracle.yaml")
    for group in ("backend", "backend@reference"):
        finished = cli(f"{group}=oracle")
        assert finished.status == 2
        assert "backend=oracle: ruler_bench and zebra both have a backend of this name" in (
            finished.err
        )
    assert cli("backend=gpu_only", "dry_run=true", "length=1024", "num_samples=1").status == 0


@pytest.mark.parametrize("target", ["gone.configs", "zebra.nothing", "zebra", "."])
def test_a_folder_that_is_not_there_is_told_once_and_keeps_nobody(brings, cli, target):
    brings("zebra", target, "zebra/__init__.py")
    finished = cli("backend=oracle", "dry_run=true", "length=1024", "num_samples=1")
    assert finished.status == 0
    assert finished.err.count("the package zebra names its configurations") == 1


def test_a_package_is_not_imported_to_find_its_settings(brings):
    brings("zebra", "zebra.configs", "zebra/__init__.py", "zebra/configs/backend/stripes.yaml")
    assert "zebra" in [one.name for one in config_packages()]
    assert "zebra" not in sys.modules
