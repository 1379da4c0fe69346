"""What people install is the wheel: build it, install it, run it outside the checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": environment, "platbase": environment})
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", site, str(wheel)], check=True, capture_output=True)
    # A plain path line is not searched for further .pth files, so the editable checkout of this
    # environment does not come along.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin" / "python"


def call(python: Path, cwd: Path, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    finished = subprocess.run(
        [python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_the_wheel_is_what_runs(installed: Path, tmp_path: Path) -> None:
    where = call(installed, tmp_path, "-c", "import ruler_bench; print(ruler_bench.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent.parent)


def test_the_wheel_runs_the_main_job(installed: Path, tmp_path: Path) -> None:
    out = call(installed, tmp_path, "-m", "ruler_bench", "length=512", "num_samples=1")
    assert "niah_single_1" in out
    folder = tmp_path / "results" / "niah_single_1_offload_probe_512"
    assert (folder / "records.jsonl").read_text().count('"correct": true') == 1


def test_the_wheel_has_the_launchers(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra joblib")
    asked = ("hydra/launcher=gpus", "--cfg", "hydra", "--package", "hydra.launcher")
    out = call(installed, tmp_path, "-m", "ruler_bench", *asked)
    assert "JoblibLauncher" in out
    assert "n_jobs: ${one_job_per_gpu:}" in out
