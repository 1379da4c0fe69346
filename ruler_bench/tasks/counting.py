"""Counting prompts that share most of their text: each piece is tokenised once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ruler_bench.splitting import is_cut
from ruler_bench.tokenizer import Tokenizer

MAX_REMEMBERED = 50_000
"""Pieces remembered at once; essays have 6000 sentences, noise has three lines."""


class PartCounter:
    """Counts the tokens of a text given in parts, exactly.

    Where the tokenizer splits at spaces, a text is counted in pieces, and counts are remembered:
    the sentences of a haystack return in every sample. With any other tokenizer the whole text is
    counted.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._remembered: dict[str, int] = {}

    def count(self, parts: Sequence[str]) -> int:
        """Return the number of tokens of the joined parts."""
        if not self._tokenizer.splits_at_spaces:
            return self._tokenizer.count("".join(parts))
        pieces = list(merge_parts(parts))
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._remembered]
        if new:
            if len(self._remembered) + len(new) > MAX_REMEMBERED:
                self._remembered.clear()
                new = list(dict.fromkeys(pieces))
            self._remembered.update(zip(new, self._tokenizer.counts(new), strict=True))
        return sum(map(self._remembered.__getitem__, pieces))

    def count_before(self, parts: Sequence[str], offset: int) -> int:
        """Return the number of tokens of the joined parts up to a character offset."""
        before: list[str] = []
        for part in parts:
            if offset <= 0:
                break
            before.append(part[:offset])
            offset -= len(part)
        return self.count(before)


def merge_parts(parts: Sequence[str]) -> Iterator[str]:
    """Yield the parts, joined wherever a text must not be cut."""
    piece = ""
    for part in parts:
        if piece and part and is_cut(piece, part):
            yield piece
            piece = part
        else:
            piece += part
    if piece:
        yield piece
