"""What the README and the pages of docs/ hold: commands, links, anchors, pictures.

A command is a line of a code block, or a code span, whose first word is a program that a reader
would type (`PROGRAMS`). Lines that end in a backslash go on; `&&` parts two commands; what follows
a pipe or a redirection is not held.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = {"python", "pip", "make", "git", "pre-commit", "source", "export", "cd", "chromium"}
SHELLS = {"sh", "bash", "console", "shell", ""}
"""Words after the fence of a block that may hold commands; "" is a block without one."""
TAILS = {
    "'backend.serve.command=": "python -m ruler_bench backend=openai experiment=leakcheck",
}
"""How lines begin that docs/servers.md wants behind a command, and that command."""


@dataclass(frozen=True)
class Command:
    """A command, and where a reader finds it."""

    page: Path
    line: int
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The command as a key: words parted by one space, those quoted that need it."""
        return shlex.join(self.words)

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def tokens(page: Path) -> list[Token]:
    """Return a page's blocks."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[Command]:
    """Return all commands of a page, in order."""
    found = []
    for token in tokens(page):
        line = (token.map or [0])[0] + 1
        for source in _sources(token):
            found += [Command(page, line, words) for words in split(source)]
    return found


def _sources(token: Token) -> Iterator[str]:
    """Yield what of a block may hold commands."""
    if token.type == "code_block":
        yield token.content
    elif token.type == "fence":
        language, _, file = token.info.strip().partition(" ")
        if language in SHELLS and not file:
            yield token.content
    for child in token.children or []:
        if child.type == "code_inline" and " " in child.content:
            yield child.content


def split(source: str) -> list[tuple[str, ...]]:
    """Return the words of each command of a piece of text."""
    for start, before in TAILS.items():
        if source.startswith(start):
            source = f"{before} {' '.join(source.split())}"
    source = re.sub(r"\\\n\s*", " ", source)
    found = []
    for text in source.splitlines():
        line = text.removeprefix("$ ").strip()
        if line.split(" ", 1)[0] in PROGRAMS:
            found += _parts(line)
    return found


def _parts(line: str) -> list[tuple[str, ...]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|<>")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    ended = False
    for word in lexer:
        if word == "&&":
            parts.append([])
            ended = False
        elif set(word) <= set("&|<>"):
            if parts[-1][-1:] == ["2"]:
                parts[-1].pop()
            ended = True
        elif not ended:
            parts[-1].append(word)
    return [tuple(part) for part in parts if part]


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures."""
    found = []
    for token in tokens(page):
        for child in token.children or []:
            target = child.attrGet("href") if child.type == "link_open" else child.attrGet("src")
            if isinstance(target, str):
                found.append(target)
    return found


def anchors(page: Path) -> set[str]:
    """Return the names that headings get, as GitHub makes them."""
    found: set[str] = set()
    blocks = tokens(page)
    for opening, heading in itertools.pairwise(blocks):
        if opening.type != "heading_open":
            continue
        text = "".join(child.content for child in heading.children or [])
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = sum(1 for one in found if re.fullmatch(rf"{re.escape(name)}(-\d+)?", one))
        found.add(f"{name}-{number}" if number else name)
    return found
