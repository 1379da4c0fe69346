"""Fitting samples to a length: RULER's search for the haystack's size, and its sample loop.

Both draw from the one random stream of the generator, so the order of draws and the integers
searched decide every sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ruler_bench.errors import UsageError
from ruler_bench.tasks.counting import PartCounter
from ruler_bench.tasks.niah import PREFIX_MARK, Draw, Niah
from ruler_bench.tasks.sample import Sample
from ruler_bench.tasks.spec import DataSpec

MAX_REDRAWS = 100
"""Draws of one sample at the smallest haystack after which it counts as not fitting. Keys and
values differ in tokens, so a draw may still fit where others do not; the reference draws for ever.
"""


class DoesNotFitError(Exception):
    """A sample does not fit the length, however small its haystack.

    Attributes:
        totals: tokens of prompt and generation that its draws took, ascending.
    """

    def __init__(self, totals: Sequence[int]) -> None:
        super().__init__(f"{len(totals)} draws do not fit")
        self.totals = sorted(totals)


def iterate(spec: DataSpec) -> Iterator[Sample]:
    """Yield the samples of a task without end.

    Raises:
        DoesNotFitError: the next sample does not fit.
        UsageError: the tokenizer gives no tokens.
    """
    fitting = _Fitting(spec)
    size = fitting.find_size()
    ordinal = 0
    while True:
        yield fitting.next_sample(size, ordinal)
        ordinal += 1


class _Fitting:
    def __init__(self, spec: DataSpec) -> None:
        self._spec = spec
        self._niah = Niah(spec)
        self._counter = PartCounter(spec.tokenizer)

    def find_size(self) -> int:
        """Return the haystack size that RULER's binary search ends with.

        Every probe is a new draw, so that a size may pass or fail by luck; the largest probe that
        fitted wins, and the smallest size where none did.

        Raises:
            UsageError: the tokenizer gives no tokens.
        """
        low = self._niah.step
        tokens = self._counter.count(self._niah.draw(low).parts)
        if tokens == 0:
            raise UsageError(
                f"tokenizer {self._spec.tokenizer.name!r} gives no tokens for the text of "
                f"{self._spec.task.name}: its vocabulary is empty or lacks it; name another "
                "tokenizer."
            )
        high = max(int(self._spec.length / (tokens / low) * 3), low * 2)
        best = low
        while low <= high:
            size = (low + high) // 2
            if self._total(self._niah.draw(size)) <= self._spec.length:
                best = size
                low = size + 1
            else:
                high = size - 1
        return best

    def next_sample(self, size: int, ordinal: int) -> Sample:
        """Draw until one fits, giving up a step of the haystack after each that does not."""
        totals: list[int] = []
        while len(totals) < MAX_REDRAWS:
            draw = self._niah.draw(size)
            total = self._total(draw)
            if total <= self._spec.length:
                return self._sample(draw, total, ordinal)
            if size > self._niah.step:
                size -= self._niah.step
            else:
                totals.append(total)
            if size < self._niah.least_size:
                raise DoesNotFitError([total])
        raise DoesNotFitError(totals)

    def _total(self, draw: Draw) -> int:
        return self._counter.count(draw.parts) + self._spec.task.tokens_to_generate

    def _sample(self, draw: Draw, total: int, ordinal: int) -> Sample:
        prompt = "".join(draw.parts)
        cut = prompt.rfind(PREFIX_MARK)
        answer = prompt.find(draw.answers[0], 0, cut)
        return Sample(
            task=self._spec.task.name,
            ordinal=ordinal,
            input=prompt[:cut],
            answer_prefix=prompt[cut:],
            outputs=draw.answers,
            length=total,
            tokens_to_generate=self._spec.task.tokens_to_generate,
            depth=draw.depth,
            answer_offset=answer,
            answer_token_position=self._counter.count_before(draw.parts, answer),
        )
