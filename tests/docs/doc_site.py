"""A folder in which the documents' commands are given, by the programs that they name."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import doc_outside
from doc_held import PROBE, Done, Held, call
from doc_pages import ROOT, tokens


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
                done = self.hold(one)
                assert self.table[one].is_right(done), f"{one}\n{done.err}"
            if held.by == "pip":
                self._give_pips()
            else:
                self.done[text] = self._given(held, held.arguments(shlex.split(text)))
        return self.done[text]

    def _give_pips(self) -> None:
        """Give all commands of pip's: one start for all of them."""
        texts = [text for text, held in self.table.items() if held.by == "pip"]
        words = [self.table[text].arguments(shlex.split(text)) for text in texts]
        self.done |= dict(zip(texts, doc_outside.pips(words, self.folder), strict=True))

    def _given(self, held: Held, words: list[str]) -> Done:
        if held.by == "shell":
            return doc_outside.shell(words, self.folder / held.place, held.then)
        if held.by == "make":
            return doc_outside.make(words, self.folder)
        with contextlib.ExitStack() as stack:
            given = [stack.enter_context(one(self.folder)) for one in held.within]
            return call(
                words, self.folder, {key: value for one in given for key, value in one.items()}
            )


def furnish(folder: Path) -> None:
    """Put into a folder what the documents say that a reader has: engines, a model, old runs."""
    package, engine = folder / "my_package.py", folder / "my_engine"
    package.write_text(block(ROOT / "README.md", "python"), encoding="utf-8")
    page = ROOT / "docs" / "add_a_backend.md"
    # Once as it is imported, once as pip installs it.
    names = ["my_engine/__init__.py", "my_engine/configs/backend/my_engine.yaml"]
    places = {one: one for one in names} | {f"project/{one}": one for one in names}
    for place, name in (places | {"project/pyproject.toml": "pyproject.toml"}).items():
        path = folder / place
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
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
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
    shutil.copytree(PROBE, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
        "<|assistant|>"
    )
