"""Frequent words: RULER's fwe, draw for draw as freq_words_extraction.py makes it.

https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/synthetic/freq_words_extraction.py

A sample, shortened:

    Read the following coded text and track the frequency of each coded word. Find the three most
    frequently appeared coded words. ... ufnllw ... iwshay ufnllw rhbtmq ... ... ufnllw
    Question: Do not provide any explanation. Please ignore the dots '....'. What are the three
    most frequently appeared words in the above coded text? Answer: According to the coded text
    above, the three most frequently appeared words are:
"""

from __future__ import annotations

import random
import string
from functools import lru_cache

from ruler_bench.tasks.counting import PartCounter
from ruler_bench.tasks.draw import Draw, shuffled
from ruler_bench.tasks.fit import DoesNotFitError, NoTokensError
from ruler_bench.tasks.spec import DataSpec, FrequentWordsTask
from ruler_bench.tasks.wording import (
    CODED_NOISE,
    FREQUENT_WORDS_ANSWER_PREFIX,
    FREQUENT_WORDS_TEMPLATE,
)

ASKED = 3
TOKENS_PER_WORD = 50
"""Of the length, for each word of the vocabulary."""
LEAST_VOCABULARY = 2
"""The first word becomes dots, so that one alone leaves nothing to ask for."""
STEPS = 32
"""Texts grow and shrink by this part of the length."""


class FrequentWords:
    """Draws prompts from one random stream; a size is the number of words before rounding.

    Every sample has a vocabulary of its own. RULER searches for the size with the first one, in
    equal steps, and lets each sample give up as many steps as it must.

    Args:
        spec: what decides the data.
        task: its task.
        counter: counts the tokens.
    """

    def __init__(self, spec: DataSpec, task: FrequentWordsTask, counter: PartCounter) -> None:
        self._task, self._seed, self._counter = task, spec.seed, counter
        self._random = random.Random(spec.seed)
        self._prompt_tokens = spec.length - task.tokens_to_generate
        self._step = self._prompt_tokens // STEPS
        self._num_words = task.vocab_size
        if task.vocab_size == -1:
            self._num_words = self._prompt_tokens // TOKENS_PER_WORD
        template = spec.model_template()
        head, _, question = FREQUENT_WORDS_TEMPLATE.partition(" {context}")
        self._head = template.before + head
        self._end = question + template.after + FREQUENT_WORDS_ANSWER_PREFIX

    def find_size(self) -> int:
        """Return the largest size of RULER's search that leaves the first text too short.

        Raises:
            DoesNotFitError: the length gives no vocabulary or no step.
            NoTokensError: the tokenizer gives none.
        """
        least = max(LEAST_VOCABULARY * TOKENS_PER_WORD if self._task.vocab_size == -1 else 0, STEPS)
        if self._prompt_tokens < least:
            raise DoesNotFitError([least + self._task.tokens_to_generate])
        vocabulary = self._draw_vocabulary()
        size = self._prompt_tokens // self._task.coded_wordlen
        while (tokens := self._tokens(vocabulary, size)) < self._prompt_tokens:
            if tokens == 0:
                raise NoTokensError
            size += self._step
        return size - self._step

    def next_draw(self, size: int) -> tuple[Draw, int]:
        """Draw a sample, and shorten it until it fits.

        Returns:
            The draw, and the tokens that it takes with its generation.

        Raises:
            DoesNotFitError: the text around the words does not fit by itself.
        """
        vocabulary = self._draw_vocabulary()
        while (tokens := self._tokens(vocabulary, size)) > self._prompt_tokens:
            if size <= 0:
                raise DoesNotFitError([tokens + self._task.tokens_to_generate])
            size -= self._step
        answers = tuple(vocabulary[1 : 1 + ASKED])
        draw = Draw(self._parts(vocabulary, size), FREQUENT_WORDS_ANSWER_PREFIX, answers)
        return draw, tokens + self._task.tokens_to_generate

    def _draw_vocabulary(self) -> list[str]:
        """Draw different words, the most frequent first, which is the dots."""
        words = {self._draw_word() for _ in range(self._num_words)}
        while len(words) < self._num_words:
            words.add(self._draw_word())
        return [CODED_NOISE, *shuffled(sorted(words), self._seed)[1:]]

    def _draw_word(self) -> str:
        letters = self._random.choices(string.ascii_lowercase, k=self._task.coded_wordlen)
        return "".join(letters)

    def _tokens(self, vocabulary: list[str], size: int) -> int:
        return self._counter.count(self._parts(vocabulary, size))

    def _parts(self, vocabulary: list[str], size: int) -> list[str]:
        counts = _counts(size, len(vocabulary), self._task.alpha)
        words = [
            f" {word}" for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)
        ]
        parts = [self._head, *(shuffled(words, self._seed) or [" "])]
        parts[-1] += self._end
        return parts


@lru_cache(maxsize=64)
def _counts(size: int, num_words: int, alpha: float) -> tuple[int, ...]:
    """Return how often each word stands: its share of `size` by the zeta distribution."""
    import numpy as np  # noqa: PLC0415 (no other task needs them)
    from scipy.special import zeta  # noqa: PLC0415

    ranks = np.arange(1, num_words + 1)
    shares = size * (ranks**-alpha) / zeta(alpha)
    return tuple(shares.astype(int).tolist())
