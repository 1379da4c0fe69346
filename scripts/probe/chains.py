"""Training sequences of variable tracking: chains of assignments among repeated lines.

As sequences.py has them: a "dense" sequence hides many chains and ends with as many questions with
answers as fit, a "real" one is what the task asks, its worked example included. To answer, the
model finds the value and copies the name before it, then finds the name it has just written where
that is assigned on, and again copies the name before it. Dense sequences mix in shorter chains,
which teach the first of these steps by itself, and now and then names that begin alike.

An answer's names have a space before them, as in the text and in the example's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scripts.probe.corpus import Corpus, Ragged, Tokens
from scripts.probe.families import CHAINS
from scripts.probe.rows import ELSEWHERE, Rng, Row, lay_out, size

VALUES = (10_000, 99_999)
"""The least, and one more than the largest."""

EXAMPLE_LINES = 12
"""Noise lines of the worked example, as many as its 500 tokens hold."""

LEAST_LINES = 5
"""Noise lines of the smallest haystack: a place for each link."""

SHORT_TOKENS = 1024
HOPS_SHARES_SHORT = (0.2, 0.15, 0.15, 0.15, 0.35)  # chains of 0 to 4 hops, in short sequences
HOPS_SHARES = (0.05, 0.05, 0.1, 0.1, 0.7)
FEW_CHAINS_SHARE = 0.25  # of the dense sequences do not have as many chains as they can hold
EXAMPLE_SHARE = 0.3  # of the longer dense sequences begin with the worked example
ALIKE_SHARE = 0.15  # of the dense sequences have names that begin alike, and values
ALIKE_SPREAD = 4  # they are drawn from so many times as many neighbours in sorted order
LINES_SPARE = 11  # a real prompt may lack up to ten lines, which the task takes away to fit


class Chain(NamedTuple):
    """A value and the variables that have it, in the order of their assignments.

    Attributes:
        value: its tokens, a space before it.
        names: tokens of each name, a space before it.
    """

    value: Tokens
    names: Sequence[Tokens]


class ChainBuilder:
    """Builds sequences of variable tracking from a corpus; stateless."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        wording = corpus.wording
        self._space, self._newline = wording[" "], wording["\n"]
        self._noise_line = np.concatenate([corpus.noise, self._newline])
        self._end_of_text = np.array([corpus.end_of_text], np.int16)

    def real_row(self, rng: Rng, length: int, wrapper: str, answer_kind: int) -> Row:
        """Build a sequence that ends with one question, as the evaluation task asks it.

        Where the worked example does not fit beside a haystack, it is left out.
        """
        (chain,) = self._chains(rng, self.corpus.names, [CHAINS.num_hops], alike=False)
        asked, answer = self._question(wrapper, chain), self._answer(chain)
        opening = self._example(rng, wrapper)
        taken = size(asked) + size(answer) + size(self._links(chain))
        lines = (length - taken - size(opening)) // len(self._noise_line)
        if lines < LEAST_LINES:
            opening = [self.corpus.wording[f"chain.open.{wrapper}"]]
            lines = (length - taken - size(opening)) // len(self._noise_line)
        lines = max(LEAST_LINES, lines - int(rng.integers(0, LINES_SPARE)))
        context = self._real_context(rng, chain, lines)
        return lay_out(
            length,
            self.corpus.pad,
            [([*opening, *context, *asked], ELSEWHERE), (answer, answer_kind)],
        )

    def dense_row(self, rng: Rng, length: int, wrapper: str, answer_kind: int) -> Row:
        """Build a sequence with many chains and a question about each of most of them."""
        part = length * rng.uniform(0.25, 0.5 if length <= SHORT_TOKENS else 0.35)
        opening = [self.corpus.wording[f"chain.open.{wrapper}"]]
        if length > SHORT_TOKENS and rng.random() < EXAMPLE_SHARE:
            opening = self._example(rng, wrapper)
        most = max(1, int(part / self._question_tokens()))
        if rng.random() < FEW_CHAINS_SHARE:
            most = max(1, int(most ** rng.random()))
        while True:
            decoys = int(rng.integers(0, 1 + most // 2 + (length > SHORT_TOKENS)))
            chains = self._dense_chains(rng, length, most + decoys)
            questions = [
                (self._question(wrapper if first else self.corpus.wrappers[0], chain), chain)
                for first, chain in zip([True, *[False] * most], chains[:most], strict=False)
            ]
            taken = size(opening) + sum(size(self._links(chain)) for chain in chains)
            taken += sum(size(asked) + size(self._answer(chain)) for asked, chain in questions)
            if taken + len(self._noise_line) <= length:
                break
            if most == 1:
                opening = [self.corpus.wording[f"chain.open.{wrapper}"]]
            most = max(1, most * 4 // 5)
        context = self._context(rng, chains, (length - taken) // len(self._noise_line))
        return lay_out(
            length,
            self.corpus.pad,
            [
                ([*opening, *context], ELSEWHERE),
                *(
                    part
                    for asked, chain in questions
                    for part in ((asked, ELSEWHERE), (self._answer(chain), answer_kind))
                ),
            ],
        )

    # Text

    def _example(self, rng: Rng, wrapper: str) -> list[Tokens]:
        """Return the opening with the worked example, up to the context of the question itself."""
        (chain,) = self._chains(rng, self.corpus.example_names, [CHAINS.num_hops], alike=False)
        wording = self.corpus.wording
        return [
            wording[f"chain.open.{wrapper}"],
            *self._real_context(rng, chain, EXAMPLE_LINES),
            *self._question(self.corpus.wrappers[0], chain),
            *chain.names,
            wording["chain.again"],
        ]

    def _real_context(self, rng: Rng, chain: Chain, lines: int) -> list[Tokens]:
        """Lay a chain before lines of noise, no two links before the same one, as RULER does."""
        places = np.sort(rng.choice(lines, len(chain.names), replace=False))
        return self._lay(np.repeat(0, len(places)), places, [chain], lines)

    def _context(self, rng: Rng, chains: Sequence[Chain], lines: int) -> list[Tokens]:
        """Lay many chains before lines of noise, each in its order, all of them mixed."""
        places = [np.sort(rng.random(len(chain.names))) * max(1, lines) for chain in chains]
        owners = np.repeat(np.arange(len(chains)), [len(own) for own in places])
        flat = np.concatenate(places)
        order = np.argsort(flat, kind="stable")
        return self._lay(owners[order], flat[order].astype(int), chains, lines)

    def _lay(
        self,
        owners: np.ndarray[tuple[int], np.dtype[np.int64]],
        places: np.ndarray[tuple[int], np.dtype[np.int64]],
        chains: Sequence[Chain],
        lines: int,
    ) -> list[Tokens]:
        """Lay the next link of chain `owners[i]` before noise line `places[i]`, ascending."""
        links = [iter(self._chain_lines(chain)) for chain in chains]
        pieces: list[Tokens] = []
        done = 0
        for owner, place in zip(owners.tolist(), places.tolist(), strict=True):
            pieces += [self._noise_line] * (place - done) + next(links[owner])
            done = place
        pieces += [self._noise_line] * (lines - done)
        return [*pieces[:-1], pieces[-1][:-1]]  # the question brings the last newline

    def _links(self, chain: Chain) -> list[Tokens]:
        return [piece for line in self._chain_lines(chain) for piece in line]

    def _chain_lines(self, chain: Chain) -> list[list[Tokens]]:
        wording = self.corpus.wording
        variable, newline = wording["chain.variable"], self._newline
        lines = [[variable, chain.names[0], wording["chain.value"], chain.value, newline]]
        for before, name in zip(chain.names[:-1], chain.names[1:], strict=True):
            lines.append(
                [variable, name, wording["chain.name"], before, self._space, newline],
            )
        return lines

    def _question(self, wrapper: str, chain: Chain) -> list[Tokens]:
        wording = self.corpus.wording
        return [
            wording["chain.ask"],
            chain.value,
            wording[f"chain.answer.{wrapper}"],
            self._space,
            self.corpus.characters[[len(chain.names)]],
            wording["chain.assigned"],
            chain.value,
            wording["chain.end"],
        ]

    def _answer(self, chain: Chain) -> list[Tokens]:
        return [*chain.names, self._end_of_text]

    def _question_tokens(self) -> int:
        """Return about how many tokens a question with its answer takes."""
        blank = Chain(self._space.repeat(6), [self._space.repeat(5)] * (1 + CHAINS.num_hops))
        return size(self._question(self.corpus.wrappers[0], blank)) + size(self._answer(blank))

    # Chains

    def _dense_chains(self, rng: Rng, length: int, count: int) -> list[Chain]:
        shares = HOPS_SHARES_SHORT if length <= SHORT_TOKENS else HOPS_SHARES
        hops = rng.choice(len(shares), count, p=shares).tolist()
        alike = bool(rng.random() < ALIKE_SHARE)
        return self._chains(rng, self.corpus.names, hops, alike=alike)

    def _chains(self, rng: Rng, names: Ragged, hops: Sequence[int], *, alike: bool) -> list[Chain]:
        """Draw one chain for each number of hops; no name and no value comes twice."""
        drawn = [names[i] for i in _draw(rng, len(names), sum(hops) + len(hops), alike)]
        values = VALUES[0] + np.array(_draw(rng, VALUES[1] - VALUES[0], len(hops), alike))
        table = np.empty((len(hops), 6), np.int16)
        table[:, 0] = self._space[0]
        table[:, 1:] = self.corpus.characters[values[:, None] // 10 ** np.arange(4, -1, -1) % 10]
        ends = np.cumsum([count + 1 for count in hops]).tolist()
        return [
            Chain(value, drawn[end - count - 1 : end])
            for value, count, end in zip(table, hops, ends, strict=True)
        ]


def _draw(rng: Rng, among: int, count: int, alike: bool) -> list[int]:
    """Draw distinct numbers below `among`, from close neighbours if they are to be alike."""
    start, width = 0, among
    if alike:
        width = min(among, ALIKE_SPREAD * count)
        start = int(rng.integers(0, among - width + 1))
    numbers: list[int] = (start + rng.choice(width, count, replace=False)).tolist()
    return numbers
