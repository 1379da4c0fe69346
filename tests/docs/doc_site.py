"""A folder in which the documents' commands are given, by the programs that they name."""

from __future__ import annotations

import contextlib
import importlib
import io
import shlex
import shutil
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from doc_pages import ROOT, tokens
from hydra.core.global_hydra import GlobalHydra

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


@dataclass(frozen=True)
class Held:
    """How a command is held.

    Attributes:
        by: "call" gives it to its program, in this process; "parse" has the script's own parser
            read it; "make" has make say what it would do; "pip" looks its extra up in
            pyproject.toml; "read" starts nothing, since `why`.
        status: the exit status that is right.
        swap: what stands in for placeholders, and for what takes long, in any word.
        add: words behind it; one with a key that is there takes that one's place.
        drop: how words begin that are left out.
        before: commands of the documents, in the folder, that it needs.
        or_says: status 2 is right, too, with this in the message: a package that is not here.
        why: what keeps it from being run as it stands.
    """

    by: str = "call"
    status: int = 0
    swap: Mapping[str, str] = field(default_factory=dict)
    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    or_says: str | None = None
    why: str = ""

    def arguments(self, words: Sequence[str]) -> list[str]:
        """Return the words to give."""
        for old, new in self.swap.items():
            words = [word.replace(old, new) for word in words]
        keys = {one.partition("=")[0] for one in self.add if "=" in one}
        kept = [one for one in words if "=" not in one or one.partition("=")[0] not in keys]
        return [*(one for one in kept if not one.startswith(self.drop or ("\0",))), *self.add]


@dataclass(frozen=True)
class Done:
    """What a command left."""

    status: int
    out: str
    err: str


@dataclass
class Site:
    """The folder, and what was done in it so far, by command."""

    folder: Path
    table: Mapping[str, Held]
    done: dict[str, Done] = field(default_factory=dict)

    def hold(self, text: str) -> Done:
        """Give a command as the table says, once."""
        if text not in self.done:
            held = self.table[text]
            for one in held.before:
                assert self.hold(one).status == self.table[one].status, self.done[one].err
            self.done[text] = HOW[held.by](held.arguments(shlex.split(text)), self.folder)
        return self.done[text]


def call(words: Sequence[str], folder: Path) -> Done:
    """Run `python -m NAME ...` or `python SCRIPT ...` in this process, as if in a folder."""
    name, arguments = _program(words)
    importlib.invalidate_caches()
    main = importlib.import_module(MAINS.get(name, name)).main
    return _called(main, [name, *arguments], folder)


def parse(words: Sequence[str], folder: Path) -> Done:
    """Have a script's own parser read its arguments."""
    name, arguments = _program(words)
    parser = importlib.import_module(name).parse
    return _called(lambda: parser(arguments) and 0, [name, *arguments], folder)


def _program(words: Sequence[str]) -> tuple[str, list[str]]:
    assert words[0] == "python", words
    if words[1] == "-m":
        return words[2], list(words[3:])
    return words[1].removesuffix(".py").replace("/", "."), list(words[2:])


def _called(main: Callable[[], int], argv: list[str], folder: Path) -> Done:
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = argv
    try:
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with contextlib.chdir(folder), streams[0], streams[1]:
            status = _status(main, err)
    finally:
        sys.argv = before
        GlobalHydra.instance().clear()
    return Done(status, out.getvalue(), err.getvalue())


def _status(main: Callable[[], int], err: io.StringIO) -> int:
    try:
        return int(main() or 0)
    except SystemExit as stop:
        return int(stop.code or 0)
    except Exception:
        err.write(traceback.format_exc())
        return 1


def make(words: Sequence[str], folder: Path) -> Done:
    """Have make say what it would do."""
    found = subprocess.run(
        ["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return Done(found.returncode, found.stdout, found.stderr)


def pip(words: Sequence[str], folder: Path) -> Done:
    """Look up whether pyproject.toml has the extras that are named."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = []
    for word in words[2:]:
        name, _, extras = word.rstrip("]").partition("[")
        if name.replace("_", "-") in (project["name"], "."):
            wanted = [one for one in extras.split(",") if one]
            missing += [one for one in wanted if one not in project["optional-dependencies"]]
    return Done(len(missing), "", f"no such extra: {missing}")


def read(words: Sequence[str], folder: Path) -> Done:
    """Do nothing: the table says why."""
    return Done(0, "", "")


HOW = {"call": call, "parse": parse, "make": make, "pip": pip, "read": read}


def furnish(folder: Path) -> None:
    """Put into a folder what the documents say that a reader has: engines, a model, old runs."""
    package, engine = folder / "my_package.py", folder / "my_engine"
    package.write_text(block(ROOT / "README.md", "python"), encoding="utf-8")
    page = ROOT / "docs" / "add_a_backend.md"
    for name in ("my_engine/__init__.py", "my_engine/configs/backend/my_engine.yaml"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block(page, Path(name).suffix, name), encoding="utf-8")
    page = ROOT / "docs" / "add_a_task.md"
    for token in tokens(page):
        _, _, name = token.info.partition(" ")
        if name:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(token.content, encoding="utf-8")
    information = folder / f"{engine.name}-0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-engine\nVersion: 0.1\n")
    points = "[ruler_bench.configs]\nmy_engine = my_engine.configs\n"
    (information / "entry_points.txt").write_text(points)
    _thinking_model(folder / "thinking_model")
    oracle = ["python", "-m", "ruler_bench", "backend=oracle", "length=1024", "num_samples=4"]
    for name, arm in (("A", "persistent"), ("B", "fresh"), ("C", "fresh"), ("D", "persistent")):
        done = call([*oracle, f"arms=[{arm}]", "fresh=inprocess", f"out={name}"], folder)
        assert done.status == 0, done.err


def block(page: Path, language: str, file: str = "") -> str:
    """Return the first block of a page in a language, or that of a file."""
    for token in tokens(page):
        words = token.info.split() if token.type == "fence" else []
        if words and (words[1:] == [file] if file else words[0] == language):
            return str(token.content)
    raise AssertionError(f"{page.name} has no block of {file or language}")


def _thinking_model(folder: Path) -> None:
    """Make a model whose chat template has what `system` and `thinking` set."""
    shutil.copytree(ROOT / "ruler_bench" / "assets" / "probe", folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
        "<|assistant|>"
    )
