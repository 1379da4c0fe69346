"""Training sequences: prompts at token level, with many questions or exactly one.

A "dense" sequence has many needles and, in its last part, as many questions with answers as fit,
so that one sequence teaches many retrievals. A "real" sequence ends as an evaluation prompt
does: one question of one of the tasks, right after the context. Both use RULER's wording
and its joins (spaces doubled, leading and trailing where RULER has them). Those of the needle
tasks are built here, those of variable tracking in chains.py.

Seeds: evaluation data come from seeds 0..2^32-1 of the tasks' own generators. Training draws
from numpy Generators under a SeedSequence whose entropy is longer than that (SEED_NAMESPACE),
so no training sequence is an evaluation prompt. The vocabulary of words is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scripts.probe.chains import ChainBuilder
from scripts.probe.corpus import Corpus, Tokens
from scripts.probe.families import CHAINS, FAMILIES, NEEDLES, NeedleFamily
from scripts.probe.rows import (
    DENSE_ANSWER,
    ELSEWHERE,
    REAL_ANSWER,
    Batch,
    Rng,
    Row,
    lay_out,
    size,
    with_loss_positions,
)

SEED_NAMESPACE = int.from_bytes(b"ruler_bench probe training", "big")

Ints = npt.NDArray[np.int64]

CHAINS_INDEX = FAMILIES.index(CHAINS)

LONG_TOKENS = 8192  # a real sequence this long teaches one answer for a great deal of work, so:
REAL_SHARE, REAL_SHARE_LONG = 0.2, 0.1  # of the sequences end as an evaluation prompt does
WRAPPED_SHARE = 0.08  # of the sequences stand in a chat template
HARD_KEYS_SHARE = 0.3  # of the sequences have keys that look alike
OTHER_HAYSTACK_SHARE = 0.1  # of the dense sequences put the family's needles in another haystack
GROUP_SIZES, GROUP_SHARES = (2, 3, 4), (0.1, 0.15, 0.75)  # values of a key, keys of a question

# RULER's places for a needle in an essay, per cent of its sentences.
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int)


class Needles(NamedTuple):
    """Needles of a sequence, in the order of the text.

    Attributes:
        keys: tokens of each key, a space before it.
        key_of: the key of each needle, [needles].
        values: tokens of each needle's value, a space before it and a full stop after it.
    """

    keys: Sequence[Tokens]
    key_of: Ints
    values: Sequence[Tokens]

    def of_key(self, key: int) -> Ints:
        """Return the needles of one key in the order of the text."""
        return np.flatnonzero(self.key_of == key)


class Question(NamedTuple):
    """A question up to its answer, and the answer with the end of text.

    Attributes:
        asked: tokens up to the answer.
        answer: tokens of the answer, the end of text included.
        number: whether "one" or "many" values are asked for.
    """

    asked: Sequence[Tokens]
    answer: Sequence[Tokens]
    number: str


class SequenceBuilder:
    """Builds sequences from a corpus; stateless, so that any process can build any batch."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self._chains = ChainBuilder(corpus)
        self._adjectives, self._nouns = list(corpus.adjectives), list(corpus.nouns)
        self._space, self._newline = corpus.wording[" "], corpus.wording["\n"]
        self._comma, self._and = corpus.wording[","], corpus.wording[" and"]
        self._dot_id, self._space_id = int(corpus.wording["."][0]), int(self._space[0])
        self._hyphen_id = int(corpus.nouns[0][0])
        self._end_of_text = np.array([corpus.end_of_text], np.int16)
        self._noise_line = np.concatenate([corpus.noise, self._newline])
        self._shares = np.cumsum([family.share for family in FAMILIES])

    def batch(self, seed: int, number: int, length: int, tokens: int, loss_positions: int) -> Batch:
        """Build micro-batch `number`: the same numbers give the same batch in any process.

        Args:
            seed: of the training run.
            number: of the micro-batch within the run.
            length: tokens of each row.
            tokens: tokens of the batch, a multiple of `length`.
            loss_positions: places where the loss is taken; answers come first, then a random
                choice of the rest.
        """
        rng = np.random.default_rng(
            np.random.SeedSequence([SEED_NAMESPACE, seed], spawn_key=(length, number))
        )
        rows = [self.row(rng, length) for _ in range(tokens // length)]
        return with_loss_positions(
            rng,
            np.stack([row.tokens for row in rows]),
            np.stack([row.kinds for row in rows]),
            loss_positions,
        )

    def row(self, rng: Rng, length: int) -> Row:
        """Build one sequence of a family drawn by its share."""
        family = int(np.searchsorted(self._shares, rng.random() * self._shares[-1]))
        if rng.random() < (REAL_SHARE_LONG if length >= LONG_TOKENS else REAL_SHARE):
            return self.real_row(rng, length, family)
        return self.dense_row(rng, length, family)

    def real_row(self, rng: Rng, length: int, family_index: int) -> Row:
        """Build a sequence that ends with one question, as the evaluation task asks it."""
        wrapper = self._wrapper(rng)
        if family_index == CHAINS_INDEX:
            return self._chains.real_row(rng, length, wrapper, REAL_ANSWER + family_index)
        family = NEEDLES[family_index]
        sizes = [family.num_values] * family.num_keys
        keys = self._keys(rng, family.keys, family.num_keys + _most_lines(family, length))
        needles = self._needles(rng, family.values, keys, sizes)
        asked = rng.permutation(family.num_keys)[: family.num_queries]
        questions = [self._question(wrapper, family, needles, asked)]
        return self._assemble(
            rng,
            length=length,
            wrapper=wrapper,
            family=family,
            haystack=family.haystack,
            needles=needles,
            questions=questions,
            answer_kind=REAL_ANSWER + family_index,
            at_depths=True,
        )

    def dense_row(self, rng: Rng, length: int, family_index: int) -> Row:
        """Build a sequence with many needles or chains, its last part full of questions."""
        wrapper = self._wrapper(rng)
        if family_index == CHAINS_INDEX:
            return self._chains.dense_row(rng, length, wrapper, DENSE_ANSWER + family_index)
        family = NEEDLES[family_index]
        haystack = family.haystack
        if rng.random() < OTHER_HAYSTACK_SHARE:
            haystack = str(rng.choice(("noise", "essay", "needle")))
        part = length * rng.uniform(0.25, 0.5 if length <= 1024 else 0.35)
        num_questions = max(1, int(part / self._question_tokens(family)))
        while True:
            needles, questions = self._dense_parts(
                rng,
                length=length,
                wrapper=wrapper,
                family=family,
                haystack=haystack,
                num_questions=num_questions,
            )
            asked_tokens = sum(size(q.asked) + size(q.answer) for q in questions)
            needle_tokens = sum(self._needle_tokens(needles, i) for i in range(len(needles.key_of)))
            opening = self.corpus.wording[f"open.{wrapper}.{questions[0].number}.{family.values}"]
            if len(opening) + asked_tokens + needle_tokens + 96 <= length:
                break
            if num_questions == 1:
                wrapper = self.corpus.wrappers[0]
            num_questions = max(1, num_questions * 4 // 5)
        return self._assemble(
            rng,
            length=length,
            wrapper=wrapper,
            family=family,
            haystack=haystack,
            needles=needles,
            questions=questions,
            answer_kind=DENSE_ANSWER + family_index,
            at_depths=False,
        )

    def _dense_parts(
        self,
        rng: Rng,
        *,
        length: int,
        wrapper: str,
        family: NeedleFamily,
        haystack: str,
        num_questions: int,
    ) -> tuple[Needles, list[Question]]:
        grouped = family.num_values > 1 or family.num_queries > 1
        sizes = (
            rng.choice(GROUP_SIZES, num_questions, p=GROUP_SHARES).tolist()
            if grouped
            else [1] * num_questions
        )
        num_keys = num_questions if family.num_values > 1 else sum(sizes)
        decoys = int(rng.integers(0, 1 + num_keys // 2 + (length > 1024)))
        keys = self._keys(
            rng, family.keys, num_keys + decoys + _most_lines(family, length, haystack)
        )
        if family.num_values > 1:
            values_per_key, groups = sizes, [np.array([key]) for key in range(num_keys)]
        else:
            values_per_key = [1] * num_keys
            groups = np.split(np.arange(num_keys), np.cumsum(sizes)[:-1])
        needles = self._needles(rng, family.values, keys, [*values_per_key, *[1] * decoys])
        questions = [
            self._question(wrapper if first else self.corpus.wrappers[0], family, needles, group)
            for first, group in zip([True, *[False] * len(groups)], groups, strict=False)
        ]
        return needles, questions

    def _assemble(
        self,
        rng: Rng,
        *,
        length: int,
        wrapper: str,
        family: NeedleFamily,
        haystack: str,
        needles: Needles,
        questions: Sequence[Question],
        answer_kind: int,
        at_depths: bool,
    ) -> Row:
        opening = self.corpus.wording[f"open.{wrapper}.{questions[0].number}.{family.values}"]
        asked_tokens = sum(size(q.asked) + size(q.answer) for q in questions)
        budget = length - len(opening) - asked_tokens
        context = (
            self._essay(rng, budget, family.values, needles, at_depths)
            if haystack == "essay"
            else self._lines(rng, budget, family.values, needles, haystack)
        )
        return lay_out(
            length,
            self.corpus.pad,
            [
                ([opening, *context], ELSEWHERE),
                *(
                    part
                    for question in questions
                    for part in ((question.asked, ELSEWHERE), (question.answer, answer_kind))
                ),
            ],
        )

    # Context

    def _lines(
        self, rng: Rng, budget: int, values: str, needles: Needles, haystack: str
    ) -> list[Tokens]:
        """Lay noise lines, or needles that nobody asks for, around the needles."""
        own = [
            [*self._needle(needles, index, f"needle_line.{values}"), self._newline]
            for index in range(len(needles.key_of))
        ]
        budget -= sum(map(size, own)) - 1  # the last line has no newline
        if haystack == "noise":
            lines = [[self._noise_line]] * (budget // len(self._noise_line))
        else:
            lines = []
            spare = needles.keys[int(needles.key_of.max()) + 1 :]
            for key, value in zip(spare, self._values(rng, values, len(spare)), strict=True):
                line = [
                    self.corpus.wording[f"needle_line.{values}"], key,
                    self.corpus.wording["is"], value, self._newline,
                ]  # fmt: skip
                budget -= size(line)
                if budget < 0:
                    break
                lines.append(line)
        # RULER inserts before a line, so never after the last one, and at no line twice.
        if len(lines) > len(own):
            before = np.sort(rng.choice(len(lines), len(own), replace=False))
        else:
            before = np.sort(rng.integers(0, max(1, len(lines)), len(own)))
        pieces: list[Tokens] = []
        done = 0
        for line, place in zip(own, before.tolist(), strict=True):
            for other in lines[done:place]:
                pieces += other
            pieces += line
            done = place
        for other in lines[done:]:
            pieces += other
        return pieces[:-1] if len(pieces[-1]) == 1 else [*pieces[:-1], pieces[-1][:-1]]

    def _essay(
        self, rng: Rng, budget: int, values: str, needles: Needles, at_depths: bool
    ) -> list[Tokens]:
        """Lay the needles between sentences of the essay; half the time from its beginning."""
        corpus = self.corpus
        own = [
            self._needle(needles, index, f"needle.{values}") for index in range(len(needles.key_of))
        ]
        budget -= sum(map(size, own)) + len(own) + 2  # a space for every empty piece
        starts = corpus.sentence_starts
        first = 0
        if rng.random() < 0.5:
            last = int(np.searchsorted(starts, len(corpus.essay) - budget - 64)) - 1
            first = int(rng.integers(0, max(1, last)))
        begin = int(starts[first])
        words = int(np.searchsorted(corpus.word_starts, begin + budget, side="right")) - 1
        stop = max(begin, int(corpus.word_starts[words]))
        cuts = np.append(starts[first : int(np.searchsorted(starts, stop))], stop).tolist()
        if at_depths and len(own) <= len(DEPTHS):
            depths = np.sort(rng.choice(DEPTHS, len(own), replace=False))
            places = ((len(cuts) - 1) * (depths / 100)).astype(int).tolist()
        else:
            places = np.sort(rng.integers(0, len(cuts), len(own))).tolist()
        pieces: list[Tokens] = []
        if places[0] > 0:
            head = begin + int(corpus.sentence_head_tokens[first])
            pieces += [corpus.sentence_heads[first], corpus.essay[head : cuts[places[0]]]]
        for needle, place, following in zip(own, places, [*places[1:], len(cuts) - 1], strict=True):
            pieces += needle
            text = corpus.essay[cuts[place] : cuts[following]]
            pieces.append(text if len(text) else self._space)
        return pieces

    # Needles, keys, values

    def _needles(
        self, rng: Rng, kind: str, keys: Sequence[Tokens], values_per_key: Sequence[int]
    ) -> Needles:
        key_of = rng.permutation(np.repeat(np.arange(len(values_per_key)), values_per_key))
        return Needles(keys, key_of, self._values(rng, kind, len(key_of)))

    def _needle(self, needles: Needles, index: int, wording: str) -> list[Tokens]:
        key = needles.keys[needles.key_of[index]]
        return [
            self.corpus.wording[wording], key, self.corpus.wording["is"], needles.values[index],
        ]  # fmt: skip

    def _needle_tokens(self, needles: Needles, index: int) -> int:
        return 12 + len(needles.keys[needles.key_of[index]]) + len(needles.values[index])

    def _keys(self, rng: Rng, kind: str, count: int) -> list[Tokens]:
        """Draw distinct keys; in a share of the sequences they look alike."""
        hard = rng.random() < HARD_KEYS_SHARE
        if kind == "uuids":
            digits = self._uuid_digits(rng, count)
            if hard:
                shared = int(rng.integers(1, 7))
                alike = self._uuid_digits(rng, 1 + count // 8)
                digits[:, :shared] = alike[rng.integers(0, len(alike), count), :shared]
            return self._uuid_tokens(digits, self._end_of_text[:0])
        num_adjectives, num_nouns = len(self._adjectives), len(self._nouns)
        if hard:
            side = int(np.ceil(2 * np.sqrt(count))) + 1
            some_adjectives = rng.integers(0, num_adjectives, side)
            some_nouns = rng.integers(0, num_nouns, side)
            cells = rng.choice(side * side, count, replace=False)
            codes = some_adjectives[cells // side] * num_nouns + some_nouns[cells % side]
        else:
            codes = rng.integers(0, num_adjectives * num_nouns, count)
        while len(np.unique(codes)) < count:
            _, kept = np.unique(codes, return_index=True)
            repeated = np.setdiff1d(np.arange(count), kept)
            codes[repeated] = rng.integers(0, num_adjectives * num_nouns, len(repeated))
        adjectives, nouns = self._adjectives, self._nouns
        return [
            np.concatenate((adjectives[code // num_nouns], nouns[code % num_nouns]))
            for code in codes.tolist()
        ]

    def _values(self, rng: Rng, kind: str, count: int) -> list[Tokens]:
        """Draw values, each with a space before it and a full stop after it."""
        if kind == "uuids":
            stop = np.array([self._dot_id], np.int16)
            return self._uuid_tokens(self._uuid_digits(rng, count), stop)
        numbers = rng.integers(10**6, 10**7, count)
        digits = numbers[:, None] // 10 ** np.arange(6, -1, -1) % 10
        table = np.empty((count, 9), np.int16)
        table[:, 0], table[:, 8] = self._space_id, self._dot_id
        table[:, 1:8] = self.corpus.characters[digits]
        return list(table)

    def _uuid_digits(self, rng: Rng, count: int) -> Ints:
        """Draw version 4 UUIDs as hexadecimal digits, [count, 32]."""
        digits = rng.integers(0, 16, (count, 32))
        digits[:, 12] = 4
        digits[:, 16] = 8 + digits[:, 16] % 4
        return digits

    def _uuid_tokens(self, digits: Ints, ending: Tokens) -> list[Tokens]:
        corpus = self.corpus
        table = np.empty((len(digits), 37 + len(ending)), np.int16)
        table[:, 0] = self._space_id
        characters = corpus.characters[digits]
        place = 1
        for begin, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)):
            table[:, place : place + end - begin] = characters[:, begin:end]
            place += end - begin
            if end < 32:
                table[:, place] = self._hyphen_id
                place += 1
        table[:, 37:] = ending
        # A space joins a letter in one token and stays alone before a digit.
        spaced = corpus.spaced_characters[digits[:, 0]]
        joined = spaced >= 0
        table[joined, 1] = spaced[joined]
        return [row[skip:] for row, skip in zip(table, joined.astype(int).tolist(), strict=True)]

    # Questions

    def _question(
        self, wrapper: str, family: NeedleFamily, needles: Needles, asked: Ints
    ) -> Question:
        wording = self.corpus.wording
        keys = [needles.keys[key] for key in asked.tolist()]
        query: list[Tokens] = [keys[0]]
        for key in keys[1:-1]:
            query += [self._comma, key]
        if len(keys) > 1:
            query += [self._comma, self._and, keys[-1]]
        values = [needles.values[i] for key in asked.tolist() for i in needles.of_key(key).tolist()]
        count = "one" if len(values) == 1 else "many"
        answer: list[Tokens] = []
        for value in values[:-1]:
            answer += [value[:-1], self._comma]
        return Question(
            asked=[
                wording[f"ask.{count}.{family.values}"],
                *query,
                wording[f"answer.{wrapper}.{count}.{family.values}"],
                *query,
                wording[f"end.{count}"],
            ],
            answer=[*answer, values[-1], self._end_of_text],
            number=count,
        )

    def _question_tokens(self, family: NeedleFamily) -> float:
        """Estimate the tokens of one question with its answer."""
        key = 37 if family.keys == "uuids" else 6
        value = 37 if family.values == "uuids" else 9
        keys, values = family.num_queries, max(family.num_values, family.num_queries)
        return 30 + 2 * keys * (key + 1) + values * value

    def _wrapper(self, rng: Rng) -> str:
        if rng.random() < WRAPPED_SHARE:
            return self.corpus.wrappers[int(rng.integers(1, len(self.corpus.wrappers)))]
        return self.corpus.wrappers[0]


def _most_lines(family: NeedleFamily, length: int, haystack: str | None = None) -> int:
    """Return how many lines of needles `length` tokens can hold at most, 0 for other haystacks."""
    if (haystack or family.haystack) != "needle":
        return 0
    key = 36 if family.keys == "uuids" else 3
    value = 36 if family.values == "uuids" else 8
    return length // (12 + key + value) + 1
