"""Fixtures shared by all tests."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from ruler_bench.__main__ import main

ROOT = Path(__file__).parent.parent
PROBE = ROOT / "ruler_bench" / "assets" / "probe"


@dataclass(frozen=True)
class Finished:
    """What a command left: its exit status, and what it printed."""

    status: int
    out: str
    err: str


Cli = Callable[..., Finished]


@pytest.fixture(scope="session", autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep prepared data out of the user's cache, and share them between tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RULER_BENCH_CACHE", str(folder))
        yield folder


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, where results/ goes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli(workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call `python -m ruler_bench` in this process, in an empty folder."""

    def call(*arguments: str, entry: Callable[[], int] = main) -> Finished:
        monkeypatch.setattr(sys, "argv", ["ruler_bench", *arguments])
        capsys.readouterr()
        try:
            status = entry()
        except SystemExit as stop:
            status = int(stop.code or 0)
        finally:
            GlobalHydra.instance().clear()
        printed = capsys.readouterr()
        return Finished(status, printed.out, printed.err)

    return call
