"""Common words: RULER's cwe, draw for draw as common_words_extraction.py makes it.

https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/synthetic/common_words_extraction.py

A sample, shortened; a worked example of the same kind stands before it:

    Below is a numbered list of words. In these words, some appear more often than others. ...
    1. gullible 2. kale 3. terminology 4. gullible 5. nebulous ...
    Question: What are the 10 most common words in the above list? Answer: The top 10 words that
    appear most often in the list are:
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ruler_bench.errors import UsageError
from ruler_bench.tasks.draw import SHORT_LENGTH, Draw, shuffled
from ruler_bench.tasks.long_words import FETCH, NoLongWordsError, load_long_words
from ruler_bench.tasks.spec import CommonWordsTask, DataSpec
from ruler_bench.tasks.wording import COMMON_WORDS_ANSWER_PREFIX, COMMON_WORDS_TEMPLATE
from ruler_bench.tasks.words import load_pool

STEP = 10
FIRST_SIZE = 4096


class CommonWords:
    """Draws prompts from one random stream; a size is the number of different words.

    Args:
        spec: what decides the data.
        task: its task.
    """

    step = STEP
    least_size = 1
    first_size = FIRST_SIZE

    def __init__(self, spec: DataSpec, task: CommonWordsTask) -> None:
        self._num_common = task.num_cw
        self._length, self._seed = spec.length, spec.seed
        self._random = random.Random(spec.seed)
        self._pool = shuffled(load_pool(), spec.seed)
        self._tokens_per_word = 0.0
        if spec.length < SHORT_LENGTH:
            self._example = (20, 3, 1)
            self._repeats = (6, 1)
        else:
            self._example = (40, 10, 3)
            self._repeats = (task.freq_cw, task.freq_ucw)
        template = spec.model_template()
        head, _, question = COMMON_WORDS_TEMPLATE.partition("{context}")
        self._head = template.before + head
        self._end = question + template.after + COMMON_WORDS_ANSWER_PREFIX

    def largest_size(self, length: int, tokens_per_unit: float) -> int:
        """See `Drawer`. RULER takes twice the estimate, in whole words."""
        self._tokens_per_word = tokens_per_unit
        return max(int(length // tokens_per_unit) * 2, STEP * 2)

    def probe(self, size: int) -> Draw:
        """Draw the next prompt from the stream: the example, and a list of `size` words."""
        example, common = self._draw_list(*self._example)
        parts = [self._head, *example]
        parts[-1] += self._end
        parts += _numbered(common)
        words, answers = self._draw_list(size, *self._repeats)
        parts[-1] += "\n" + self._head
        parts += [words[0].lstrip(), *words[1:]]
        parts[-1] += self._end
        parts[1] = parts[1].lstrip()
        return Draw(parts, COMMON_WORDS_ANSWER_PREFIX, tuple(answers))

    def draw(self, size: int, ordinal: int) -> Draw:
        """Draw the next prompt from the stream, whichever sample it is for."""
        return self.probe(size)

    def _draw_list(
        self, size: int, repeats: int, other_repeats: int
    ) -> tuple[list[str], list[str]]:
        """Return a numbered list in parts, and its common words.

        Raises:
            UsageError: it takes more words than there are.
        """
        drawn = self._random.sample(self._words(size), size)
        common, others = drawn[: self._num_common], drawn[self._num_common :]
        return _numbered(shuffled(common * repeats + others * other_repeats, self._seed)), common

    def _words(self, size: int) -> Sequence[str]:
        if size <= len(self._pool):
            return self._pool
        try:
            words = load_long_words()
        except NoLongWordsError as error:
            raise UsageError(
                f"cwe at length={self._length} needs RULER's longer list of words, and {error} is"
                f" not there: {FETCH}; up to length={self._length_of_pool()} it is not needed."
            ) from error
        if size > len(words):
            raise UsageError(
                f"cwe at length={self._length} tries lists of {size} words, more than the"
                f" {len(words)} there are; use a smaller length."
            )
        return words

    def _length_of_pool(self) -> int:
        """Return the largest length at which the search stays within the pool."""
        words = len(self._pool) // 2
        return math.ceil((words + 1) * self._tokens_per_word) - 1


def _numbered(words: Sequence[str]) -> list[str]:
    """Return " 1. word 2. word ..." in parts."""
    parts = []
    for number, word in enumerate(words, start=1):
        parts += [f" {number}.", f" {word}"]
    return parts
