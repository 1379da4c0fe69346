"""How a command of the documents is held, and the programs of ours that are called for it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from doc_pages import ROOT
from hydra.core.global_hydra import GlobalHydra

PROBE = str(ROOT / "ruler_bench" / "assets" / "probe")
MAINS = {
    "ruler_bench": "ruler_bench.__main__",
    "ruler_bench.compare": "ruler_bench.compare",
    "ruler_bench.divergence": "ruler_bench.divergence.__main__",
    "ruler_bench.minimise": "ruler_bench.minimise",
    "ruler_bench.prepare": "ruler_bench.prepare",
    "ruler_bench.report": "ruler_bench.report.__main__",
    "ruler_bench.score": "ruler_bench.score_files",
    "ruler_bench.show": "ruler_bench.show",
    "ruler_bench.testing": "ruler_bench.testing.__main__",
}
"""Where the main of `python -m NAME` is."""


Within = Callable[[Path], AbstractContextManager[Mapping[str, Any]]]
"""What stands in while a command runs, by the folder; see doc_stand_ins.py."""


@dataclass(frozen=True)
class Missing:
    """A package or program that need not be here.

    Attributes:
        is_here: whether it is.
        says: what the command says where it is not.
    """

    is_here: bool
    says: str


def has_package(name: str) -> bool:
    """Tell whether pip finds a package here."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True)
class Held:
    """How a command is held.

    Attributes:
        by: "call" gives it to its program, in this process; "make", "pip" and "shell" run it as
            doc_outside.py says.
        status: the exit status that is right.
        says: words that must be in what it prints.
        swap: what stands in for placeholders, and for what takes long, in any word.
        add: words behind it; one with a key that is there takes that one's place.
        drop: how words begin that are left out.
        then: of a shell's command: a line that must hold behind it.
        place: of a shell's command: where in the folder it is given.
        before: commands of the documents, in the folder, that it needs.
        within: what stands in for servers, packages and processes.
        missing: what may be missing here, so that the command fails and says so.
        dry: the server for whose want `dry_run=true` is added: all that a run checks is checked.
        cuda: what of the command needs CUDA and is left out.
    """

    by: str = "call"
    status: int = 0
    says: str = ""
    swap: Mapping[str, str] = field(default_factory=dict)
    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    then: str = "true"
    place: str = "."
    before: tuple[str, ...] = ()
    within: tuple[Within, ...] = ()
    missing: Missing | None = None
    dry: str = ""
    cuda: str = ""

    def arguments(self, words: Sequence[str]) -> list[str]:
        """Return the words to give."""
        for old, new in self.swap.items():
            words = [word.replace(old, new) for word in words]
        added = [*self.add, *(["dry_run=true"] if self.dry else [])]
        keys = {one.partition("=")[0] for one in added if "=" in one}
        kept = [one for one in words if "=" not in one or one.partition("=")[0] not in keys]
        return [*(one for one in kept if not one.startswith(self.drop or ("\0",))), *added]

    def is_right(self, done: Done) -> bool:
        """Tell whether what a command left is what it should leave."""
        if self.missing is not None and not self.missing.is_here:
            return done.status != 0 and self.missing.says in done.err
        return done.status == self.status and self.says in done.out + done.err


@dataclass(frozen=True)
class Done:
    """What a command left."""

    status: int
    out: str
    err: str


def call(words: Sequence[str], folder: Path, given: Mapping[str, Any] | None = None) -> Done:
    """Run `python -m NAME ...` or `python SCRIPT ...` in this process, as if in a folder.

    Args:
        words: of the command.
        folder: where it is given.
        given: arguments of the program's main.
    """
    name, arguments = _program(words)
    importlib.invalidate_caches()
    main = importlib.import_module(MAINS.get(name, name)).main
    return _called(lambda: main(**(given or {})), [name, *arguments], folder)


def start(name: str, *arguments: str) -> Done:
    """Have `python -m NAME` begin as a process begins it, in this one."""

    def main() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it is loaded already
            runpy.run_module(name, run_name="__main__", alter_sys=True)

    return _called(main, [name, *arguments], ROOT)


def _program(words: Sequence[str]) -> tuple[str, list[str]]:
    assert words[0] == "python", words
    if words[1] == "-m":
        return words[2], list(words[3:])
    return words[1].removesuffix(".py").replace("/", "."), list(words[2:])


def _called(main: Callable[[], Any], argv: list[str], folder: Path) -> Done:
    out, err = io.StringIO(), io.StringIO()
    before, threads = sys.argv, torch.get_num_threads()
    sys.argv = argv
    try:
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with contextlib.chdir(folder), streams[0], streams[1]:
            status = _status(main, err)
    finally:
        sys.argv = before
        torch.set_num_threads(threads)
        GlobalHydra.instance().clear()
    return Done(status, out.getvalue(), err.getvalue())


def _status(main: Callable[[], Any], err: io.StringIO) -> int:
    try:
        return int(main() or 0)
    except SystemExit as stop:
        return int(stop.code or 0)
    except Exception:
        err.write(traceback.format_exc())
        return 1


def executable(path: Path, text: str) -> None:
    """Write a program for the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
