"""Fitting samples to a length: RULER's search for a size, and its sample loop.

Both draw from the one random stream of the generator, so the order of draws and the integers
searched decide every sample.
"""

from __future__ import annotations

from collections.abc import Sequence

from ruler_bench.tasks.counting import PartCounter
from ruler_bench.tasks.draw import Draw, Drawer, FailedDrawError

REDRAWS, MAX_REDRAWS = 100, 1000
"""Draws of one sample at the smallest size after which it counts as not fitting: the first where
none comes near, the second in any case. Keys, values and words differ in tokens, so a draw may
still fit where others do not; the reference draws for ever.
"""


class DoesNotFitError(Exception):
    """A sample does not fit the length, however small.

    Attributes:
        totals: tokens of prompt and generation that its draws took, ascending.
    """

    def __init__(self, totals: Sequence[int]) -> None:
        super().__init__(f"{len(totals)} draws do not fit")
        self.totals = sorted(totals)


class NoTokensError(Exception):
    """The tokenizer makes nothing of a prompt."""


class Fitting:
    """Fits what a drawer draws to a length.

    Args:
        drawer: draws the prompts.
        counter: counts their tokens.
        length: tokens that prompt and generation may take together.
        tokens_to_generate: kept free for the answer.
    """

    def __init__(
        self, drawer: Drawer, counter: PartCounter, length: int, tokens_to_generate: int
    ) -> None:
        self._drawer = drawer
        self._counter = counter
        self._length = length
        self._tokens_to_generate = tokens_to_generate

    def find_size(self) -> int:
        """Return the size that RULER's binary search ends with.

        Every probe is a new draw, so that a size may pass or fail by luck; the largest probe that
        fitted wins, and the smallest size where none did.

        Raises:
            NoTokensError: the tokenizer gives none.
            UsageError: there is nothing to draw from.
        """
        drawer = self._drawer
        tokens = self._counter.count(drawer.probe(drawer.first_size).parts)
        if tokens == 0:
            raise NoTokensError
        low = best = drawer.step
        high = drawer.largest_size(self._length, tokens / drawer.first_size)
        while low <= high:
            size = (low + high) // 2
            if self._total(drawer.probe(size)) <= self._length:
                best = size
                low = size + 1
            else:
                high = size - 1
        return best

    def next_draw(self, size: int, ordinal: int) -> tuple[Draw, int]:
        """Draw until one fits, giving up a step of the size after each that does not.

        Returns:
            The draw, and the tokens that it takes with its generation.

        Raises:
            DoesNotFitError: none does.
            UsageError: there is nothing to draw from.
        """
        totals: list[int] = []
        redraws, total = 0, self._length + 1
        while size >= self._drawer.least_size and not self._is_hopeless(redraws, totals):
            try:
                draw = self._drawer.draw(size, ordinal)
            except FailedDrawError:
                pass
            else:
                total = self._total(draw)
                if total <= self._length:
                    return draw, total
                if size <= self._drawer.step:
                    totals.append(total)
            if size > self._drawer.step:
                size -= self._drawer.step
            else:
                redraws += 1
        raise DoesNotFitError(totals or [total])

    def _is_hopeless(self, redraws: int, totals: Sequence[int]) -> bool:
        """Tell whether to stop: at the end, or where the draws differ by less than they exceed."""
        if redraws % REDRAWS or not redraws:
            return False
        if redraws >= MAX_REDRAWS or not totals:
            return True
        return min(totals) - self._length > (max(totals) - min(totals)) / 6

    def _total(self, draw: Draw) -> int:
        return self._counter.count(draw.parts) + draw.missing_tokens + self._tokens_to_generate
