"""Delta debugging: the smallest part of a sequence that still shows what the whole shows.

`ddmin` is the minimising delta debugging algorithm of A. Zeller and R. Hildebrandt, "Simplifying
and Isolating Failure-Inducing Input", IEEE Transactions on Software Engineering 28(2), 2002.
Nothing here knows of engines: `shows` is whatever test the caller has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def last_that_show(items: Sequence[T], shows: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return the shortest end of a sequence that shows, of 1, 2, 4... items; else all of it.

    What a request changes is mostly what one shortly before it left behind, so that this finds
    with a few small probes what halves of the whole find with many large ones.
    """
    count = 1
    while count < len(items):
        end = tuple(items[-count:])
        if shows(end):
            return end
        count *= 2
    return tuple(items)


def ddmin(items: Sequence[T], shows: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return a part of a sequence that shows and does not without any single one of its items.

    Args:
        items: a sequence that shows; its order is kept.
        shows: the test; never asked about nothing.
    """
    found = tuple(items)
    parts = 2
    while len(found) > 1:
        pieces = _pieces(found, parts)
        piece = next((one for one in reversed(pieces) if shows(one)), None)
        if piece is not None:
            found, parts = piece, 2
            continue
        # With two pieces, the rest without one is the other, which was tried.
        rests = _rests(pieces) if parts > 2 else ()
        rest = next((one for one in rests if shows(one)), None)
        if rest is not None:
            found, parts = rest, max(parts - 1, 2)
        elif parts >= len(found):
            break
        else:
            parts = min(2 * parts, len(found))
    return found


def _pieces(items: tuple[T, ...], parts: int) -> list[tuple[T, ...]]:
    edges = [len(items) * part // parts for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(edges)]


def _rests(pieces: Sequence[tuple[T, ...]]) -> Iterable[tuple[T, ...]]:
    """Yield the sequence without each of its pieces."""
    for left_out in range(len(pieces)):
        yield tuple(
            item for place, piece in enumerate(pieces) if place != left_out for item in piece
        )


def smaller_items(
    items: Sequence[T],
    smaller: Callable[[T], Iterable[T]],
    shows: Callable[[tuple[T, ...]], bool],
) -> tuple[T, ...]:
    """Return a sequence whose items are as small as they can be, one after the other.

    Args:
        items: a sequence that shows.
        smaller: the next smaller forms of an item, the best first; none ends its shrinking.
        shows: the test.
    """
    found = tuple(items)
    for place in range(len(found)):
        while True:
            forms = ((*found[:place], form, *found[place + 1 :]) for form in smaller(found[place]))
            chosen = next((one for one in forms if shows(one)), None)
            if chosen is None:
                break
            found = chosen
    return found
