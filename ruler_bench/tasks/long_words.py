"""The second list of words of cwe, for prompts that the 8169 of wonderwords are too few for.

RULER keeps it as a file of its own in Git LFS (scripts/data/synthetic/json/english_words.json).
It is large and in no package, so it is read from the folder that scripts/fetch_data.py fills.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache

from ruler_bench.errors import UsageError
from ruler_bench.folders import sources_dir

FILE = "english_words.json"
SHA256 = "affcd6d45fdf3cc843d585c99c97ad615094e760e6c4756b654bab6c73bc2eca"
SIZE_BYTES = 8_564_991
"""Both as RULER's repository names them at commit c3f5e3b."""

FETCH = "python scripts/fetch_data.py words"


class NoLongWordsError(Exception):
    """The list is not there."""


@cache
def load_long_words() -> tuple[str, ...]:
    """Return the words, in the order of the file.

    Raises:
        NoLongWordsError: the file is not there.
        UsageError: it is another file.
    """
    path = sources_dir() / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise NoLongWordsError(str(path)) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).") from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UsageError(
            f"{path}: is not the list that RULER uses (sha256 {SHA256[:12]}...); delete it, then:"
            f" {FETCH}"
        )
    return tuple(json.loads(content).values())


def fingerprint() -> str:
    """Return the hash of the one list that is taken."""
    return SHA256
