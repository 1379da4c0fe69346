"""Draw: a prompt as drawn. Drawer: what draws prompts from one random stream."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

Item = TypeVar("Item")


SHORT_LENGTH = 4096
"""Below it, haystacks of lines shrink in small steps, and lists of words repeat less."""


@dataclass(frozen=True)
class Draw:
    """One prompt as drawn, before anyone knows whether it fits.

    Attributes:
        parts: the whole prompt in pieces, in order, answer prefix included; most begin where a
            text may be cut for counting.
        answer_prefix: the end of the prompt that the answer continues.
        answers: what is to be found, in the order asked.
        depth: place of the first needle asked for, 0 to 1; None where there is none.
        missing_tokens: tokens that RULER adds when it searches for a size, for text that it puts
            in only later.
    """

    parts: list[str]
    answer_prefix: str
    answers: tuple[str, ...]
    depth: float | None = None
    missing_tokens: int = 0


class FailedDrawError(Exception):
    """A draw came to nothing; the reference takes that for one that does not fit."""


class Drawer(Protocol):
    """Draws prompts of one task from one random stream.

    Attributes:
        step: units (words, lines or documents) that a sample which does not fit gives up; one no
            larger than that is not shrunk.
        least_size: units below which a prompt cannot be drawn.
        first_size: units of the draw from which the tokens of a unit are estimated.
    """

    step: int
    least_size: int
    first_size: int

    def probe(self, size: int) -> Draw:
        """Draw the next prompt of the search for a size.

        Raises:
            UsageError: there is nothing to draw it from.
        """
        ...

    def draw(self, size: int, ordinal: int) -> Draw:
        """Draw the next prompt for a sample.

        Raises:
            FailedDrawError: it came to nothing; the stream has moved on all the same.
            UsageError: there is nothing to draw it from.
        """
        ...

    def largest_size(self, length: int, tokens_per_unit: float) -> int:
        """Return the units with which the search for a size begins from above."""
        ...


def largest_size(length: int, tokens_per_unit: float, step: int) -> int:
    """Return RULER's usual upper end of the search: three times the estimate."""
    return max(int(length / tokens_per_unit * 3), step * 2)


def line_parts(lines: Iterable[str]) -> list[str]:
    """Return the joined lines in parts, of which every one but the first begins with a space.

    A line's first word belongs to the part before.
    """
    parts = [""]
    joint = ""
    for line in lines:
        first, space, rest = line.partition(" ")
        parts[-1] += joint + first
        if space:
            parts.append(space + rest)
        joint = "\n"
    return parts


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """Return the items as `random.Random(seed).shuffle` orders them."""
    return [items[place] for place in _order(len(items), seed)]


@lru_cache(maxsize=4)
def _order(count: int, seed: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)
