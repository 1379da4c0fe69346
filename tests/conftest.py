"""Fixtures shared by all tests."""

import contextlib
import gc
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import settings

from ruler_bench import lives
from ruler_bench.__main__ import main

ROOT = Path(__file__).parent.parent
PROBE = ROOT / "ruler_bench" / "assets" / "probe"
LONGEST = (
    "scripts/test_measure_detector.py",
    "leak/test_diagnose.py",
    "docs/test_commands.py",
    "scripts/test_check_engine.py",
    "test_run.py",
    "controls/test_reused_caches.py",
    "test_sweep.py",
    "test_run_arms.py",
    "scripts/test_founding_case.py",
    "test_cli.py",
    "backends/test_contract.py",
    "backends/engine/test_interpreted.py",
)
"""Files that take longest: begun first, so that no process is left with one of them at the end."""

FROZEN_MODULES = pytest.StashKey[int]()

settings.register_profile("any machine", deadline=None)  # how long it takes says nothing here
settings.load_profile("any machine")


@dataclass(frozen=True)
class Finished:
    """What a command left: its exit status, and what it printed."""

    status: int
    out: str
    err: str


Cli = Callable[..., Finished]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session", autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep prepared data out of the user's cache, and share them between tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RULER_BENCH_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Have the fork server of this process import all that engines need, whoever is the first.

    A program has one such server, and its first engine decides what that imports. After an oracle,
    every process of our own engine would spend seconds on importing torch for itself.
    """
    modules = [*lives.preloaded("backends.engine.gpu_only"), *lives.WITHOUT_MODEL]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lives, "preloaded", lambda _: modules)
        yield


@pytest.fixture(scope="session")
def _in_the_end_nothing_is_left_out() -> Iterator[None]:
    """Let the interpreter free all when it ends; some libraries complain of what they then hold."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _modules_left_out_of_garbage(
    _in_the_end_nothing_is_left_out: None, request: pytest.FixtureRequest
) -> None:
    """Freeze what lives between tests, modules above all, whenever more are imported.

    Every engine that ends has garbage looked for, which takes a third of a second where all that
    was ever imported is looked through.
    """
    modules = request.session.stash.setdefault(FROZEN_MODULES, 0)
    if len(sys.modules) != modules:
        gc.collect()
        gc.freeze()
        request.session.stash[FROZEN_MODULES] = len(sys.modules)


def call_in(folder: Path, *arguments: str) -> Finished:
    """Call `python -m ruler_bench` in this process, in a folder: for fixtures of a module."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["ruler_bench", *arguments])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main()
            finally:
                GlobalHydra.instance().clear()
    return Finished(status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def cli_in() -> Cli:
    """Give fixtures that outlive a test the command in this process; its first argument: where."""
    return call_in


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
