"""The strip of a run's indices by arm, and a card for each index that has something to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ruler_bench.report.digest import Digest, Shown, name_parts
from ruler_bench.report.text import visible

BLOCK = 25
"""Indices side by side in a strip: as many as a telephone shows."""
LISTED_CARDS, LISTED_SQUARES, LISTED_STRIPS = 300, 6000, 40


@dataclass(frozen=True)
class Square:
    """One index in one arm: its state, what hovering shows, and the card that a click opens."""

    state: str
    hint: str
    card: str | None


@dataclass(frozen=True)
class Card:
    """Everything about one index of a run."""

    key: str
    title: str
    is_right: bool
    expected: str
    tail: str
    answers: Sequence[tuple[str, Shown]]


@dataclass(frozen=True)
class Strip:
    """The indices of a run by arm, in blocks that lie side by side where there is room."""

    title: str
    link: str | None
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Block:
    """Some indices: the first and the last, and the squares of each arm."""

    first: int
    last: int
    arms: Sequence[tuple[str, Sequence[Square | None]]]


@dataclass(frozen=True)
class LeftOut:
    """What a page has no room for."""

    cards: int
    squares: int


def strips_of(
    digests: Sequence[Digest], tails: Mapping[str, str], links: Mapping[int, str]
) -> tuple[list[Card], list[Strip], LeftOut]:
    """Return cards, failures first, the strips of runs, and what there is no room for.

    Args:
        digests: arms of runs; those of one run share its number.
        tails: ends of prompts by the hash in the records.
        links: address of each run's own page, by its number.
    """
    groups: dict[int, list[Digest]] = {}
    for one in digests:
        groups.setdefault(one.run, []).append(one)
    cards = _cards(groups, tails)
    known = {card.key for card in cards}
    strips: list[Strip] = []
    room = LISTED_SQUARES
    squares_left_out = 0
    for number, arms in groups.items():
        count = sum(len(one.shown) for one in arms)
        if count > room or len(strips) == LISTED_STRIPS:
            squares_left_out += count
            continue
        if count:
            room -= count
            strips.append(_strip(number, arms, known, links.get(number)))
    wanted = sum(
        len({one.ordinal for arm in arms for one in arm.shown if one.state != "right"})
        for arms in groups.values()
    )
    listed = sum(not card.is_right for card in cards)
    return cards, strips, LeftOut(wanted - listed, squares_left_out)


def _cards(groups: Mapping[int, Sequence[Digest]], tails: Mapping[str, str]) -> list[Card]:
    """Return cards of indices, those that failed first, as many as a page has room for."""
    found: list[Card] = []
    for number, arms in groups.items():
        by_ordinal: dict[int, list[tuple[str, Shown]]] = {}
        for arm in arms:
            for one in arm.shown:
                by_ordinal.setdefault(one.ordinal, []).append((visible(arm.arm), one))
        run = f" of {', '.join(name_parts(arms[0].row))}" if len(groups) > 1 else ""
        for ordinal, answers in sorted(by_ordinal.items()):
            first = answers[0][1]
            tail = tails.get(first.prompt_sha256, "")
            found.append(
                Card(
                    key=_key(number, ordinal),
                    title=f"Index {ordinal}{run}",
                    is_right=all(one.state == "right" for _, one in answers),
                    expected=first.expected,
                    tail=tail,
                    answers=answers,
                )
            )
    found.sort(key=lambda card: card.is_right)
    return found[:LISTED_CARDS]


def _key(run: int, ordinal: int) -> str:
    return f"i{run}-{ordinal}"


def _strip(number: int, arms: Sequence[Digest], known: set[str], link: str | None) -> Strip:
    ordinals = sorted({one.ordinal for arm in arms for one in arm.shown})
    by_arm = [(visible(arm.arm), {one.ordinal: one for one in arm.shown}) for arm in arms]
    blocks = []
    for start in range(0, len(ordinals), BLOCK):
        part = ordinals[start : start + BLOCK]
        lines = [
            (name, [_square(number, shown.get(ordinal), name, known) for ordinal in part])
            for name, shown in by_arm
        ]
        blocks.append(Block(part[0], part[-1], lines))
    title = ", ".join(name_parts(arms[0].row))
    return Strip(title, link, blocks)


def _square(number: int, one: Shown | None, arm: str, known: set[str]) -> Square | None:
    if one is None:
        return None
    key = _key(number, one.ordinal)
    before = "none" if one.predecessor is None else str(one.predecessor)
    hint = (
        f"index {one.ordinal}, {arm}: {one.state}\nexpected: {one.expected}\ngot: {one.got}\n"
        f"predecessor: {before}, position {one.position}"
    )
    return Square(one.state, hint, key if key in known else None)
