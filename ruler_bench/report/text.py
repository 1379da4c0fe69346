"""Text for people: outputs of any content made safe to show, and figures with units."""

from __future__ import annotations

import re
from typing import Any

SHOWN_CHARACTERS = 200

_MARKUP = re.compile(r"[\\`*{}\[\]<>#|~&@$!]|(?<![^\W_])_|_(?![^\W_])")


def visible(text: str, limit: int | None = None) -> str:
    """Return one line that shows what is in `text`: what does not print becomes an escape.

    Args:
        text: anything, as an engine put it out.
        limit: how many characters to show; the length of a longer text is said instead.
    """
    shown = text if limit is None else text[:limit]
    line = "".join(
        letter if letter.isprintable() and letter != "\\" else _escape(letter) for letter in shown
    )
    return line if len(shown) == len(text) else f"{line}... ({len(text)} characters)"


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def markdown_cell(text: str, limit: int | None = SHOWN_CHARACTERS) -> str:
    """Return `visible` text as Markdown that renders as just that, also within a table.

    Characters with a meaning become entities: a backslash before a bar means different things to
    different renderers, an entity does not. Underscores within a word have no meaning and stay.
    """
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", visible(text, limit))


def csv_cell(value: Any) -> Any:
    """Return a value for a CSV file: text on one line, and none that a spreadsheet runs.

    Excel and others take text that begins with one of = + - @ as a formula; an apostrophe before it
    keeps it text. Numbers stay numbers.
    """
    if not isinstance(value, str):
        return value
    line = visible(value)
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) else line


def code_block(lines: list[str]) -> str:
    """Return lines, each free of line breaks, as a fenced block that none of them can close."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}text", *lines, fence])


def human_bytes(count: float | None) -> str:
    """Return a number of bytes in KiB, MiB or GiB; zero stays recognisable as none at all."""
    if count is None:
        return "-"
    if count == 0:
        return "0 MiB"
    mib = count / 2**20
    if mib < 1:
        return f"{mib * 1024:.1f} KiB"
    return f"{mib:.1f} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"


def human_seconds(seconds: float | None) -> str:
    """Return a time in s or ms."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def human_number(value: float | None, decimals: int) -> str:
    """Return a number with fixed decimals."""
    return "-" if value is None else f"{value:.{decimals}f}"


def human_percent(share: float | None) -> str:
    """Return a share of 1 in percent."""
    return "-" if share is None else f"{share:.1%}"
