"""Counting prompts that share most of their text: each word of it is tokenised once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ruler_bench.splitting import Cuts, is_cut
from ruler_bench.tokenizer import Tokenizer

MAX_REMEMBERED = 100_000
"""Parts, and words of parts, remembered at once. Essays have 6000 sentences of 15000 words; the
rest are needles, which hardly ever return, and their words, which do.
"""


class PartCounter:
    """Counts the tokens of a text given in parts, exactly.

    Where the tokenizer names places for cuts, a text is counted in pieces, and their counts are
    remembered: sentences of a haystack return in every sample. With any other tokenizer the whole
    text is counted.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._parts: dict[str, int] = {}
        self._words: dict[str, int] = {}

    def count(self, parts: Sequence[str]) -> int:
        """Return the number of tokens of the joined parts."""
        cuts = self.tokenizer.cuts
        if cuts is None:
            return self.tokenizer.count("".join(parts))
        merged = list(merge_parts(parts, cuts))
        known = self._parts
        new = list(dict.fromkeys(part for part in merged if part not in known))
        if len(known) + len(new) > MAX_REMEMBERED:
            known.clear()
            new = list(dict.fromkeys(merged))
        known.update(zip(new, self._counts([cuts.split(part) for part in new]), strict=True))
        return sum(map(known.__getitem__, merged))

    def count_before(self, parts: Sequence[str], offset: int) -> int:
        """Return the number of tokens of the joined parts up to a character offset."""
        before: list[str] = []
        for part in parts:
            if offset <= 0:
                break
            before.append(part[:offset])
            offset -= len(part)
        return self.count(before)

    def _counts(self, texts: list[list[str]]) -> list[int]:
        """Return the number of tokens of each text, given as its words."""
        known = self._words
        new = list(dict.fromkeys(word for words in texts for word in words if word not in known))
        if len(known) + len(new) > MAX_REMEMBERED:
            known.clear()
            new = list(dict.fromkeys(word for words in texts for word in words))
        known.update(zip(new, self.tokenizer.counts(new), strict=True))
        return [sum(map(known.__getitem__, words)) for words in texts]


def merge_parts(parts: Sequence[str], cuts: Cuts) -> Iterator[str]:
    """Yield the parts, joined wherever a text must not be cut."""
    piece = ""
    for part in parts:
        if piece and part and is_cut(cuts, piece, part):
            yield piece
            piece = part
        else:
            piece += part
    if piece:
        yield piece
